from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments import demo, demo_report
from experiments.demo_prompts import PROMPTS
from experiments.demo_report import Pair
from experiments.differences import Difference
from experiments.results import Measured
from jspec.drafting.ngram import ngram
from jspec.generation import Decoder
from jspec.metrics import Counts, Timing
from jspec.requests import Completion, Delta
from jspec.tokenizers import Tokenizer
from tests import tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def completion(tokens: tuple[int, ...], seconds: float, rounds: int) -> Completion:
    histogram = np.zeros((8, 8), np.int64)
    histogram[1, 0] = rounds
    counts = Counts(histogram, np.zeros(7), len(tokens), 0)
    return Completion(tokens, "", "stop", None, counts, Timing(1.0, 1.1, 1.0 + seconds))


def pair(
    name: str, plain: tuple[int, ...], speculative: tuple[int, ...], times: tuple[float, float]
) -> Pair:
    return Pair(
        name,
        Measured(0, 5, 1, completion(plain, times[0], len(plain))),
        Measured(0, 5, 1, completion(speculative, times[1], len(speculative) // 2)),
    )


def test_it_compares_every_prompt(
    run_jspec: Callable[..., int],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [f"--model={tiny_model}", f"--output={tmp_path}"]
    arguments += ["--gamma=3", "--max_new_tokens=8"]
    assert run_jspec("--experiment=demo", *arguments) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out  # not a terminal
    assert "which no figure below includes" in captured.out
    for index, (name, text) in enumerate(PROMPTS):
        assert f"[{index + 1}/{len(PROMPTS)}] {name}\n  > {text.splitlines()[0]}\n" in captured.out
    assert len(re.findall(r"^\[plain .*; identical: yes\]$", captured.out, re.M)) == len(PROMPTS)
    assert f"{len(PROMPTS)} of {len(PROMPTS)} outputs are identical" in captured.out

    (folder,) = tmp_path.iterdir()
    assert (folder / "table.txt").read_text() in f"{captured.out}\n"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in metrics[::2]] == [name for name, _ in PROMPTS]
    # Who begins takes turns.
    assert [line["mode"] for line in metrics[:4]] == [
        "plain",
        "speculative",
        "speculative",
        "plain",
    ]
    assert all(line["block_efficiency"] == 1 for line in metrics if line["mode"] == "plain")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["identical"] == len(PROMPTS)
    assert summary["gamma"] == 3
    assert set(summary["prompts"]) == {name for name, _ in PROMPTS}


def test_accepted_drafts_are_marked_on_a_terminal(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_path(tiny_model)
    a, b, c, d = tokenizer.encode("abcd")
    done = completion((a, b, c, d), 1.0, 2)
    deltas = [Delta(0, (a,), "a", None), Delta(0, (b, c, d), "bcd", done)]
    for name, shown in (("xterm", "a\x1b[32mbc\x1b[0md"), ("dumb", "abcd")):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", name)
        monkeypatch.setattr(sys, "stdout", Terminal())
        assert list(demo._Show(tokenizer).stream(iter(deltas))) == deltas
        assert isinstance(sys.stdout, Terminal)
        assert sys.stdout.getvalue() == shown


@pytest.mark.parametrize(
    ("reason", "shown"), [("length", "ab …[cut at 2 tokens]"), ("stop", "ab"), ("error", "ab")]
)
def test_an_answer_that_the_budget_cut_says_so(
    reason: str, shown: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_path(tiny_model)
    done = dataclasses.replace(completion((1, 2), 1.0, 2), finish_reason=reason)
    deltas = [Delta(0, (1,), "a", None), Delta(0, (2,), "b", done)]
    assert list(demo._Show(tokenizer).stream(iter(deltas))) == deltas
    assert capsys.readouterr().out == shown


def test_a_loss_is_owned_up_to() -> None:
    tokens = (1, 2, 3, 4)
    won = pair("won", tokens, tokens, (4.0, 1.0))
    lost = pair("lost", tokens, tokens, (2.0, 4.0))
    assert won.speedup == pytest.approx(4)
    assert lost.speedup == pytest.approx(0.5)
    # In 4 s there were 2 rounds, and a plain step took half a second.
    sentence = demo_report._why([won, lost], [lost])
    assert sentence.startswith("It lost on 1 of 2: lost (0.50x).")
    assert "took 4.00 plain steps" in sentence
    assert "only 2.00 tokens" in sentence
    assert "none" in demo_report._why([won], [])


def test_a_disturbed_measurement_is_said_to_be_one() -> None:
    tokens = (1, 2, 3, 4)
    decoder = Decoder(tiny.model(), ngram())
    # Two rounds in 0.9 s cannot be cheaper than two plain steps of 0.5 s each.
    text, sums = demo_report.make([pair("odd", tokens, tokens, (2.0, 0.9))], decoder)
    assert sums["disturbed"] == ["odd"]
    assert "On odd a round of speculation seems cheaper" in text
    parting = Difference(place=2, gap=0.00123)
    even = dataclasses.replace(pair("even", tokens, (1, 2, 9), (2.0, 1.5)), difference=parting)
    text, sums = demo_report.make([even], decoder)
    assert sums["disturbed"] == []
    assert "busy" not in text
    assert "Block efficiency: " in text
    assert "Acceptance: " in text
    assert "no (at token 2, where the two best logits are 0.0012 apart)" in " ".join(text.split())
    assert "0 of 1 outputs are identical" in text
    assert "within rounding" in text
