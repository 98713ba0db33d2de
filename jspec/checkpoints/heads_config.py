"""The config.json of trained drafters, as their authors publish it, and what it means to us.

EAGLE: https://github.com/SafeAILab/EAGLE; Medusa: https://github.com/FasterDecoding/Medusa. Which
of the target's layers an EAGLE-3 head reads is written in two ways: inside `eagle_config` as the
layers whose outputs are read (SGLang), at the top as indices of transformers' `hidden_states`, of
which 0 is the embedding and j the output of layer j - 1 (vLLM).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jspec.checkpoints import huggingface_config
from jspec.checkpoints.fields import CHECK, count, flag
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import require
from jspec.models.eagle import EagleConfig, low_middle_high
from jspec.models.medusa import MedusaConfig

Kind = Literal["eagle", "eagle3", "medusa", "draft-model"]

OTHER = "use a drafter that was trained for this target"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Ours, of an EAGLE head that reads more than the normed output: layers whose outputs it adds.
_LOWER = "lower_layers"
_ARCHITECTURES: dict[Kind, tuple[str, ...]] = {
    "eagle": ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "LlamaForCausalLM"),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    "medusa": ("MedusaModel", "MedusaForCausalLM"),
    "draft-model": (),  # any that the reader of models knows
}
# Of the target, as config.json's "target" has them.
_FINGERPRINT = ("hidden_size", "num_layers", "vocab_size")


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> Kind:
    """Return what a directory holds, by the names of its tensors and its config.json.

    Raises:
        InputError: the two contradict each other, or the architecture is not known.
    """
    if any(name.startswith("midlayer.") for name in names):
        kind: Kind = "eagle3"
    elif "fc.weight" in names:
        kind = "eagle"
    elif any(name.endswith(".linear.weight") for name in names):
        kind = "medusa"
    else:
        kind = "draft-model"
    said: Kind | None = None
    if "medusa_num_heads" in config:
        said = "medusa"
    elif config.get("draft_vocab_size") is not None or "eagle_config" in config:
        said = "eagle3"
    require(
        said in (None, kind),
        "kind",
        said,
        f"is what config.json describes, but the tensors are those of {kind}",
        "use the config.json that was published with the weights",
    )
    architectures = config.get("architectures")
    known = _ARCHITECTURES[kind]
    if kind != "draft-model" and architectures is not None:
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        require(
            first in known,
            "architectures",
            architectures,
            f"is not supported as {kind}",
            f"use a head of one of {', '.join(known)}",
        )
    return kind


def check_target(config: Mapping[str, Any], target: ModelConfig) -> None:
    """Raise `InputError` where the config.json says that the drafter is for another target."""
    recorded = config.get("target")
    if recorded is None:
        return
    require(isinstance(recorded, dict), "target", recorded, "is no object", CHECK)
    for field in _FINGERPRINT:
        ours = getattr(target, field)
        require(
            recorded.get(field) == ours,
            f"target.{field}",
            recorded.get(field),
            f"is not the {ours} of this target; it was trained for {recorded.get('name')!r}",
            OTHER,
        )


def fingerprint(name: str, target: ModelConfig) -> dict[str, Any]:
    """Return what a drafter's config.json says of its target."""
    return {"name": name} | {field: getattr(target, field) for field in _FINGERPRINT}


def _same(field: str, value: int, ours: int) -> None:
    require(value == ours, field, value, f"is not the target's {ours}", OTHER)


def read_eagle(
    kind: Literal["eagle", "eagle3"],
    config: Mapping[str, Any],
    target: ModelConfig,
    fc_bias: bool,
) -> EagleConfig:
    """Return the architecture of an EAGLE head; its `layer.vocab_size` is Vd as config.json has it.

    Args:
        kind: of the head.
        config: its config.json.
        target: of the target.
        fc_bias: the file has a bias of the linear map.

    Raises:
        InputError: it does not fit the target, or asks for what is not computed.
    """
    layer = huggingface_config.parse({**config, "architectures": ["LlamaForCausalLM"]})
    require(
        layer.num_layers == 1,
        "num_hidden_layers",
        layer.num_layers,
        "is more than the one layer of a head that is supported",
        "use a head of one layer",
    )
    _same("hidden_size", layer.hidden_size, target.hidden_size)
    if config.get("target_hidden_size") is not None:
        _same("target_hidden_size", count(config, "target_hidden_size"), target.hidden_size)
    _same("vocab_size", layer.vocab_size, target.vocab_size)
    require(
        not flag(config, "norm_before_residual"),
        "norm_before_residual",
        True,
        "is not supported",
        "use a head whose residual is not normed",
    )
    # Published EAGLE-3 heads have none, and a config.json like an EAGLE head's may say otherwise.
    said = flag(config, "bias", fc_bias) if kind == "eagle" else fc_bias
    require(
        said == fc_bias,
        "bias",
        said,
        f"but fc.bias is {'' if fc_bias else 'not '}stored",
        "use a whole file, or make config.json say what is stored",
    )
    known = count(config, "draft_vocab_size", layer.vocab_size)
    require(
        known <= target.vocab_size,
        "draft_vocab_size",
        known,
        f"is more than the target's {target.vocab_size}",
        OTHER,
    )
    layer = dataclasses.replace(layer, vocab_size=known, tie_embeddings=False)
    layers = _lower(config, target) if kind == "eagle" else _feature_layers(config, target)
    return EagleConfig(kind, layer, layers, fc_bias)


