"""Limits on the resources that an archive may use; what exceeds them is refused.

No image needs more. Layers of many gigabytes are fine: the limits are on what a small archive can
blow up to, which is the memory for names, and the bytes that a few compressed ones expand to.
"""

from __future__ import annotations

JSON = 4 << 20  # bytes of an index, a manifest or a config: as many as registries accept
NESTING = 8  # depth of indexes within indexes
LAYERS = 500  # as many as overlayfs allows; docker allows 125
MEMBERS = 100_000  # members of the outer tar of an archive
HEADER = 1 << 20  # bytes of an extended header, a long name, or the map of a sparse file
NAME = 255  # bytes of a name, as in Linux
PATH = 4096  # bytes of a path or a link's target
LINKS = 40  # symbolic links on one path, as in Linux

# Bytes of memory for the merged tree. NODE is the measured size of an entry without its strings,
# SEGMENT that of a segment of a sparse file's map.
TREE = 1 << 30
NODE = 700
STEPS = 100_000_000  # steps from folder to folder on the paths of all entries: half a minute
SEGMENT = 120

UNPACKED = 1 << 40  # bytes of all layers decompressed, and of all files written
HOLES = 64 << 30  # bytes of all holes in sparse files, which are written as zeros
# A gigabyte of zeros may be a swap file, but no real layers are 2000 times as large as their blobs.
RATIO = 2000
RATIO_FROM = 1 << 30
WINDOW = 128 << 20  # bytes that a zstd frame may ask a decoder to keep
BLOCKS = 1 << 20  # blocks of a zstd layer whose headers are read; a full block unpacks to 128 KiB
