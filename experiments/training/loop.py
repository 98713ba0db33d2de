"""The loop of a training: steps, checkpoints and measurements, ended and gone on with at any time.

What a step does follows from the settings, its number and the state before it, so a job that was
killed and goes on from a checkpoint comes to the same losses.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from experiments import tables
from experiments.interrupts import Interrupted, Interrupts
from experiments.status import Status
from experiments.training import batches, optimizer, snapshots
from experiments.training.batches import Corpus
from experiments.training.batches import Plan as BatchPlan
from experiments.training.losses import Batch, Frozen, Metrics
from experiments.training.methods import Start
from experiments.training.optimizer import Plan, State, Sums
from experiments.training.progress import History, Progress
from jspec.errors import require

_RECENT = 50  # steps whose rate is shown


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the loop goes by.

    Attributes:
        plan: of the optimiser.
        batch_tokens: of a batch, padding included.
        accumulate: batches of a step.
        prompt_weight: what guessing a token of a prompt counts; one of an answer counts 1.
        seed: of the batches' order.
        save_every: steps between checkpoints.
        measure_every: steps between measurements.
        keep: checkpoints that stay.
    """

    plan: Plan
    batch_tokens: int
    accumulate: int
    prompt_weight: float
    seed: int
    save_every: int
    measure_every: int
    keep: int


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained on and measured on.

    Attributes:
        train: conversations.
        held: held-out conversations.
        vocab_size: V.
    """

    train: Corpus
    held: Corpus
    vocab_size: int


# From the drafter's own parameters to what is measured of real decoding, by name.
Decode = Callable[[Any], dict[str, Any]]


class Trainer:
    """Trains a drafter.

    Args:
        folder: of the job.
        begun: the drafter at its start.
        data: conversations.
        settings: of the loop.
        mesh: devices over whose axis "data" the rows of a batch are split.
        decode: measures real decoding.
        draw: is called after each measurement.
    """

    def __init__(
        self,
        folder: Path,
        begun: Start,
        data: Data,
        settings: Settings,
        mesh: Mesh,
        decode: Decode,
        draw: Callable[[History], None],
    ) -> None:
        self._folder, self._begun, self._data = folder, begun, data
        self._settings, self._decode, self._draw = settings, decode, draw
        self._everywhere = NamedSharding(mesh, jax.P())
        self._by_rows = NamedSharding(mesh, jax.P("data"))
        self._devices = mesh.size
        self._frozen: Frozen = jax.device_put(begun.frozen, self._everywhere)
        self._order = Order(data.train, settings.batch_tokens, settings.seed)

    def run(self, status: Status, interrupts: Interrupts) -> tuple[Any, History]:
        """Train to the end; returns the parameters and what it came to.

        Raises:
            InputError: a checkpoint cannot be read, the disk is full, or the loss is no number.
            Interrupted: a signal asked for it; a checkpoint has been written.
        """
        plan = self._settings.plan
        state = jax.device_put(optimizer.begin(plan, self._begun.params), self._everywhere)
        found = snapshots.load(self._folder, state)
        done, state = (0, state) if found is None else found
        if done:
            status.say(f"Going on after step {done} of {plan.steps}")
        with (
            Progress(self._folder, done) as progress,
            concurrent.futures.ThreadPoolExecutor(1) as ahead,
        ):
            if not progress.history.measured:
                self._measure(done, state, progress, status)
            clock = _Clock(progress.history)
            following = ahead.submit(self._gather, done)
            for step in range(done, plan.steps):
                finished = False
                try:
                    with interrupts.held():
                        begun = time.monotonic()
                        given = following.result()
                        following = ahead.submit(self._gather, step + 1)
                        state = self._step(step, state, given, progress, clock, begun)
                        self._show(step + 1, progress.history, clock, status)
                        if self._due(step + 1, self._settings.measure_every):
                            self._measure(step + 1, state, progress, status)
                        if self._due(step + 1, self._settings.save_every):
                            snapshots.save(self._folder, step + 1, state, self._settings.keep)
                        finished = True
                except Interrupted:
                    if finished and not self._due(step + 1, self._settings.save_every):
                        snapshots.save(self._folder, step + 1, state, self._settings.keep)
                    raise
            return state.params, progress.history

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._settings.plan.steps

    def _step(
        self,
        step: int,
        state: State,
        given: _Given,
        progress: Progress,
        clock: _Clock,
        begun: float,
    ) -> State:
        sums: Sums | None = None
        for batch in given.batches:
            placed = jax.device_put(batch, self._by_rows)
            sums = optimizer.add(self._begun.method, state.params, self._frozen, placed, sums)
        assert sums is not None
        count = len(given.batches)
        state, norm = optimizer.move(self._settings.plan, state, sums.gradient, count)
        loss = float(sums.loss) / count
        require(
            np.isfinite(loss) and bool(np.isfinite(norm)),
            "learning_rate",
            self._settings.plan.learning_rate,
            f"led to a loss of {loss} at step {step + 1}",
            "give a lower one, or a smaller --clip",
        )
        clock.count(given.tokens, time.monotonic() - begun)
        progress.write(
            {
                "step": step + 1,
                "loss": loss,
                "learning_rate": optimizer.rate(self._settings.plan, step),
                "gradient": float(norm),
                "tokens": clock.tokens,
                "seconds": round(clock.seconds, 3),
                **per_token(sums.metrics),
            }
        )
        return state

    def _gather(self, step: int) -> _Given:
        settings = self._settings
        chosen = [
            self._order.batch(step * settings.accumulate + part)
            for part in range(settings.accumulate)
        ]
        return _Given(
            [self._batch(self._data.train, plan, settings.prompt_weight) for plan in chosen],
            sum(_tokens(self._data.train, plan) for plan in chosen),
        )

    def _batch(self, corpus: Corpus, plan: BatchPlan, weight: float) -> Batch:
        filled = np.full(-len(plan.rows) % self._devices, -1, plan.rows.dtype)
        plan = dataclasses.replace(plan, rows=np.concatenate([plan.rows, filled]))
        return batches.gather(corpus, plan, self._begun.places, self._data.vocab_size, weight)

    def _measure(self, step: int, state: State, progress: Progress, status: Status) -> None:
        status.busy(f"Measuring on held-out conversations after step {step} ...")
        parts = []
        for plan in batches.plan(self._data.held, self._settings.batch_tokens, 0, 0):
            # What is drafted is answers, so only they count.
            batch = jax.device_put(self._batch(self._data.held, plan, 0.0), self._by_rows)
            _, metrics = optimizer.measure(self._begun.method, state.params, self._frozen, batch)
            parts.append(jax.device_get(metrics))
        total = Metrics(*(np.sum(column, axis=0) for column in zip(*parts, strict=True)))
        measured = per_token(total) | self._decode(state.params)
        tokens = progress.history.tokens
        progress.write({"step": step, "tokens": tokens, "held_out": measured})
        shares = " ".join(f"{share:.2f}" for share in measured["agree"])
        said = f"step {step}: held-out cross-entropy {measured['cross_entropy'][0]:.3f}"
        said += f", agreement {shares}"
        if "block_efficiency" in measured:
            said += f", block efficiency {measured['block_efficiency']:.2f}"
        status.say(said)
        self._draw(progress.history)

    def _show(self, step: int, history: History, clock: _Clock, status: Status) -> None:
        rate, each = clock.rates()
        steps = self._settings.plan.steps
        status.passing(
            f"step {step}/{steps}, loss {history.steps[-1]['loss']:.3f}, "
            f"{tables.rate(rate)} tokens/s, {tables.seconds((steps - step) * each)} left"
        )


class Order:
    """Which batch comes when: pass after pass over a corpus, each in an order of its own.

    Args:
        corpus: what is passed over.
        tokens: of a batch.
        seed: of the order.
    """

    def __init__(self, corpus: Corpus, tokens: int, seed: int) -> None:
        self._corpus, self._tokens, self._seed = corpus, tokens, seed
        self._epoch, self._plans = 0, batches.plan(corpus, tokens, seed, 0)

    def batch(self, number: int) -> BatchPlan:
        """Return a batch by its number in the whole training."""
        # Every pass has the same number of batches: only their order differs.
        epoch, place = divmod(number, len(self._plans))
        if epoch != self._epoch:
            plans = batches.plan(self._corpus, self._tokens, self._seed, epoch)
            self._epoch, self._plans = epoch, plans
        return self._plans[place]


def per_token(metrics: Metrics) -> dict[str, list[float]]:
    """Return means a token by name, one a step ahead: cross-entropy, agreement, overlap."""
    weight = np.maximum(np.asarray(metrics.weight, np.float64), 1e-9)
    named = {
        "cross_entropy": metrics.loss,
        "agree": metrics.agree,
        "overlap": metrics.overlap,
    }
    return {
        name: [float(value) for value in np.asarray(sums, np.float64) / weight]
        for name, sums in named.items()
    }


@dataclasses.dataclass(frozen=True)
class _Given:
    """The batches of a step, and their tokens without padding."""

    batches: list[Batch]
    tokens: int


class _Clock:
    """Tokens and seconds of steps, those of earlier processes included, measurements not."""

    def __init__(self, history: History) -> None:
        self.tokens, self.seconds = history.tokens, history.seconds
        self._recent: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RECENT)

    def count(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self._recent.append((tokens, seconds))

    def rates(self) -> tuple[float, float]:
        """Return tokens a second and seconds a step, of the last steps: the first ones compile."""
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        return tokens / seconds, seconds / len(self._recent)


def _tokens(corpus: Corpus, plan: BatchPlan) -> int:
    rows = plan.rows[plan.rows >= 0]
    return int(np.minimum(corpus.length[rows], plan.width).sum())
