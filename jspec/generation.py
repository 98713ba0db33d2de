"""Decoding from the host's side: rows are set up, chunks run on the device, results are read back.

Between chunks the host only looks; it decides nothing that would change a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jspec import admission, decoding, randomness
from jspec.checkpoints.assembly import checked_dtype
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.errors import is_list, require, require_integer
from jspec.model import Model, require_model
from jspec.readout import Clock, Reader, Sample, View
from jspec.requests import Completion, Delta, Request
from jspec.state import DecodeState

# One program a (static arguments, shapes) pair, shared by every decoder of the process. The state
# is donated: caches are updated in place.
run_prefill = jax.jit(
    decoding.prefill,
    static_argnames=("target", "drafter", "width"),
    donate_argnames="state",
)
run_fan_out = jax.jit(admission.fan_out, static_argnames="drafter")
run_chunk = jax.jit(decoding.decode_chunk, static_argnames="program", donate_argnames="state")

# The host looks for stop texts between chunks; rounds past one are wasted.
STOP_TEXT_ROUNDS = 8


class Decoder:
    """Decodes requests with one target, one drafter and one speculation setting.

    Args:
        target: the model whose law the output has.
        drafter: proposes tokens; None decodes plainly.
        speculation: how much to speculate; without a drafter gamma must be left out or 0.
        batch_size: most rows decoded together.
        prefill_width: most prompt tokens a row run in one prefill step.
        cache_dtype: of keys and values; None takes the target's `Model.cache_dtype`.

    Raises:
        InputError: a setting is of the wrong kind, or settings contradict each other.
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
        require_model("target", target)
        if speculation is None:
            speculation = default_speculation(drafter)
        require(
            isinstance(speculation, SpeculationConfig),
            "speculation",
            speculation,
            "is no SpeculationConfig",
            "give jspec.SpeculationConfig(gamma=...)",
        )
        require(
            drafter is None or isinstance(drafter, BoundDrafter),
            "drafter",
            drafter,
            "is no drafter",
            "give jspec.ngram(), jspec.ngram_tree(), jspec.draft_model(...), .. or a BoundDrafter",
        )
        require(
            drafter is not None or speculation.gamma == 0,
            "gamma",
            speculation.gamma,
            "asks for drafts but there is no drafter",
            "give a drafter, or gamma=0 for plain decoding",
        )
        drafts = drafter.drafts if drafter is not None else None
        require(
            drafts is None or speculation.verification != "block",
            "verification",
            speculation.verification,
            "is a rule for chains, and the drafter makes trees",
            "use token",
        )
        require(
            drafts is None or speculation.gamma in (0, drafts),
            "gamma",
            speculation.gamma,
            f"is not the {drafts} drafts of the drafter's tree",
            f"leave it out, or give gamma={drafts}, or 0 for plain decoding",
        )
        most = drafter.most_drafts if drafter is not None else None
        require(
            most is None or speculation.gamma <= most,
            "gamma",
            speculation.gamma,
            f"is above the {most} drafts that the drafter can make",
            f"give gamma={most} or less",
        )
        require_integer("batch_size", batch_size)
        require(batch_size >= 1, "batch_size", batch_size, "is below 1", "decode at least one row")
        require_integer("prefill_width", prefill_width)
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
        self._scratch = (drafts or 0) if self.drafter is not None else 0
        self.batch_size = batch_size
        self.prefill_width = prefill_width
        self.cache_dtype = (
            target.cache_dtype if cache_dtype is None else checked_dtype(cache_dtype, "cache_dtype")
        )
        functions = target.functions
        self._program = Program(
            target=functions,
            drafter=self.drafter.drafter if self.drafter else None,
            gamma=speculation.gamma,
            verification=speculation.verification,
            typical=speculation.typical,
            kernels=functions.kernels,
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
            on_progress: called with the number of finished samples whenever it grows.

        Returns:
            One completion for every sample: those of the first request, then of the second, ...

        Raises:
            InputError: a request is not valid; its index is in the field's name.
        """
        require(
            on_progress is None or callable(on_progress),
            "on_progress",
            on_progress,
            "is no function",
            "give one of the number of finished samples, or None",
        )
        done: dict[tuple[int, int], Completion] = {}
        for delta in self.stream(requests):
            if delta.completion is not None:
                done[delta.index, delta.sample] = delta.completion
                if on_progress is not None:
                    on_progress(len(done))
        return [done[key] for key in sorted(done)]

    def stream(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Decode all requests and yield what is new after every chunk of rounds.

        Args:
            requests: checked before any of them is run.

        Raises:
            InputError: a request is not valid; its index is in the field's name.
        """
        require(  # a generator would be used up by the checks
            is_list(requests),
            "requests",
            requests,
            "is no list",
            "give a list of jspec.Request",
        )
        for index, request in enumerate(requests):
            self.check(request, f"requests[{index}]")
        return self._stream(requests)

    def check(self, request: Request, field: str = "request") -> None:
        """Raise `InputError` unless the request can be decoded; `field` names it."""
        admission.check(self.target, request, field)

    def capacity(self, requests: Sequence[Request]) -> int:
        """Return the slots a row of a batch: its longest row, rounded up to a multiple of 128."""
        return admission.capacity(self.target, requests, self._scratch)

    def new_state(self, requests: Sequence[Request]) -> DecodeState:
        """Return the state of a batch before its prefill, in buckets of static shape.

        Rows are padded to a power of two with inactive ones; see `capacity` for the slots.
        """
        rows = min(self.batch_size, admission.power_of_two(len(requests)))
        drafter = self._program.drafter
        return admission.new_state(
            self.target, drafter, requests, rows, self.cache_dtype, self._scratch
        )

    def _stream(self, requests: Sequence[Request]) -> Iterator[Delta]:
        samples = [
            Sample(index, number, request)
            for index, request in enumerate(requests)
            for number in range(request.sampling.n)
        ]
        for start in range(0, len(samples), self.batch_size):
            yield from self._batch(samples[start : start + self.batch_size])

    def _prefilled(self, samples: Sequence[Sample]) -> DecodeState:
        """Return the state of a batch after its prefill, in which a prompt is run once."""
        prompts = list({sample.index: sample.request for sample in samples}.values())
        longest = max(len(prompt.token_ids) for prompt in prompts)
        state = run_prefill(
            target=self._program.target,
            drafter=self._program.drafter,
            width=min(self.prefill_width, admission.power_of_two(longest)),
            params=self.target.params,
            drafter_params=self._drafter_params,
            state=self.new_state(prompts),
        )
        if all(sample.request.sampling.n == 1 for sample in samples):
            return state
        rows = min(self.batch_size, admission.power_of_two(len(samples)))
        place = {index: row for row, index in enumerate(dict.fromkeys(s.index for s in samples))}
        source, seeds = np.zeros(rows, np.int32), np.zeros((rows, 2), np.uint32)
        for row, sample in enumerate(samples):
            source[row] = place[sample.index]
            seeds[row] = randomness.seed_words(sample.request.sampling.seed, sample.number)
        active = np.arange(rows) < len(samples)
        return run_fan_out(
            drafter=self._program.drafter, state=state, source=source, seeds=seeds, active=active
        )

    def _batch(self, samples: Sequence[Sample]) -> Iterator[Delta]:
        started = time.perf_counter()
        state = self._prefilled(samples)
        jax.block_until_ready(state)
        clock = Clock(len(samples), started)
        readers = [
            Reader(sample, row, self.target.tokenizer, self.speculation)
            for row, sample in enumerate(samples)
        ]
        most_rounds = self.speculation.rounds_per_chunk
        if any(sample.request.sampling.stop for sample in samples):
            most_rounds = min(most_rounds, STOP_TEXT_ROUNDS)
        rounds_wanted = 1  # the first chunk is one round, which times the first token
        ended = np.zeros(len(state.length), bool)
        while not all(reader.done for reader in readers):
            state, rounds = run_chunk(
                program=self._program,
                params=self.target.params,
                drafter_params=self._drafter_params,
                state=state,
                max_rounds=np.int32(rounds_wanted),
                until_finish=np.bool_(False),
                ended=ended,
            )
            view = View.fetch(state, rounds)
            clock.chunk(view)
            for row, reader in enumerate(readers):
                if not reader.done:
                    delta = reader.read(view, clock)
                    if delta is not None:
                        yield delta
                    ended[row] = reader.done
            rounds_wanted = min(most_rounds, np.iinfo(np.int32).max)


def default_speculation(drafter: object) -> SpeculationConfig:
    """Return what holds where nothing is asked for."""
    if not isinstance(drafter, BoundDrafter):
        return SpeculationConfig() if drafter is not None else SpeculationConfig(gamma=0)
    if drafter.drafts is not None:
        return SpeculationConfig(drafter.drafts)
    most = drafter.most_drafts
    return (
        SpeculationConfig()
        if most is None
        else SpeculationConfig(min(most, SpeculationConfig.gamma))
    )
