"""Trained drafters by flag: used, recorded, and refused by the flag at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import jspec
from tests.oracles import tiny_heads

PROMPT = "abcabcabc"


@pytest.fixture(scope="module")
def heads(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with drafters for the tiny model."""
    root, config = tmp_path_factory.mktemp("heads"), jspec.load(tiny_model).config
    tiny_heads.write(root / "eagle", *tiny_heads.eagle(config))
    tiny_heads.write(root / "medusa", *tiny_heads.medusa(config, heads=2, blocks=1, own=False))
    other, tensors = tiny_heads.medusa(config)
    tiny_heads.write(root / "other", other | {"hidden_size": 99}, tensors)
    return root


def test_a_trained_drafter_with_lookup(
    run_jspec: Callable[..., int], tiny_model: Path, heads: Path, tmp_path: Path
) -> None:
    arguments = [
        f"--model={tiny_model}",
        "--experiment=generate",
        f"--prompt={PROMPT}",
        "--max_new_tokens=12",
        f"--output={tmp_path}",
        "--drafter=trained",
        f"--trained={heads / 'medusa'}",
        "--lookup",
    ]
    assert run_jspec(*arguments) == 0
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["drafter"] == "hybrid-medusa-2"
    recorded = json.loads((folder / "config.json").read_text())["flags"]
    assert recorded["trained"] == str(heads / "medusa")
    assert recorded["lookup"] is True
    (metrics,) = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(json.loads(metrics)["histogram"]) == 3  # no longer than there are heads
    (completion,) = (folder / "completions.jsonl").read_text().splitlines()
    chat = [{"role": "user", "content": PROMPT}]
    plain = jspec.generate(
        jspec.load(tiny_model), [chat], sampling=jspec.SamplingParams(max_new_tokens=12)
    )
    assert json.loads(completion)["token_ids"] == list(plain[0].token_ids)


@pytest.mark.parametrize(
    ("name", "arguments", "begins"),
    [
        ("other", [], "hidden_size=99 is not the target's 64"),
        ("medusa", ["--gamma=3"], "gamma=3 is above the 2 drafts"),
        ("medusa", ["--tree=dynamic"], "tree='dynamic' cannot be honoured by Medusa heads"),
        ("medusa", ["--tree=1,1,1"], "tree=(-1, 0, 1, 2) is 3 drafts deep"),
        ("medusa", ["--tree=2", "--draws=independent"], "draws='independent' cannot be honoured"),
        ("eagle", ["--tree=dynamic", "--tree_nodes=9", "--tree_depth=1"], "tree_nodes=9 is more"),
        ("eagle", ["--min_confidence=-1"], "min_confidence=-1.0 is no probability"),
        ("eagle", ["--min_confidence=.3", "--tree=2"], "min_confidence=0.3 ends chains, and a"),
        ("eagle", ["--tree=optimal"], "tree='optimal' is not known before"),
    ],
)
def test_what_a_trained_drafter_cannot_do(
    name: str,
    arguments: list[str],
    begins: str,
    run_jspec: Callable[..., int],
    tiny_model: Path,
    heads: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run_jspec(
        f"--model={tiny_model}",
        "--experiment=generate",
        f"--prompt={PROMPT}",
        f"--output={tmp_path}",
        "--drafter=trained",
        f"--trained={heads / name}",
        *arguments,
    )
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {begins}")


@pytest.mark.parametrize(
    "arguments", [["--drafter=early-exit", "--exit_layers=1"], ["--drafter=trained"]]
)
def test_chains_end_where_the_drafter_is_unsure(
    arguments: list[str],
    run_jspec: Callable[..., int],
    tiny_model: Path,
    heads: Path,
    tmp_path: Path,
) -> None:
    if arguments == ["--drafter=trained"]:
        arguments = [*arguments, f"--trained={heads / 'eagle'}"]
    drafts = []
    for confidence in (0, 1):
        given = [f"--model={tiny_model}", "--experiment=generate", f"--prompt={PROMPT}"]
        output = tmp_path / str(confidence)
        given += [f"--min_confidence={confidence}", "--max_new_tokens=8", f"--output={output}"]
        assert run_jspec(*given, *arguments) == 0
        (folder,) = output.iterdir()
        (metrics,) = (folder / "metrics.jsonl").read_text().splitlines()
        drafts.append(sum(json.loads(metrics)["proposed"]))
    assert drafts[0] > 0
    assert drafts[1] == 0


def test_trees_and_lookups_have_no_confidence(
    run_jspec: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    tree = ["--drafter=early-exit", "--exit_layers=1", "--tree=2"]
    assert run_jspec("--experiment=generate", "--prompt=a", "--min_confidence=0.3", *tree) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: min_confidence=0.3 ends chains, and a tree is asked for")
    asked = ["--experiment=generate", f"--prompt={PROMPT}", "--drafter=ngram"]
    assert run_jspec(*asked, "--min_confidence=0.3") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: min_confidence=0.3 has no effect with --drafter=ngram")
    assert "--drafter=trained or draft-model or early-exit" in said


@pytest.mark.parametrize("argument", ["--tree=optimal", "--rates=1"])
def test_trees_of_trained_drafters_are_not_optimised(
    argument: str,
    run_jspec: Callable[..., int],
    heads: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--tree=2", "--rates=1"] if argument != "--tree=optimal" else [argument]
    status = run_jspec(
        "--experiment=tree",
        f"--prompt={PROMPT}",
        "--drafter=trained",
        f"--trained={heads / 'eagle'}",
        *arguments,
    )
    assert status == 2
    assert "--drafter=trained" in capsys.readouterr().err
