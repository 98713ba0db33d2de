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
    """

    name: str
    drafter: Drafter
    params: Any = ()
