"""From a flag that names a model to the model."""

from __future__ import annotations

from typing import cast

from absl import flags as absl_flags

import jspec
from experiments import flags
from jspec.errors import InputError
from jspec.quantization import Weights


def load(
    flag: absl_flags.FlagHolder[str] | absl_flags.FlagHolder[str | None],
    dtype: str | None = None,
    weights: Weights | None = None,
) -> jspec.Model:
    """Return the model that `flag` names.

    Args:
        flag: names it.
        dtype: None is that of --dtype.
        weights: None is those of --weights.

    Raises:
        InputError: it cannot be found, read or is not supported; the field is the flag.
    """
    try:
        return jspec.load(
            flag.value or "",
            dtype or flags.DTYPE.value,
            weights or cast("Weights", flags.WEIGHTS.value),
            flags.KERNELS.value,
        )
    except InputError as error:
        if error.field not in ("path", "model"):  # a file or tensor inside it
            raise
        raise InputError(flag.name, flag.value, error.problem, error.remedy) from error


def load_target() -> jspec.Model:
    """Return the model of --model.

    Raises:
        InputError: as `load`.
    """
    return load(flags.MODEL)
