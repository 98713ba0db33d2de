"""The TPU kernel's body: up to 8 rows of logits in VMEM, a node a sublane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.rejection_sampling.columns import (
    BEST,
    FREQUENCY,
    GREEDY,
    HIGHEST,
    LOG_MIN_P,
    LOG_TOTAL,
    PRESENCE,
    RAW_TOTAL,
    REPETITION,
    TEMPERATURE,
    THRESHOLD,
    TOP_P,
    USABLE,
    WANTED,
)
from pallas_kernels.rejection_sampling.reference import INFINITY, negated
from pallas_kernels.rejection_sampling.tpu_operands import (
    LANES,
    LOG_Q,
    NEXT,
    OVERLAP,
    SUBLANES,
    Shape,
)
from pallas_kernels.rejection_sampling.transforms import penalised

Refs = dict[str, Any]


def _spans(shape: Shape) -> tuple[int, int]:
    """Return the number of whole chunks of the vocabulary, and what is left over."""
    return divmod(shape.vocab, shape.chunk)


def _lanes(chunk: Any, shape: Shape) -> Any:
    return pl.ds(pl.multiple_of(chunk * shape.chunk, LANES), shape.chunk)


def _sum(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=1, keepdims=True)


def _over_work(
    shape: Shape,
    work: Any,
    step: Callable[[jax.Array, Any, tuple[jax.Array, ...]], tuple[jax.Array, ...]],
    start: tuple[jax.Array, ...],
    wanted: jax.Array | bool = True,
) -> tuple[jax.Array, ...]:
    """Go over the chunks of the working rows; not at all unless wanted."""
    chunks = shape.padded // shape.chunk
    count = jnp.where(wanted, chunks, 0)

    def body(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        lanes = _lanes(chunk, shape)
        return step(work[:, lanes], lanes, carry)

    return jax.lax.fori_loop(0, count, body, start)


def _column(refs: Refs, index: int, rows: int | None = None) -> jax.Array:
    return refs["params"][0, slice(rows), index : index + 1]


def _tile(
    shape: Shape, token: jax.Array, sublane: jax.Array | int | None = None
) -> tuple[Any, jax.Array]:
    """Return the lanes of the vector register that holds a token, and where in it the token is.

    Nowhere, if there is no such token. Of one node alone, or of all.
    """
    real = (token >= 0) & (token < shape.vocab)
    inside = jnp.where(real, token, 0)
    # `//` and `%` would ask which TPU it is to run on, which nobody knows when compiling ahead.
    start = pl.multiple_of(jax.lax.div(inside, jnp.int32(LANES)) * LANES, LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, (shape.block, LANES), 1)
    hit = lane == jnp.where(real, inside - start, -1)
    if sublane is not None:
        hit &= jax.lax.broadcasted_iota(jnp.int32, hit.shape, 0) == sublane
    return pl.ds(start, LANES), hit


def _load(shape: Shape, refs: Refs) -> jax.Array:
    """Copy logits, and counts as floats, to the working rows; return the raw maximum."""
    whole, rest = _spans(shape)
    work, extra = refs["work"], refs["extra"]
    if rest:
        tail = pl.ds(whole * shape.chunk, shape.chunk)
        work[:, tail] = jnp.full((shape.block, shape.chunk), -jnp.inf, jnp.float32)
        extra[:, tail] = jnp.zeros((shape.block, shape.chunk), jnp.float32)

    def copy(lanes: Any, highest: jax.Array) -> jax.Array:
        values = refs["logits"][0, :, lanes].astype(jnp.float32)
        work[:, lanes] = values
        if shape.penalties:
            counts = refs["counts"][0, :, lanes].astype(jnp.float32)
            extra[:, lanes] = jnp.broadcast_to(counts, values.shape)
        return jnp.maximum(highest, jnp.max(values, axis=1, keepdims=True))

    start = jnp.full((shape.block, 1), -jnp.inf, jnp.float32)
    highest = jax.lax.fori_loop(0, whole, lambda c, high: copy(_lanes(c, shape), high), start)
    return copy(pl.ds(whole * shape.chunk, rest), highest) if rest else highest


def _of_tokens(
    shape: Shape, refs: Refs, value: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Return [block, LANES]: in column j, value(working entry, token) of draft j at each node."""
    first = pl.program_id(0) * shape.drafts
    column = jax.lax.broadcasted_iota(jnp.int32, (shape.block, LANES), 1)

    def step(draft: jax.Array, found: jax.Array) -> jax.Array:
        token = refs["tokens"][first + draft]
        lanes, hit = _tile(shape, token)
        entry = _sum(jnp.where(hit, refs["work"][:, lanes], 0.0))
        return jnp.where(column == draft, value(entry, token), found)

    start = jnp.zeros((shape.block, LANES), jnp.float32)
    return jax.lax.fori_loop(0, shape.drafts, step, start)


