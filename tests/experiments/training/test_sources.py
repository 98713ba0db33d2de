from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jspec
from experiments.training import exclusion, sources
from experiments.training.text import Recipe
from jspec.errors import InputError
from tests.experiments.conftest import write_model

RECIPE = Recipe(conversations=4, material_tokens=10, answer_tokens=6, temperatures=(0.0,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> jspec.Model:
    return jspec.load(write_model(tmp_path_factory.mktemp("sources") / "tiny"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list[Any]], str]:
    def write(rows: list[Any]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
        return str(path)

    return write


def test_prompts_are_answered_and_text_stays(
    model: jspec.Model, write: Callable[[list[Any]], str]
) -> None:
    rows: list[Any] = [
        {"prompt": "one", "source": "elsewhere"},
        {"text": "abcdefghijklmnopqrstuvwxyz"},
        {"turns": ["two", "three"]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "four"}]},
    ]
    given = sources.read([write(rows)])
    cut = sources.shards(given, model, RECIPE)
    # The text makes pieces of 16 and 10 tokens: six items in shards of four.
    assert [len(items) for items in cut] == [4, 2]
    first = sources.shard(model, RECIPE, 0, cut[0])
    second = sources.shard(model, RECIPE, 1, cut[1])
    assert first is not None
    assert second is not None
    assert model.tokenizer is not None
    decode = model.tokenizer.decode
    shown = [
        (decode(ids[:answer].tolist()), decode(ids[answer:length].tolist()))
        for text in (first, second)
        for ids, length, answer in zip(text.tokens, text.length, text.answer, strict=True)
    ]

    def greedy(chat: list[dict[str, str]]) -> str:
        sampling = jspec.SamplingParams(temperature=0, max_new_tokens=6)
        return decode(jspec.generate(model, [chat], sampling=sampling)[0].token_ids)

    ask = [{"role": "user", "content": "two"}]
    answered = [*ask, {"role": "assistant", "content": greedy(ask)}]
    assert shown[0] == ("user: one\nassistant: ", greedy([{"role": "user", "content": "one"}]))
    assert shown[1:3] == [("", "abcdefghijklmnop"), ("", "qrstuvwxyz")]
    prompt = f"user: two\nassistant: {answered[1]['content']}\nuser: three\nassistant: "
    assert shown[3][0] == prompt
    assert shown[3][1] == greedy([*answered, {"role": "user", "content": "three"}])
    assert shown[4] == ("user: q\nassistant: ", "yes")
    assert shown[5][0] == "system: s\nuser: four\nassistant: "
    # A conversation that stands there ends as the target would end it.
    assert first.tokens.shape[0] + second.tokens.shape[0] == 6
    assert second.tokens[0][second.length[0] - 1] == 0


def test_a_compressed_file_is_the_same_source(tmp_path: Path) -> None:
    line = b'{"prompt": "x"}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    plain, packed = sources.read([str(tmp_path / "a.jsonl"), str(tmp_path / "a.jsonl.gz")])
    assert plain.sha256 == packed.sha256
    assert plain.items[0].questions == packed.items[0].questions == ("x",)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"prompt": "x", "text": "y"}', "exactly one"),
        ('{"prompt": ""}', "wrong kind or empty"),
        ('{"turns": "x"}', "list of the user's texts"),
        ('{"messages": [{"role": "user"}]}', "both strings"),
        ("[1]", "exactly one"),
        ("{", "is not JSON"),
        ("", "is empty"),
        ("\ud800", "is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named(content: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=word):
        sources.read([str(path)])


def test_eight_words_in_a_row_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.jsonl"
    rows = [{"turns": ["a b c", "One, two; three four FIVE six seven eight nine."]}, {"id": 7}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    excluded = exclusion.read(path)
    assert exclusion.shares("so: two three four five six (seven) eight nine!", excluded)
    assert exclusion.shares("ONE\ntwo three four five six seven eight", excluded)
    assert not exclusion.shares("one two three four five six seven nine eight", excluded)
    assert not exclusion.shares("a b c", excluded)
    path.write_text('{"turns": ["too short"]}\n')
    with pytest.raises(InputError, match="no run of 8 words"):
        exclusion.read(path)
    path.write_text("{\n")
    with pytest.raises(InputError, match="not JSON"):
        exclusion.read(path)
