"""Block efficiency of a drafter in training: held-out prompts decoded with its present weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.training import shards
from experiments.training.batches import Corpus
from jspec import metrics
from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.generation import Decoder
from jspec.model import Model
from jspec.requests import Request
from jspec.sampling_params import SamplingParams


def requests(corpus: Corpus, count: int, sampling: SamplingParams) -> list[Request]:
    """Return the first prompts of a corpus; text that nobody asked for has none.

    Args:
        corpus: conversations.
        count: most of them.
        sampling: prompt i takes seed + i.
    """
    found: list[Request] = []
    for index in range(len(corpus.rows)):
        answer = shards.answer(corpus, index)
        if answer > 0 and len(found) < count:
            prompt = shards.tokens(corpus, index)[:answer]
            seed = ((sampling.seed or 0) + len(found)) % 2**64
            own = dataclasses.replace(sampling, seed=seed)
            found.append(Request(tuple(prompt.tolist()), own))
    return found


def block_efficiency(
    target: Model, drafter: BoundDrafter, gamma: int, asked: Sequence[Request]
) -> dict[str, Any]:
    """Decode requests and return tokens a target pass, and the drafts' acceptance by position.

    Args:
        target: the model.
        drafter: of chains.
        gamma: drafts a round.
        asked: at least one.
    """
    speculation = SpeculationConfig(gamma=gamma)
    done = Decoder(target, drafter, speculation, batch_size=len(asked)).generate(asked)
    counts = metrics.total([completion.counts for completion in done])
    return {
        "block_efficiency": metrics.block_efficiency(counts),
        "acceptance": metrics.conditional_rates(counts),
        "decoded_tokens": counts.emitted,
    }
