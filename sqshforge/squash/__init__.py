"""Packing: what is asked for, base and payload, the cache of bases, mksquashfs, staging."""