def _lower(config: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the layers that an EAGLE head reads, the normed output last; published ones no other.

    Raises:
        InputError: they are no layers of the target's.
    """
    given = config.get(_LOWER, [])
    require(
        isinstance(given, list)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
        and all(0 <= i < target.num_layers for i in given),
        _LOWER,
        given,
        f"is no list of layers of the target's, 0..{target.num_layers - 1}",
        OTHER,
    )
    return *given, target.num_layers


def _feature_layers(config: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    inner = config.get("eagle_config")
    inner = {} if inner is None else inner
    require(isinstance(inner, dict), "eagle_config", inner, "is no object", CHECK)
    require(
        flag(inner, "use_aux_hidden_state", True),
        "use_aux_hidden_state",
        False,
        "is not supported",
        "use a head that reads several of the target's layers",
    )
    given, shift = inner.get(_LAYERS), 0
    if given is None:
        given, shift = config.get(_LAYERS), -1
    if given is None:
        given, shift = list(low_middle_high(target.num_layers)), 0
    require(
        isinstance(given, list)
        and bool(given)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in given),
        _LAYERS,
        given,
        "is no list of layers",
        CHECK,
    )
    layers = tuple(i + shift for i in given)
    require(
        all(0 <= layer < target.num_layers for layer in layers),
        _LAYERS,
        given,
        f"reads the outputs of layers {layers}, but the target's are 0..{target.num_layers - 1}",
        OTHER,
    )
    return layers


def read_medusa(
    config: Mapping[str, Any], target: ModelConfig, names: Collection[str]
) -> MedusaConfig:
    """Return the architecture of Medusa heads over the target's whole vocabulary.

    Args:
        config: the config.json.
        target: of the target.
        names: of the stored tensors.

    Raises:
        InputError: it does not fit the target.
    """
    for field, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(field) is not None:
            _same(field, count(config, field), ours)
    places = {tuple(name.split(".")[:2]) for name in names if name.endswith(".linear.weight")}
    stored = {
        "medusa_num_heads": len({head for head, _ in places}),
        "medusa_num_layers": len({block for _, block in places}),
    }
    for field, number in stored.items():
        said = count(config, field, 1 if field == "medusa_num_layers" else None)
        require(
            said == number,
            field,
            said,
            f"is not the {number} that are stored",
            f"set it to {number} in config.json, or use the one published with the weights",
        )
    return MedusaConfig(
        heads=stored["medusa_num_heads"],
        blocks=stored["medusa_num_layers"],
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target_layers=target.num_layers,
    )


def read_draft_model(config: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Return the architecture of a draft model.

    Raises:
        InputError: its vocabulary is not the target's, or its architecture is not supported.
    """
    model = huggingface_config.parse(config)
    _same("vocab_size", model.vocab_size, target.vocab_size)
    return dataclasses.replace(model, token_count=target.token_count)


def write(
    kind: Kind,
    config: EagleConfig | MedusaConfig | ModelConfig,
    target: ModelConfig,
    known: int,
) -> dict[str, Any]:
    """Return a config.json of the published kind.

    Args:
        kind: of the drafter.
        config: its architecture.
        target: of the target.
        known: Vd, tokens that it can propose.

    Raises:
        InputError: the architecture has what the layout has no words for.
    """
    if isinstance(config, MedusaConfig):
        return {
            "medusa_num_heads": config.heads,
            "medusa_num_layers": config.blocks,
            "hidden_size": config.hidden_size,
            "vocab_size": target.vocab_size,
        }
    if isinstance(config, EagleConfig):
        whole = dataclasses.replace(config.layer, vocab_size=target.vocab_size, token_count=None)
        fields = _llama(whole) | {"architectures": [_ARCHITECTURES[kind][0]]}
        fields["bias"] = config.fc_bias
        if kind == "eagle" and len(config.feature_layers) > 1:
            fields[_LOWER] = list(config.feature_layers[:-1])
        if kind == "eagle3":
            fields["draft_vocab_size"] = known
            fields["eagle_config"] = {
                "use_aux_hidden_state": True,
                _LAYERS: list(config.feature_layers),
            }
        return fields
    return _llama(dataclasses.replace(config, token_count=None))


def _llama(config: ModelConfig) -> dict[str, Any]:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling(config.rope),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
    }
    understood = dataclasses.replace(huggingface_config.parse(fields), name=config.name)
    require(
        understood == config,
        "config",
        config,
        "has what a Llama config.json does not say",
        "save it with jspec.checkpoints.save",
    )
    return fields


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    fields: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return fields
    fields["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        factors = {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    else:
        factors = {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
    return fields | factors
