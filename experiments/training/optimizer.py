"""How weights are moved: AdamW with warm-up, cosine decay and clipping, over several batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.training import losses
from experiments.training.losses import Batch, Frozen, Method, Metrics


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of the optimiser. Hashable: a static argument of jitted programs.

    Attributes:
        steps: of the whole training.
        warmup: steps over which the rate rises to its highest.
        learning_rate: the highest.
        final_rate: share of the highest that is left at the end of the cosine.
        weight_decay: of matrices; norms and biases have none.
        clip: largest norm of a gradient.
        betas: of Adam's two means.
    """

    steps: int
    warmup: int
    learning_rate: float
    final_rate: float = 0.05
    weight_decay: float = 0.0
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What training moves.

    Attributes:
        params: of the drafter, float32.
        optimizer: optax's own.
        step: steps done, a scalar int32.
    """

    params: Any
    optimizer: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What the batches of a step have given so far.

    Attributes:
        gradient: as the parameters.
        loss: scalar.
        metrics: of `losses.loss`.
    """

    gradient: Any
    loss: Any
    metrics: Metrics


def schedule(plan: Plan) -> optax.Schedule:
    """Return the learning rate by step: a straight rise, then half a cosine."""
    return optax.warmup_cosine_decay_schedule(
        init_value=plan.learning_rate / (plan.warmup + 1),
        peak_value=plan.learning_rate,
        warmup_steps=plan.warmup,
        decay_steps=max(plan.steps, plan.warmup + 1),
        end_value=plan.learning_rate * plan.final_rate,
    )


@functools.cache
def build(plan: Plan) -> optax.GradientTransformation:
    """Return the optimiser (AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    return optax.chain(
        optax.clip_by_global_norm(plan.clip),
        optax.adamw(
            schedule(plan),
            *plan.betas,
            weight_decay=plan.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        ),
    )


@contextlib.contextmanager
def _lenient() -> Iterator[None]:
    """Let optax, which counts in integers and scales by floats, promote as JAX does by itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def rate(plan: Plan, step: int) -> float:
    """Return the learning rate of a step, the first being 0."""
    with _lenient():
        return float(schedule(plan)(step))


def begin(plan: Plan, params: Any) -> State:
    """Return the state before the first step."""
    return State(params, build(plan).init(params), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames="method", donate_argnames="sums")
def add(method: Method, params: Any, frozen: Frozen, batch: Batch, sums: Sums | None) -> Sums:
    """Return the sums of a step with those of one more batch; None before the first."""
    of_batch = jax.value_and_grad(losses.loss, argnums=1, has_aux=True)
    (loss, metrics), gradient = of_batch(method, params, frozen, batch)
    mine = Sums(gradient, loss, metrics)
    return mine if sums is None else jax.tree.map(jnp.add, sums, mine)


@functools.partial(jax.jit, static_argnames=("plan", "batches"), donate_argnames="state")
def move(plan: Plan, state: State, gradient: Any, batches: int) -> tuple[State, jax.Array]:
    """Return the state after a step, and the gradient's norm before it was clipped.

    Args:
        plan: the settings.
        state: before the step.
        gradient: summed over `batches`, whose mean is taken.
        batches: how many.
    """
    mean = jax.tree.map(lambda leaf: leaf / batches, gradient)
    with _lenient():
        updates, inner = build(plan).update(mean, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
    return State(params, inner, state.step + 1), optax.tree.norm(mean)


measure = jax.jit(losses.loss, static_argnums=0)
