"""Frozen, hashable configuration: what the model is, how to sample, how to speculate."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Collection
from typing import Literal

from jspec.errors import InputError, require

Verification = Literal["token", "block"]

# Beyond about 8e37 the reciprocal of a float32 is flushed to 0, and -inf logits would turn to NaN.
_MAX_TEMPERATURE = 1e37


def _require_integer(field: str, value: object) -> None:
    """Refuse 0.5 and True where a count is wanted: arrays of integers would cut them silently."""
    require(
        isinstance(value, numbers.Integral) and not isinstance(value, bool),
        field,
        value,
        "is not an integer",
        "give an integer",
    )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric progression of wavelengths.
        scaling: "none"; "linear" (positions divided by `factor`); or "llama3" (long wavelengths
            divided by `factor`, short ones kept, a smooth blend between; Llama 3.1's rule).
        factor: the scaling factor, >= 1.
        low_freq_factor: llama3 only; wavelengths above original_context / this are divided.
        high_freq_factor: llama3 only; wavelengths below original_context / this are kept.
        original_context: llama3 only; context length of pre-training, in tokens.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        require(self.theta > 0, "rope.theta", self.theta, "is not positive", "give a base > 0")
        require(self.factor >= 1, "rope.factor", self.factor, "is below 1", "give a factor >= 1")
        if self.scaling not in ("none", "linear", "llama3"):
            raise InputError(
                "rope.scaling", self.scaling, "is not supported", "use none, linear or llama3"
            )
        if self.scaling == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise InputError(
                "rope.high_freq_factor",
                self.high_freq_factor,
                f"is not above low_freq_factor ({self.low_freq_factor})",
                "check the checkpoint's rope scaling",
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer.

    Attributes:
        name: family as the checkpoint calls it, for messages only ("llama").
        vocab_size: rows of the embedding, padding included.
        hidden_size: model width D.
        intermediate_size: width F of the gated feed-forward block.
        num_layers: L.
        num_heads: query heads N, a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads G.
        head_dim: H, even.
        max_context: longest sequence in tokens that the positions were trained for.
        norm_eps: epsilon of the RMS norms.
        rope: rotary position embedding.
        tie_embeddings: the head is the embedding.
        attention_bias: biases on the query, key and value projections.
        activation: gate activation.
        token_count: number of real ids, where the embedding is padded beyond them; ids at or above
            it are never proposed or emitted. None when every row is real.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float = 1e-5
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    activation: Literal["silu"] = "silu"
    token_count: int | None = None

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_context",
        ):
            value = getattr(self, field)
            require(value >= 1, field, value, "is not positive", "check the checkpoint's config")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"does not divide num_heads ({self.num_heads})",
            "check the checkpoint's config",
        )
        require(
            self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            "is odd, so rotary positions cannot pair its dimensions",
            "check the checkpoint's config",
        )

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Every field is per row and holds at every verified position.

    The transforms apply in this order: temperature, top_k, top_p, min_p. Each works on what the one
    before left, renormalised. Tokens tied with the last one kept are kept too.

    Attributes:
        temperature: 0 is greedy (argmax, lowest id first on exact ties); otherwise logits are
            divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches top_p.
        min_p: keep tokens with at least min_p times the largest probability; 0 keeps all.
        seed: 64-bit seed of the request's random streams; None draws a fresh one from the OS.
        max_new_tokens: at most this many tokens, and exactly as many when nothing stops the row.
        stop_token_ids: ids that end the row, beside the model's own end-of-sequence ids. The id is
            part of the output.
        ignore_eos: do not stop at the model's own end-of-sequence ids.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature <= _MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            f"is not a number in [0, {_MAX_TEMPERATURE:g}]",
            "give 0 for greedy or a positive temperature",
        )
        _require_integer("top_k", self.top_k)
        require(self.top_k >= 0, "top_k", self.top_k, "is negative", "give 0 to keep all tokens")
        require(
            0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "is outside (0, 1]",
            "give 1 to keep all tokens",
        )
        require(
            0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "is outside [0, 1]",
            "give 0 to keep all tokens",
        )
        _require_integer("max_new_tokens", self.max_new_tokens)
        require(
            self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "is below 1",
            "ask for at least one token",
        )
        if self.seed is not None:
            _require_integer("seed", self.seed)
            require(
                0 <= self.seed < 2**64,
                "seed",
                self.seed,
                "does not fit in 64 bits",
                "give a seed in [0, 2**64)",
            )
        require(
            isinstance(self.stop_token_ids, Collection),
            "stop_token_ids",
            self.stop_token_ids,
            "is not a list of ids",
            "give a tuple of ids of the vocabulary",
        )
        for token in self.stop_token_ids:
            _require_integer("stop_token_ids", token)
            require(
                token >= 0, "stop_token_ids", token, "is negative", "give ids of the vocabulary"
            )


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """How much to speculate and by which rule drafts are verified.

    Attributes:
        gamma: draft tokens a round; 0 is plain decoding through the same loop.
        verification: "token" (Leviathan et al. 2023, arXiv 2211.17192) or "block" (Sun et al.,
            arXiv 2403.10444); both leave the output law exactly the target's.
        rounds_per_chunk: rounds that run on the device between two looks of the host. Large for
            offline generation, small for streaming; it never changes the tokens.
    """

    gamma: int = 7
    verification: Verification = "token"
    rounds_per_chunk: int = 64

    def __post_init__(self) -> None:
        _require_integer("gamma", self.gamma)
        _require_integer("rounds_per_chunk", self.rounds_per_chunk)
        require(
            0 <= self.gamma <= 127,
            "gamma",
            self.gamma,
            "is outside 0..127",
            "give 0 for plain decoding, or a chain of up to 127 drafts",
        )
        require(
            self.verification in ("token", "block"),
            "verification",
            self.verification,
            "is not a rule",
            "use token or block",
        )
        require(
            self.rounds_per_chunk >= 1,
            "rounds_per_chunk",
            self.rounds_per_chunk,
            "is below 1",
            "give at least one round a chunk",
        )
