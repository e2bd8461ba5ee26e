"""Read squash files (squashfs 4.0) without mounting them: their tree, and the bytes behind it.

The format is described in the Linux kernel's Documentation/filesystems/squashfs.rst and
fs/squashfs/squashfs_fs.h. A file may be damaged or hostile: what it says is checked before it is
followed, and every fault is a `WorkError`.
"""
