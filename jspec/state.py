"""The state of a batch of rows being decoded: one pytree of static shape."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax

from jspec.cache import KVCache
from jspec.logprobs import LogProbs
from jspec.sampling import RowSampling
from jspec.trace import Trace


class Finish(enum.IntEnum):
    """Why a row ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a round reads and writes.

    The last committed token of a row is pending: no model has run it yet, and the target's cache is
    one entry shorter than the row. Prefill stops before it, so a row's first token comes from a
    round like every other.

    Attributes:
        tokens: [B, S] int32, prompt and committed tokens; what lies at or past `length` is unread.
        length: [B] int32, committed tokens, the prompt included; at least 1.
        end: [B] int32, length at which the row's budget is used up.
        active: [B] bool, rows still decoding.
        finish: [B] int32, a `Finish`.
        sampling: transforms of the rows.
        seeds: [B, 2] uint32.
        stop_ids: [B, K] int32, ids that end the row; -1 is padding.
        cache: the target's.
        drafter: the drafter's own state.
        trace: what every round proposed and accepted.
        logprobs: log probabilities of the tokens, None where no row asks for them.
    """

    tokens: jax.Array
    length: jax.Array
    end: jax.Array
    active: jax.Array
    finish: jax.Array
    sampling: RowSampling
    seeds: jax.Array
    stop_ids: jax.Array
    cache: KVCache
    drafter: Any
    trace: Trace
    logprobs: LogProbs | None = None
