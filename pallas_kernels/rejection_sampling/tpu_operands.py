"""What the TPU kernel of rejection sampling is given, and what is made of its results."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.rejection_sampling.columns import parameters
from pallas_kernels.rejection_sampling.inputs import Drafts, Transforms, on_path
from pallas_kernels.rejection_sampling.transforms import packed_counts

LANES, SUBLANES = 128, 8
# Lanes a step of a pass; their allow-bits fill the lanes of one vector register.
CHUNK = 32 * LANES
# The column after every kernel's parameters: the draft drawn at the node.
NEXT = 8
# Columns of the comparison with q.
OVERLAP, LOG_Q = range(2)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static facts of one call; B, T as the kernel sees them."""

    batch: int
    nodes: int
    vocab: int
    drafts: int  # J, drafts a row
    shared: bool  # the nodes of a block are of one row
    biases: int
    forbidden: int
    penalties: bool
    allowed: bool
    law: bool
    own_trees: bool

    @property
    def block(self) -> int:
        """Nodes of a block."""
        return min(self.nodes, SUBLANES)

    @property
    def blocks(self) -> int:
        """Blocks of a batch row."""
        return pl.cdiv(self.nodes, self.block)

    @property
    def law_block(self) -> int:
        """Drafts of a block; draft j + 1 was drawn at node j."""
        return min(self.drafts, SUBLANES)

    @property
    def chunk(self) -> int:
        """Tokens of one step of a pass."""
        return min(CHUNK, pl.cdiv(self.vocab, LANES) * LANES)

    @property
    def padded(self) -> int:
        """V, filled up to whole chunks."""
        return pl.cdiv(self.vocab, self.chunk) * self.chunk

    @property
    def scalars(self) -> int:
        """Numbers in scalar memory: drafts, bias and forbidden tokens."""
        rows = self.batch * self.blocks * self.block
        biased = self.batch if self.shared else rows
        return self.batch * self.drafts + 2 * biased * self.biases + rows * self.forbidden

    @property
    def words(self) -> int:
        """Words of 32 allow-bits, whole vector registers of them."""
        return pl.cdiv(self.padded // 32, LANES) * LANES


def shape_of(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> Shape:
    """Return the static facts of a call; rows of a batch are its nodes where there is no draft."""
    batch, nodes, vocab = logits.shape
    shared = nodes > 1
    return Shape(
        batch=batch if shared else 1,
        nodes=nodes if shared else batch,
        vocab=vocab,
        drafts=nodes - 1,
        shared=shared,
        biases=0 if transforms.bias is None else transforms.bias.tokens.shape[1],
        forbidden=0 if transforms.forbidden is None else transforms.forbidden.shape[-1],
        penalties=transforms.penalties is not None,
        allowed=transforms.allowed is not None,
        law=drafts.chain_log_q is not None,
        own_trees=drafts.own_trees,
    )


def operands(
    shape: Shape, logits: jax.Array, transforms: Transforms, drafts: Drafts
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], list[pl.BlockSpec]]:
    """Return the kernel's scalars (SMEM), its arrays, and the blocks of these."""
    vocab, block, rows = shape.vocab, shape.block, shape.blocks * shape.block
    scalars: dict[str, jax.Array] = {}
    if shape.drafts:
        scalars["tokens"] = drafts.tokens.reshape(-1)
    if transforms.bias is not None:
        extra = 0 if shape.shared else rows - shape.nodes
        padding = ((0, extra), (0, 0))
        tokens = jnp.pad(transforms.bias.tokens, padding, constant_values=vocab)
        scalars["bias_tokens"] = tokens.reshape(-1)
        scalars["bias_values"] = jnp.pad(transforms.bias.values, padding).reshape(-1)
    if transforms.forbidden is not None:
        tokens = transforms.forbidden.reshape(shape.batch, shape.nodes, shape.forbidden)
        by_row = ((0, 0), (0, rows - shape.nodes), (0, 0))
        scalars["forbidden"] = jnp.pad(tokens, by_row, constant_values=vocab).reshape(-1)

    def by_node(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, lanes), lambda b, j, *_: (b, j, 0))

    arrays = {
        "logits": logits.reshape(shape.batch, shape.nodes, vocab),
        "params": _parameters(shape, transforms, drafts),
    }
    specs = [by_node(vocab), by_node(LANES)]
    if transforms.penalties is not None:
        counts = packed_counts(transforms.penalties)
        if shape.shared:
            arrays["counts"] = counts[:, None, :]
            specs.append(pl.BlockSpec((1, 1, vocab), lambda b, j, *_: (b, 0, 0)))
        else:
            arrays["counts"] = counts[None]
            specs.append(by_node(vocab))
        if shape.drafts:
            by_tree = ((0, 0), (0, rows - shape.nodes), (0, LANES - shape.drafts))
            arrays["path"] = jnp.pad(on_path(drafts).astype(jnp.float32), by_tree)
            own = shape.own_trees
            specs.append(pl.BlockSpec((1, block, LANES), lambda b, j, *_: (b if own else 0, j, 0)))
    if transforms.allowed is not None:
        words = jax.lax.bitcast_convert_type(transforms.allowed, jnp.int32)
        words = words.reshape(shape.batch, shape.nodes, -1)
        words = jnp.pad(words, ((0, 0), (0, 0), (0, shape.words - words.shape[-1])))
        arrays["allowed"] = words
        specs.append(by_node(shape.words))
    if drafts.chain_log_q is not None:
        last = pl.cdiv(shape.drafts, shape.law_block) - 1
        arrays["log_q"] = drafts.chain_log_q
        specs.append(
            pl.BlockSpec((1, shape.law_block, vocab), lambda b, j, *_: (b, jnp.minimum(j, last), 0))
        )
    return scalars, arrays, specs


def _parameters(shape: Shape, transforms: Transforms, drafts: Drafts) -> jax.Array:
    """Return [B, rows, LANES] float32, the parameters of every node in the first columns."""
    vocab = shape.vocab
    table = parameters(transforms, vocab)
    width = shape.nodes if shape.shared else 1
    table = jnp.broadcast_to(table[:, None], (table.shape[0], width, NEXT))
    table = table.reshape(shape.batch, shape.nodes, NEXT)
    following = jnp.full((shape.batch, shape.nodes, 1), -1.0, jnp.float32)
    if shape.drafts:
        following = following.at[:, :-1, 0].set(drafts.tokens.astype(jnp.float32))
    table = jnp.concatenate([table, following], axis=-1)
    rows = shape.blocks * shape.block
    # A node that is only padding asks for nothing.
    nothing = jnp.array([1, 0, vocab, 1, -jnp.inf, 1, 0, 0, -1], jnp.float32)
    padding = jnp.broadcast_to(nothing, (shape.batch, rows - shape.nodes, nothing.size))
    table = jnp.concatenate([table, padding], axis=1)
    return jnp.pad(table, ((0, 0), (0, 0), (0, LANES - nothing.size)))
