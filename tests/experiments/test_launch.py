from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import launch
from tests.experiments.conftest import write_model

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ["--experiment=generate", "--prompt=hi"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "experiments.launch", *map(str, arguments)]


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "HOME": str(home), "PYTHONPATH": str(ROOT)}


def test_help_is_short_and_ours(tmp_path: Path) -> None:
    result = subprocess.run(
        command("--help"),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[2].startswith("Usage: jspec --experiment=NAME")
    at = {title: lines.index(title) for title in ("Examples", "Experiments")}
    assert at["Examples"] < at["Experiments"] < lines.index("Flags of every experiment")
    for experiment in launch.EXPERIMENTS:
        assert any(line.startswith(f"  {experiment.name} ") for line in lines)
    shown = {line.strip().removeprefix("--").split("=")[0] for line in lines if "  --" in line}
    assert {"model", "drafter", "gamma", "top_p", "profile", "prompt", "input", "raw"} <= shown
    assert not shown & {"verbosity", "flagfile", "undefok", "pdb", "alsologtostderr"}
    assert max(map(len, lines)) <= 100
    assert len(lines) < 280


def test_helpfull_shows_absls_flags_too(
    run_jspec: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jspec("--helpfull") == 0
    out = capsys.readouterr().out
    assert "--flagfile" in out
    assert "--gamma" in out


# Arguments, and what the one sentence must name: field, value, remedy.
MALFORMED: list[tuple[list[str], list[str]]] = [
    ([], ["error: experiment is not given; give one of demo, generate"]),
    (["--experiment=nothing"], ["experiment='nothing'", "give one of demo, generate"]),
    (["generate"], ["argument='generate'", "--experiment=generate"]),
    (["--experiment=generate", "x.txt"], ["argument='x.txt'", "--name=value"]),
    ([*GENERATE, "--gama=3"], ["flag='--gama'", "did you mean --gamma"]),
    ([*GENERATE, "--zzzzzz"], ["flag='--zzzzzz'", "--help"]),
    ([*GENERATE, "--gamma"], ["flag='--gamma'", "--gamma=VALUE"]),
    ([*GENERATE, "--gamma=x"], ["gamma='x'", "give an integer"]),
    ([*GENERATE, "--gamma=3.5"], ["gamma='3.5'", "give an integer"]),
    ([*GENERATE, "--gamma="], ["gamma=''", "give an integer"]),
    ([*GENERATE, "--gamma=-1"], ["gamma=-1", "0..127", "plain decoding"]),
    ([*GENERATE, "--gamma=128"], ["gamma=128", "0..127", "up to 127"]),
    ([*GENERATE, "--drafter=none", "--gamma=4"], ["gamma=4", "--drafter=none", "leave it out"]),
    ([*GENERATE, "--drafter=medusa9"], ["drafter='medusa9'", "none, ngram, trained, draft-model"]),
    ([*GENERATE, "--drafter=draft-model"], ["error: draft_model names no model", "smaller model"]),
    ([*GENERATE, "--draft_model=a/b"], ["draft_model='a/b'", "--drafter=draft-model"]),
    ([*GENERATE, "--drafter=early-exit"], ["error: exit_layers is no number", "at least 1"]),
    (
        [*GENERATE, "--drafter=early-exit", "--exit_layers=0"],
        ["exit_layers=0", "give at least 1"],
    ),
    ([*GENERATE, "--exit_layers=2"], ["exit_layers=2", "--drafter=early-exit"]),
    ([*GENERATE, "--ngram_min=0"], ["ngram_min=0", "at least one token"]),
    ([*GENERATE, "--ngram_max=1"], ["ngram_max=1", "ngram_min (2)", "ngram_max >= ngram_min"]),
    ([*GENERATE, "--drafter=none", "--ngram_max=4"], ["ngram_max=4", "--drafter=ngram"]),
    ([*GENERATE, "--verification=tree"], ["verification='tree'", "token, block"]),
    ([*GENERATE, "--batch_size=0"], ["batch_size=0", "at least one row"]),
    ([*GENERATE, "--rounds_per_chunk=0"], ["rounds_per_chunk=0", "at least one round"]),
    ([*GENERATE, "--temperature=-0.5"], ["temperature=-0.5", "0 for greedy"]),
    ([*GENERATE, "--temperature=nan"], ["temperature=nan", "0 for greedy"]),
    ([*GENERATE, "--temperature=warm"], ["temperature='warm'", "give a number"]),
    ([*GENERATE, "--top_k=-1"], ["top_k=-1", "give 0"]),
    ([*GENERATE, "--top_p=0"], ["top_p=0.0", "(0, 1]", "give 1"]),
    ([*GENERATE, "--top_p=1.01"], ["top_p=1.01", "(0, 1]", "give 1"]),
    ([*GENERATE, "--min_p=2"], ["min_p=2.0", "[0, 1]", "give 0"]),
    ([*GENERATE, "--seed=-1"], ["seed=-1", "64 bits", "[0, 2**64)"]),
    ([*GENERATE, f"--seed={2**64}"], [f"seed={2**64}", "64 bits"]),
    ([*GENERATE, "--max_new_tokens=0"], ["max_new_tokens=0", "at least one token"]),
    ([*GENERATE, "--stop_token_ids=1,x"], ["stop_token_ids='1,x'", "separated by commas"]),
    ([*GENERATE, "--stop_token_ids=-4"], ["stop_token_ids=-4", "ids of the vocabulary"]),
    ([*GENERATE, "--stop_token_ids=9999"], ["stop_token_ids=9999", "vocabulary of 257"]),
    ([*GENERATE, "--ignore_eos=maybe"], ["ignore_eos='maybe'", "--noignore_eos"]),
    ([*GENERATE, "--dtype=int8"], ["dtype='int8'", "float32, bfloat16, float16"]),
    ([*GENERATE, "--model=nowhere.gguf"], ["model='nowhere.gguf'", "give a path"]),
    ([*GENERATE, "--model=empty"], ["model='empty'", "is an empty directory", "give a directory"]),
    ([*GENERATE, "--flagfile=nowhere.flags"], ["flagfile='nowhere.flags'", "check the path"]),
    ([*GENERATE, "--flagfile=bad.flags"], ["gamma='many'", "give an integer"]),
    (["--experiment=generate"], ["error: prompt ", "--prompt=TEXT"]),
    (["--experiment=generate", "--prompt="], ["prompt[0]=''", "give some text"]),
    (["--experiment=generate", "--input=nowhere.txt"], ["input='nowhere.txt'", "check the path"]),
    (["--experiment=generate", "--input=a.csv"], ["input='a.csv'", ".jsonl"]),
    (["--experiment=generate", "--input=empty.txt"], ["input='empty.txt'", "at least one"]),
    (["--experiment=generate", "--input=folder.txt"], ["input='folder.txt'", "check the path"]),
    (["--experiment=generate", "--input=latin.txt"], ["input='latin.txt'", "UTF-8"]),
    (["--experiment=generate", "--input=bad.jsonl"], ['bad.jsonl:2=\'{"prompt"', "is not JSON"]),
    (["--experiment=generate", "--input=both.jsonl"], ["both.jsonl:1", "exactly one"]),
    (["--experiment=generate", "--input=number.jsonl"], ["number.jsonl:1=3", "give a string"]),
    (["--experiment=generate", "--input=turns.jsonl"], ["turns.jsonl:1", '"role"']),
    (["--experiment=generate", "--input=chat.jsonl", "--raw"], ["chat.jsonl:1", "leave --raw out"]),
    ([*GENERATE, "--output=a.csv"], ["output='a.csv'", "another --output"]),
    ([*GENERATE, "--compilation_cache=a.csv/x"], ["compilation_cache=", "another folder"]),
    (["--experiment=demo", "--prompt=hi"], ["prompt=['hi']", "of --experiment=generate"]),
    (["--experiment=demo", "--batch_size=4"], ["batch_size=4", "one prompt at a time"]),
    (["--experiment=demo", "--temperature=1"], ["temperature=1.0", "greedily", "leave it out"]),
    (["--experiment=demo", "--drafter=none"], ["drafter='none'", "nothing to compare"]),
    (["--experiment=demo", "--gamma=0"], ["gamma=0", "nothing to compare"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the files that the table names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.txt").mkdir()
    files = {
        "a.csv": "x",
        "empty.txt": "\n  \n",
        "bad.flags": "--gamma=many\n",
        "bad.jsonl": '{"prompt": "fine"}\n{"prompt": \n',
        "both.jsonl": '{"prompt": "a", "messages": []}\n',
        "number.jsonl": '{"prompt": 3}\n',
        "turns.jsonl": '{"messages": [{"role": "user"}]}\n',
        "chat.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.txt").write_bytes("Gr\u00fc\u00dfe\n".encode("latin-1"))
    return tmp_path


@pytest.mark.parametrize(("arguments", "words"), MALFORMED, ids=lambda x: " ".join(x)[-50:])
def test_bad_input_is_one_sentence(
    arguments: list[str],
    words: list[str],
    folder: Path,
    tiny_model: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not any(argument.startswith("--model=") for argument in arguments):
        arguments = [f"--model={tiny_model}", *arguments]
    assert run_jspec(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *progress, sentence = captured.err.splitlines()
    assert all(line.endswith("...") for line in progress)
    assert sentence.startswith("error: ")
    for word in words:
        assert word in sentence
    # Nothing was computed, so nothing is left behind.
    assert not list(folder.glob("results/*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafter=early-exit", "--exit_layers=2"], ["exit_layers=2", "1..1"]),
        (["--drafter=draft-model", "--draft_model=nowhere"], ["draft_model='nowhere'"]),
        (["--max_new_tokens=5", f"--prompt={'long ' * 300}"], ["prompt[1]", "1024"]),
    ],
)
def test_what_only_the_model_can_tell(
    arguments: list[str],
    words: list[str],
    folder: Path,
    tiny_model: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_jspec(*GENERATE, f"--model={tiny_model}", *arguments) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    for word in words:
        assert word in sentence
    assert not list(folder.glob("results/*"))


def test_a_model_without_a_chat_template_needs_raw(
    base_model: Path,
    tmp_path: Path,
    run_jspec: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = [*GENERATE, f"--model={base_model}", f"--output={tmp_path}", "--max_new_tokens=2"]
    shared.append("--drafter=none")
    assert run_jspec(*shared) == 2
    assert "--raw" in capsys.readouterr().err
    assert run_jspec(*shared, "--raw") == 0


def test_an_error_sets_the_exit_status(tmp_path: Path) -> None:
    result = subprocess.run(
        command("--experiment=generate", "--prompt=hi", "--gamma=x"),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert result.returncode == 2
    assert result.stderr == "error: gamma='x' is not an integer; give an integer\n"
    assert result.stdout == ""


def test_interrupting_keeps_what_was_finished(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(5000)))
    arguments = [
        "--experiment=generate",
        f"--model={model}",
        f"--input={prompts}",
        "--batch_size=2",
        "--max_new_tokens=16",
        "--drafter=none",
        f"--output={tmp_path / 'out'}",
    ]
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(tmp_path),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # something is finished
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in stderr
    (folder,) = (tmp_path / "out").iterdir()
    # Whole files, and no summary: the run was not finished.
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "completions.jsonl",
    }
    assert (tmp_path / ".cache/jspec/xla").is_dir()


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        command("--help"),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    os.close(writer)
    assert process.stderr == b""
    assert process.returncode == 141


def test_an_unusable_default_cache_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    launch._use_compilation_cache(str(tmp_path / "file" / "cache"))


def test_a_terminal_that_cannot_show_a_character_ends_no_run(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    finished = subprocess.run(
        command(
            "--experiment=generate",
            f"--model={model}",
            "--prompt=na\u00efve",
            "--prompt=two",
            "--raw",
            "--max_new_tokens=2",
            f"--output={tmp_path / 'results'}",
        ),
        env=environment(tmp_path) | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
        capture_output=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert b"na\\xefve" in finished.stdout