def _lists(shape: Shape) -> Iterator[tuple[jax.Array, int]]:
    """Yield place among all nodes, and sublane, of each node of the block."""
    first = pl.program_id(0) * (shape.blocks * shape.block) + pl.program_id(1) * shape.block
    for sublane in range(shape.block):
        yield first + sublane, sublane


def _add_bias(shape: Shape, refs: Refs) -> None:
    lists: list[tuple[jax.Array, int | None]]
    lists = [(pl.program_id(0), None)] if shape.shared else list(_lists(shape))
    for place, sublane in lists:

        @pl.loop(0, shape.biases)
        def _(k: jax.Array, place: jax.Array = place, sublane: int | None = sublane) -> None:
            entry = place * shape.biases + k
            lanes, hit = _tile(shape, refs["bias_tokens"][entry], sublane)
            values = refs["work"][:, lanes]
            refs["work"][:, lanes] = jnp.where(hit, values + refs["bias_values"][entry], values)


def _forbid(shape: Shape, refs: Refs) -> None:
    for place, sublane in _lists(shape):

        @pl.loop(0, shape.forbidden)
        def _(k: jax.Array, place: jax.Array = place, sublane: int = sublane) -> None:
            token = refs["forbidden"][place * shape.forbidden + k]
            lanes, hit = _tile(shape, token, sublane)
            refs["work"][:, lanes] = jnp.where(hit, -jnp.inf, refs["work"][:, lanes])


def _count_path(shape: Shape, refs: Refs) -> None:
    """Add the drafts on each node's way to its counts (two a draft: they are packed)."""
    first = pl.program_id(0) * shape.drafts
    column = jax.lax.broadcasted_iota(jnp.int32, (shape.block, LANES), 1)

    @pl.loop(0, shape.drafts)
    def _(draft: jax.Array) -> None:
        on_way = _sum(jnp.where(column == draft, refs["path"][0], 0.0))
        lanes, hit = _tile(shape, refs["tokens"][first + draft])
        counts = refs["extra"][:, lanes]
        refs["extra"][:, lanes] = jnp.where(hit, counts + 2.0 * on_way, counts)


def _edit_all(shape: Shape, refs: Refs) -> None:
    """Penalise, and apply the allow-bits, in one pass."""
    rates = [_column(refs, index) for index in (REPETITION, FREQUENCY, PRESENCE)]

    @pl.loop(0, shape.padded // shape.chunk)
    def _(chunk: jax.Array) -> None:
        lanes = _lanes(chunk, shape)
        values = refs["work"][:, lanes]
        if shape.penalties:
            counts = refs["extra"][:, lanes]
            values = penalised(values, counts > 0, jnp.floor(counts * 0.5), *rates)
        if shape.allowed:
            words = refs["allowed"][0, :, pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)]
            values = jnp.where(_bits(words, shape.chunk) == 1, values, -jnp.inf)
        refs["work"][:, lanes] = values


