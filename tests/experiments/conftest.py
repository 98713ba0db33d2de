from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from experiments import launch
from tests.experiments import batch_jobs
from tests.oracles.tiny_checkpoints import CONFIG, random_tensors, write_huggingface
from tests.oracles.tiny_vocabularies import byte_alphabet

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(directory: Path, *, seed: int = 0, template: str | None = TEMPLATE) -> Path:
    """Write a model of two tiny layers that reads and writes bytes."""
    vocabulary = {token: index for index, token in enumerate([END, *byte_alphabet()])}
    changes = {"vocab_size": 257, "max_position_embeddings": 1024, "eos_token_id": 0}
    config = CONFIG | changes
    write_huggingface(directory, random_tensors(config, seed), config)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    entries = {"eos_token": END} | ({"chat_template": template} if template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(entries))
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without a chat template."""
    return write_model(tmp_path_factory.mktemp("models") / "base", template=None)


@pytest.fixture
def run_jspec(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run a command line in this process; flags are as new afterwards."""

    def run(*arguments: str | Path) -> int:
        argv = ["jspec", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver():
            return launch.main(argv)

    # JAX settles on a cache once a process, and the tests have theirs.
    with flagsaver.flagsaver():
        flags.FLAGS.set_default("compilation_cache", "")
        yield run


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a batch job."""
    return tmp_path / "job"


@pytest.fixture
def run_batch(
    run_jspec: Callable[..., int], tiny_model: Path, tmp_path: Path, job: Path
) -> Callable[..., int]:
    """Run the experiment on rows, or on files that are named among the arguments."""

    def run(*arguments: str, rows: list[Any] = batch_jobs.ROWS) -> int:
        inputs = []
        if not any(argument.startswith("--input") for argument in arguments):
            batch_jobs.write(tmp_path / "rows.jsonl", rows)
            inputs = [f"--input={tmp_path / 'rows.jsonl'}"]
        if not any(argument.startswith("--model") for argument in arguments):
            inputs.append(f"--model={tiny_model}")
        return run_jspec(
            "--experiment=batch",
            "--drafter=none",
            f"--max_new_tokens={batch_jobs.BUDGET}",
            "--batch_size=2",
            f"--output={job}",
            *inputs,
            *arguments,
        )

    return run
