"""The temperatures at which an experiment measures everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import flags as absl_flags

from experiments import flags
from experiments.workloads import Workload
from jspec.errors import require
from jspec.requests import Request

FLAG = absl_flags.DEFINE_list(
    "temperatures", ["0", "1"], "Everything is measured at each of these temperatures."
)


def listed() -> list[float]:
    """Return what the flag says.

    Raises:
        InputError: it lists nothing, something that is no number, or a number twice.
    """
    values = flags.listed(FLAG.name, FLAG.value, float)
    require(len(values) > 0, FLAG.name, "", "is empty", "give one at least, as 0")
    require(
        len(set(values)) == len(values),
        FLAG.name,
        ",".join(FLAG.value),
        "names one twice",
        "name each once",
    )
    return values


def at(
    temperature: float, prompts: Sequence[tuple[Workload, Request]]
) -> list[tuple[Workload, Request]]:
    """Return the prompts, asked for at a temperature."""
    return [
        (
            workload,
            dataclasses.replace(
                request, sampling=dataclasses.replace(request.sampling, temperature=temperature)
            ),
        )
        for workload, request in prompts
    ]
