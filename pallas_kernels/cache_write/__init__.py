"""Ragged write of new entries into a key/value cache."""

from pallas_kernels.cache_write.op import cache_write

__all__ = ["cache_write"]