def _bits(words: jax.Array, size: int) -> jax.Array:
    """Spread [block, LANES] int32 words of 32 bits over `size` lanes, a bit each."""
    rows = words.shape[0]
    # Mosaic gathers along lanes where there is more than one sublane.
    words = jnp.broadcast_to(words, (SUBLANES, LANES)) if rows == 1 else words
    lane = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1)
    per = LANES // 32
    tiles = [
        jnp.take_along_axis(words, jnp.right_shift(lane, 5) + per * tile, axis=1)
        for tile in range(size // LANES)
    ]
    spread = jnp.concatenate(tiles, axis=1)[:rows]
    place = jax.lax.broadcasted_iota(jnp.int32, spread.shape, 1) & 31
    return jnp.right_shift(spread, place) & 1


def _bisect(
    shape: Shape,
    holds: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    wanted: jax.Array,
    enough: jax.Array,
) -> jax.Array:
    """Return thresholds [block, 1] equivalent to the reference's `largest_threshold`.

    Stops once what they keep is settled: no two scores lie in the bracket, or as many are kept as
    are enough.

    Args:
        shape: of the call.
        holds: from thresholds to (float 0 or 1, number of scores from there on).
        wanted: [block, 1] float, 0 where no threshold is asked for (it is -inf).
        enough: [block, 1] float, number of scores that settles it, or below 0.
    """
    full = (shape.block, 1)

    def unsettled(
        below: jax.Array, known: jax.Array, fewer: jax.Array, count: jax.Array
    ) -> jax.Array:
        undecided = (known - below > 1) & (count - fewer > 1) & (count != enough)
        return jnp.max(jnp.where(undecided & (wanted > 0), 1.0, 0.0))

    def step(carry: Any) -> Any:
        below, known, fewer, count, _ = carry
        middle = below + jax.lax.shift_right_logical(known - below, jnp.int32(1))
        held, above = holds(negated(middle))
        held = (held > 0) | (middle == known)
        # A settled node may go on beside one that is not: its bracket only gets narrower.
        below = jnp.where(held, below, middle)
        fewer = jnp.where(held, fewer, above)
        known = jnp.where(held, middle, known)
        count = jnp.where(held, above, count)
        return below, known, fewer, count, unsettled(below, known, fewer, count)

    below, known = jnp.full(full, -1, jnp.int32), jnp.full(full, INFINITY, jnp.int32)
    fewer = jnp.zeros(full, jnp.float32)
    count = jnp.full(full, shape.vocab, jnp.float32)
    start = (below, known, fewer, count, unsettled(below, known, fewer, count))
    _, known, *_ = jax.lax.while_loop(lambda carry: carry[-1] > 0, step, start)
    return jnp.where(wanted > 0, negated(known), -jnp.inf)


def _thresholds(shape: Shape, refs: Refs) -> jax.Array:
    """Return the [block, 1] threshold from which the working scores are kept."""
    work, extra = refs["work"], refs["extra"]
    nothing = jnp.zeros((shape.block, 1), jnp.float32)
    wanted, top_p = _column(refs, WANTED), _column(refs, TOP_P)

    def enough(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        (count,) = _over_work(
            shape,
            work,
            lambda x, _, c: (c[0] + _sum(jnp.where(x >= threshold, 1.0, 0.0)),),
            (nothing,),
        )
        return jnp.where(count >= wanted, 1.0, 0.0), count

    limited = jnp.where(wanted < shape.vocab, 1.0, 0.0)
    by_count = _bisect(shape, enough, limited, wanted)

    nucleus = jnp.where(top_p < 1, 1.0, 0.0)

    def weigh(x: jax.Array, lanes: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weight = jnp.where(x >= by_count, jnp.exp(x), 0.0)
        extra[:, lanes] = weight
        return (carry[0] + _sum(weight),)

    (mass,) = _over_work(shape, work, weigh, (nothing,), jnp.max(nucleus) > 0)

    def covers(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add(x: jax.Array, lanes: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            above = x >= threshold
            covered = _sum(jnp.where(above, extra[:, lanes], 0.0))
            return carry[0] + covered, carry[1] + _sum(jnp.where(above, 1.0, 0.0))

        covered, count = _over_work(shape, work, add, (nothing, nothing))
        return jnp.where(covered >= top_p * mass, 1.0, 0.0), count

    by_mass = _bisect(shape, covers, nucleus, jnp.full_like(nucleus, -1.0))
    return jnp.maximum(jnp.maximum(by_count, by_mass), _column(refs, LOG_MIN_P))


def _compare(
    shape: Shape, refs: Refs, threshold: jax.Array, log_total: jax.Array, best: jax.Array
) -> None:
    """Write sum min(p, q) and log q of each draft."""
    rows = shape.law_block
    whole, rest = _spans(shape)
    greedy = _column(refs, GREEDY, rows) > 0
    following = _column(refs, NEXT, rows)
    threshold, log_total, best = threshold[:rows], log_total[:rows], best[:rows]

    def add(
        lanes: Any, base: jax.Array | int, carry: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        overlap, own, fit, some = carry
        log_q = refs["log_q"][0, :, lanes]
        x = refs["work"][0:rows, lanes]
        token = (jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + base).astype(jnp.float32)
        p = jnp.where(x >= threshold, jnp.exp(x - log_total), 0.0)
        p = jnp.where(greedy, jnp.where(token == best, 1.0, 0.0), p)
        overlap += _sum(jnp.minimum(p, jnp.exp(log_q)))
        own += _sum(jnp.where(token == following, log_q, 0.0))
        fit = jnp.minimum(fit, jnp.min(jnp.where(log_q < jnp.inf, 1.0, 0.0), axis=1, keepdims=True))
        some = jnp.maximum(
            some, jnp.max(jnp.where(log_q > -jnp.inf, 1.0, 0.0), axis=1, keepdims=True)
        )
        return overlap, own, fit, some

    zero = jnp.zeros((rows, 1), jnp.float32)
    carry: tuple[jax.Array, ...] = (zero, zero, zero + 1.0, zero)
    carry = jax.lax.fori_loop(
        0, whole, lambda c, carry: add(_lanes(c, shape), c * shape.chunk, carry), carry
    )
    if rest:
        carry = add(pl.ds(whole * shape.chunk, rest), whole * shape.chunk, carry)
    overlap, own, fit, some = carry
    overlap = jnp.where((fit > 0) & (some > 0), overlap, jnp.nan)
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    refs["law"][0] = jnp.where(column == OVERLAP, overlap, jnp.where(column == LOG_Q, own, 0.0))


def kernel(shape: Shape, refs: Refs) -> None:
    """Write the statistics of one block of nodes."""
    work = refs["work"]
    zero = jnp.zeros((shape.block, 1), jnp.float32)
    raw_highest = _load(shape, refs)
    if shape.drafts:
        refs["raw"][0] = _of_tokens(shape, refs, lambda entry, _: entry)
    (raw_sum,) = _over_work(
        shape, work, lambda x, _, c: (c[0] + _sum(jnp.exp(x - raw_highest)),), (zero,)
    )
    if shape.biases:
        _add_bias(shape, refs)
    if shape.penalties and shape.drafts:
        _count_path(shape, refs)
    if shape.penalties or shape.allowed:
        _edit_all(shape, refs)
    if shape.forbidden:
        _forbid(shape, refs)

    def survey(x: jax.Array, _: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        fit = jnp.min(jnp.where(x < jnp.inf, 1.0, 0.0), axis=1, keepdims=True)
        high = jnp.max(x, axis=1, keepdims=True)
        return jnp.maximum(carry[0], high), jnp.minimum(carry[1], fit)

    highest, fit = _over_work(shape, work, survey, (zero - jnp.inf, zero + 1.0))
    temperature = _column(refs, TEMPERATURE)

    def score(x: jax.Array, lanes: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        token = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + lanes.start
        place = jnp.where(x == highest, token.astype(jnp.float32), jnp.float32(shape.vocab))
        scores = (x - highest) / temperature
        work[:, lanes] = scores
        first = jnp.min(place, axis=1, keepdims=True)
        return jnp.minimum(carry[0], first), carry[1] + _sum(jnp.exp(scores))

    best, total = _over_work(shape, work, score, (zero + shape.vocab, zero))
    threshold = _thresholds(shape, refs)
    truncated = jnp.max(jnp.where(threshold > -jnp.inf, 1.0, 0.0)) > 0
    (kept,) = _over_work(
        shape,
        work,
        lambda x, _, c: (c[0] + _sum(jnp.where(x >= threshold, jnp.exp(x), 0.0)),),
        (zero,),
        truncated,
    )
    log_total = jnp.log(jnp.where(truncated, kept, total))
    if shape.drafts:
        greedy = _column(refs, GREEDY) > 0

        def log_p(entry: jax.Array, token: jax.Array) -> jax.Array:
            drawn = jnp.where(entry >= threshold, entry - log_total, -jnp.inf)
            point = jnp.where(best == token.astype(jnp.float32), 0.0, -jnp.inf)
            return jnp.where(greedy, point, drawn)

        refs["log_p"][0] = _of_tokens(shape, refs, log_p)
    if shape.law:
        _compare(shape, refs, threshold, log_total, best)

    columns = {
        USABLE: jnp.where(highest > -jnp.inf, fit, 0.0),
        BEST: best,
        HIGHEST: highest,
        THRESHOLD: threshold,
        LOG_TOTAL: log_total,
        RAW_TOTAL: raw_highest + jnp.log(raw_sum),
    }
    column = jax.lax.broadcasted_iota(jnp.int32, (shape.block, LANES), 1)
    table = jnp.zeros((shape.block, LANES), jnp.float32)
    for index, value in columns.items():
        table = jnp.where(column == index, value, table)
    refs["stats"][0] = table
