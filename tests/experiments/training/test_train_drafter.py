from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

import jspec
from experiments import tree_plot
from experiments.training import plot, progress, snapshots
from jspec.checkpoints import heads
from tests import tiny
from tests.experiments.training import jobs

ROOT = Path(__file__).resolve().parents[3]
STEPS = 9
Train = Callable[..., int]


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.model(tmp_path_factory.mktemp("training") / "target")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    """What all trainings here are given; their data are made once."""
    folder = tmp_path_factory.mktemp("training")
    return [
        "--experiment=train_drafter",
        f"--model={model}",
        f"--train_input={jobs.chats(folder / 'chats.jsonl')}",
        f"--data={folder / 'data'}",
        "--text_tokens=0",
        "--max_new_tokens=16",
        "--batch_size=40",
        "--batch_tokens=1024",
        "--warmup=2",
        "--learning_rate=0.01",
        "--draft_vocab=64",
        "--measure_every=100",
        f"--steps={STEPS}",
        "--save_every=3",
        "--train_dtype=float32",
    ]


@pytest.fixture
def train(
    run_jspec: Train, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Train:
    """Run the experiment; pictures take long, so only who asks for them gets some."""

    def run(name: str, *arguments: str, drawn: bool = False) -> int:
        if not drawn:
            monkeypatch.setattr(plot, "figure", lambda history, title: None)
            monkeypatch.setattr(tree_plot, "files", lambda figure, stem: {})
        return run_jspec(*inputs, f"--output={tmp_path / name}", *arguments)

    return run


@pytest.mark.parametrize(
    ("kind", "tokens"), [("eagle3", 257), ("eagle", 257), ("medusa", 200), ("draft-model", 200)]
)
def test_every_kind_learns_and_drafts(
    kind: str,
    tokens: int,
    train: Train,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--layers=1"] if kind == "draft-model" else ["--drafts=2", "--gamma=2"]
    highest = 0.01
    if kind in ("eagle", "draft-model"):  # they begin near their best
        highest = 0.001
        more += ["--learning_rate=0.001"]
    more += ["--lower_layers"] if kind == "eagle" else []
    decoded = kind != "eagle3"  # as eagle is
    more += [f"--draft_vocab={tokens}", f"--measure_prompts={2 * decoded}", "--steps=12"]
    assert train("job", f"--kind={kind}", *more, drawn=kind == "eagle3") == 0
    folder = tmp_path / "job"
    steps, measured = jobs.progress(folder)
    assert [line["step"] for line in measured] == [0, 12]
    before, after = (line["held_out"] for line in measured)
    if kind == "draft-model":  # least squares know so small a text by heart
        assert before["agree"][0] > 0.9
        assert after["cross_entropy"][0] < before["cross_entropy"][0] + 0.05
    else:
        assert sum(after["cross_entropy"]) < sum(before["cross_entropy"]) - 0.05
        assert sum(after["overlap"]) > sum(before["overlap"])
    assert steps[-1]["loss"] < steps[0]["loss"]
    # Every token of every pass is counted once, and the rate falls from its highest.
    assert steps[-1]["tokens"] > steps[0]["tokens"] > 0
    assert steps[2]["learning_rate"] == pytest.approx(highest)
    assert steps[-1]["learning_rate"] < highest / 5
    if kind == "eagle3":
        assert image.imread(folder / "training.png").min() < 1
        assert "</svg>" in (folder / "training.svg").read_text()
    card = (folder / "drafter" / "README.md").read_text()
    for said in (
        f"# {kind} drafter",
        f"{steps[-1]['tokens']:,} tokens in 12 steps",
        "chats.jsonl",
        f"--kind={kind}",
        f"{tokens} of 257",
        "38, and 2 held out",
    ):
        assert said in card
    if decoded:
        assert 1 <= after["block_efficiency"] <= 5
        assert len(after["acceptance"]) == (4 if kind == "draft-model" else 2)
        assert f"block efficiency {after['block_efficiency']:.2f}" in card
    assert "step 12: held-out cross-entropy" in capsys.readouterr().err
    target = jspec.load(model)
    stored = heads.load(folder / "drafter", target.config, target.params, "float32")
    assert stored.kind == kind
    kept = stored.vocabulary
    assert kept is None if tokens == 257 else kept is not None and len(kept) == tokens


def lines(folder: Path) -> list[dict[str, Any]]:
    """All lines, without their times."""
    steps, measured = jobs.progress(folder)
    return [{k: v for k, v in line.items() if k != "seconds"} for line in [*steps, *measured]]


def test_killed_and_interrupted_it_comes_to_the_same_losses(
    train: Train, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medusa = ["--kind=medusa", "--drafts=2", "--measure_prompts=0", "--gamma=2"]
    assert train("whole", *medusa) == 0
    # SIGKILL in the middle of the line of step 5; the last checkpoint is of step 3.
    killer = (
        "import os, signal, sys\n"
        "from experiments import launch\n"
        "from experiments.training.progress import Progress\n"
        "write = Progress.write\n"
        "def cut(self, line):\n"
        "    if line['step'] == 5:\n"
        '        self._file.write(\'{"step": 5, "lo\')\n'
        "        self._file.flush()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(self, line)\n"
        "Progress.write = cut\n"
        "launch.main(sys.argv)\n"
    )
    job = tmp_path / "job"
    arguments = [*inputs, *medusa, f"--output={job}", "--compilation_cache="]
    done = subprocess.run(
        [sys.executable, "-c", killer, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert snapshots.steps(job) == [3]
    assert (job / "progress.jsonl").read_text().endswith('{"step": 5, "lo')

    write = progress.Progress.write

    def interrupted(self: progress.Progress, line: dict[str, Any]) -> None:
        write(self, line)
        if line["step"] == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "write", interrupted)
        assert train("job", *medusa) == 143
    assert snapshots.steps(job) == [6, 7]
    assert train("job", *medusa) == 0
    for ours, theirs in zip(lines(job), lines(tmp_path / "whole"), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["step"] == theirs["step"]
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
            assert ours["tokens"] == theirs["tokens"]
        else:
            for name, values in theirs["held_out"].items():
                assert ours["held_out"][name] == pytest.approx(values, abs=1e-5)
    # Another run changes nothing; other settings are refused, and a lost checkpoint goes unnoticed.
    before = (job / "progress.jsonl").read_bytes()
    assert train("job", *medusa) == 0
    assert (job / "progress.jsonl").read_bytes() == before
    assert train("job", *medusa, "--learning_rate=0.02") == 2
    shutil.rmtree(job / "checkpoints" / "step-00000009" / "state")
    assert train("job", *medusa, "--keep=1") == 0
    assert lines(job)[-1]["held_out"]["cross_entropy"] == pytest.approx(
        lines(tmp_path / "whole")[-1]["held_out"]["cross_entropy"], abs=1e-5
    )
    assert snapshots.steps(job) == [9]


def test_eight_devices_come_to_the_losses_of_one(train: Train, tmp_path: Path) -> None:
    medusa = ["--kind=medusa", "--drafts=2", "--gamma=2", "--measure_prompts=0", "--accumulate=2"]
    found = []
    for devices in (1, 8):
        assert train(f"on{devices}", *medusa, f"--mesh_data={devices}", "--steps=4") == 0
        steps, measured = jobs.progress(tmp_path / f"on{devices}")
        found.append(
            [
                *[line["loss"] for line in steps],
                *[line["gradient"] for line in steps],
                *measured[-1]["held_out"]["cross_entropy"],
            ]
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["error: kind is not given"]),
        (["--kind=eagle4"], ["kind='eagle4'", "eagle3"]),
        (["--kind=medusa", "--steps=0"], ["steps=0", "give at least 1"]),
        (["--kind=medusa", "--learning_rate=0"], ["learning_rate=0.0", "above 0"]),
        (["--kind=medusa", "--gamma=5", "--drafts=4"], ["gamma=5", "4 heads"]),
        (["--kind=medusa", "--layers=1"], ["layers=['1']", "--kind=medusa"]),
        (["--kind=draft-model", "--drafts=3"], ["drafts=3", "--kind=draft-model"]),
        (["--kind=draft-model", "--layers=0,9"], ["layers=9", "0..1"]),
        (["--kind=medusa", "--drafter=ngram"], ["drafter='ngram'", "one is trained"]),
        (["--kind=medusa", "--weights=int8"], ["weights='int8'", "rounded"]),
        (["--kind=medusa", "--mesh_data=64"], ["mesh_data=64", "8 devices"]),
        (["--kind=medusa", "--exclude=nowhere.jsonl"], ["exclude='nowhere.jsonl'", "read"]),
        (["--kind=medusa", "--train_input=a.csv"], ["train_input='a.csv'", ".jsonl"]),
        (["--kind=medusa", "--max_new_tokens=17"], ["answer_tokens=17", "another --data"]),
    ],
    ids=lambda x: " ".join(x)[:50],
)
def test_refused(
    arguments: list[str],
    words: list[str],
    train: Train,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("refused", *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error


def test_a_job_needs_a_folder_of_its_own(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    assert train("full", "--kind=medusa") == 2
    assert "holds thesis.tex without a settings.json" in capsys.readouterr().err


def test_what_shares_words_with_the_evaluation_is_left_out(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"turns": ["so THE COW sat on the mat, the cow sat"]}]
    path = tmp_path / "evaluation.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--kind=medusa", "--measure_prompts=0", "--steps=1", "--drafts=2", "--gamma=2"]
    assert train("job", *more, f"--exclude={path}") == 0
    assert "8 of 40 conversations were left out" in capsys.readouterr().err
    assert "8 of 40 conversations" in (tmp_path / "job" / "drafter" / "README.md").read_text()
