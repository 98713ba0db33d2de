from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jspec
from experiments import input_files, rows
from experiments.input_files import Line
from jspec.errors import InputError
from jspec.sampling_params import SamplingParams

BASE = SamplingParams(temperature=0.5, max_new_tokens=9, seed=100)


def parse(value: object, *, index: int = 3, raw: bool = False) -> rows.Row:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return rows.parse(Line(index, f"file:{index + 1}", data), BASE, raw)


@pytest.mark.parametrize(
    ("value", "kind", "content"),
    [
        ({"prompt": "na\u00efve"}, "prompt", "na\u00efve"),
        (
            {"messages": [{"role": "user", "content": ""}]},
            "messages",
            [{"role": "user", "content": ""}],
        ),
        ({"token_ids": [0, 10**30]}, "token_ids", [0, 10**30]),
        ({"turns": ["a", "b"]}, "turns", ["a", "b"]),
    ],
)
def test_the_four_kinds(value: dict[str, Any], kind: str, content: object) -> None:
    row = parse(value)
    assert (row.error, row.kind, row.content) == (None, kind, content)
    assert row.id == "file:4"
    assert row.turns == (2 if kind == "turns" else 1)


def test_sampling_parameters_stand_beside_the_prompt() -> None:
    row = parse({"prompt": "p", "top_k": 3.0, "stop": "\n", "temperature": None})
    assert row.sampling == SamplingParams(
        temperature=0.5, max_new_tokens=9, top_k=3, stop=("\n",), seed=103
    )
    assert parse({"prompt": "p", "seed": 5}, index=7).sampling == SamplingParams(
        temperature=0.5, max_new_tokens=9, seed=5
    )


def test_a_seed_follows_from_the_place_in_the_input_alone() -> None:
    seeds = [parse({"prompt": "p"}, index=index).sampling for index in range(3)]
    assert [s.seed for s in seeds if s] == [100, 101, 102]


@pytest.mark.parametrize(
    ("value", "identity"),
    [
        ({"id": "x"}, "x"),
        ({"id": 0}, 0),
        ({"id": None}, "file:4"),
        ({"question_id": 81}, 81),
        ({"question_id": 81, "id": "mine"}, "mine"),
    ],
)
def test_ids(value: dict[str, Any], identity: str | int) -> None:
    row = parse({"prompt": "p", **value})
    assert row.error is None
    assert row.id == identity
    assert type(row.id) is type(identity)


def test_spec_bench_fields_are_copied() -> None:
    extra = {"category": "math", "subcategory": "s", "source": "t", "reference": ["4"]}
    row = parse({"question_id": 1, "turns": ["2+2?"], **extra})
    assert row.error is None
    assert row.copied == extra


# What the line holds, and what the error must name.
MALFORMED: list[tuple[Any, list[str]]] = [
    (b"{", ["row='{'", "is not JSON"]),
    (b"\xff\n", ["row=b'\\xff\\n'", "is not UTF-8 (byte 0)"]),
    (b"[" * 100_000, ["is not JSON"]),
    (b"1" * 5000, ["is not JSON"]),
    (["prompt"], ["is no object"]),
    (None, ["row", "is no object"]),
    ({}, ["exactly one of prompt, messages, token_ids, turns"]),
    ({"prompt": "p", "turns": ["t"]}, ["exactly one of"]),
    ({"prompt": ""}, ["prompt=''", "give some text"]),
    ({"prompt": 3}, ["prompt=3", "give some text"]),
    ({"messages": []}, ["messages=[]", '"role"']),
    ({"messages": [{"role": "user"}]}, ["messages=", '"content"']),
    ({"messages": "text"}, ["messages='text'"]),
    ({"token_ids": []}, ["token_ids=[]", "list of token ids"]),
    ({"token_ids": [1, True]}, ["token_ids=[1, True]"]),
    ({"token_ids": [1.0]}, ["token_ids=[1.0]"]),
    ({"turns": "text"}, ["turns='text'"]),
    ({"turns": ["a", ""]}, ["turns=['a', '']"]),
    ({"prompt": "p", "id": 1.5}, ["id=1.5", "neither a string nor an integer"]),
    ({"prompt": "p", "id": True}, ["id=True"]),
    ({"prompt": "p", "question_id": []}, ["question_id=[]"]),
    ({"prompt": "p", "temprature": 1}, ["temprature=1", "did you mean temperature"]),
    ({"prompt": "p", "max_tokens": 1}, ["max_tokens=1", "did you mean max_new_tokens"]),
    ({"prompt": "p", "temperature": -1}, ["temperature=-1"]),
    ({"prompt": "p", "temperature": float("nan")}, ["temperature=nan"]),
    ({"prompt": "p", "top_k": "many"}, ["top_k='many'"]),
    ({"turns": ["a"], "n": 2}, ["n=2", "several samples"]),
]


