from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    kernel_cases,
    kernel_checks,
    kernel_ops,
    kernel_plan,
    kernel_report,
    kernel_run,
    kernel_speed,
)
from experiments.kernel_budget import Compiler, Deadline
from experiments.kernel_cases import Attention, Cache, Rejection, case
from pallas_kernels import shapes
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "summary.json").read_text()), [json.loads(x) for x in lines]


def test_every_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_run.main([f"--output={tmp_path}", "--rehearsal"]) == 0
    (folder,) = tmp_path.iterdir()
    summary, lines = read(folder)
    assert summary["label"] == "rehearsal"
    assert [row["op"] for row in summary["checks"]] == ["tree_attention", "cache_commit"]
    assert all(row["passed"] for row in summary["checks"])
    ops = ["tree_attention", "rejection_sampling", "cache_write"]
    assert [row["op"] for row in summary["speed"]] == ops
    for row in summary["speed"]:
        assert row["errors"] == {}
        assert {"kernel", "xla"} <= set(row["seconds"])
    assert "dot_product_attention" in summary["speed"][0]["seconds"]
    assert all(value > 0 for value in summary["bandwidth"].values())
    assert {goal["goal"] for goal in summary["goals"]} >= {"not slower than XLA"}
    (timed, drafting) = summary["loop"]
    assert timed["errors"] == {}
    assert min(timed["seconds"]["kernel"], timed["seconds"]["xla"]) > 0
    assert drafting["drafting"] > 0
    assert [line["part"] for line in lines] == ["checks"] * 2 + ["speed"] * 3 + ["loop"] * 2
    text = (folder / "table.txt").read_text()
    assert "rehearsal" in text.splitlines()[0]
    assert text.strip() in capsys.readouterr().out
    assert (folder / "times.png").stat().st_size > 0


