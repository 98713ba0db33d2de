from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments import timing, workloads
from jspec.errors import InputError


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def question(number: object, category: str, text: str) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": [text, "and then?"]}


def test_the_first_prompts_of_each_category(tmp_path: Path) -> None:
    path = write(
        tmp_path / "prompts.jsonl",
        question(1, "qa", "a"),
        question("HumanEval/0", "code", "b"),
        question(2, "qa", "c"),
        question(3, "qa", "d"),
    )
    taken = workloads.read(path, 2)
    assert [(w.question_id, w.category, w.prompt) for w in taken] == [
        ("1", "qa", "a"),
        ("2", "qa", "c"),
        ("HumanEval/0", "code", "b"),
    ]
    assert len(workloads.read(path, 0)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompts"),
        ("not json\n", "line 1.*is not a Spec-Bench question"),
        ('{"question_id": 1, "category": "qa", "turns": []}\n', "line 1.*IndexError"),
        ('\n{"question_id": 1, "turns": ["a"]}\n', "line 2.*category"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        workloads.read(path, 1)


def test_interleaving_takes_turns_after_one_warm_turn() -> None:
    order: list[str] = []

    def timer(name: str, seconds: float) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return seconds * (1 + order.count(name))

        return measure

    samples = timing.interleave({"a": timer("a", 2.0), "b": timer("b", 1.0)}, repeats=3)
    assert order == ["a", "b"] * 4
    assert samples == {"a": [6.0, 8.0, 10.0], "b": [3.0, 4.0, 5.0]}
    assert timing.ratio(samples, "a", "b") == 2.0


def test_bench_decodes_every_way_and_reports_ratios_of_totals(
    tmp_path: Path,
    tiny_model: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = write(
        tmp_path / "prompts.jsonl",
        question(1, "qa", "What is what is what is what is"),
        question(2, "copying", "ab ab ab ab ab ab ab ab"),
    )
    status = run_jspec(
        "--experiment=bench",
        f"--model={tiny_model}",
        f"--workloads={prompts}",
        f"--output={tmp_path / 'runs'}",
        "--max_new_tokens=12",
        "--repeats=2",
        "--rows=1,3",
        "--gamma=3",
        "--batches=2",
        "--throughput_batches=2,1",
        "--throughput_tokens=5",
        "--throughput_prompts=3",
        "--throughput_repeats=2",
    )
    assert status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert [line["question_id"] for line in lines] == ["1", "2"]
    assert all(line["identical"] for line in lines)
    assert set(summary["categories"]) == {"qa", "copying"}
    for line in lines:
        group = summary["categories"][line["category"]]
        ratio = line["plain_decode"] / line["speculative_decode"]
        assert np.isclose(group["speedup"], ratio)
    plain, speculative = (
        sum(line[f"{kind}_decode"] for line in lines) for kind in ("plain", "speculative")
    )
    assert np.isclose(summary["total"]["speedup"], plain / speculative)
    steps = summary["steps"]
    assert set(steps["step_seconds"]) == {
        f"{batch} {nodes}" for batch in (1, 2) for nodes in (1, 3, 4)
    }
    assert steps["step_ratios"]["1 1"] == 1
    # 2 layers of the tiny model, two norms and the tied embedding, in float32.
    assert steps["weight_bytes"] > 4 * 257
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "copying" in page
    table = (folder / "table.txt").read_text()
    assert "copying" in table
    assert table in f"{capsys.readouterr().out}\n"

    for mode in ("plain", "speculative"):
        for name, key in (("ttft", "ttft"), ("tpot", "tpot"), ("end_to_end", "total")):
            times = [line[f"{mode}_{key}"] for line in lines]
            expected = np.percentile(times, [50, 90, 99])
            found = summary["latency"][mode][name]
            assert found["samples"] == 2
            np.testing.assert_allclose([found[q] for q in ("p50", "p90", "p99")], expected)
    by_batch = summary["throughput"]
    # Two prompts are all there are, so at batch 2 they are one group, in each of two turns.
    assert by_batch["prompts"] == ["1", "2"]
    assert list(by_batch["batches"]) == ["1", "2"]
    raw = [json.loads(x) for x in (folder / "throughput.jsonl").read_text().splitlines()]
    assert {tuple(line["tokens"]) for line in raw} == {(5,), (5, 5)}
    plain = [line for line in raw if line["batch"] == 2 and line["mode"] == "plain"]
    rates = [10 / (max(line["end"]) - line["prefill"]) for line in plain]
    assert len(rates) == 2
    assert np.isclose(by_batch["batches"]["2"]["plain_tokens_per_second"], np.median(rates))
    assert by_batch["batches"]["1"]["identical"] == by_batch["batches"]["1"]["rows"] == 4


def test_bench_without_prompts_or_drafts_is_refused(
    tmp_path: Path,
    tiny_model: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", question(1, "qa", "a"))
    assert run_jspec("--experiment=bench", f"--model={tiny_model}") == 2
    message = "error: workloads is not given; give a JSON-lines file of prompts\n"
    assert capsys.readouterr().err == message
    common = ("--experiment=bench", f"--model={tiny_model}", f"--workloads={prompts}")
    assert run_jspec(*common, "--drafter=none") == 2
    assert run_jspec(*common, "--gamma=0") == 2
    assert run_jspec(*common, "--rows=one") == 2
    assert run_jspec(*common, "--batches=0") == 2
    capsys.readouterr()
    for name in ("repeats", "throughput_repeats", "throughput_tokens", "throughput_prompts"):
        assert run_jspec(*common, f"--{name}=0") == 2
        assert f"{name}=0 is below 1" in capsys.readouterr().err
    assert run_jspec(*common, "--throughput_batches=1,x") == 2
    assert "throughput_batches='1,x' is not a list" in capsys.readouterr().err