@pytest.mark.parametrize(("value", "words"), MALFORMED)
def test_what_is_wrong_with_a_row_is_its_error(value: Any, words: list[str]) -> None:
    row = parse(value)
    assert row.error is not None
    assert row.finished
    for word in words:
        assert word in row.error
    assert "\n" not in row.error


def test_a_bad_row_keeps_its_id_and_category() -> None:
    row = parse({"id": "x", "category": "c", "prompt": ""})
    assert (row.id, row.copied) == ("x", {"category": "c"})
    assert parse({"id": [], "prompt": "p"}).id == "file:4"


@pytest.mark.parametrize("value", [{"turns": ["t"]}, {"messages": [{"role": "u", "content": ""}]}])
def test_a_chat_cannot_be_raw(value: dict[str, Any]) -> None:
    assert "leave --raw out" in (parse(value, raw=True).error or "")
    assert parse({"prompt": "p"}, raw=True).error is None


@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*rows.KINDS, "id", "n", "seed", "stop", "logit_bias", "top_p"]),
                inner,
            )
        ),
        max_leaves=8,
    )
)
def test_no_line_brings_the_job_down(value: Any) -> None:
    row = parse(value)
    assert isinstance(row.id, str | int)
    assert (row.error is None) == (row.sampling is not None)


def test_turns_are_asked_one_after_the_other(tiny_model: Path) -> None:
    model = jspec.load(tiny_model)
    row = parse({"turns": ["one", "two"]})
    first = row.request(model, raw=False)
    assert first.token_ids == jspec.to_token_ids(model, [{"role": "user", "content": "one"}])
    assert first.sampling.seed == 103
    row.answers.append({"text": "ONE"})
    assert not row.finished
    second = row.request(model, raw=False)
    assert second.token_ids == jspec.to_token_ids(
        model,
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "ONE"},
            {"role": "user", "content": "two"},
        ],
    )
    # Of its own, and not the seed of any other row.
    assert second.sampling.seed not in range(1000)
    assert second == row.request(model, raw=False)
    row.answers.append({"text": "TWO"})
    assert row.finished


def scan(*paths: Path) -> tuple[list[input_files.InputFile], list[Line]]:
    files = input_files.scan([str(path) for path in paths])
    return files, list(input_files.lines(files))


