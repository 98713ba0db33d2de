"""Attention of T speculated nodes over a cached prefix and their own ancestors."""

from pallas_kernels.tree_attention.op import describe, supports, tree_attention
from pallas_kernels.tree_attention.reference import Plan, plan

__all__ = ["Plan", "describe", "plan", "supports", "tree_attention"]
