"""What a round commits and counts, token by token in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Commit(NamedTuple):
    """Outcome of one row's round.

    Attributes:
        tokens: appended to the row.
        reason: "none", "stop", "length" or "error".
        proposed: drafts that count.
        accepted: drafts that count as accepted.
        examined: drafts that the target's law was compared with.
        discarded: tokens verified and then cut.
    """

    tokens: list[int]
    reason: str
    proposed: int
    accepted: int
    examined: int
    discarded: int


def commit(
    drafts: Sequence[int], accepted: int, final: int, finite: bool, stops: set[int], room: int
) -> Commit:
    """Append the verified tokens one by one until a stop, the budget or unusable logits.

    Args:
        drafts: proposed ones, at most room - 1.
        accepted: of them.
        final: token after the accepted drafts; only meaningful where `finite`.
        finite: the logits after the accepted drafts were usable.
        stops: ids that end the row.
        room: tokens left of the budget, at least 1.
    """
    verified = list(drafts[:accepted]) + ([final] if finite else [])
    tokens: list[int] = []
    reason = "none"
    for token in verified:
        tokens.append(token)
        if token in stops:
            reason = "stop"
        elif len(tokens) == room:
            reason = "length"
        if reason != "none":
            break
    discarded = len(verified) - len(tokens)
    if reason == "none" and not finite:
        reason = "error"
    # What lies beyond an early end was decided by it, not by the drafter.
    proposed = len(drafts)
    if len(tokens) <= accepted:
        proposed = min(proposed, len(tokens))
    kept = min(accepted, len(tokens))
    return Commit(tokens, reason, proposed, kept, min(kept + 1, proposed), discarded)
