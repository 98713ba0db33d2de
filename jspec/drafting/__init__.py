"""Drafters: one file a method, all behind `protocol.Drafter`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.drafting.protocol import Drafter


@dataclasses.dataclass(frozen=True)
class BoundDrafter:
    """A drafter with its parameters, ready to be given to a decoder.

    Attributes:
        name: for results and messages.
        drafter: the pure functions.
        params: their parameters, () where there are none.
        drafts: how many it proposes a round where it can't be told (the nodes of its tree but the
            root), None where gamma says.
        most_drafts: of a chain, where it can't be longer; None where it can.
    """

    name: str
    drafter: Drafter
    params: Any = ()
    drafts: int | None = None
    most_drafts: int | None = None
