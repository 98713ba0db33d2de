"""Statistics of rejection sampling for GPU (Pallas, Triton lowering).

One program a node goes over its row of logits block by block: once for all sums, and for the nodes
that truncate a few times more, from the L2 cache as far as it holds them. Edits are made anew in
each pass, so nothing but the statistics is written.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.rejection_sampling.columns import (
    FREQUENCY,
    GREEDY,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    WANTED,
    parameters,
    unfit,
    unpacked,
)
from pallas_kernels.rejection_sampling.inputs import Drafts, Statistics, Transforms, on_path
from pallas_kernels.rejection_sampling.reference import INFINITY, negated
from pallas_kernels.rejection_sampling.transforms import dense_bias, packed_counts, penalised

BLOCK, WARPS = 1024, 16
# Thresholds tried in one pass of a search, which shrinks its bracket by one more than these.
TRIED = 7
# Finite, so that a lane that has seen nothing gives 0 instead of inf - inf.
LOWEST = -1e30
# Columns of the statistics after those of every kernel.
OVERLAP, LOG_Q = 6, 7

Refs = dict[str, Any]
Carry = tuple[jax.Array, ...]


def supports(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> str | None:
    """Return why the kernel cannot run on these arrays (or abstract ones), or None."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this JAX has no Triton lowering of Pallas"
    return unfit(logits, transforms, drafts)


def statistics(
    logits: jax.Array, transforms: Transforms, drafts: Drafts, *, interpret: bool = False
) -> Statistics:
    """Do as `reference.statistics`.

    Args:
        logits: as there.
        transforms: as there.
        drafts: as there.
        interpret: run without a GPU.

    Raises:
        ValueError: `supports` gives a reason.
    """
    reason = supports(logits, transforms, drafts)
    if reason is not None:
        raise ValueError(f"rejection_sampling on GPU: {reason}")
    from jax.experimental.pallas import triton as pltriton

    batch, nodes, vocab = logits.shape
    arrays = {"logits": logits, "params": parameters(transforms, vocab)}
    width = pl.next_power_of_2(max(nodes - 1, 1))
    if nodes > 1:
        tokens = jnp.pad(drafts.tokens, ((0, 0), (0, width - nodes + 1)), constant_values=-1)
        arrays["tokens"] = tokens
        path = on_path(drafts).astype(jnp.int32)
        arrays["path"] = jnp.pad(path, ((0, 0), (0, 0), (0, width - nodes + 1)))
    if transforms.bias is not None:
        arrays["bias"] = dense_bias(transforms.bias, vocab)
    if transforms.penalties is not None:
        arrays["counts"] = packed_counts(transforms.penalties)
    if transforms.forbidden is not None:
        arrays["forbidden"] = transforms.forbidden
    if transforms.allowed is not None:
        arrays["allowed"] = jax.lax.bitcast_convert_type(transforms.allowed, jnp.int32)
    if drafts.chain_log_q is not None:
        arrays["log_q"] = drafts.chain_log_q
    outputs = {"stats": 8, **({"log_p": width, "raw": width} if nodes > 1 else {})}
    keys = [*arrays, *outputs]
    results = pl.pallas_call(
        lambda *refs: _kernel(dict(zip(keys, refs, strict=True))),
        grid=(batch, nodes),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(outputs),
        out_shape=[
            jax.ShapeDtypeStruct((batch, nodes, size), jnp.float32) for size in outputs.values()
        ],
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="rejection_sampling",
    )(*arrays.values())
    found = dict(zip(outputs, results, strict=True))
    stats = found["stats"]
    compared = None
    if drafts.chain_log_q is not None:
        compared = stats[:, :-1, OVERLAP], stats[:, :-1, LOG_Q]
    return unpacked(drafts, stats, found.get("log_p"), found.get("raw"), compared)


