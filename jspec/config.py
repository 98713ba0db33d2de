"""Frozen, hashable configuration: what the model is, and how much to speculate."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast, get_args

from jspec.errors import InputError, is_finite, require, require_integer, require_number

Activation = Literal["silu", "gelu_tanh"]
Verification = Literal["token", "block", "typical"]

_CHECK_ROPE = "check the checkpoint's rope scaling"
# Positions, ids and offsets are int32.
_MOST = 2**31 - 1
_MOST_FACTOR = 1e6
_LEAST_TURNS = 1e-3


def _require_size(field: str, value: object) -> None:
    require_integer(field, value)
    require(
        1 <= cast(int, value) <= _MOST,
        field,
        value,
        f"is outside 1..{_MOST}",
        "check the checkpoint's config",
    )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric progression of wavelengths.
        scaling: "none"; "linear" (positions divided by `factor`); "llama3" (long wavelengths
            divided by `factor`, short ones kept, a smooth blend between; Llama 3.1's rule); or
            "yarn" (the same idea, blended by dimension; Peng et al., arXiv 2309.00071).
        factor: the scaling factor, >= 1.
        low_freq_factor: llama3 only; wavelengths above original_context / this are divided.
        high_freq_factor: llama3 only; wavelengths below original_context / this are kept.
        original_context: llama3 and yarn; context length of pre-training, in tokens.
        beta_fast: yarn only; dimensions that turn more often within original_context are kept.
        beta_slow: yarn only; dimensions that turn less often are divided.
        attention_factor: the rotated queries and keys are multiplied by it (yarn's temperature).
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in ("scaling", "original_context"):
                require_number(f"rope.{field.name}", getattr(self, field.name), _CHECK_ROPE)
        _require_size("rope.original_context", self.original_context)
        require(self.theta > 1, "rope.theta", self.theta, "is not above 1", "give a base > 1")
        require(
            1 <= self.factor <= _MOST_FACTOR,
            "rope.factor",
            self.factor,
            f"is outside [1, {_MOST_FACTOR:g}]",
            "give a factor >= 1",
        )
        if self.scaling not in ("none", "linear", "llama3", "yarn"):
            raise InputError(
                "rope.scaling", self.scaling, "is not supported", "use none, linear, llama3 or yarn"
            )
        if self.scaling == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise InputError(
                "rope.high_freq_factor",
                self.high_freq_factor,
                f"is not above low_freq_factor ({self.low_freq_factor})",
                _CHECK_ROPE,
            )
        require(
            self.low_freq_factor > 0,
            "rope.low_freq_factor",
            self.low_freq_factor,
            "is not positive",
            _CHECK_ROPE,
        )
        require(
            self.beta_fast > self.beta_slow >= _LEAST_TURNS,
            "rope.beta_fast",
            self.beta_fast,
            f"is not above beta_slow ({self.beta_slow}), or that is below {_LEAST_TURNS:g}",
            _CHECK_ROPE,
        )
        require(
            self.attention_factor > 0,
            "rope.attention_factor",
            self.attention_factor,
            "is not positive",
            _CHECK_ROPE,
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
        activation: gate activation: "silu", or "gelu_tanh" (the tanh approximation of GELU).
        token_count: number of real ids, where the embedding is padded beyond them; ids at or above
            it are never proposed or emitted. None when every row is real.
        qk_norm: an RMS norm over each head's query and key, before the rotation.
        post_norms: RMS norms of what attention and the feed-forward block add to the stream.
        norm_unit_offset: every RMS norm multiplies by 1 + weight, not by weight. The weight is kept
            as trained and 1 added in float32 in the pass: folded into it, bfloat16 would keep of a
            weight near 0 only what shows beside the 1 (7 bits after the point).
        embedding_scale: the embeddings are multiplied by it, rounded to their dtype; None: by 1.
        attention_scale: the scores are multiplied by it; None: by head_dim ** -0.5.
        attention_softcap: c in scores -> c tanh(scores / c), before the mask; None: no cap.
        logit_softcap: the same of the model's logits.
        windows: for each layer, how many positions its nodes see, their own included; None sees
            all. () when every layer sees all.
        local_rope: rotary embedding of the layers with a window, where theirs differs.
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
    activation: Activation = "silu"
    token_count: int | None = None
    qk_norm: bool = False
    post_norms: bool = False
    norm_unit_offset: bool = False
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None

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
            _require_size(field, getattr(self, field))
        require_number("norm_eps", self.norm_eps, "check the checkpoint's config")
        require(
            self.norm_eps >= 0,
            "norm_eps",
            self.norm_eps,
            "is negative",
            "check the checkpoint's config",
        )
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
        require(
            self.activation in ("silu", "gelu_tanh"),
            "activation",
            self.activation,
            "is not supported",
            "use silu or gelu_tanh",
        )
        for field in (
            "embedding_scale",
            "attention_scale",
            "attention_softcap",
            "logit_softcap",
        ):
            value = getattr(self, field)
            require(
                value is None or (is_finite(value) and value > 0),
                field,
                value,
                "is no positive number",
                "check the checkpoint's config, or give None",
            )
        require(
            len(self.windows) in (0, self.num_layers),
            "windows",
            self.windows,
            f"is not one entry for each of {self.num_layers} layers",
            "give an integer or None for each layer",
        )
        for window in self.windows:
            if window is not None:
                _require_size("windows", window)

    def window(self, layer: int) -> int | None:
        """Return how many positions a node of `layer` sees, or None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance:
    """Parameters of `jspec.typical_acceptance`; the defaults are those of Medusa's authors.

    Attributes:
        epsilon: a draft of a higher probability is accepted whatever the entropy; in (0, 1).
        delta: the share of exp(-entropy) that suffices; positive.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for field in ("epsilon", "delta"):
            require_number(f"typical.{field}", getattr(self, field))
        require(
            0 < self.epsilon < 1,
            "typical.epsilon",
            self.epsilon,
            "is outside (0, 1)",
            "give a probability",
        )
        require(
            self.delta > 0, "typical.delta", self.delta, "is not positive", "give a positive share"
        )


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """How much to speculate and by which rule drafts are verified.

    Attributes:
        gamma: draft tokens a round; 0 is plain decoding through the same loop.
        verification: "token" (Leviathan et al. 2023, arXiv 2211.17192) or "block" (Sun et al.,
            arXiv 2403.10444), which leave the output law exactly the target's; or "typical", which
            is LOSSY: it accepts whatever the target finds typical enough, and the output has
            another law (Cai et al. 2024, arXiv 2401.10774).
        typical: parameters of "typical", of no effect with another rule.
        rounds_per_chunk: rounds that run on the device between two looks of the host. Large for
            offline generation, small for streaming; it never changes the tokens.
    """

    gamma: int = 7
    verification: Verification = "token"
    rounds_per_chunk: int = 64
    typical: TypicalAcceptance = TypicalAcceptance()

    def __post_init__(self) -> None:
        require_integer("gamma", self.gamma)
        require_integer("rounds_per_chunk", self.rounds_per_chunk)
        require(
            0 <= self.gamma <= 127,
            "gamma",
            self.gamma,
            "is outside 0..127",
            "give 0 for plain decoding, or a chain of up to 127 drafts",
        )
        require(
            isinstance(self.verification, str) and self.verification in get_args(Verification),
            "verification",
            self.verification,
            "is not a rule",
            "use token or block, or typical, which is lossy",
        )
        require(
            isinstance(self.typical, TypicalAcceptance),
            "typical",
            self.typical,
            "is no TypicalAcceptance",
            "give jspec.TypicalAcceptance(epsilon, delta)",
        )
        require(
            self.rounds_per_chunk >= 1,
            "rounds_per_chunk",
            self.rounds_per_chunk,
            "is below 1",
            "give at least one round a chunk",
        )

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's law."""
        return self.gamma == 0 or self.verification != "typical"
