"""Packing: requests, base and payload, the cache of bases, mksquashfs, staging."""
