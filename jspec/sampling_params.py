"""What one request asks of the sampler: every field is checked when the object is made."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from jspec.errors import InputError, is_list, require, require_integer, require_number

# Beyond about 8e37 the reciprocal of a float32 is flushed to 0, and -inf logits would turn to NaN.
_MAX_TEMPERATURE = 1e37
_MAX_TOP = 128
_MAX_BAD_WORD = 32
_MAX_SAMPLES = 1 << 16

# What other engines take and this one refuses, with the reason.
_REFUSED = {
    "num_beams": "beam search",
    "use_beam_search": "beam search",
    "beam_width": "beam search",
    "best_of": "best-of sampling",
    "guided_json": "structured output",
    "guided_regex": "structured output",
    "guided_grammar": "structured output",
    "structured_outputs": "structured output",
    "response_format": "structured output",
}
# Names of other engines for what is here under another one.
_ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
    "num_return_sequences": "n",
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Every field is per row and holds at every verified position.

    The target's logits become the distribution that tokens are drawn from in this order:
    logit_bias; repetition_penalty; frequency_penalty and presence_penalty; bad_words and
    min_new_tokens, which forbid tokens; then temperature, top_k, top_p, min_p, each of which works
    on what the one before left, renormalised. Tokens tied with the last one kept are kept too.
    Drafts before a position are its history, as committed tokens are. Lists are kept as tuples, so
    that the object is hashable; one stop text may be given alone.

    Attributes:
        temperature: 0 is greedy (argmax, lowest id first on exact ties); otherwise logits are
            divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches top_p.
        min_p: keep tokens with at least min_p times the largest probability; 0 keeps all.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it,
            negative ones multiplied; 1 is none (Keskar et al., arXiv 1909.05858).
        frequency_penalty: subtracted from a token's logit for every time it was generated; in
            [-2, 2].
        presence_penalty: subtracted once from the logit of every token generated; in [-2, 2].
        logit_bias: added to the logits of these ids; a mapping, kept as sorted pairs.
        bad_words: texts, or tuples of ids, never to be completed: the last token of each is
            forbidden wherever the ones before it, prompt included, end the text so far. A text is
            forbidden both as a word of its own and as the continuation of one.
        min_new_tokens: no stop (end of sequence, stop id or stop text) ends the row before.
        stop: texts that end the row, at the token that completes one. The text is cut before it,
            token_ids after that token.
        stop_token_ids: ids that end the row, beside the model's own end-of-sequence ids. The id is
            part of the output.
        ignore_eos: do not stop at the model's own end-of-sequence ids.
        max_new_tokens: at most this many tokens, and exactly as many when nothing stops the row.
        logprobs: give every generated token's log probabilities, raw (of the target's own logits)
            and processed (of the distribution it was drawn from), and those of this many most
            probable tokens; 0 for the token alone, None for nothing.
        prompt_logprobs: the same for the prompt's tokens after the first, raw alone.
        n: samples of the prompt, which is prefilled once.
        seed: 64-bit seed of the request's random streams, from which further samples derive
            theirs; None draws a fresh one from the operating system.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_new_tokens: int = 128
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_transforms()
        self._check_lengths()
        self._check_outputs()
        self._widen()

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs sorted by id, the form it is kept in."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _normalise(self) -> None:
        """Turn what JSON and people give into the hashable forms."""
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for field in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, field)
            require(is_list(value), field, value, "is not a list", "give a list")
        self._set("stop", tuple(self.stop))
        self._set("stop_token_ids", tuple(self.stop_token_ids))
        words = [tuple(word) if isinstance(word, list) else word for word in self.bad_words]
        self._set("bad_words", tuple(words))
        self._set("logit_bias", _pairs(self.logit_bias))

    def _widen(self) -> None:
        """Turn NumPy's integers into Python's: a prompt's length plus a uint8 would wrap around."""
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None:
                self._set(field, int(value))
        self._set("stop_token_ids", tuple(map(int, self.stop_token_ids)))
        words = [w if isinstance(w, str) else tuple(map(int, w)) for w in self.bad_words]
        self._set("bad_words", tuple(words))

    def _check_transforms(self) -> None:
        require_number("temperature", self.temperature, "give 0 for greedy, or a positive number")
        require(
            0 <= float(self.temperature) <= _MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            f"is not a number in [0, {_MAX_TEMPERATURE:g}]",
            "give 0 for greedy or a positive temperature",
        )
        require_integer("top_k", self.top_k)
        require(self.top_k >= 0, "top_k", self.top_k, "is negative", "give 0 to keep all tokens")
        require_number("top_p", self.top_p)
        require(
            0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "is outside (0, 1]",
            "give 1 to keep all tokens",
        )
        require_number("min_p", self.min_p)
        require(
            0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "is outside [0, 1]",
            "give 0 to keep all tokens",
        )
        require_number("repetition_penalty", self.repetition_penalty)
        require(
            0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            self.repetition_penalty,
            "is outside [0.01, 100]",
            "give 1 for none, or a value above 1 against repetition",
        )
        for field in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, field)
            require_number(field, value)
            require(-2 <= value <= 2, field, value, "is outside [-2, 2]", "give 0 for none")

    def _check_lengths(self) -> None:
        require_integer("max_new_tokens", self.max_new_tokens)
        require(
            self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "is below 1",
            "ask for at least one token",
        )
        require_integer("min_new_tokens", self.min_new_tokens)
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"is outside 0..max_new_tokens ({self.max_new_tokens})",
            "give 0, or raise max_new_tokens",
        )
        for text in self.stop:
            require(
                isinstance(text, str) and text != "",
                "stop",
                text,
                "is no text, or an empty one",
                "give texts of at least one character",
            )
            _require_unicode("stop", text)
        for token in self.stop_token_ids:
            _require_id("stop_token_ids", token)
        require(
            isinstance(self.ignore_eos, bool),
            "ignore_eos",
            self.ignore_eos,
            "is neither true nor false",
            "give true or false",
        )
        for word in self.bad_words:
            require(
                isinstance(word, str | tuple) and len(word) > 0,
                "bad_words",
                word,
                "is neither a text nor a list of ids, or is empty",
                "give texts, or lists of token ids",
            )
            if isinstance(word, str):
                _require_unicode("bad_words", word)
            else:
                for token in word:
                    _require_id("bad_words", token)
                require_short_word(word, word)

    def _check_outputs(self) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                require_integer(field, value)
                require(
                    0 <= value <= _MAX_TOP,
                    field,
                    value,
                    f"is outside 0..{_MAX_TOP}",
                    "ask for fewer of the most probable tokens",
                )
        require_integer("n", self.n)
        require(
            1 <= self.n <= _MAX_SAMPLES,
            "n",
            self.n,
            f"is outside 1..{_MAX_SAMPLES}",
            "ask for at least one sample, or split many over several requests",
        )
        require(
            self.n == 1 or self.temperature > 0,
            "n",
            self.n,
            "asks for several samples at temperature 0, which would all be the same",
            "give a temperature above 0, or n=1",
        )
        if self.seed is not None:
            require_integer("seed", self.seed)
            require(
                0 <= self.seed < 2**64,
                "seed",
                self.seed,
                "does not fit in 64 bits",
                "give a seed in [0, 2**64)",
            )


