"""The tokenizer of a checkpoint."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jspec import checkpoints
from jspec.checkpoints.gguf_header import GgufHeader, read_header
from jspec.checkpoints.huggingface_config import read_eos_token_ids, read_json
from jspec.errors import InputError, require
from jspec.tokenizers import chat, from_gguf
from jspec.tokenizers.stream import TextStream, decoder_from_state

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_LIBRARY_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """Text to token ids and back, with the model's chat template.

    Args:
        backend: the `tokenizers` object.
        special_tokens: template variables such as bos_token, with their text.
        eos_token_ids: ids that end a sequence.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self._decoder_state = json.loads(backend.to_str())["decoder"]
        decoder_from_state(self._decoder_state)  # refuses what cannot be streamed
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Return the tokenizer of a checkpoint.

        Args:
            path: a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja),
                a GGUF file, or a directory with one.

        Raises:
            InputError: there is none, or its kind is not supported.
        """
        directory = Path(path)
        if (directory / _LIBRARY_FILE).exists():
            return cls._from_directory(directory)
        if (directory / "tokenizer.model").exists():
            raise InputError(
                "path",
                str(directory / "tokenizer.model"),
                "is a SentencePiece file without tokenizer.json",
                "save the tokenizer again with transformers, which writes tokenizer.json",
            )
        kind, found = checkpoints.find(path)
        if kind == "gguf":
            return cls._from_gguf(read_header(found))
        raise InputError(
            "path", str(directory), f"has no {_LIBRARY_FILE}", "copy the tokenizer's files into it"
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's embedding may have more rows."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        """Return every token's id, added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token's id, None where the model has none."""
        token = self._special_tokens.get("bos_token")
        return None if token is None else self._backend.token_to_id(token)

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of control tokens, which give no text unless asked for."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: any text. Bytes that the vocabulary lacks (SmolLM2's has no token for some control
                characters) give nothing, as with the published tokenizers.
            add_special_tokens: add what the model expects around a sequence, such as the
                beginning-of-sequence token. Leave it out after `apply_chat_template`, whose
                result has them.
            parse_special_tokens: read the text of a control token, such as <|im_start|>, as that
                token, which the result of `apply_chat_template` needs. With False it is plain
                text, so that a user's text cannot forge a turn.

        Raises:
            InputError: the text has a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                "text", text, f"is not valid Unicode ({error})", "remove lone surrogates"
            ) from None
        backend = self._backend if parse_special_tokens else self._literal_backend
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD, unknown ids give nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """Return an incremental `decode` for one sequence."""
        return TextStream(
            self._backend.id_to_token,
            decoder_from_state(self._decoder_state),
            self.special_token_ids if skip_special_tokens else (),
        )

    def apply_chat_template(
        self, messages: Sequence[chat.Message], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as one prompt, to be encoded without added special tokens.

        Args:
            messages: the turns; each has the strings "role" and "content".
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            InputError: the checkpoint has no template, or it refuses the messages.
        """
        return chat.render(
            self._chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
        )

    def save(self, directory: str | Path) -> None:
        """Write the files from which `from_path` builds this tokenizer again."""
        directory = Path(directory)
        self._backend.save(str(directory / _LIBRARY_FILE))
        _write_json(directory / _CONFIG_FILE, self._special_tokens)
        _write_json(
            directory / "generation_config.json", {"eos_token_id": list(self.eos_token_ids)}
        )
        if self._chat_template is not None:
            (directory / _TEMPLATE_FILE).write_text(self._chat_template, encoding="utf-8")

    @functools.cached_property
    def _literal_backend(self) -> Backend:
        """A second object, since the switch is the object's state and callers may be threads."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @classmethod
    def _from_gguf(cls, header: GgufHeader) -> Tokenizer:
        from jspec.checkpoints.gguf_config import read_eos_token_ids as read_gguf_eos_token_ids

        return cls(
            from_gguf.build(header.metadata),
            special_tokens=from_gguf.special_tokens(header.metadata),
            eos_token_ids=read_gguf_eos_token_ids(header),
            chat_template=_text(header.metadata.get("tokenizer.chat_template")),
        )

    @classmethod
    def _from_directory(cls, directory: Path) -> Tokenizer:
        path = directory / _LIBRARY_FILE
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise InputError(
                "path", str(path), f"is no tokenizer ({error})", "fetch the file again"
            ) from None
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", _CONFIG_FILE):  # the later one wins
            if (directory / name).exists():
                config |= read_json(directory / name)
        special_tokens = {}
        for name in _SPECIAL_NAMES:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special_tokens[name] = token
        eos_token_ids = read_eos_token_ids(directory)
        if not eos_token_ids and "eos_token" in special_tokens:
            index = backend.token_to_id(special_tokens["eos_token"])
            eos_token_ids = () if index is None else (index,)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=eos_token_ids,
            chat_template=_template(directory, config),
        )


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes before the entry of tokenizer_config.json."""
    path = directory / _TEMPLATE_FILE
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(
                "chat_template", str(path), f"cannot be read ({error})", "fetch the file again"
            ) from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        require(
            len(entries) == len(template),
            "chat_template",
            template,
            "is no list of named templates",
            "fetch tokenizer_config.json again",
        )
        default = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = default[0] if default else None
    return _text(template)


def _text(template: object) -> str | None:
    if template is None or isinstance(template, str):
        return template
    raise InputError(
        "chat_template", template, "is no text", "fetch the checkpoint's template again"
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
