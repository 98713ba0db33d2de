from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

import jspec
from experiments import bench, timing, tree_rates
from tests import tiny

PROMPT = "ab ab ab ab ab ab"


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture
def run_tree(run_jspec: Callable[..., int], tmp_path: Path) -> Callable[..., Path]:
    """Run the experiment and return the run's folder."""

    def run(*arguments: str | Path) -> Path:
        runs = tmp_path / "runs"
        assert run_jspec("--experiment=tree", f"--output={runs}", *arguments) == 0
        (folder,) = runs.iterdir()
        for name in {path.stem for path in folder.glob("*.png")}:
            assert image.imread(folder / f"{name}.png").min() < 1
            assert "</svg>" in (folder / f"{name}.svg").read_text()
        return folder

    return run


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_tree_needs_no_model(
    run_tree: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_tree("--tree=2,2")
    assert read(folder)["parents"] == [-1, 0, 0, 1, 1, 2, 2]
    table = (folder / "table.txt").read_text()
    assert "├─ 1\n│  ├─ 3\n│  └─ 4\n└─ 2\n" in table
    assert table in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "summary.json",
        "table.txt",
        "tree.png",
        "tree.svg",
    ]


def test_a_tree_beside_chain_and_best_tree_for_given_rates(run_tree: Callable[..., Path]) -> None:
    found = read(run_tree("--tree=parents:-1,0,0,1", "--rates=0.5,0.25"))["trees"]
    assert found["tree"]["reached"] == [1, 0.5, 0.25, 0.25]
    assert found["tree"]["expected_tokens"] == 2.0
    assert found["chain"]["expected_tokens"] == 1.875
    assert found["best by tokens"]["expected_tokens"] == 2.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tree=optimal", "--rates=0,0", "--tree_nodes=5"),
        ("--tree=optimal", "--rates=1", "--tree_nodes=40"),
    ],
)
def test_no_picture_where_none_can_be_drawn(
    arguments: tuple[str, ...], run_tree: Callable[..., Path]
) -> None:
    folder = run_tree(*arguments)
    assert list(folder.glob("*.png")) == []
    assert "best by tokens" in (folder / "table.txt").read_text()


def test_the_best_tree_of_a_model_that_drafts_for_itself_is_a_chain(
    run_tree: Callable[..., Path],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tree_rates, "SIZES", (1, 2))
    folder = run_tree(
        f"--model={tiny_model}",
        "--drafter=draft-model",
        f"--draft_model={tiny_model}",
        "--tree=optimal",
        "--tree_nodes=3",
        "--temperatures=0",
        "--max_new_tokens=12",
        f"--prompt={PROMPT}",
    )
    plan = read(folder)["plans"]["0"]
    assert plan["rates"] == [1, 0, 0, 0]
    assert plan["rounds"] == 6
    assert plan["trees"]["tree"]["parents"] == [-1, 0, 1, 2]
    assert plan["trees"]["tree"]["expected_tokens"] == 4
    assert set(plan["verify_seconds"]) == {"1", "2", "4"}
    out = capsys.readouterr().out
    assert "--tree=parents:-1,0,1,2" in out
    assert "Best by cost" in out
    assert {path.stem for path in folder.glob("*.png")} == {"tree-0", "proposal-0"}
    # The drafts shown are what plain decoding goes on with.
    model = jspec.load(tiny_model)
    chat = [{"role": "user", "content": PROMPT}]
    plain = jspec.generate(model, [chat], sampling=jspec.SamplingParams(max_new_tokens=12))[0]
    assert model.tokenizer is not None
    shown = [repr(model.tokenizer.decode((token,))) for token in plain.token_ids[:3]]
    indented = [f"{' ' * 3 * depth}└─ {text}" for depth, text in enumerate(shown)]
    assert "\n".join(indented) in out


def test_lookups_are_shown_with_their_text(
    run_tree: Callable[..., Path], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tree(
        f"--model={tiny_model}",
        "--tree=dynamic",
        "--tree_nodes=4",
        "--temperatures=0",
        "--raw",
        "--prompt=xaxbx",
    )
    out = capsys.readouterr().out
    assert "4 drafts after the pending token (on top); generated so far: nothing\n\n'x'\n" in out
    for text in ("─ 'b'\n", "─ 'a'\n"):
        assert text in out


def test_trees_against_chains_on_workloads(
    run_tree: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    rows = [("qa", "What is what is what is"), ("copying", PROMPT)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"question_id": number, "category": category, "turns": [text]}) + "\n"
            for number, (category, text) in enumerate(rows)
        )
    )
    folder = run_tree(
        f"--model={tiny_model}", f"--workloads={questions}", "--sizes=3", "--max_new_tokens=8"
    )
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {(line["temperature"], line["method"], line["category"]): line for line in lines}
    assert len(found) == len(lines) == 2 * 3 * 2
    assert all(line["identical"] for line in lines if line["temperature"] == 0)
    comparison = read(folder)["comparison"]
    assert list(comparison) == ["0", "1"]
    for (temperature, method, category), line in found.items():
        group = comparison[f"{temperature:g}"]["categories"][category][method]
        assert group["block_efficiency"] == line["block_efficiency"]
        assert group["tokens"] == line["tokens"]
        plain = found[temperature, "plain", category]
        rates = [one["tokens"] / one["decode"] for one in (line, plain)]
        assert group["speedup"] == pytest.approx(rates[0] / rates[1])
    assert "tree over" in (folder / "table.txt").read_text()
    assert (folder / "comparison.png").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tree_nodes=4"],
        ["--drafter=early-exit", "--exit_layers=1", "--tree=2,1", "--draws=top-k"],
        ["--drafter=early-exit", "--exit_layers=1", "--tree=dynamic", "--tree_nodes=3"],
    ],
)
def test_other_experiments_speculate_with_trees(
    arguments: list[str],
    run_jspec: Callable[..., int],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    model = f"--model={tiny_model}"
    done = []
    for name, flags in (("tree", arguments), ("plain", ["--drafter=none"])):
        output = tmp_path / name
        common = ["--experiment=generate", model, f"--output={output}", "--max_new_tokens=12"]
        assert run_jspec(*common, f"--prompt={PROMPT}", *flags) == 0
        (folder,) = output.iterdir()
        done.append(json.loads((folder / "completions.jsonl").read_text())["token_ids"])
        if name == "tree":
            drafter = read(folder)["drafter"]
            assert drafter.startswith(("ngram", "early-exit-1l"))
            assert drafter.endswith(("tree-3", "tree-4"))
    assert done[0] == done[1]


def test_the_bench_counts_the_passes_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    def timer(model: jspec.Model, batch: int, nodes: int, *rest: int) -> Callable[[], float]:
        return lambda: nodes

    monkeypatch.setattr(timing, "step_timer", timer)
    target = tiny.model()

    def passes(drafter: jspec.BoundDrafter, gamma: int = 7) -> list[tuple[float, int]]:
        decoder = jspec.Decoder(target, drafter, jspec.SpeculationConfig(gamma=gamma))
        return [(measure(), times) for measure, times in bench._drafting_timers(decoder, 64, 8)]

    assert passes(jspec.draft_model(target, target)) == [(2, 1), (1, 6)]
    assert passes(jspec.draft_tree(target, target, (-1, 0, 0, 1)), 3) == [(4, 2)]
    assert passes(jspec.dynamic_draft_tree(target, target, 5, 3, 2), 5) == [(1, 1), (2, 2)]
    assert passes(jspec.ngram()) == []
