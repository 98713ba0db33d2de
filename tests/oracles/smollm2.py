"""The real small model, where it is installed or fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from jspec import hub
from jspec.errors import InputError


def path_or_skip() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, or skip the test."""
    try:
        return hub.locate("smollm2")
    except InputError as error:
        pytest.skip(str(error))
