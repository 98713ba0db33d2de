"""Tokenizers from GGUF metadata against the published algorithms and patterns."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jspec.errors import InputError
from jspec.tokenizers import from_gguf
from tests.oracles import tiny_vocabularies as tiny

TEXT = "I'M 12345 it's\n\n   x  .\n\t¡Hé!! 世界"


def words(pre: str, text: str = TEXT) -> list[str]:
    backend = from_gguf.build(tiny.byte_level([("a", "b")], pre=pre))
    alphabet = {character: byte for byte, character in enumerate(tiny.byte_alphabet())}
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(alphabet[c] for c in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "I|'|M| 12345| it|'s|\n\n  | x| | .|\n|\t|¡|Hé|!!| 世界"),
        ("smollm", "I|'|M| |1|2|3|4|5| it|'s|\n\n  | x| | .|\n|\t|¡|Hé|!!| 世界"),
        ("llama-bpe", "I|'M| |123|45| it|'s|\n\n|  | x| | .\n|\t|¡Hé|!!| 世界"),
        ("qwen2", "I|'M| |1|2|3|4|5| it|'s|\n\n|  | x| | .\n|\t|¡Hé|!!| 世界"),
        ("default", "I|'|M| |123|45| it|'|s|\n\n  | x|  |.|\n\t|¡|Hé|!!| 世界"),
    ],
)
def test_word_boundaries(pre: str, expected: str) -> None:
    assert words(pre) == expected.split("|")


def test_smollm_cuts_digits_before_it_looks_at_spaces() -> None:
    # With the words cut first, the last space would belong to the digit's word.
    assert words("smollm", "\n    0") == ["\n    ", "0"]
    assert words("gpt-2", "\n    0") == ["\n   ", " 0"]


def test_qwen2_composes_characters() -> None:
    backend = from_gguf.build(tiny.byte_level(pre="qwen2"))
    assert backend.encode("e\u0301").ids == backend.encode("\u00e9").ids


@pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("qwen2", 3)])
def test_llama3_takes_whole_words_that_no_merge_makes(pre: str, count: int) -> None:
    backend = from_gguf.build(tiny.byte_level(whole=["xyz"], pre=pre, add_bos_token=False))
    assert len(backend.encode("xyz").ids) == count


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"pre": "llama-bpe"}, [0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_the_beginning_of_a_sequence(keys: dict[str, Any], expected: list[int]) -> None:
    backend = from_gguf.build(tiny.byte_level(**keys))
    plain = backend.encode("hi", add_special_tokens=False).ids
    assert backend.encode("hi", add_special_tokens=True).ids == expected + plain


def test_sentencepiece_begins_with_bos_and_can_end_with_eos() -> None:
    metadata = tiny.sentencepiece({"▁": -1.0, "a": -2.0}, add_eos_token=True)
    assert from_gguf.build(metadata).encode("a").ids == [1, 259, 260, 2]


def reference_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: join the best-scored neighbours until none is a piece."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (scores[a + b], -i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in scores
        ]
        if not joined:
            break
        i = -max(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [
        token
        for symbol in symbols
        for token in ([symbol] if symbol in scores else [f"<0x{b:02X}>" for b in symbol.encode()])
    ]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [({"ab": -1.0, "bc": -2.0}, ["ab", "c"]), ({"ab": -2.0, "bc": -1.0}, ["a", "bc"])],
)
def test_the_better_score_is_joined_first(scores: dict[str, float], expected: list[str]) -> None:
    metadata = tiny.sentencepiece(dict.fromkeys("▁abc", -9.0) | scores, add_space_prefix=False)
    assert from_gguf.build(metadata).encode("abc", add_special_tokens=False).tokens == expected


@given(
    pieces=st.lists(st.text("ab▁", min_size=2, max_size=3), unique=True, min_size=3, max_size=25),
    order=st.randoms(use_true_random=False),
    text=st.text("ab ", min_size=5, max_size=30) | st.text("ab é🙂", max_size=30),
)
def test_scores_become_the_merges_that_sentencepiece_makes(
    pieces: list[str], order: Any, text: str
) -> None:
    pieces = [*"▁ab", *pieces]
    ranks = list(range(len(pieces)))
    order.shuffle(ranks)
    scores = {piece: -float(rank) for piece, rank in zip(pieces, ranks, strict=True)}
    backend = from_gguf.build(tiny.sentencepiece(scores))
    expected = reference_sentencepiece(text, scores) if text else []
    assert backend.encode(text, add_special_tokens=False).tokens == expected
    assert backend.decode(backend.encode(text).ids) == text


def test_no_space_is_put_before_the_text_when_the_file_says_so() -> None:
    metadata = tiny.sentencepiece({"▁": -1.0, "a": -2.0}, add_space_prefix=False)
    backend = from_gguf.build(metadata)
    assert backend.encode("a a", add_special_tokens=False).tokens == ["a", "▁", "a"]
    assert backend.decode(backend.encode(" a").ids) == " a"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "model='bert' is not supported"),
        ({"pre": "tekken"}, "pre='tekken' is not supported.*smollm"),
        ({"tokens": None}, "tokens=None is missing"),
        ({"merges": None}, "merges=None is missing"),
        ({"merges": ["zz yy"]}, "don't fit the tokens"),
        ({"merges": ["whole"]}, "don't fit the tokens"),
        ({"token_type": [1, 1]}, "token_type=2 is no full list"),
        ({"bos_token_id": 999, "add_bos_token": True}, "bos_token_id=999 is no id"),
    ],
)
def test_metadata_that_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_gguf.build(
            tiny.byte_level() | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        )
