"""Compilers for chips that are not here; a test without its compiler is skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from experiments import compilers
from experiments.compilers import H100_SHARED_MEMORY, TritonKernel, as_on_an_h100, triton_kernels

__all__ = ["H100_SHARED_MEMORY", "as_on_an_h100", "compile_for_h100", "tpu", "triton_kernels"]


def tpu(name: str) -> jax.Device:
    """A described TPU chip to compile for."""
    try:
        return compilers.tpu(name)
    except compilers.UnavailableError as error:
        pytest.skip(str(error))


def compile_for_h100(kernel: TritonKernel, folder: Path) -> compilers.Resources:
    """What a kernel takes, compiled to machine code."""
    try:
        return compilers.compile_for_h100(kernel, folder)
    except compilers.UnavailableError as error:
        pytest.skip(str(error))
