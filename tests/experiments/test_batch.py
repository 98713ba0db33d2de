from __future__ import annotations

import dataclasses
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jspec
from experiments import batch_decoding, runs
from experiments.rows import Row
from experiments.status import Status
from jspec.generation import Decoder
from jspec.requests import Delta, Request
from jspec.sampling_params import SamplingParams
from tests import tiny
from tests.experiments.batch_jobs import (
    BUDGET,
    ROWS,
    Command,
    read,
    results,
    untimed,
    write,
)
from tests.experiments.conftest import write_model


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def test_every_kind_of_row_is_what_the_library_gives(
    run_batch: Command, tiny_model: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch("--seed=50") == 0
    found = results(job)
    model = jspec.load(tiny_model)

    def alone(prompt: jspec.Prompt, **params: Any) -> jspec.Completion:
        sampling = SamplingParams(**{"max_new_tokens": BUDGET, **params})
        (completion,) = jspec.generate(model, [prompt], sampling=sampling)
        return completion

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    expected = {
        0: alone([user("zero")]),
        1: alone(ROWS[1]["messages"]),
        2: alone([70, 71, 72], max_new_tokens=3),
        4: alone([user("sampled")], temperature=1.5, top_p=0.9, seed=54),
        5: alone([user("last")], temperature=1.5, seed=9),
    }
    for index, completion in expected.items():
        line = found[index]
        assert line["text"] == completion.text
        assert tuple(line["token_ids"]) == completion.token_ids
        assert line["finish_reason"] == completion.finish_reason
        assert line["error"] is None
        assert line["counters"]["emitted"] == len(completion.token_ids)
        assert line["counters"]["rounds"] == len(completion.token_ids)
        assert 0 < line["timing"]["prefill"] < line["timing"]["first"] <= line["timing"]["end"]
    assert [line["id"] for line in found] == [
        "first",
        "rows:2",
        "rows:3",
        81,
        "rows:5",
        "rows:6",
    ]
    assert [line["seed"] for line in found] == [50, 51, 52, 53, 54, 9]
    assert found[0]["prompt_tokens"] == len("user: zero\nassistant: ")
    assert found[2]["prompt_tokens"] == 3

    chat = found[3]
    assert "text" not in chat
    assert chat["category"] == "math"
    first, second = chat["turns"]
    assert first["text"] == alone([user("one")], temperature=1.0, seed=53).text
    so_far = [user("one"), {"role": "assistant", "content": first["text"]}, user("two")]
    assert second["prompt_tokens"] == len(jspec.to_token_ids(model, so_far))
    assert chat["finish_reason"] == second["finish_reason"]

    summary = read(job / "summary.json")
    answers = [*(found[index] for index in expected), first, second]
    assert (summary["rows"], summary["failed"]) == (6, 0)
    assert summary["generated_tokens"] == sum(len(answer["token_ids"]) for answer in answers)
    assert summary["prompt_tokens"] == sum(answer["prompt_tokens"] for answer in answers)
    assert summary["emitted"] == summary["generated_tokens"]
    assert summary["block_efficiency"] == 1
    assert summary["finish_reasons"] == {
        reason: sum(line["finish_reason"] == reason for line in found)
        for reason in {line["finish_reason"] for line in found}
    }
    assert summary["last_process"]["rows"] == 6
    config = read(job / "config.json")
    assert config["experiment"] == "batch"
    assert config["seed"] == 50
    assert config["versions"]["jax"]
    assert {path.name for path in job.iterdir()} == {
        "config.json",
        "lock",
        "results.jsonl",
        "settings.json",
        "summary.json",
    }
    assert "Finished: 6 rows" in capsys.readouterr().err


def test_it_is_what_generate_gives(run_jspec: Command, run_batch: Command, job: Path) -> None:
    rows = [{"prompt": f"prompt {index}"} for index in range(3)]
    assert run_batch("--temperature=1", "--seed=7", rows=rows) == 0
    settings = read(job / "settings.json")["flags"]
    assert (
        run_jspec(
            "--experiment=generate",
            f"--model={settings['model']}",
            "--drafter=none",
            f"--max_new_tokens={BUDGET}",
            "--temperature=1",
            "--seed=7",
            "--batch_size=2",
            f"--input={job.parent / 'rows.jsonl'}",
            f"--output={job.parent / 'out'}",
        )
        == 0
    )
    (run,) = (job.parent / "out").iterdir()
    lines = (run / "completions.jsonl").read_bytes().split(b"\n")[:-1]
    texts = {line["index"]: line["text"] for line in map(json.loads, lines)}
    assert {line["index"]: line["text"] for line in results(job)} == texts


def test_several_files_one_compressed(run_batch: Command, tmp_path: Path, job: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"prompt": "x"}, "", {"prompt": "y"}])
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(b'{"prompt": "z"}\n'))
    assert run_batch(f"--input={first}", f"--input={second}") == 0
    assert [line["id"] for line in results(job)] == ["a:1", "a:3", "b:1"]


def test_raw_continues_the_text(run_batch: Command, tiny_model: Path, job: Path) -> None:
    assert run_batch("--raw", rows=[{"prompt": "abc"}, {"turns": ["t"]}]) == 1
    line, chat = results(job)
    (expected,) = jspec.generate(
        jspec.load(tiny_model), ["abc"], sampling=SamplingParams(max_new_tokens=BUDGET)
    )
    assert tuple(line["token_ids"]) == expected.token_ids
    assert "--raw" in chat["error"]