def test_lines_of_several_files_count_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf1\n\n \r\n2\xe2\x80\xa8\x0c3\n4")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"5\n6\n"))
    files, lines = scan(tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz")
    assert [file.rows for file in files] == [3, 2]
    assert lines == [
        Line(0, "a:1", b"1\n"),
        Line(1, "a:4", b"2\xe2\x80\xa8\x0c3\n"),
        Line(2, "a:5", b"4"),
        Line(3, "b:1", b"5\n"),
        Line(4, "b:2", b"6\n"),
    ]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (BOM + b'\n{"prompt": "x"}\n', [Line(0, "p:2", b'{"prompt": "x"}\n')]),
        (BOM + b" \r\n1", [Line(0, "p:2", b"1")]),
        (BOM + b"1\n" + BOM + b"\n", [Line(0, "p:1", b"1\n"), Line(1, "p:2", BOM + b"\n")]),
    ],
)
def test_rows_that_are_counted_are_rows_that_come(
    data: bytes, found: list[Line], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_bytes(data)
    (file,), lines = scan(tmp_path / "p.jsonl")
    assert (file.rows, lines) == (len(found), found)
    assert file.sha256 == hashlib.sha256(data).hexdigest()


@given(
    st.lists(st.sampled_from([BOM, b"\n", b"\r", b" ", b"\x0c", b"1", b"\xc2\xa0"]), max_size=12)
)
def test_a_file_has_as_many_rows_as_lines(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.jsonl"
        (Path(folder) / "q.jsonl").write_bytes(b"last")
        path.write_bytes(b"".join(parts))
        (file, other), lines = scan(path, Path(folder) / "q.jsonl")
    assert other.rows == 1
    assert len(lines) == file.rows + 1
    assert lines[-1] == Line(file.rows, "q:1", b"last")


def test_compression_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"1\n2\n")
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n"))
    (plain,), lines = scan(tmp_path / "p.jsonl")
    (packed,), same = scan(tmp_path / "p.jsonl.gz")
    assert (plain.name, plain.sha256, lines) == (packed.name, packed.sha256, same)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.jsonl").write_text(f'"{folder}"\n')
    files, lines = scan(tmp_path / "x" / "p.jsonl", tmp_path / "y" / "p.jsonl")
    assert len({line.name for line in lines}) == 2
    rows.check_ids(files)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ["input", "--input=FILE.jsonl"]),
        (["no.jsonl"], ["no.jsonl", "cannot be read", "check the file"]),
        (["p.txt"], ["p.txt", ".jsonl.gz"]),
        (["p.jsonl", "./p.jsonl"], ["is given twice"]),
        (["empty.jsonl"], ["has no rows"]),
        (["mark.jsonl"], ["has no rows"]),
        (["folder.jsonl"], ["is no file"]),
        (["cut.jsonl.gz"], ["cut.jsonl.gz", "cannot be read"]),
        (["false.jsonl.gz"], ["false.jsonl.gz", "cannot be read"]),
        (["bad.jsonl.gz"], ["bad.jsonl.gz", "cannot be read"]),
    ],
)
def test_files_that_are_refused(
    names: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = gzip.compress(b'{"prompt": "p"}\n' * 50)
    (tmp_path / "folder.jsonl").mkdir()
    for name, data in {
        "p.jsonl": b"1\n",
        "p.txt": b"1\n",
        "empty.jsonl": b"\n \n",
        "mark.jsonl": b"\xef\xbb\xbf\n",
        "cut.jsonl.gz": whole[:-12],
        "false.jsonl.gz": b"1\n",
        "bad.jsonl.gz": whole[:14] + b"\xff\xff\xff" + whole[17:],
    }.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        input_files.scan(names)
    assert caught.value.field == "input"
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_changes_under_the_job_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\n2\n")
    files, _ = scan(path)
    path.write_bytes(b"1\n3\n")
    with pytest.raises(InputError, match="was changed while it was read"):
        list(input_files.lines(files))


def test_a_file_that_has_grown_gives_no_row_too_many(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"1\n2\n")
    files, found = scan(path)
    path.write_bytes(b"1\n2\n3\n")
    lines = input_files.lines(files)
    assert [next(lines), next(lines)] == found
    with pytest.raises(InputError, match="was changed while it was read"):
        next(lines)


def test_an_id_that_comes_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 7}\n{"id": "x"}\n{"id": "7"}\n')
    (tmp_path / "b.jsonl").write_text('{}\nnonsense\n{"question_id": "x", "prompt": 1}\n')
    files, _ = scan(tmp_path / "a.jsonl")
    rows.check_ids(files)  # 7 and "7" are two ids
    files, _ = scan(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="id='x' is that of a:2 and of b:3"):
        rows.check_ids(files)


def test_an_id_may_not_be_the_name_of_another_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "a:2"}\n{}\n')
    files, _ = scan(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="a:1 and of a:2"):
        rows.check_ids(files)
