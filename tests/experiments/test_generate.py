from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jspec
from jspec.sampling_params import SamplingParams
from tests.experiments.conftest import write_model

BUDGET = 24


def read(folder: Path, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return value


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run_generate(
    run_jspec: Callable[..., int], tiny_model: Path, tmp_path: Path
) -> Callable[..., Path]:
    """Run the experiment and return the run's folder."""

    def run(*arguments: str | Path, drafter: str = "none") -> Path:
        status = run_jspec(
            "--experiment=generate",
            f"--model={tiny_model}",
            f"--output={tmp_path / 'out'}",
            f"--max_new_tokens={BUDGET}",
            f"--drafter={drafter}",
            *arguments,
        )
        assert status == 0
        return max((tmp_path / "out").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    return run


def test_one_prompt_streams_and_leaves_a_folder(
    run_generate: Callable[..., Path], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_generate("--prompt=abcabcabc", "--gamma=3", drafter="ngram")
    captured = capsys.readouterr()

    # The library itself, asked for the chat that --prompt stands for.
    target = jspec.load(tiny_model)
    (expected,) = jspec.generate(
        target,
        [[{"role": "user", "content": "abcabcabc"}]],
        sampling=SamplingParams(max_new_tokens=BUDGET),
    )
    assert captured.out == f"{expected.text}\n"
    assert str(folder) in captured.err

    (completion,) = lines(folder, "completions.jsonl")
    assert completion["prompt"] == "abcabcabc"
    assert completion["text"] == expected.text
    assert tuple(completion["token_ids"]) == expected.token_ids
    assert completion["finish_reason"] == expected.finish_reason

    config = read(folder, "config.json")
    assert config["experiment"] == "generate"
    assert config["flags"]["gamma"] == 3
    assert config["flags"]["temperature"] == 0
    assert config["flags"]["prompt"] == ["abcabcabc"]
    assert config["versions"] | {"jspec": None} == {
        "python": platform.python_version(),
        "jspec": None,
        **{package: version(package) for package in ("jax", "jaxlib", "numpy")},
    }
    assert {device["platform"] for device in config["devices"]} == {"cpu"}
    assert config["cpu"]["model"]
    assert set(config["git"] or {"revision", "dirty"}) == {"revision", "dirty"}
    assert 0 <= config["seed"] < 2**64

    (metrics,) = lines(folder, "metrics.jsonl")
    histogram = np.array(metrics["histogram"])
    assert metrics["generated_tokens"] == len(expected.token_ids)
    assert metrics["emitted"] == len(expected.token_ids)
    assert metrics["prompt_tokens"] == len("user: abcabcabc\nassistant: ")
    assert histogram.shape == (4, 4)
    assert metrics["rounds"] == histogram.sum()
    assert metrics["block_efficiency"] == pytest.approx(metrics["emitted"] / histogram.sum())
    timing = metrics["timing"]
    assert 0 < timing["prefill"] < timing["first"] < timing["end"]
    assert metrics["tpot"] == pytest.approx(
        (timing["end"] - timing["first"]) / (metrics["generated_tokens"] - 1)
    )

    summary = read(folder, "summary.json")
    assert summary["label"] == "measured"
    assert summary["requests"] == 1
    assert summary["lossless"] is metrics["lossless"] is completion["lossless"] is True
    assert "LOSSY" not in captured.err
    assert summary["tpot_p50"] == metrics["tpot"]
    late = metrics["generated_tokens"] - metrics["first_round_tokens"]
    rate = late / (timing["end"] - timing["first"])
    assert summary["tokens_per_second"] == pytest.approx(rate)
    table = (folder / "table.txt").read_text(encoding="utf-8")
    assert table in captured.err
    assert "TPOT p50" in table
    assert sorted(path.name for path in folder.iterdir()) == [
        "completions.jsonl",
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "table.txt",
    ]


def test_prompts_of_every_kind_in_batches(
    run_generate: Callable[..., Path],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "one"}}\n\n{{"messages": {json.dumps(chat)}}}\n')
    folder = run_generate("--prompt=zero", f"--input={file}", "--batch_size=2")
    out = capsys.readouterr().out

    prompts = [[{"role": "user", "content": text}] for text in ("zero", "one")]
    expected = jspec.generate(
        jspec.load(tiny_model),
        [*prompts, chat],
        sampling=SamplingParams(max_new_tokens=BUDGET),
    )
    found = sorted(lines(folder, "completions.jsonl"), key=lambda line: int(line["index"]))
    assert [tuple(line["token_ids"]) for line in found] == [e.token_ids for e in expected]
    assert [line["prompt"] for line in found] == ["zero", "one", chat]
    for completion, name in zip(
        expected, ("prompt[0]: zero", "prompts.jsonl:1: one", "prompts.jsonl:3: u"), strict=True
    ):
        assert f"{name}\n{completion.text}\n" in out
    assert out.index("--- 1/3") < out.index("--- 2/3") < out.index("--- 3/3")
    assert read(folder, "summary.json")["requests"] == 3


def test_raw_continues_text_lines(
    run_generate: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first line\r\n\n second\n", encoding="utf-8-sig")
    folder = run_generate(f"--input={file}", "--raw", "--batch_size=2")
    found = sorted(lines(folder, "completions.jsonl"), key=lambda line: int(line["index"]))
    assert [line["prompt"] for line in found] == ["first line", " second"]
    expected = jspec.generate(
        jspec.load(tiny_model),
        ["first line", " second"],
        sampling=SamplingParams(max_new_tokens=BUDGET),
    )
    assert [tuple(line["token_ids"]) for line in found] == [e.token_ids for e in expected]


def test_samples_come_again_from_the_recorded_seed(
    run_generate: Callable[..., Path], tmp_path: Path
) -> None:
    def texts(folder: Path) -> list[str]:
        found = sorted(lines(folder, "completions.jsonl"), key=lambda line: int(line["index"]))
        return [str(line["text"]) for line in found]

    arguments = ["--prompt=same", "--prompt=same", "--temperature=2", "--batch_size=2"]
    first = run_generate(*arguments)
    seed = read(first, "config.json")["seed"]
    assert {line["seed"] for line in lines(first, "metrics.jsonl")} == {seed, (seed + 1) % 2**64}
    again = run_generate(*arguments, f"--seed={seed}")
    other = run_generate(*arguments)
    assert texts(first) == texts(again)
    assert len({*texts(first), *texts(other)}) == 4


def test_every_drafter_gives_the_same_text(
    run_generate: Callable[..., Path], tmp_path: Path
) -> None:
    small = write_model(tmp_path / "small", seed=1)
    same = ["--prompt=xyz", "--gamma=2"]
    texts = {
        name: lines(run_generate(*arguments, drafter=name), "completions.jsonl")[0]["token_ids"]
        for name, arguments in {
            "none": same[:1],
            "early-exit": [*same, "--exit_layers=1"],
            "draft-model": [*same, f"--draft_model={small}"],
        }.items()
    }
    assert texts["none"] == texts["early-exit"] == texts["draft-model"]


def test_a_lossy_rule_is_labelled_wherever_its_results_are(
    run_generate: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_generate(
        "--prompt=xyz", "--gamma=2", "--verification=typical", "--temperature=1", drafter="ngram"
    )
    assert "LOSSY" in capsys.readouterr().err
    assert "LOSSY" in (folder / "table.txt").read_text(encoding="utf-8")
    assert read(folder, "summary.json")["lossless"] is False
    assert [line["lossless"] for line in lines(folder, "metrics.jsonl")] == [False]
    assert [line["lossless"] for line in lines(folder, "completions.jsonl")] == [False]


def test_flags_come_from_a_file_too(run_generate: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "run.flags"
    file.write_text("# a comment\n--prompt=from a file\n--max_new_tokens=3\n--ignore_eos\n")
    folder = run_generate(f"--flagfile={file}")
    assert read(folder, "config.json")["flags"]["max_new_tokens"] == 3
    (completion,) = lines(folder, "completions.jsonl")
    assert completion["prompt"] == "from a file"
    assert len(completion["token_ids"]) == 3


def test_a_profile_lies_in_the_folder(run_generate: Callable[..., Path]) -> None:
    folder = run_generate("--prompt=abc", "--profile")
    traces = list((folder / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1
    assert traces[0].stat().st_size > 1000
    assert (folder / "summary.json").exists()


def test_a_useless_drafter_is_reported_loudly(
    run_jspec: Callable[..., int],
    run_generate: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Another random model knows nothing of this one.
    stranger = write_model(tmp_path / "stranger", seed=1)
    folder = run_generate(
        "--prompt=xyz",
        "--gamma=2",
        f"--draft_model={stranger}",
        "--max_new_tokens=64",
        "--ignore_eos",
        drafter="draft-model",
    )
    (warning,) = read(folder, "summary.json")["warnings"]
    assert warning.startswith("WARNING: only ")
    assert "tokenizer" in warning
    assert warning in capsys.readouterr().err


def test_the_exit_status_tells_of_failed_requests(
    run_jspec: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = jspec.load

    def broken(*arguments: Any) -> jspec.Model:
        model = load(*arguments)
        params = dataclasses.replace(model.params, final_norm=model.params.final_norm * np.nan)
        return dataclasses.replace(model, params=params)

    monkeypatch.setattr(jspec, "load", broken)
    assert (
        run_jspec(
            f"--model={tiny_model}",
            "--experiment=generate",
            "--prompt=hi",
            "--drafter=none",
            f"--output={tmp_path}",
            f"--max_new_tokens={BUDGET}",
        )
        == 1
    )
    assert "error: prompt[0]: the target's logits" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert read(folder, "summary.json")["finish_reasons"] == {"error": 1}
