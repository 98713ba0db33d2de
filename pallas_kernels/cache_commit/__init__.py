"""Move of a tree's accepted path to the slots behind the committed prefix."""

from pallas_kernels.cache_commit.op import cache_commit

__all__ = ["cache_commit"]
