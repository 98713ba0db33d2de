"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from jspec.errors import InputError, require

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_PADDING = re.compile(r"\[PAD\d+\]")  # what converters call the rows that only pad the embedding
_SPACE = "\u2581"  # SentencePiece's word boundary
_CHECK = "convert the model to GGUF again"

# Word boundaries by pre-tokenizer type: patterns that split the text one after the other. Those of
# "default" are llama.cpp's for files that name no type; the others are the original tokenizers'.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
}


def build(metadata: Mapping[str, Any]) -> Backend:
    """Return the tokenizer that `tokenizer.ggml.*` describes.

    Raises:
        InputError: the model or its pre-tokenizer is not supported, or the lists don't fit.
    """
    model = metadata.get("tokenizer.ggml.model")
    metadata = _without_padding(metadata)
    tokens = _list(metadata, "tokens", str)
    if model == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise InputError(
            "tokenizer.ggml.model", model, "is not supported", "use a file with gpt2 or llama"
        )
    kinds = _types(metadata, tokens)
    # normalized=False: the token is looked for in the text as the user wrote it. All in one call,
    # which rebuilds the search: Gemma has thousands.
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    _add_sequence_ends(backend, metadata, tokens)
    return backend


def _without_padding(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata without the last tokens that stand for no text and are never made."""
    tokens = _list(metadata, "tokens", str)
    types = _types(metadata, tokens)
    size = len(tokens)
    while size and types[size - 1] == _UNUSED and _PADDING.fullmatch(tokens[size - 1]):
        size -= 1
    keys = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))
    cut = {key: value[:size] for key in keys if isinstance(value := metadata.get(key), list)}
    return {**metadata, **cut}


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables bos_token, eos_token, unk_token and pad_token, where defined."""
    tokens = _list(metadata, "tokens", str)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {short: _token(metadata, tokens, long) for long, short in names.items()}
    return {f"{name}_token": token for name, token in found.items() if token is not None}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    kind = metadata.get("tokenizer.ggml.pre", "default")
    require(
        isinstance(kind, str) and kind in _PATTERNS,
        "tokenizer.ggml.pre",
        kind,
        "is not supported",
        f"use a file with one of {', '.join(_PATTERNS)}",
    )
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str)]
    backend = _bpe(tokens, merges, ignore_merges=kind == "llama-bpe")
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in _PATTERNS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    scores = _list(metadata, "scores", float)
    types = _types(metadata, tokens)
    require(
        len(scores) == len(tokens), "tokenizer.ggml.scores", len(scores), "is no full list", _CHECK
    )
    plain = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    unknown = _token(metadata, tokens, "unknown")
    backend = _bpe(
        tokens, _merges(plain, tokens), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), *steps] if prefix else steps
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(scores: Mapping[str, float], tokens: list[str]) -> list[tuple[str, str]]:
    """Return the merges, most urgent first, that SentencePiece's scores stand for.

    SentencePiece joins the neighbours whose joined piece scores best, so every split of a piece
    into two pieces is a merge with that piece's score.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> Backend:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Backend(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the package raises bare Exception and TypeError
        raise InputError(
            "tokenizer.ggml.merges", merges[:3], f"don't fit the tokens ({error})", _CHECK
        ) from None


def _add_sequence_ends(backend: Backend, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Begin and end encoded text with the tokens the file asks for; llama.cpp has the defaults."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    bos_default = sentencepiece or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    names = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", bos_default),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {name: _token(metadata, tokens, name) for name, wanted in names.items() if wanted}
    bos, eos = ends.get("bos"), ends.get("eos")
    if bos is None and eos is None:
        return
    wanted = [token for token in (bos, eos) if token is not None]
    try:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(wanted)],
        )
    except ValueError as error:
        raise InputError(
            "tokenizer.ggml.bos_token_id", wanted, f"cannot begin or end a text ({error})", _CHECK
        ) from None


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    full = f"tokenizer.ggml.{key}"
    value = metadata.get(full)
    require(value is not None, full, value, "is missing", _CHECK)
    # The entries of a file's list are of one type.
    fits = isinstance(value, list) and all(isinstance(entry, kind) for entry in value[:1])
    require(fits, full, value, f"is no list of {kind.__name__}", _CHECK)
    entries: list[Any] = value  # type: ignore[assignment]
    return entries


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    if metadata.get("tokenizer.ggml.token_type") is None:
        return [1] * len(tokens)
    types = _list(metadata, "token_type", int)
    require(
        len(types) == len(tokens),
        "tokenizer.ggml.token_type",
        len(types),
        "is no full list",
        _CHECK,
    )
    return types


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.get(key)
    if index is None:
        return None
    fits = isinstance(index, int) and 0 <= index < len(tokens)
    require(fits, key, index, f"is no id of {len(tokens)} tokens", _CHECK)
    return str(tokens[index])
