"""Checks and timings of the Pallas kernels on the accelerator that is there."""

from __future__ import annotations

from experiments import flags, kernel_run
from experiments.experiment import Experiment
from experiments.help import of_module, ours

_USED = ("experiment", "output", "compilation_cache", "help", "helpfull")


def run() -> int:
    """Run the experiment; returns the exit status."""
    return kernel_run.measure(flags.OUTPUT.value, ours(EXPERIMENT))


EXPERIMENT = Experiment(
    name=kernel_run.NAME,
    summary="the Pallas kernels against their references and, on a GPU or TPU, against the clock",
    run=run,
    refused={
        flag.name: "has no effect here: shapes and settings are the experiment's own"
        for flag in of_module(flags.__name__)
        if flag.name not in _USED
    },
)