@dataclasses.dataclass(frozen=True)
class _Node:
    """One program's row of logits."""

    refs: Refs
    row: jax.Array
    node: jax.Array

    @property
    def vocab(self) -> int:
        return int(self.refs["logits"].shape[-1])

    def parameter(self, index: int) -> jax.Array:
        return self.refs["params"][self.row, index]

    def raw(self, token: jax.Array) -> jax.Array:
        """Return the logits of tokens, -inf where there is no such token."""
        real = (token >= 0) & (token < self.vocab)
        inside = jnp.where(real, token, 0)
        place = self.refs["logits"].at[self.row, self.node, inside]
        loaded = _load(place, mask=real, other=-jnp.inf)
        return loaded.astype(jnp.float32)

    def edited(self, raw: jax.Array, token: jax.Array) -> jax.Array:
        """Return edited logits of tokens."""
        refs, row, node = self.refs, self.row, self.node
        real = (token >= 0) & (token < self.vocab)
        inside = jnp.where(real, token, 0)
        values = raw
        if "bias" in refs:
            values += _load(refs["bias"].at[row, inside], mask=real, other=0.0)
        if "counts" in refs:
            counts = _load(refs["counts"].at[row, inside], mask=real, other=0)
            if "tokens" in refs:
                drafts = refs["tokens"].shape[-1]
                tree = row if refs["path"].shape[0] > 1 else 0

                def add(draft: jax.Array, counts: jax.Array) -> jax.Array:
                    hit = token == refs["tokens"][row, draft]
                    return counts + jnp.where(hit, 2 * refs["path"][tree, node, draft], 0)

                counts = jax.lax.fori_loop(0, drafts, add, counts)
            rates = [self.parameter(index) for index in (REPETITION, FREQUENCY, PRESENCE)]
            times = (counts // 2).astype(jnp.float32)
            values = penalised(values, counts > 0, times, *rates)
        if "forbidden" in refs:

            def forbid(index: jax.Array, values: jax.Array) -> jax.Array:
                hit = token == refs["forbidden"][row, node, index]
                return jnp.where(hit, -jnp.inf, values)

            values = jax.lax.fori_loop(0, refs["forbidden"].shape[-1], forbid, values)
        if "allowed" in refs:
            place = refs["allowed"].at[row, node, inside // 32]
            word = _load(place, mask=real, other=0)
            values = jnp.where(jnp.right_shift(word, inside % 32) & 1 == 1, values, -jnp.inf)
        return values

    def sweep(
        self,
        step: Callable[[jax.Array, jax.Array, jax.Array, Carry], Carry],
        start: Carry,
        wanted: jax.Array | None = None,
    ) -> Carry:
        """Carry `step(token, raw, edited, carry)` over the row's blocks; over none if unwanted."""

        def body(block: jax.Array, carry: Carry) -> Carry:
            token = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            raw = self.raw(token)
            return step(token, raw, self.edited(raw, token), carry)

        blocks = pl.cdiv(self.vocab, BLOCK)
        # A product, for Triton's lowering takes a selection's condition for the loop's bound.
        count = blocks if wanted is None else wanted.astype(jnp.int32) * blocks
        return jax.lax.fori_loop(0, count, body, start)


def _load(place: Any, mask: jax.Array, other: float) -> jax.Array:
    from jax.experimental.pallas import triton as pltriton

    return pltriton.load(place, mask=mask, other=other)


def _search(
    tried: Callable[[list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]],
    wanted: jax.Array,
    enough: jax.Array,
    vocab: int,
) -> jax.Array:
    """Return a threshold that keeps what the reference's `largest_threshold` keeps.

    Args:
        tried: from thresholds to whether each holds, and the number of scores from there on.
        wanted: bool, whether there is to be one; -inf if not.
        enough: float, number of scores that settles it, or below 0.
        vocab: V.
    """

    def open_(carry: Any) -> jax.Array:
        below, known, fewer, count = carry
        return wanted & (known - below > 1) & (count - fewer > 1) & (count != enough)

    def step(carry: Any) -> Any:
        below, known, fewer, count = carry
        stride = (known - below + TRIED) // (TRIED + 1)
        places = [jnp.minimum(below + stride * (i + 1), known) for i in range(TRIED)]
        holds, counts = tried([negated(place) for place in places])
        new_below, new_known = below, known
        for place, held, above in zip(places, holds, counts, strict=True):
            held |= place == known
            # They go down, so what holds comes after what does not.
            first = held & (place < new_known)
            new_known, count = jnp.where(first, place, new_known), jnp.where(first, above, count)
            new_below = jnp.where(held, new_below, place)
            fewer = jnp.where(held, fewer, above)
        return new_below, new_known, fewer, count

    start = (jnp.int32(-1), jnp.int32(INFINITY), jnp.float32(0), jnp.float32(vocab))
    _, known, _, _ = jax.lax.while_loop(open_, step, start)
    return jnp.where(wanted, negated(known), -jnp.inf)


def _threshold(node: _Node, score: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the threshold from which scores are kept."""
    zeros = jnp.zeros(BLOCK, jnp.float32)
    wanted, top_p = node.parameter(WANTED), node.parameter(TOP_P)

    def enough(thresholds: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def add(_: jax.Array, __: jax.Array, x: jax.Array, carry: Carry) -> Carry:
            scores = score(x)
            return tuple(
                c + jnp.where(scores >= t, 1.0, 0.0) for c, t in zip(carry, thresholds, strict=True)
            )

        counts = [jnp.sum(c) for c in node.sweep(add, (zeros,) * TRIED)]
        return [count >= wanted for count in counts], counts

    by_count = _search(enough, wanted < node.vocab, wanted, node.vocab)

    def weight(scores: jax.Array) -> jax.Array:
        return jnp.where(scores >= by_count, jnp.exp(scores), 0.0)

    nucleus = top_p < 1

    def weigh(_: jax.Array, __: jax.Array, x: jax.Array, carry: Carry) -> Carry:
        return (carry[0] + weight(score(x)),)

    mass = top_p * jnp.sum(node.sweep(weigh, (zeros,), nucleus)[0])

    def covers(thresholds: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def add(_: jax.Array, __: jax.Array, x: jax.Array, carry: Carry) -> Carry:
            scores = score(x)
            mass_here = weight(scores)
            above = [scores >= t for t in thresholds]
            covered = [jnp.where(a, mass_here, 0.0) for a in above]
            counted = [jnp.where(a, 1.0, 0.0) for a in above]
            return tuple(c + a for c, a in zip(carry, [*covered, *counted], strict=True))

        sums = [jnp.sum(c) for c in node.sweep(add, (zeros,) * (2 * TRIED))]
        return [s >= mass for s in sums[:TRIED]], sums[TRIED:]

    by_mass = _search(covers, nucleus, jnp.float32(-1), node.vocab)
    return jnp.maximum(jnp.maximum(by_count, by_mass), node.parameter(LOG_MIN_P))


def _kernel(refs: Refs) -> None:
    node = _Node(refs, pl.program_id(0), pl.program_id(1))
    temperature = node.parameter(TEMPERATURE)
    greedy = node.parameter(GREEDY) > 0
    zeros = jnp.zeros(BLOCK, jnp.float32)
    lowest = jnp.full(BLOCK, LOWEST, jnp.float32)

    def survey(token: jax.Array, raw: jax.Array, x: jax.Array, carry: Carry) -> Carry:
        """Online sums (Milakov and Gimelshein, arXiv 1805.02867), a lane each."""
        raw_high, raw_sum, high, total, best, unfit = carry
        higher = jnp.maximum(raw_high, raw)
        raw_sum = raw_sum * jnp.exp(raw_high - higher) + jnp.exp(raw - higher)
        best = jnp.where(x > high, token, best)
        top = jnp.maximum(high, x)
        total = total * jnp.exp((high - top) / temperature) + jnp.exp((x - top) / temperature)
        return higher, raw_sum, top, total, best, jnp.where(x < jnp.inf, unfit, 1.0)

    start = (lowest, zeros, lowest, zeros, jnp.zeros(BLOCK, jnp.int32), zeros)
    raw_high, raw_sum, high, total, best, unfit = node.sweep(survey, start)
    raw_highest, highest = jnp.max(raw_high), jnp.max(high)
    raw_total = raw_highest + jnp.log(jnp.sum(raw_sum * jnp.exp(raw_high - raw_highest)))
    all_mass = jnp.sum(total * jnp.exp((high - highest) / temperature))
    argmax = jnp.min(jnp.where(high == highest, best, node.vocab))
    usable = (jnp.max(unfit) == 0) & (highest > LOWEST)

    def score(x: jax.Array) -> jax.Array:
        return (x - highest) / temperature

    threshold = _threshold(node, score)

    def keep(_: jax.Array, __: jax.Array, x: jax.Array, carry: Carry) -> Carry:
        scores = score(x)
        return (carry[0] + jnp.where(scores >= threshold, jnp.exp(scores), 0.0),)

    truncated = threshold > -jnp.inf
    kept_mass = jnp.sum(node.sweep(keep, (zeros,), truncated)[0])
    log_total = jnp.log(jnp.where(truncated, kept_mass, all_mass))

    def log_p(x: jax.Array, token: jax.Array) -> jax.Array:
        drawn = jnp.where(score(x) >= threshold, score(x) - log_total, -jnp.inf)
        return jnp.where(greedy, jnp.where(token == argmax, 0.0, -jnp.inf), drawn)

    columns = [
        jnp.where(usable, 1.0, 0.0),
        argmax.astype(jnp.float32),
        highest,
        threshold,
        log_total,
        raw_total,
    ]
    if "tokens" in refs:
        tokens = refs["tokens"][node.row, :]
        raw = node.raw(tokens)
        refs["raw"][node.row, node.node, :] = raw
        refs["log_p"][node.row, node.node, :] = log_p(node.edited(raw, tokens), tokens)
    if "log_q" in refs:
        columns += _compare(node, log_p)
    for index, value in enumerate(columns):
        refs["stats"][node.row, node.node, index] = value


def _compare(node: _Node, log_p: Callable[[jax.Array, jax.Array], jax.Array]) -> list[jax.Array]:
    """Return sum min(p, q) and log q of the node's draft; of no meaning at the last node."""
    drafts = node.refs["log_q"].shape[1]
    draft = jnp.minimum(node.node, drafts - 1)
    own = node.refs["tokens"][node.row, draft]
    zeros = jnp.zeros(BLOCK, jnp.float32)

    def add(token: jax.Array, _: jax.Array, x: jax.Array, carry: Carry) -> Carry:
        overlap, of_own, unfit, some = carry
        real = token < node.vocab
        place = node.refs["log_q"].at[node.row, draft, jnp.where(real, token, 0)]
        log_q = _load(place, mask=real, other=-jnp.inf)
        overlap += jnp.minimum(jnp.exp(log_p(x, token)), jnp.exp(log_q))
        of_own += jnp.where(token == own, log_q, 0.0)
        unfit = jnp.where(log_q < jnp.inf, unfit, 1.0)
        return overlap, of_own, unfit, jnp.where(log_q > -jnp.inf, 1.0, some)

    overlap, of_own, unfit, some = node.sweep(add, (zeros,) * 4)
    fit = (jnp.max(unfit) == 0) & (jnp.max(some) > 0)
    return [jnp.where(fit, jnp.sum(overlap), jnp.nan), jnp.sum(of_own)]