def broken_embedding(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Make the model's logits NaN wherever a token has been read."""
    load = jspec.load

    def broken(*arguments: Any) -> jspec.Model:
        model = load(*arguments)
        params = model.params
        embedding = params.embedding.at[token].set(np.nan)
        return dataclasses.replace(model, params=dataclasses.replace(params, embedding=embedding))

    monkeypatch.setattr(jspec, "load", broken)


def test_what_fails_is_the_rows_alone_and_is_done_again_when_asked(
    run_batch: Command,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[Any] = [
        {"prompt": "fine"},
        "{",
        {"prompt": "long " * 300, "id": "long"},
        {"prompt": "p", "tempo": 1},
        {"token_ids": [1, 257]},
        {"token_ids": [9, 10], "id": "nan"},
        {"turns": ["short", "long " * 300]},
        {"prompt": "fine too"},
    ]
    with monkeypatch.context() as patch:
        broken_embedding(patch, 9)
        assert run_batch(rows=rows) == 1
    found = untimed(job)
    assert [line["error"] is None for line in found] == [True, *[False] * 6, True]
    for line, words in zip(
        found[1:7],
        ["not JSON", "1024", "tempo=1", "257 is outside the vocabulary", "not finite", "1024"],
        strict=True,
    ):
        assert words in line["error"]
        assert line["finish_reason"] == "error"
        assert "requests[" not in line["error"]
        assert "request 0" not in line["error"]
    assert found[5]["token_ids"] == []
    # What it answered before it failed is there.
    assert len(found[6]["turns"]) == 1
    assert read(job / "summary.json")["failed"] == 6
    err = capsys.readouterr().err
    assert "error: row long: " in err
    assert "6 of 8 rows failed" in err
    assert "--retry_failed" in err
    assert "More rows failed" in err

    # Not unless it is asked for; then only those that can succeed now do.
    before = (job / "results.jsonl").read_bytes()
    assert run_batch(rows=rows) == 1
    assert (job / "results.jsonl").read_bytes() == before
    assert run_batch("--retry_failed", rows=rows) == 1
    again = untimed(job)
    assert again[5]["error"] is None
    assert len(again[5]["token_ids"]) == BUDGET
    assert [*again[:5], *again[6:]] == [*found[:5], *found[6:]]
    assert read(job / "summary.json")["failed"] == 5


def test_a_model_without_a_template_fails_the_job(
    run_batch: Command, base_model: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch(f"--model={base_model}") == 2
    assert "--raw" in capsys.readouterr().err.splitlines()[-1]
    # Nothing was finished, so another setting is no contradiction.
    assert run_batch(f"--model={base_model}", "--raw", rows=ROWS[:1]) == 0


@pytest.mark.parametrize(
    "expression", ["1 / 0", "raise_exception('no')", "none + 'x'", "messages[0].content.x.y"]
)
def test_a_template_that_breaks_fails_the_row(
    expression: str, run_batch: Command, tmp_path: Path, job: Path
) -> None:
    template = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ " + expression + " }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    model = write_model(tmp_path / "model", template=template)
    rows = [{"prompt": "good"}, {"prompt": "bad"}]
    assert run_batch(f"--model={model}", rows=rows) == 1
    good, bad = results(job)
    assert good["error"] is None
    assert bad["error"].startswith(("messages=", "prompt="))


def test_a_file_that_cannot_be_read_ends_the_job(
    run_batch: Command,
    tmp_path: Path,
    job: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_batch(f"--input={tmp_path / 'nowhere.jsonl'}") == 2
    assert "nowhere.jsonl" in capsys.readouterr().err.splitlines()[-1]
    assert not job.exists()


def test_ids_that_come_twice_end_the_job(
    run_batch: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch(rows=[{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}]) == 2
    assert "id=1 is that of rows:1 and of rows:2" in capsys.readouterr().err


def test_the_folder_must_be_named(run_jspec: Command, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert run_jspec("--experiment=batch", f"--input={path}") == 2


def test_memory_that_is_too_small_is_an_error(
    run_batch: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Decoder, requests: list[Request]) -> Iterator[Delta]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Decoder, "stream", full)
    assert run_batch() == 2
    assert "batch_size=2 is too large" in capsys.readouterr().err.splitlines()[-1]


def test_groups_are_alike_and_the_same_every_time() -> None:
    def pair(index: int, length: int, turns: int = 1, budget: int = 4, n: int = 1) -> Any:
        params = SamplingParams(max_new_tokens=budget, n=n, temperature=1.0)
        content = ["t"] * turns
        kind = "turns" if turns > 1 else "prompt"
        row = Row(index, index, kind=kind, content=content, sampling=params)
        return row, Request((1,) * length, params)

    pairs = [
        pair(0, 9),
        pair(1, 5),
        pair(2, 7, turns=2),
        pair(3, 5),
        pair(4, 1, budget=8),
        pair(5, 6, n=5),
        pair(6, 7, n=3),
    ]
    found = [[row.index for row, _ in group] for group in batch_decoding.groups(pairs, 4)]
    assert found == [[1, 3], [5], [6, 0], [4, 2]]
    again = batch_decoding.groups(pairs[::-1], 4)
    assert [[row.index for row, _ in group] for group in again] == found


def test_progress_counts_earlier_rows_as_done_but_not_in_the_rates() -> None:
    stream = io.StringIO()
    Status(stream).progress(6, 10, 300, 20.0, earlier=4)
    assert stream.getvalue() == "6/10 done, 15.0 tokens/s, 0.10 rows/s, 40 s left\n"


def test_a_profile_lies_in_the_folder(run_batch: Command, job: Path) -> None:
    assert run_batch("--profile", rows=ROWS[2:3]) == 0
    assert list((job / "profile").rglob("*.xplane.pb"))
    assert (job / runs.SUMMARY).exists()
