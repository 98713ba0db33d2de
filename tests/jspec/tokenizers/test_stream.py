"""Streaming: pieces concatenate to the library's own decoding, wherever the ids are cut."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from jspec.errors import InputError
from jspec.tokenizers import Tokenizer, from_gguf
from jspec.tokenizers.stream import decoder_from_state
from tests.oracles import smollm2
from tests.oracles import tiny_vocabularies as tiny


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte level":
        merges = [("a", "b"), ("Ġ", "ab"), (tiny.spell("🙂")[:1], tiny.spell("🙂")[1:2])]
        backend = from_gguf.build(tiny.byte_level(merges))
        backend.add_tokens(["  ", "né"])  # outside the byte alphabet, and misleadingly inside it
    else:
        scores = {piece: -float(i) for i, piece in enumerate(["▁", "a", "▁a", "世", "é", "▁▁"])}
        keys = {"add_space_prefix": kind == "space prefix"}
        backend = from_gguf.build(tiny.sentencepiece(scores, **keys))
    return Tokenizer(backend, special_tokens={})


KINDS = ["byte level", "space prefix", "no space prefix"]


def streamed(tok: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> str:
    stream = tok.stream(skip_special_tokens=skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join([*pieces, stream.finish()])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 40), max_size=10), skip=st.booleans())
def test_random_ids(kind: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tok = tokenizer(kind)
    # Five ids beyond the vocabulary: rows that pad an embedding.
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 4), max_size=40))
    assert streamed(tok, ids, cuts, skip) == tok.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 60), max_size=10))
@example("🙂", [1, 2, 3])
@example("世界 né  a👩‍👩‍👧‍👦", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_any_text(kind: str, text: str, cuts: list[int]) -> None:
    tok = tokenizer(kind)
    ids = tok.encode(text)
    assert streamed(tok, ids, cuts, True) == tok.decode(ids)
    assert tok.decode(ids) == text or "né" in text


@given(data=st.data(), cuts=st.lists(st.integers(0, 60), max_size=10), skip=st.booleans())
def test_smollm2(data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tok = real_tokenizer()
    text = st.text(st.sampled_from("ab 世界🙂é\n"), max_size=20).map(tok.encode)
    ids = data.draw(text | st.lists(st.integers(0, tok.vocab_size - 1), max_size=40))
    assert streamed(tok, ids, cuts, skip) == tok.decode(ids, skip_special_tokens=skip)


@functools.cache
def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_path(smollm2.path_or_skip())


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_ends_inside_a_character(kind: str) -> None:
    tok = tokenizer(kind)
    stream = tok.stream()
    pieces = [stream.push([token]) for token in tok.encode("a🙂é世")]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == "a🙂é世"


def test_a_byte_level_character_comes_with_its_last_byte() -> None:
    tok = tokenizer("byte level")
    stream = tok.stream()
    assert [stream.push([token]) for token in tok.encode("é🙂")] == ["", "é", "", "", "🙂"]


def test_what_never_became_a_character_comes_at_the_end() -> None:
    for kind in KINDS:
        tok = tokenizer(kind)
        ids = tok.encode("a🙂")[:-1]
        stream = tok.stream()
        assert stream.push(ids) == "a"
        assert stream.finish() == tok.decode(ids)[1:] != ""
        assert stream.push(tok.encode("a")) + stream.finish() == "a"  # and the stream begins anew


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_linear(kind: str) -> None:
    tok = tokenizer(kind)
    invalid = tok.encode("🙂")[-1]  # a continuation byte: alone it never becomes a character

    def seconds(count: int) -> float:
        stream, start = tok.stream(), time.process_time()
        for _ in range(count):
            stream.push([invalid])
        stream.finish()
        return time.process_time() - start

    seconds(1000)
    # A quadratic stream would take 400 times as long for 20 times the tokens.
    assert min(seconds(40_000) for _ in range(3)) < 100 * min(seconds(2000) for _ in range(3))


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    ],
)
def test_other_decoders_are_refused(state: Any) -> None:
    with pytest.raises(InputError, match="decoder"):
        decoder_from_state(state)
