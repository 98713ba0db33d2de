"""Topologies of speculated tokens. A chain is the tree in which every node has one child.

Node 0 is the root: the row's pending token, whose successors are being guessed. Nodes 1 .. T-1 are
drafts. A topology is data (arrays), so that another one of the same size needs no compilation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.reference import unpack_ancestors

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Topology:
    """A rooted tree of T nodes in an order where parents come first.

    All rows share it, or each of B rows has its own: then every array has a leading row axis.

    Attributes:
        parents: [T] or [B, T] int32, parent of each node; -1 for the root.
        depths: [T] or [B, T] int32, 0 for the root.
        ancestors: [T, W] or [B, T, W] uint32, W = ceil(T / 32), packed ancestor-or-self bits.
        is_chain: static; every node's parent is the node before it, so nothing has to be moved when
            a path is accepted.
    """

    parents: Array
    depths: Array
    ancestors: Array
    is_chain: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def size(self) -> int:
        """T, number of nodes with the root."""
        return int(self.parents.shape[-1])

    def by_row(self) -> Topology:
        """Return it as device arrays with a row axis, of length 1 where all rows share it."""
        if self.parents.ndim == 2:
            return jax.tree.map(jnp.asarray, self)
        return jax.tree.map(lambda array: jnp.asarray(array)[None], self)


def from_parents(parents: tuple[int, ...]) -> Topology:
    """Build a topology from each node's parent.

    Args:
        parents: -1 for node 0, then for every node the index of an earlier node.

    Raises:
        ValueError: the first node is not a root, or a parent is no integer or does not come before
            its child.
    """
    for node, parent in enumerate(parents):
        if not isinstance(parent, int | np.integer) or isinstance(parent, bool):
            raise ValueError(f"node {node} has parent {parent!r}, which is no integer")
    if not parents or parents[0] != -1:
        raise ValueError(f"node 0 must be the root (parent -1), not {parents[:1]}")
    size = len(parents)
    depths = np.zeros(size, np.int32)
    dense = np.eye(size, dtype=bool)
    for node in range(1, size):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}, which does not come before it")
        depths[node] = depths[parent] + 1
        dense[node] |= dense[parent]
    words = -(-size // 32)
    padded = np.zeros((size, words * 32), bool)
    padded[:, :size] = dense
    bits = padded.reshape(size, words, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return Topology(
        parents=np.asarray(parents, np.int32),
        depths=depths,
        ancestors=bits.sum(axis=-1).astype(np.uint32),
        is_chain=parents == tuple(range(-1, size - 1)),
    )


def chain(gamma: int) -> Topology:
    """Return the root followed by a chain of `gamma` drafts (T = gamma + 1)."""
    return from_parents(tuple(range(-1, gamma)))


def from_parent_rows(parents: jax.Array) -> Topology:
    """Build a topology of each row's own on the device.

    Args:
        parents: [B, T] int32, T >= 1, -1 for node 0, then for every node the index of an earlier
            one; may be traced, so it is not checked.

    Returns:
        The topology with a row axis.
    """
    size = parents.shape[-1]
    node = np.arange(size)
    own = np.zeros((size, -(-size // 32)), np.uint32)
    own[node, node // 32] = np.uint32(1) << (node % 32).astype(np.uint32)
    # Pointer doubling: after k steps a node knows 2^k nodes of its way and jumps over as many.
    known = jnp.broadcast_to(jnp.asarray(own), (*parents.shape, own.shape[-1]))
    jump = jnp.maximum(parents, 0)
    for _ in range((size - 1).bit_length()):
        known |= jnp.take_along_axis(known, jump[..., None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return Topology(
        parents=parents,
        depths=jnp.sum(jax.lax.population_count(known), axis=-1).astype(jnp.int32) - 1,
        ancestors=known,
    )


def paths(drafts: jax.Array, topology: Topology) -> jax.Array:
    """Return the drafts on the way to every node.

    Args:
        drafts: [B, T - 1] int32, tokens of nodes 1 .. T - 1.
        topology: of T nodes.

    Returns:
        [B, T, T - 1] int32: the tokens from the root (without it) to each node (with it) in order,
        then -1.
    """
    size, rows = topology.size, topology.by_row()
    on_path = unpack_ancestors(jnp.asarray(rows.ancestors), size)[:, :, 1:]
    place = jnp.asarray(rows.depths)[:, None, 1:] - 1
    # Nodes off the path go nowhere.
    place = jnp.where(on_path, place, size)
    batch = drafts.shape[0]
    shape = (batch, size, size - 1)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    node = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    result = jnp.full(shape, -1, jnp.int32)
    token = jnp.broadcast_to(drafts[:, None, :], shape)
    return result.at[row, node, jnp.broadcast_to(place, shape)].set(token, mode="drop")
