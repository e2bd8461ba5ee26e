"""Images in archives: OCI layouts, OCI archives and archives of `docker save`.

They are read in place: no byte of an image reaches the disk before the squash file. An archive is
assumed to be hostile: nothing in it can name a path outside of it, `tar.limits` bounds the
resources that it can use, and every fault in it is a `WorkError`.
"""
