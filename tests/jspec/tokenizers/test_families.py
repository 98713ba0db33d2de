"""Vocabularies of the kinds that Qwen and Gemma have, from both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jspec.tokenizers import Tokenizer, from_gguf
from tests.oracles import tiny_vocabularies as tiny

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
# As long as any run in `TEXTS`: what is longer is split in another way by each format.
RUNS = ["▁" * length for length in range(2, 13)]
MERGED = ["▁a", "ab", "▁ab", "ba", "bab"]
LETTERS = ["▁", "a", "b", "\n"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = [*SPECIAL, *BYTES, *RUNS, *LETTERS, *MERGED]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEXTS = st.text("ab \n", max_size=12) | st.text("ab é🙂<", max_size=12)


def gemma_file() -> Backend:
    """As transformers' GemmaTokenizer makes it; runs of spaces merge before anything else."""
    merges = [(run[:cut], run[cut:]) for run in RUNS for cut in range(1, len(run))]
    for piece in MERGED:
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [pair for pair in splits if set(pair) <= set(VOCABULARY)]
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Backend(
        models.BPE(vocabulary, merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return backend


def gemma_metadata(padding: int = 0) -> dict[str, Any]:
    """As llama.cpp's converter writes it: runs as plain spaces that the user defined."""
    pads = [f"[PAD{len(VOCABULARY) + i}]" for i in range(padding)]
    pieces = LETTERS + MERGED
    types = [3, 3, 3, 2, 3, 3] + [6] * 256 + [4] * len(RUNS) + [1] * len(pieces)
    scores = [0.0] * (6 + 256 + len(RUNS)) + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *(token.replace("▁", " ") if token in RUNS else token for token in VOCABULARY),
            *pads,
        ],
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.scores": scores + [-10000.0] * padding,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


@pytest.fixture(scope="module")
def gemma_pair() -> tuple[Tokenizer, Tokenizer]:
    metadata = gemma_metadata()
    special = from_gguf.special_tokens(metadata)
    return (
        Tokenizer(gemma_file(), special_tokens=special, chat_template=TEMPLATE),
        Tokenizer(from_gguf.build(metadata), special_tokens=special, chat_template=TEMPLATE),
    )


@given(text=TEXTS)
def test_gemma_in_both_formats(gemma_pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    from_file, from_metadata = gemma_pair
    ids = from_file.encode(text)
    assert from_metadata.encode(text) == ids
    for tokenizer in gemma_pair:
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join([*(stream.push([token]) for token in ids), stream.finish()]) == text


def test_gemma_s_turns(gemma_pair: tuple[Tokenizer, Tokenizer]) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    for tokenizer in gemma_pair:
        prompt = tokenizer.apply_chat_template(messages)
        assert prompt.startswith(
            "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
        )
        ids = tokenizer.encode(prompt)
        assert ids[:2] == [2, 4]
        assert ids.count(5) == 2
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert gemma_pair[1].encode("ab", add_special_tokens=True)[0] == 2


def test_padding_rows_are_no_tokens() -> None:
    padded = Tokenizer(from_gguf.build(gemma_metadata(padding=7)), special_tokens={})
    assert padded.vocab_size == len(VOCABULARY)
    qwen = tiny.byte_level([("a", "b")], pre="qwen2")
    plain = from_gguf.build(qwen).get_vocab_size()
    for name, values in (("tokens", ["[PAD300]", "[PAD301]"]), ("token_type", [5, 5])):
        qwen[f"tokenizer.ggml.{name}"] = qwen[f"tokenizer.ggml.{name}"] + values
    assert from_gguf.build(qwen).get_vocab_size() == plain


def qwen_file() -> Backend:
    """As transformers' Qwen2Tokenizer makes it, with the vocabulary of `tiny.byte_level`."""
    metadata = tiny.byte_level([("a", "b"), ("ab", "c")])
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:2]])
    return backend


@pytest.fixture(scope="module")
def qwen_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    directory = tmp_path_factory.mktemp("qwen")
    qwen_file().save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|b|>", "bos_token": None, "chat_template": "{{ eos_token }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    metadata = tiny.byte_level([("a", "b"), ("ab", "c")], pre="qwen2")
    return (
        Tokenizer.from_path(Path(directory)),
        Tokenizer(from_gguf.build(metadata), special_tokens={}),
    )


@given(text=st.text("abc 1\n.'sé世🙂", max_size=16))
def test_qwen_in_both_formats(qwen_pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    from_file, from_metadata = qwen_pair
    ids = from_file.encode(text)
    assert from_metadata.encode(text) == ids
    assert from_file.decode(ids) == from_metadata.decode(ids) == text


def test_qwen_s_end_of_sequence(qwen_pair: tuple[Tokenizer, Tokenizer]) -> None:
    assert qwen_pair[0].eos_token_ids == (1,)
    assert qwen_pair[0].encode("a<|b|>")[-1] == 1
