"""What an experiment is to the launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment, kept as `EXPERIMENT` in the module that defines its own flags.

    Attributes:
        name: value of --experiment.
        summary: one line for the help.
        run: does it, with the flags parsed; returns the exit status.
        defaults: shared flags that have another default here.
        refused: shared flags that it cannot honour, each with the reason as the rest of a sentence
            that begins with the flag.
        flag_modules: modules beside its own whose flags it goes by, and which others share.
    """

    name: str
    summary: str
    run: Callable[[], int]
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flag_modules: tuple[str, ...] = ()
