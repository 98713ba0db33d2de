"""Stop texts are found wherever they lie, and nothing of one is ever let out."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from jspec.stop_texts import StopTexts
from jspec.tokenizers import Tokenizer, from_gguf
from tests.oracles import tiny_vocabularies as tiny

pieces = st.lists(st.text("ab\n", max_size=4), max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, given: list[str]) -> tuple[str, str | None]:
    """Return the text before the first stop text, and that one: the earliest, then longest."""
    for start in range(len(text)):
        found = [stop for stop in given if text.startswith(stop, start)]
        if found:
            return text[:start], max(found, key=len)
    return text, None


@hypothesis.given(pieces=pieces, stops=stops)
def test_found_in_the_piece_that_completes_one(pieces: list[str], stops: list[str]) -> None:
    search, out = StopTexts(stops), ""
    for count, piece in enumerate(pieces, start=1):
        so_far = "".join(pieces[:count])
        out += search.push(piece)
        expected, stop = cut(so_far, stops)
        if stop is not None:
            assert search.found == stop
            assert out == expected
            return
        assert search.found is None
        assert so_far.startswith(out)
        held = so_far[len(out) :]
        # What is held back could begin a stop text, and nothing shorter than it need be.
        assert held == "" or any(stop.startswith(held) for stop in stops)
    assert out + search.finish() == "".join(pieces)


@hypothesis.given(pieces=pieces, stops=stops, early=st.integers(0, 12))
@hypothesis.example(["Hi", "\n", "there"], ["\n", "\n\n"], 2)
@hypothesis.example(["a", "bc", "x"], ["abcd", "bc"], 2)
def test_a_stop_text_that_ends_too_early_is_text(
    pieces: list[str], stops: list[str], early: int
) -> None:
    text, least = "".join(pieces), len("".join(pieces[:early]))
    # The first piece that completes a stop text past the early ones, and where that begins.
    ends = [len("".join(pieces[:count])) for count in range(len(pieces) + 1)]
    expected = text
    for end in ends:
        starts = [
            start
            for stop in stops
            for start in range(end)
            if text.startswith(stop, start) and least < start + len(stop) <= end
        ]
        if starts:
            expected = text[: min(starts)]
            break
    search, out = StopTexts(stops), ""
    for count, piece in enumerate(pieces, start=1):
        out += search.push(piece, may_stop=count > early)
        if search.found is not None:
            # What was let out before the stop text could count is not taken back.
            assert expected.startswith(out) or out.startswith(expected)
            assert text.startswith(out + search.found) or out.startswith(expected)
            assert expected != text
            return
    assert out + search.finish() == text
    assert expected == text


def test_a_byte_that_ends_too_early_does_not_count_when_its_run_ends() -> None:
    tok = tokenizer("byte fallback")
    search, stream, out = StopTexts(["\n"]), tok.stream(), ""
    for count, token in enumerate(tok.encode("a\nb\nb"), start=1):
        out += search.push(stream.push([token]), ahead=stream.peek(), may_stop=count > 3)
        if search.found is not None:
            break
    assert out == "a\nb"


def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte level":
        return Tokenizer(from_gguf.build(tiny.byte_level()), special_tokens={})
    scores = {"▁": -1.0, "a": -2.0, "b": -3.0}
    return Tokenizer(from_gguf.build(tiny.sentencepiece(scores)), special_tokens={})


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("stop", ["\n", "é", "🙂", "a\n", "世b"])
def test_characters_of_several_tokens_end_at_their_last_byte(kind: str, stop: str) -> None:
    tok = tokenizer(kind)
    before, after = tok.encode("ab"), tok.encode(stop + "ba")
    ids, search, stream, out = before + after, StopTexts([stop]), tok.stream(), ""
    count = 0
    while search.found is None:
        out += search.push(stream.push([ids[count]]), ahead=stream.peek())
        count += 1
    # The same count as decoding ever longer beginnings.
    assert count == next(n for n in range(len(ids) + 1) if stop in tok.decode(ids[:n]))
    assert out == tok.decode(ids[:count]).split(stop)[0]


def test_looking_ahead_changes_nothing() -> None:
    for kind in ("byte level", "byte fallback"):
        tok = tokenizer(kind)
        ids = tok.encode("a é世\n b🙂")
        plain, peeked = tok.stream(), tok.stream()
        for token in ids:
            peeked.peek()
            assert peeked.push([token]) == plain.push([token])
            peeked.peek()
        assert peeked.finish() == plain.finish()
