"""GGUF files of every family against the Hugging Face checkpoints that they were made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import checkpoints
from jspec.config import RopeConfig
from jspec.errors import InputError
from jspec.models.parameters import named
from tests.oracles import families, family_gguf

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "llama",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
# What a file has no key for: Qwen's windows, and the scale of other than the published Gemmas.
UNSAID: dict[str, dict[str, Any]] = {"qwen2": {"windows": ()}}
UNSAID |= {name: {"attention_scale": None} for name in ("gemma2", "gemma3")}


@pytest.mark.parametrize("name", families.NAMES)
def test_the_same_model_in_both_formats(tmp_path: Path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    path = family_gguf.write(tmp_path / "a.gguf", families.directory(name), architecture)
    for dtype in ("float32", "bfloat16"):
        expected = checkpoints.load(families.directory(name), dtype)
        found = checkpoints.load(path, dtype)
        changes: dict[str, Any] = {"name": architecture} | UNSAID.get(name, {})
        assert found.config == dataclasses.replace(expected.config, **changes)
        leaves = named(expected.params)
        assert named(found.params).keys() == leaves.keys()
        for path_, leaf in named(found.params).items():
            ours, theirs = np.asarray(leaf, np.float32), np.asarray(leaves[path_], np.float32)
            if "norm" in path_ and name.startswith("gemma"):
                # 1 + w is what counts; w itself may lose what does not show beside the 1.
                ours, theirs = np.float32(1) + ours, np.float32(1) + theirs
            np.testing.assert_array_equal(ours, theirs, path_)


@pytest.mark.parametrize(
    ("name", "layers", "scale"), [("gemma2", 46, 6.0), ("gemma3", 62, 6.0), ("gemma2", 42, None)]
)
def test_the_largest_gemmas_scale_by_width_over_heads(
    tmp_path: Path, name: str, layers: int, scale: float | None
) -> None:
    changes = {"num_hidden_layers": layers}
    path = family_gguf.write(tmp_path / "a.gguf", families.directory(name), name, changes)
    found = checkpoints.read_config(path).attention_scale
    assert found == (None if scale is None else scale**-0.5)  # 24 wide, 4 heads of 8


def test_defaults_of_gemma_files(tmp_path: Path) -> None:
    gone: dict[str, Any] = {
        f"gemma2.{key}": None
        for key in (
            "attention.sliding_window",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        )
    }
    gone["gemma2.context_length"] = 8192
    path = family_gguf.write(
        tmp_path / "2.gguf", families.directory("gemma2"), "gemma2", extra=gone
    )
    found = checkpoints.read_config(path)
    assert (found.attention_softcap, found.logit_softcap) == (50.0, 30.0)
    assert found.windows == (4096, None, 4096, None)
    path = family_gguf.write(
        tmp_path / "3.gguf",
        families.directory("gemma3"),
        "gemma3",
        extra={"gemma3.rope.freq_base_swa": None},
    )
    found = checkpoints.read_config(path)
    assert found.local_rope == RopeConfig(10000.0)
    assert found.windows == (5, 5, 5, 5, 5, None, 5)
    assert (found.attention_softcap, found.logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (3, (5, 5, None, 5, 5, None, 5)),
        ([True, False, True, True, False, True, True], (5, None, 5, 5, None, 5, 5)),
    ],
)
def test_patterns_of_windows(tmp_path: Path, pattern: Any, windows: tuple[int | None, ...]) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    path = family_gguf.write(
        tmp_path / "a.gguf", families.directory("gemma3"), "gemma3", extra={key: pattern}
    )
    assert checkpoints.read_config(path).windows == windows


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("qwen2", {"qwen2.attention.sliding_window": 32}, "which layers have it"),
        ("gemma3", {"gemma3.attention.sliding_window": None}, "sliding_window=0 is not positive"),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": [True]},
            "one flag for each of 7 layers",
        ),
        ("qwen3", {"qwen3.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ("qwen3", {"qwen3.rope.scaling.yarn_log_multiplier": 0.1}, "is not supported"),
    ],
)
def test_what_the_keys_cannot_say_is_refused(
    tmp_path: Path, name: str, extra: dict[str, Any], message: str
) -> None:
    path = family_gguf.write(tmp_path / "a.gguf", families.directory(name), name, extra=extra)
    with pytest.raises(InputError, match=message):
        checkpoints.read_config(path)


def test_the_end_of_a_turn_ends_gemma_s_answer(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "a", "<end_of_turn>"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = family_gguf.write(
        tmp_path / "a.gguf", families.directory("gemma2"), "gemma2", extra=extra
    )
    assert checkpoints.load(path, "float32").eos_token_ids == (1, 4)
