"""Attention of T speculated nodes over a cached prefix and their own ancestors."""

from pallas_kernels.tree_attention.op import describe, supports, tree_attention
from pallas_kernels.tree_attention.reference import Plan, attend, plan

__all__ = ["Plan", "attend", "describe", "plan", "supports", "tree_attention"]