def test_without_an_accelerator_it_says_so_and_times_nothing(
    tmp_path: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = kernel_plan.interpreted()
    # The rest of it takes a while, interpreted.
    short = kernel_plan.Plan(plan.checked[-2:], plan.implementations)
    monkeypatch.setattr(kernel_plan, "interpreted", lambda: short)
    assert run_jspec("--experiment=kernels", f"--output={tmp_path}") == 0
    (folder,) = tmp_path.iterdir()
    summary, lines = read(folder)
    assert summary["label"] == "checked"
    assert "bandwidth" not in summary
    assert summary["speed"] == summary["loop"] == []
    assert len(lines) == 4
    assert {line["implementation"] for line in lines} == {"tpu_interpret", "gpu_interpret"}
    out = capsys.readouterr().out
    assert "no accelerator" in out
    assert "Nothing was timed" in out


def test_flags_without_effect_are_refused(
    run_jspec: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jspec("--experiment=kernels", "--gamma=3") == 2
    assert "gamma" in capsys.readouterr().err


def compare(one: Any, monkeypatch: pytest.MonkeyPatch, op: str, spoil: Any) -> dict[str, Any]:
    """Check a case with an implementation whose result goes through `spoil`."""
    honest = getattr(kernel_ops, op)

    def spoilt(case: Any, implementation: str) -> Any:
        function = honest(case, "xla")
        if implementation == "xla":
            return function
        return lambda *operands: spoil(function(*operands))

    monkeypatch.setattr(kernel_ops, op, spoilt)
    (row,) = kernel_checks.run(
        [one], ["kernel"], Compiler(), 7, Deadline.after(60), lambda text: None
    )
    return row


MODEL = shapes.AttentionShape("tiny", 2, 1, 64, 1)
CASE = shapes.Case(MODEL, 2, 3, 64)


@pytest.mark.parametrize(
    ("one", "op", "spoil"),
    [
        (Attention(CASE, jnp.float32), "attention", lambda out: out.at[1, 2, 1, 5].add(1e-3)),
        (Cache(CASE, "cache_write"), "cache", lambda out: out.at[0, 0, 63, 0].add(1)),
    ],
)
def test_a_wrong_kernel_is_found(
    one: Any, op: str, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference has no use for NaN in stale slots.
    attention_operands = kernel_cases.attention_operands
    monkeypatch.setattr(
        kernel_cases,
        "attention_operands",
        lambda case, seed, stale=0.0: attention_operands(case, seed),
    )
    assert compare(one, monkeypatch, op, lambda out: out)["passed"] is True
    monkeypatch.undo()
    monkeypatch.setattr(
        kernel_cases,
        "attention_operands",
        lambda case, seed, stale=0.0: attention_operands(case, seed),
    )
    assert compare(one, monkeypatch, op, spoil)["passed"] is False


def test_a_wrong_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_token(outcome: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf, outcome).__class__(
            **{**vars(outcome), "final": (outcome.final + 1) % 300}
        )

    one = Rejection(300, 4, 3, "top-p", greedy=True)
    row = compare(one, monkeypatch, "rejection", other_token)
    assert row["passed"] is False
    assert row["wrong"] + row["borderline"] == 4


def test_a_failing_case_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(kernel_ops, "attention", broken)
    rows = list(
        kernel_checks.run(
            [Attention(CASE), Cache(CASE, "cache_write")],
            ["gpu_interpret"],
            Compiler(),
            1,
            Deadline.after(60),
            lambda text: None,
        )
    )
    assert [row["passed"] for row in rows] == [False, True]
    assert "no such thing" in rows[0]["said"]


def test_past_its_time_a_part_says_what_it_did_not_reach() -> None:
    rows = list(
        kernel_speed.run(
            [Cache(CASE, "cache_write")],
            "gpu_interpret",
            Compiler(),
            kernel_speed.Scale(),
            1,
            Deadline.after(0),
            lambda text: None,
        )
    )
    assert rows[0]["errors"] == dict.fromkeys(("kernel", "xla"), "not reached in the time given")
    assert "seconds" not in rows[0]


def test_bytes_that_must_move() -> None:
    ragged = Attention(case("llama-3.1-8b", 2, 5, 8192))
    # 2 rows of keys and values, 8 heads of 128 in two bytes; queries and outputs of 32 heads.
    assert ragged.read_bytes(np.array([95, 995])) == (
        2 * 8 * 128 * 2 * (100 + 1000) + 2 * 2 * 5 * 32 * 128 * 2
    )
    windowed = Attention(case("gemma-3-27b-tp8", 1, 5, 8192))
    assert windowed.read_bytes(np.array([8000])) == 2 * 2 * 128 * 2 * 1029 + 2 * 5 * 4 * 128 * 2
    assert Rejection(1000, 2, 3).read_bytes == 2 * 3 * 1000 * 4 + 2 * 2 * 1000 * 4
    assert Rejection(1000, 2, 3, law=False, dtype=jnp.bfloat16).read_bytes == 2 * 3 * 1000 * 2


def test_goals_go_by_the_measured_bandwidth() -> None:
    row = {"bytes": 100, "seconds": {"kernel": 12.0, "xla": 11.0}, "least_share": 0.8}
    assert kernel_report.goals(row, 10.0) == {
        "at least 80 % of the bandwidth": True,
        "not slower than XLA": False,
    }
    assert (
        kernel_report.goals(row | {"most_floors": 1.1}, 10.0)["at most 1.1 times the floor"]
        is False
    )
    assert kernel_report.goals({"bytes": 100, "seconds": {"xla": 1.0}}, 10.0) == {}


def test_the_full_plan_holds_what_the_goals_speak_of() -> None:
    plan = kernel_plan.full("gpu", 141 * 10**9)
    timed = [c.case for c in plan.timed if isinstance(c, Attention)]
    assert any(c.batch >= 8 and c.slots >= 8192 for c in timed)
    assert any(c.batch == 1 and c.slots >= 8192 for c in timed)
    assert {c.edits for c in plan.timed if isinstance(c, Rejection)} == {"none", "top-p", "all"}
    assert plan.loop is not None
    assert set(plan.loop.batches) == {1, 8, 32}
    assert set(plan.loop.nodes) == {1, 2, 5, 9, 17}
    assert sum(plan.seconds) <= 225


def test_jax_and_numpy_are_enough() -> None:
    """It must start where what reads checkpoints and flags is missing."""
    blocked = "absl tokenizers safetensors gguf orbax flax huggingface_hub jinja2 matplotlib"
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked.split()!r})); "
        "from experiments import kernel_run; kernel_run.main(['--help'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "--output" in found.stdout


def test_the_wrapper_names_the_interpreter_it_lacks(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "run_kernels.sh"
    found = subprocess.run(
        ["bash", script, tmp_path],
        env=os.environ | {"PYTHON": "/no/such/python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    assert "/no/such/python" in found.stderr
