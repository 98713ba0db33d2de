"""Every malformed input gives one sentence that names field, value and remedy, and nothing else.

The table's rows are in `tests/malformed`, by kind. On the command line the exit status is 2 and
nothing is left behind; a batch job's row keeps the sentence as its error; the library raises
`InputError`.
"""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jspec
from experiments import launch
from jspec.errors import InputError
from tests import tiny
from tests.experiments import conftest as fixtures
from tests.malformed import checkpoints, flags, gguf_files, library, parameters, rows, tokenizers
from tests.malformed.cases import Case, World

run_jspec = fixtures.run_jspec
tiny_model = fixtures.tiny_model

KINDS = (flags, rows, parameters, library, checkpoints, gguf_files, tokenizers)
CASES = [case for kind in KINDS for case in kind.cases()]
IDS = [re.sub(r"[^ -~]", "?", case.id) for case in CASES]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> jspec.Model:
    return jspec.load(tiny_model)


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of one batch job's results, in the order of its input."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "rows.jsonl").write_bytes(b"".join(line + b"\n" for line, _ in rows.job()))
    argv = ["jspec", "--experiment=batch", f"--model={tiny_model}", "--drafter=none"]
    argv += [f"--input={folder / 'rows.jsonl'}", f"--output={folder / 'out'}"]
    argv += ["--max_new_tokens=4", "--batch_size=2"]
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        absl_flags.FLAGS.set_default("compilation_cache", "")
        patch.setattr(sys, "argv", argv)
        assert launch.main(argv) == 1
    data = (folder / "out" / "results.jsonl").read_bytes()
    lines = [json.loads(line) for line in data.splitlines()]
    return sorted(lines, key=lambda line: int(line["index"]))


@pytest.fixture
def world(
    tmp_path: Path,
    tiny_model: Path,
    model: jspec.Model,
    results: list[dict[str, Any]],
    run_jspec: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> World:
    monkeypatch.chdir(tmp_path)

    def command(arguments: list[str]) -> str:
        flags.write_files(tmp_path)
        before = {path.name for path in tmp_path.iterdir()}
        if not any(argument.startswith("--model=") for argument in arguments):
            arguments = [f"--model={tiny_model}", *arguments]
        assert run_jspec(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        *progress, sentence = captured.err.splitlines()
        assert all(line.endswith("...") for line in progress)
        # Nothing was computed, so nothing is left behind but the folder of runs and of the job.
        assert {path.name for path in tmp_path.iterdir()} - before <= {"results", "j"}
        assert not list(tmp_path.glob("results/*"))
        return sentence

    errors = [line["error"] for line in results]
    return World(tmp_path, tiny_model, model, tiny.model(), command, errors)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bad_input_is_one_sentence(case: Case, world: World) -> None:
    sentence = case.sentence(world)
    assert len(sentence.splitlines()) == 1
    assert len(sentence) < 1000
    assert sentence.startswith(case.begins)
    problem, _, remedy = sentence.removeprefix(case.begins).partition("; ")
    assert problem
    assert case.remedy in remedy
    assert "Traceback" not in sentence


def test_a_job_of_malformed_rows_loses_none(results: list[dict[str, Any]]) -> None:
    wanted = [name or f"rows:{number}" for number, (_, name) in enumerate(rows.job(), start=1)]
    assert [line["id"] for line in results] == wanted
    good = [line for line in results if line["error"] is None]
    assert [line["id"] for line in good] == ["good-0", "good-1", "good-2"]


def test_absurd_sizes_are_not_allocated(world: World) -> None:
    for load in gguf_files.absurd():
        tracemalloc.start()
        with pytest.raises(InputError):
            load(world)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 32 << 20


# Bytes put over the file's own (at a position of 0 to 1, the fourth power of which favours its
# header), and where it is cut.
DAMAGES = st.tuples(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=3),
    st.floats(0, 1) | st.just(1.0),
)


@pytest.mark.parametrize(
    "name",
    [
        "model.gguf",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGES)
def test_a_damaged_file_is_refused_or_does_no_harm(
    name: str, damage: tuple[list[tuple[float, bytes]], float], world: World
) -> None:
    path = world.folder / "copied"
    if not path.exists():
        world.copied()
        gguf_files.write(world)
    source = world.folder / "m.gguf" if name == "model.gguf" else world.checkpoint / name
    changes, end = damage
    data = bytearray(source.read_bytes())
    for place, value in changes:
        start = int(place**4 * len(data))
        data[start : start + len(value)] = value
    damaged = world.folder / name if name == "model.gguf" else path / name
    damaged.write_bytes(data[: int(end * len(data))])
    message = "it was; harmless"
    try:
        model = jspec.load(damaged if name == "model.gguf" else path)
        jspec.to_token_ids(model, [{"role": "user", "content": "p"}])
    except InputError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    assert "; " in message


def test_there_are_many() -> None:
    assert len(CASES) == len(set(IDS))
    assert len(CASES) >= 200


def test_ids_may_be_arrays(world: World) -> None:
    assert library.accepted(world) == [(3, 4)] * 5
