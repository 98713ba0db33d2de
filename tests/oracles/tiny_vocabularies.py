"""Tiny vocabularies as GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def byte_alphabet() -> list[str]:
    """The 256 characters of GPT-2's byte-level vocabularies, by byte."""
    characters, fresh = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + fresh))
            fresh += 1
    return characters


def spell(text: str) -> str:
    """`text` in the characters of a byte-level vocabulary."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode("utf-8"))


def byte_level(
    merges: Sequence[tuple[str, str]] = (),
    control: Sequence[str] = ("<|a|>", "<|b|>"),
    whole: Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """Metadata of a vocabulary of control tokens, all bytes, and what the merges make.

    Args:
        merges: pairs of byte-level strings.
        control: control tokens, with the first ids; the first is bos, the second eos.
        whole: byte-level strings that no merge makes.
        keys: further `tokenizer.ggml` keys.
    """
    tokens = [*control, *byte_alphabet(), *(a + b for a, b in merges), *whole]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece(scores: Mapping[str, float], **keys: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of <unk>, <s>, </s>, the 256 byte tokens, and scored pieces."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scores),
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
