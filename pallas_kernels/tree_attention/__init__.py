"""Attention of T speculated nodes over a cached prefix and their own ancestors."""

from pallas_kernels.tree_attention.reference import Plan, attend, plan, tree_attention

__all__ = ["Plan", "attend", "plan", "tree_attention"]
