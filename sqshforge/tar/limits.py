"""What an archive may ask of this machine; more is refused, as no image needs it.

Layers of many gigabytes are fine. What is bounded is what a small archive can blow up to: the
memory that names take, and the bytes that a few compressed ones stand for.
"""

from __future__ import annotations

JSON = 4 << 20  # bytes of an index, a manifest or a config: what registries take
NESTING = 8  # indexes within indexes
LAYERS = 500  # as many as an overlayfs takes; docker has 125
MEMBERS = 100_000  # of the outer tar of an archive
HEADER = 1 << 20  # bytes of an extended header, of a long name, of the map of a sparse file
NAME = 255  # bytes of a name, as Linux has it
PATH = 4096  # bytes of a path and of a link's target
LINKS = 40  # symbolic links that one path may lead through, as in Linux

# Memory for the merged tree, measured; NODE is what an entry takes beside its texts.
TREE = 1 << 30
NODE = 700
STEPS = 100_000_000  # from folder to folder, on the ways to all entries: half a minute
SEGMENT = 120  # of a sparse file's map

UNPACKED = 1 << 40  # bytes of all layers, decompressed; the same for all files, written out
HOLES = 64 << 30  # bytes of all the holes in sparse files, which come out as zeros
# A gigabyte of zeros is somebody's swap file; no layers with 2000 times their blobs' size are.
RATIO = 2000
RATIO_FROM = 1 << 30
WINDOW = 128 << 20  # bytes that a zstd frame may ask a decoder to keep
BLOCKS = (
    1 << 20
)  # blocks of a zstd layer whose headers are looked at: a whole one unpacks to 128 KiB
