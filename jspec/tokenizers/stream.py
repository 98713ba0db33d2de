"""Incremental detokenisation: text as tokens arrive, equal in the end to decoding them at once.

Two decoders cover the families that jspec supports. In a byte-level vocabulary every token is a
string of bytes, and the text is their concatenation read as UTF-8. In a SentencePiece vocabulary
tokens are text, and runs of byte tokens are read as UTF-8 as a whole: one invalid byte makes every
byte of its run U+FFFD, so nothing of a run is certain before the run ends.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from jspec.errors import InputError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder(Protocol):
    """Turns tokens into text, keeping back what later tokens may still change."""

    def push(self, token: str) -> str:
        """Return the text that became certain with `token`."""

    def peek(self) -> str:
        """Return what `finish` would, and change nothing."""

    def finish(self) -> str:
        """Return the rest, given that nothing follows, and begin anew."""


class TextStream:
    """Turns token ids into text as they arrive.

    The pieces returned by `push`, and the one by `finish`, concatenate to the tokenizer's
    `decode` of all ids, wherever the ids were split. No piece ends inside a character. The cost is
    proportional to the number of tokens.

    Args:
        token_text: the vocabulary's string of an id, or None where it has none.
        decoder: a fresh decoder of the vocabulary, as `token_decoder` makes them.
        skipped: ids that give no text, as special tokens.
    """

    def __init__(
        self,
        token_text: Callable[[int], str | None],
        decoder: TokenDecoder,
        skipped: Collection[int] = (),
    ) -> None:
        self._token_text = token_text
        self._decoder = decoder
        self._skipped = frozenset(skipped)

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that became certain with `ids`; it may be empty."""
        pieces = []
        for token in ids:
            text = None if token in self._skipped else self._token_text(token)
            if text is not None:
                pieces.append(self._decoder.push(text))
        return "".join(pieces)

    def peek(self) -> str:
        """Return what `finish` would, and keep it back."""
        return self._decoder.peek()

    def finish(self) -> str:
        """Return what was kept back, an incomplete character as U+FFFD, and begin anew."""
        return self._decoder.finish()


def token_decoder(backend: Backend) -> TokenDecoder:
    """Return a fresh incremental decoder that does what `backend.decoder` does.

    Raises:
        InputError: the decoder is of another kind.
    """
    state = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    return decoder_from_state(state)


def decoder_from_state(state: Any) -> TokenDecoder:
    """Return a fresh incremental decoder for the `decoder` object of a tokenizer.json."""
    kind = state.get("type") if isinstance(state, dict) else None
    if kind == "ByteLevel":
        return _ByteLevel()
    steps = state.get("decoders", []) if kind == "Sequence" else []
    if [step.get("type") for step in steps][:3] == ["Replace", "ByteFallback", "Fuse"]:
        pattern = steps[0].get("pattern", {}).get("String")
        rest = steps[3:]
        strip = rest[0] if rest and rest[0].get("type") == "Strip" else None
        strips_start_only = strip is None or (strip["content"] == " " and strip["stop"] == 0)
        if pattern is not None and len(rest) == (strip is not None) and strips_start_only:
            start = 0 if strip is None else strip["start"]
            return _ByteFallback(pattern, steps[0]["content"], start)
    raise InputError(
        "decoder",
        state,
        "is not supported",
        "use a byte-level or a SentencePiece tokenizer with byte fallback",
    )


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes take, in order, the
    characters from U+0100 on (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = byte_level_alphabet()


class _ByteLevel:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str) -> str:
        try:
            data = bytes([_ALPHABET[character] for character in token])
        except KeyError:  # an added token outside the alphabet stands for itself
            data = token.encode("utf-8")
        return self._utf8.decode(data)

    def peek(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", errors="replace")

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _ByteFallback:
    def __init__(self, pattern: str, replacement: str, strip: int) -> None:
        self._pattern = pattern
        self._replacement = replacement
        self._strip = strip  # spaces that the very beginning of the text loses
        self._to_strip = strip
        self._run = bytearray()

    def push(self, token: str) -> str:
        text = token.replace(self._pattern, self._replacement)
        byte = _BYTE_TOKEN.fullmatch(text)
        if byte:
            self._run.append(int(byte[1], 16))
            return ""
        return self._strip_start(self._end_run() + text)

    def peek(self) -> str:
        text = self._read_run()
        start = len(text) - len(text.lstrip(" "))
        return text[min(start, self._to_strip) :]

    def finish(self) -> str:
        text = self._strip_start(self._end_run())
        self._to_strip = self._strip
        return text

    def _read_run(self) -> str:
        try:
            return self._run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(self._run)

    def _end_run(self) -> str:
        text = self._read_run()
        self._run.clear()
        return text

    def _strip_start(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text
