"""Decoding from the host's side: rows are set up, chunks run on the device, results are read back.

Between chunks the host only looks; it decides nothing that would change a token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec import counters, decoding, randomness, sampling
from jspec.config import SamplingParams, SpeculationConfig
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.errors import InputError, require
from jspec.metrics import Counts, Timing
from jspec.model import Model
from jspec.state import DecodeState, Finish

# One program a (static arguments, shapes) pair, shared by every decoder of the process. The state
# is donated: caches are updated in place.
run_prefill = jax.jit(
    decoding.prefill,
    static_argnames=("target", "drafter", "width"),
    donate_argnames="state",
)
run_chunk = jax.jit(decoding.decode_chunk, static_argnames="program", donate_argnames="state")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to sample from it.

    Attributes:
        token_ids: the prompt, at least one token.
        sampling: parameters.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)


@dataclasses.dataclass(frozen=True)
class Delta:
    """News of one row after a chunk.

    Attributes:
        index: of the request.
        token_ids: new tokens.
        text: new text, whole characters only; "" without a tokenizer.
        completion: the whole result once the row has finished.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """Result of one request.

    Attributes:
        token_ids: generated tokens, the stop token included.
        text: of the generated tokens; "" without a tokenizer.
        finish_reason: "stop", "length" or "error".
        error: what went wrong, None unless the reason is "error".
        counts: raw counts.
        timing: wall times.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: str | None
    counts: Counts
    timing: Timing


class Decoder:
    """Decodes requests with one target, one drafter and one speculation setting.

    Args:
        target: the model whose law the output has.
        drafter: proposes tokens; None decodes plainly.
        speculation: how much to speculate; without a drafter gamma must be left out or 0.
        batch_size: most rows decoded together.
        prefill_width: most prompt tokens a row run in one prefill step.
        cache_dtype: of keys and values; None takes the parameters' dtype.

    Raises:
        InputError: the settings contradict each other.
    """

    def __init__(
        self,
        target: Model,
        drafter: BoundDrafter | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        batch_size: int = 8,
        prefill_width: int = 128,
        cache_dtype: DTypeLike | None = None,
    ) -> None:
        if speculation is None:
            speculation = SpeculationConfig() if drafter else SpeculationConfig(gamma=0)
        require(
            drafter is None or isinstance(drafter, BoundDrafter),
            "drafter",
            drafter,
            "is no drafter",
            "give jspec.ngram(), jspec.draft_model(...), jspec.early_exit(...) or a BoundDrafter",
        )
        require(
            drafter is not None or speculation.gamma == 0,
            "gamma",
            speculation.gamma,
            "asks for drafts but there is no drafter",
            "give a drafter, or gamma=0 for plain decoding",
        )
        require(batch_size >= 1, "batch_size", batch_size, "is below 1", "decode at least one row")
        require(
            prefill_width >= 1,
            "prefill_width",
            prefill_width,
            "is below 1",
            "prefill at least one token a step",
        )
        self.target = target
        self.drafter = drafter if speculation.gamma > 0 else None
        self.speculation = speculation
        self.batch_size = batch_size
        self.prefill_width = prefill_width
        self.cache_dtype = cache_dtype or jax.tree.leaves(target.params)[0].dtype
        self._program = Program(
            target=target.functions,
            drafter=self.drafter.drafter if self.drafter else None,
            gamma=speculation.gamma,
            verification=speculation.verification,
        )
        self._drafter_params = self.drafter.params if self.drafter else ()

    def generate(
        self,
        requests: Sequence[Request],
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Decode all requests, `batch_size` at a time, in their order.

        Args:
            requests: checked before any of them is run.
            on_progress: called with the number of finished requests whenever it grows.

        Raises:
            InputError: a request is not valid; its index is in the field's name.
        """
        done: dict[int, Completion] = {}
        for delta in self.stream(requests):
            if delta.completion is not None:
                done[delta.index] = delta.completion
                if on_progress is not None:
                    on_progress(len(done))
        return [done[index] for index in range(len(requests))]

    def stream(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Decode all requests and yield what is new after every chunk of rounds.

        Args:
            requests: checked before any of them is run.

        Raises:
            InputError: a request is not valid; its index is in the field's name.
        """
        for index, request in enumerate(requests):
            self.check(request, f"requests[{index}]")
        return self._stream(requests)

    def check(self, request: Request, field: str = "request") -> None:
        """Raise `InputError` unless the request can be decoded; `field` names it."""
        config = self.target.config
        count = config.vocab_size if config.token_count is None else config.token_count
        ids, params = request.token_ids, request.sampling
        require(len(ids) >= 1, f"{field}.token_ids", ids, "is empty", "give at least one token")
        require(
            len(ids) < config.max_context,
            f"{field}.token_ids",
            f"<{len(ids)} tokens>",
            f"has {len(ids)} tokens, but the model's context holds {config.max_context} "
            "with at least one to generate",
            "shorten the prompt",
        )
        for name, values in (("token_ids", ids), ("stop_token_ids", params.stop_token_ids)):
            for token in values:
                if not 0 <= token < count:
                    raise InputError(
                        f"{field}.{name}",
                        token,
                        f"is outside the vocabulary of {count} tokens",
                        "use ids of the target's tokenizer",
                    )

    def _stream(self, requests: Sequence[Request]) -> Iterator[Delta]:
        for start in range(0, len(requests), self.batch_size):
            yield from self._batch(requests[start : start + self.batch_size], start)

    def capacity(self, requests: Sequence[Request]) -> int:
        """Return the slots a row of a batch: its longest row, rounded up to a multiple of 128."""
        return -(-max(map(self._end, requests)) // 128) * 128

    def _end(self, request: Request) -> int:
        """Return the length at which a request's budget or the context is used up."""
        longest = len(request.token_ids) + request.sampling.max_new_tokens
        return min(longest, self.target.config.max_context)

    def new_state(self, requests: Sequence[Request]) -> DecodeState:
        """Return the state of a batch before its prefill, in buckets of static shape.

        Rows are padded to a power of two with inactive ones; see `capacity` for the slots.
        """
        rows = min(self.batch_size, _power_of_two(len(requests)))
        filler = Request((0,), SamplingParams(max_new_tokens=1, seed=0))
        padded = [*requests, *[filler] * (rows - len(requests))]
        ends = [self._end(request) for request in padded]
        capacity = self.capacity(padded)
        tokens = np.zeros((rows, capacity), np.int32)
        stops = [self._stops(r.sampling) for r in padded]
        stop_ids = np.full((rows, max(4, _power_of_two(max(map(len, stops))))), -1, np.int32)
        for row, request in enumerate(padded):
            tokens[row, : len(request.token_ids)] = request.token_ids
            stop_ids[row, : len(stops[row])] = stops[row]
        drafter = self._program.drafter
        return DecodeState(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(np.array([len(r.token_ids) for r in padded], np.int32)),
            end=jnp.asarray(np.array(ends, np.int32)),
            active=jnp.asarray(np.arange(rows) < len(requests)),
            finish=jnp.zeros(rows, jnp.int32),
            sampling=sampling.rows([r.sampling for r in padded]),
            seeds=jnp.asarray(np.stack([randomness.seed_words(r.sampling.seed) for r in padded])),
            stop_ids=jnp.asarray(stop_ids),
            cache=self._program.target.init_cache(rows, capacity, self.cache_dtype),
            drafter=drafter.init(rows, capacity, self.cache_dtype) if drafter else (),
            counters=counters.init(rows, self.speculation.gamma),
        )

    def _stops(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.target.eos_token_ids
        return tuple(dict.fromkeys((*own, *params.stop_token_ids)))

    def _batch(self, requests: Sequence[Request], first_index: int) -> Iterator[Delta]:
        started = time.perf_counter()
        state = self.new_state(requests)
        longest = max(len(r.token_ids) for r in requests)
        state = run_prefill(
            target=self._program.target,
            drafter=self._program.drafter,
            width=min(self.prefill_width, _power_of_two(longest)),
            params=self.target.params,
            drafter_params=self._drafter_params,
            state=state,
        )
        jax.block_until_ready(state)
        clock = _Clock(len(requests), started)
        rows = [_Row(self, len(r.token_ids)) for r in requests]
        rounds_wanted = 1  # the first chunk is one round, which times the first token
        while not all(row.done for row in rows):
            state, rounds = run_chunk(
                program=self._program,
                params=self.target.params,
                drafter_params=self._drafter_params,
                state=state,
                max_rounds=np.int32(rounds_wanted),
                until_finish=np.bool_(False),
            )
            view = jax.device_get(
                (state.tokens, state.length, state.finish, state.counters, rounds)
            )
            clock.chunk(view[3].histogram.sum(axis=(1, 2)), int(view[4]))
            for index, row in enumerate(rows):
                if not row.done:
                    delta = row.read(first_index + index, index, view, clock)
                    if delta is not None:
                        yield delta
            rounds_wanted = min(self.speculation.rounds_per_chunk, np.iinfo(np.int32).max)


class _Clock:
    """Wall times of a batch's rows, split evenly over the rounds of a chunk."""

    def __init__(self, rows: int, started: float) -> None:
        self._started = started
        self._last = time.perf_counter() - started
        self.prefill = self._last
        self._rounds = np.zeros(rows, np.int64)
        self.first = np.full(rows, np.nan)
        self.end = np.full(rows, np.nan)

    def chunk(self, rounds_of_rows: np.ndarray, rounds: int) -> None:
        """Note the end of a chunk of `rounds`, after which rows have taken part in so many."""
        now = time.perf_counter() - self._started
        count = len(self._rounds)
        taken = rounds_of_rows[:count] - self._rounds
        share = (now - self._last) / max(rounds, 1)
        fresh = np.isnan(self.first)
        self.first[fresh] = self._last + share
        self.end = np.where(taken > 0, self._last + share * taken, self.end)
        self._rounds = rounds_of_rows[:count].astype(np.int64)
        self._last = now


class _Row:
    """What the host has read of one row so far."""

    def __init__(self, decoder: Decoder, prompt_length: int) -> None:
        tokenizer = decoder.target.tokenizer
        self._text = tokenizer.stream() if tokenizer is not None else None
        self._prompt = prompt_length
        self._read = prompt_length
        self._pieces: list[str] = []
        self.done = False

    def read(self, index: int, row: int, view: tuple[Any, ...], clock: _Clock) -> Delta | None:
        """Return what the chunk brought, None if nothing."""
        tokens, lengths, finishes, counts, _ = view
        length, finish = int(lengths[row]), Finish(int(finishes[row]))
        new = tuple(int(t) for t in tokens[row, self._read : length])
        self._read = length
        self.done = finish is not Finish.NONE
        if not new and not self.done:
            return None
        text = ""
        if self._text is not None:
            text = self._text.push(new) + (self._text.finish() if self.done else "")
        self._pieces.append(text)
        completion = None
        if self.done:
            step = length - self._prompt
            completion = Completion(
                token_ids=tuple(int(t) for t in tokens[row, self._prompt : length]),
                text="".join(self._pieces),
                finish_reason=finish.name.lower(),
                error=(
                    f"the target's logits of request {index} are not finite at step {step}"
                    if finish is Finish.ERROR
                    else None
                ),
                counts=Counts(
                    histogram=counts.histogram[row].astype(np.int64),
                    overlap=counts.overlap[row].astype(np.float64),
                    emitted=int(counts.emitted[row]),
                    discarded=int(counts.discarded[row]),
                ),
                timing=Timing(clock.prefill, float(clock.first[row]), float(clock.end[row])),
            )
        return Delta(index, new, text, completion)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()
