"""Read squash files (squashfs 4.0) without mounting them: their tree and their content.

The format is described in the Linux kernel's Documentation/filesystems/squashfs.rst and
fs/squashfs/squashfs_fs.h. A file may be damaged or hostile: its fields are checked before they are
used, and every fault is a `WorkError`.
"""
