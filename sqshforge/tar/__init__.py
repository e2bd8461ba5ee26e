"""A tar codec: headers read, streams of entries, entries written as mksquashfs takes them."""
