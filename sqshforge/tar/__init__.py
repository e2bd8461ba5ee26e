"""A tar codec: read entries from streams, and write entries in the form that mksquashfs reads."""
