"""Images in archives: OCI layouts, OCI archives and what `docker save` writes.

They are read in place: no byte of an image touches the disk before the squash file has it. An
archive is taken for hostile: nothing in it names a place outside of it, `tar.limits` bounds what
it can ask for, and every fault of it is a `WorkError`.
"""
