from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import dtypes
from tests import tiny


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def test_dtypes_are_compared_with_float32(
    tmp_path: Path,
    tiny_model: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is what, and what is not? " * 9)
    status = run_jspec(
        "--experiment=dtypes",
        f"--model={tiny_model}",
        f"--output={tmp_path / 'runs'}",
        f"--text={text}",
        "--turns=2",
        "--max_new_tokens=4",
    )
    assert status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ["float32", "bfloat16", "int8"]
    assert [(line["turn"], line["variant"]) for line in lines] == [
        (turn, name) for turn in range(2) for name in names
    ]
    found = json.loads((folder / "summary.json").read_text())["variants"]
    base = found["float32"]
    assert (base["speedup"], base["agreement"], base["divergence"]) == (1, 1, 0)
    assert found["bfloat16"]["weight_bytes"] * 2 == base["weight_bytes"]
    assert found["int8"]["weight_bytes"] < 0.5 * base["weight_bytes"]
    for name in names:
        mine, theirs = (
            [line["seconds_a_token"] for line in lines if line["variant"] == other]
            for other in (name, "float32")
        )
        assert np.isclose(found[name]["speedup"], np.median(np.array(theirs) / np.array(mine)))
        assert found[name]["positions"] == 256
        assert 0.5 < found[name]["agreement"] <= 1
        assert 0 <= found[name]["divergence"] < 0.1
    assert "int8" in capsys.readouterr().err


def test_quality_is_that_of_the_distributions() -> None:
    base = tiny.model()
    near = dataclasses.replace(base, params=tiny.nearby(base.params, 0.1))
    ids = list(range(61))
    found = dtypes.quality(near, base, ids)
    assert found.positions == 61
    numpy_logits = [tiny.to_numpy(m.config, m.params).run(np.array(ids))[0] for m in (near, base)]
    ours, theirs = (
        x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in map(np.asarray, numpy_logits)
    )
    assert np.isclose(found.agreement, (ours.argmax(-1) == theirs.argmax(-1)).mean())
    assert np.isclose(
        found.divergence, (np.exp(theirs) * (theirs - ours)).sum(-1).mean(), rtol=1e-3
    )
    change = [ours[i, i + 1] - theirs[i, i + 1] for i in range(60)]
    assert np.isclose(found.logprob_change, np.mean(change), rtol=1e-3)
    assert dtypes.quality(base, base, ids).divergence == 0
    assert jnp.float32 == base.cache_dtype


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--turns=0", "turns=0"),
        ("--max_new_tokens=1", "max_new_tokens=1"),
        ("--text=no-such-file", "no-such-file"),
        ("--dtype=bfloat16", "has no effect here"),
        ("--weights=int8", "has no effect here"),
        ("--gamma=3", "has no effect here"),
    ],
)
def test_bad_flags_are_refused(
    flag: str,
    word: str,
    tiny_model: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_jspec("--experiment=dtypes", f"--model={tiny_model}", flag) == 2
    assert word in capsys.readouterr().err
