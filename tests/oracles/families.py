"""The tiny checkpoints that `make_family_golden` made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

NAMES = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3")
_DATA = Path(__file__).resolve().parents[1] / "data/families"


class Golden(NamedTuple):
    """Token ids [T] and the logits [T, V] after each of them."""

    tokens: np.ndarray
    logits: np.ndarray


def directory(name: str) -> Path:
    return _DATA / name


def golden(name: str) -> Golden:
    return Golden(**load_file(_DATA / name / "logits.safetensors"))