def require_short_word(word: object, ids: Collection[int]) -> None:
    """Raise `InputError` where a bad word has more tokens than a round compares."""
    require(
        len(ids) <= _MAX_BAD_WORD,
        "bad_words",
        word,
        f"has {len(ids)} tokens, above {_MAX_BAD_WORD}",
        "give its last part alone, or a shorter text",
    )


def _require_id(field: str, token: object) -> None:
    require_integer(field, token)
    require(int(token) >= 0, field, token, "is negative", "give ids of the vocabulary")  # type: ignore[call-overload]


def _require_unicode(field: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(field, text, "is not valid Unicode", "remove lone surrogates") from None


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Return a logit bias as pairs sorted by id; JSON's keys are texts."""
    require(
        isinstance(bias, Mapping) or is_list(bias),
        "logit_bias",
        bias,
        "is not a mapping from token ids to numbers",
        'give {"token id": bias}',
    )
    items = list(bias.items()) if isinstance(bias, Mapping) else list(bias)
    pairs: dict[int, float] = {}
    for item in items:
        pair = isinstance(item, tuple | list) and len(item) == 2
        require(pair, "logit_bias", item, "is not an id and its bias", 'give {"token id": bias}')
        token, value = item
        # More digits than any id has would be refused by int() itself.
        if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 20:
            token = int(token)
        _require_id("logit_bias", token)
        require_number("logit_bias", value)
        require(
            abs(value) <= 1e4,
            "logit_bias",
            value,
            "is outside [-10000, 10000]",
            "-100 forbids a token in practice; to forbid it for certain, use bad_words",
        )
        require(int(token) not in pairs, "logit_bias", token, "is given twice", "give an id once")
        pairs[int(token)] = float(value)
    return tuple(sorted(pairs.items()))


def refusal(name: str, value: object) -> InputError | None:
    """Return the error for a parameter of other engines that is not supported; else None.

    A value that asks for nothing (null, false, one beam) is not refused.
    """
    nothing = value is None or value is False or (value is not True and value in (1, "1"))
    if name not in _REFUSED or nothing:
        return None
    return InputError(
        name,
        value,
        f"asks for {_REFUSED[name]}, which is not supported",
        "leave it out; n samples of one prompt share its prefill",
    )


def renamed(name: str) -> str | None:
    """Return the parameter that other engines call `name`, where its name is another; else None."""
    return _ELSEWHERE.get(name)


def from_mapping(values: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
    """Return the parameters that a JSON object asks for.

    Args:
        values: fields of `SamplingParams` by name; null keeps the default of `base`.
        base: what holds where `values` says nothing; None takes the defaults.

    Raises:
        InputError: a name is unknown, or a value is out of its range.
    """
    require(
        isinstance(values, Mapping),
        "sampling",
        values,
        "is no object of parameters by name",
        'give one, as {"temperature": 0.7}',
    )
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in values:
        if name in names:
            continue
        require(isinstance(name, str), "parameter", name, "is no name", "give names as strings")
        if name in _REFUSED:
            refused = refusal(name, values[name])
            if refused is not None:
                raise refused
            continue
        close = renamed(name) or next(iter(difflib.get_close_matches(name, names, 1)), None)
        remedy = f"did you mean {close}?" if close else f"use one of {', '.join(names)}"
        raise InputError(name, values[name], "is no sampling parameter", remedy)
    given = {n: value for n, value in values.items() if n in names and value is not None}
    for name, value in given.items():
        # JSON has one kind of number: 3.0 is a count where a count is wanted.
        if isinstance(value, float) and not math.isnan(value) and value.is_integer():
            given[name] = int(value) if name in _COUNTS else value
    return dataclasses.replace(base or SamplingParams(), **given)


_COUNTS = ("top_k", "max_new_tokens", "min_new_tokens", "logprobs", "prompt_logprobs", "n", "seed")
