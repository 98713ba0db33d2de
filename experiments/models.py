"""From a flag that names a model to the model."""

from __future__ import annotations

from absl import flags as absl_flags

import jspec
from experiments import flags
from jspec.errors import InputError


def load(flag: absl_flags.FlagHolder[str] | absl_flags.FlagHolder[str | None]) -> jspec.Model:
    """Return the model that `flag` names, in the dtype of --dtype and the weights of --weights.

    Raises:
        InputError: it cannot be found, read or is not supported; the field is the flag.
    """
    try:
        return jspec.load(flag.value or "", flags.DTYPE.value, flags.WEIGHTS.value)
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
