"""What goes into a decoder and what comes out."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.metrics import Counts, Timing
from jspec.sampling_params import SamplingParams


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
class TokenLogProbs:
    """Natural log probabilities at one position.

    Attributes:
        token_id: the token there.
        raw: under the target's own distribution, before any parameter.
        processed: under the distribution it was drawn from (0 in a greedy row); None for a prompt
            token.
        top_raw: the most probable tokens and their raw values, best first.
        top_processed: the same after all parameters; () for a prompt token. -inf is outside the
            support.
    """

    token_id: int
    raw: float
    processed: float | None
    top_raw: tuple[tuple[int, float], ...]
    top_processed: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """Result of one sample of a request.

    Attributes:
        token_ids: generated tokens, the stop token included.
        text: of the generated tokens, cut before a stop text; "" without a tokenizer.
        finish_reason: "stop", "length" or "error".
        error: what went wrong, None unless the reason is "error".
        counts: raw counts.
        timing: wall times.
        stop_reason: the stop text or the stop token's id, None unless the reason is "stop".
        sample: number of the sample, below the request's `n`.
        logprobs: of each generated token, None unless asked for.
        prompt_logprobs: of each prompt token, the first one's None; None unless asked for.
        lossless: whether the tokens have exactly the target's law; False where drafts were verified
            by a lossy rule (`SpeculationConfig.lossless`).
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: str | None
    counts: Counts
    timing: Timing
    stop_reason: str | int | None = None
    sample: int = 0
    logprobs: tuple[TokenLogProbs, ...] | None = None
    prompt_logprobs: tuple[TokenLogProbs | None, ...] | None = None
    lossless: bool = True

    def known_logprobs(self) -> dict[str, list[dict[str, Any] | None]]:
        """Return `logprobs` and `prompt_logprobs` as JSON, those that were asked for."""
        given = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        return {
            name: [None if entry is None else dataclasses.asdict(entry) for entry in entries]
            for name, entries in given.items()
            if entries is not None
        }


@dataclasses.dataclass(frozen=True)
class Delta:
    """News of one sample after a chunk.

    Attributes:
        index: of the request.
        token_ids: new tokens.
        text: new text, whole characters only and nothing that may turn out to begin a stop text;
            "" without a tokenizer.
        completion: the whole result once the row has finished.
        sample: of the request, below its `n`.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None
    sample: int = 0
