"""Where two greedy outputs of one prompt part, and how close the target's best tokens were there.

Verifying several tokens at once adds numbers in another order than one at a time, so outputs may
part where the two best logits lie within rounding. A wide gap would be a fault.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jspec import Decoder, Request


def first(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, None if the outputs are identical."""
    if tuple(ours) == tuple(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two outputs part.

    Attributes:
        place: index of the first generated token that differs.
        gap: how far apart the target's two best logits are there, before any edit; NaN where they
            are none.
    """

    place: int
    gap: float

    def __str__(self) -> str:
        """For a report."""
        return f"at token {self.place}, where the two best logits are {self.gap:.2g} apart"


def between(
    plain: Decoder, request: Request, ours: Sequence[int], theirs: Sequence[int]
) -> Difference | None:
    """Return where two greedy outputs part, None if they are identical.

    Args:
        plain: the target without a drafter.
        request: that both answer.
        ours: tokens.
        theirs: tokens.
    """
    place = first(ours, theirs)
    if place is None:
        return None
    sampling = dataclasses.replace(request.sampling, max_new_tokens=1, logprobs=2, n=1, stop=())
    until = (*request.token_ids, *theirs[:place])
    (done,) = plain.generate([Request(until, sampling)])
    if not done.logprobs:
        return Difference(place, math.nan)
    (_, best), (_, second) = done.logprobs[0].top_raw[:2]
    return Difference(place, best - second)
