"""A loaded language model: architecture, parameters and tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import hub
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, draft_model, draft_tree, dynamic_tree
from jspec.drafting.vocabulary import Vocabulary
from jspec.errors import InputError, require
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from jspec.quantization import Weights
from pallas_kernels.dispatch import OPS, Kernels

if TYPE_CHECKING:
    from jspec.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """A model ready to decode.

    Attributes:
        name: as it was asked for.
        config: architecture.
        params: parameters.
        tokenizer: None where only token ids are used.
        eos_token_ids: ids that end a sequence.
        kernels: which implementations of attention, cache and verification its programs run; where
            it names no platform, that of the parameters.
    """

    name: str
    config: ModelConfig
    params: TransformerParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    kernels: Kernels = kv.DEFAULT_KERNELS

    @property
    def functions(self) -> Transformer:
        """The model's pure functions."""
        norm = self.params.final_norm
        kernels = self.kernels
        if kernels.platform is None and isinstance(norm, jax.Array):
            devices = norm.devices()
            platform = next(iter(devices)).platform
            kernels = dataclasses.replace(kernels, platform=platform, devices=len(devices))
        return Transformer(self.config, kernels)

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of norms, activations and, unless it is int8, of the weights."""
        dtype: DTypeLike = self.params.final_norm.dtype
        return dtype

    @property
    def cache_dtype(self) -> DTypeLike:
        """The dtype of keys and values where none is asked for: `dtype`, on a CPU float32.

        XLA:CPU cannot write to a buffer of 16-bit floats in place: it converts the whole cache to
        float32 and back in every round.
        """
        norm = self.params.final_norm
        on_cpu = isinstance(norm, jax.Array) and {d.platform for d in norm.devices()} == {"cpu"}
        return jnp.float32 if on_cpu else self.dtype


def load(
    name: str | Path = hub.DEFAULT_MODEL,
    dtype: DTypeLike = "float32",
    weights: Weights = "same",
    kernels: str | Kernels = "auto",
) -> Model:
    """Load a model and its tokenizer.

    Args:
        name: the default model's name, a directory (Hugging Face or written by jspec), a GGUF
            file, or a hub id ("organisation/name").
        dtype: of the parameters, and so of activations: float32, bfloat16 or float16 (whose
            products are slow on a CPU). See `Model.cache_dtype` for the cache's.
        weights: "int8" keeps the matrices as int8, with a float32 scale for each output channel,
            and computes with activations that are int8 too; norms and biases stay in `dtype`.
            "same" leaves them in `dtype` (as int8 where the checkpoint was saved so).
        kernels: which implementations its programs run: "auto", the platform's Pallas kernels where
            they can run and XLA elsewhere; "xla"; or by name, as `Kernels.parse` reads them.

    Raises:
        InputError: the model cannot be found, read or is not supported, or a kernel asked for can't
            run here.
    """
    # Here, so that a model made otherwise asks for no reader of files.
    from jspec import checkpoints
    from jspec.tokenizers import Tokenizer

    asked = _kernels(kernels)
    path = hub.locate(name)
    checkpoint = checkpoints.load(path, dtype, weights=weights)
    tokenizer = Tokenizer.from_path(path)
    config = checkpoint.config
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            "tokenizer",
            str(path),
            f"has {tokenizer.vocab_size} tokens, but the model embeds only {config.vocab_size}",
            "use the tokenizer that the model was trained with",
        )
    if tokenizer.vocab_size < config.vocab_size:
        config = dataclasses.replace(config, token_count=tokenizer.vocab_size)
    eos = checkpoint.eos_token_ids
    return Model(str(name), config, checkpoint.params, tokenizer, eos, asked)


def _kernels(asked: str | Kernels) -> Kernels:
    """Return what is asked for, which can run on this process's devices.

    Raises:
        InputError: it can't, or is none.
    """
    remedy = 'give "auto", "xla", or for a single op "tree_attention:xla"'
    require(isinstance(asked, str | Kernels), "kernels", asked, "is no choice of kernels", remedy)
    try:
        parsed = asked if isinstance(asked, Kernels) else Kernels.parse(asked)
    except ValueError as error:
        raise InputError("kernels", asked, f"cannot be read ({error})", remedy) from None
    for op in OPS:
        misfit = parsed.misfit(op)
        require(misfit is None, "kernels", str(asked), f"can't run {op}: {misfit}", remedy)
    return parsed


def draft_model_for(
    target: Model,
    drafter: Model,
    vocabulary: Vocabulary | None = None,
    min_confidence: float = 0.0,
) -> BoundDrafter:
    """Return a drafter that runs `drafter`, a model of the target's own tokenizer.

    Args:
        target: what is drafted for.
        drafter: the draft model.
        vocabulary: the only tokens that it proposes, so that its head is small; None for all.
        min_confidence: the chain ends before the first draft whose highest probability is lower,
            and a round without drafts costs a plain step; 0 never ends one.

    Raises:
        InputError: one is no model, the two models' tokenizers differ, `vocabulary` is none of
            their tokens, or `min_confidence` no probability.
    """
    _require_one_vocabulary(target, drafter)
    return draft_model.draft_model(
        drafter.config, drafter.params, drafter.functions.kernels, vocabulary, min_confidence
    )


def draft_tree_for(
    target: Model,
    drafter: Model,
    parents: Sequence[int],
    draws: draft_tree.Draws = "without-replacement",
    vocabulary: Vocabulary | None = None,
) -> BoundDrafter:
    """Return a drafter that drafts a tree by `drafter`, a model of the target's own vocabulary.

    Args:
        target: what is drafted for.
        drafter: the draft model.
        parents: of the tree's nodes, as `jspec.tree_shapes` makes them; -1 for the root.
        draws: how children are chosen: "top-k", "without-replacement" or "independent".
        vocabulary: the only tokens that it proposes; None for all.

    Raises:
        InputError: as `draft_model_for`, or the tree is none.
    """
    _require_one_vocabulary(target, drafter)
    return draft_tree.draft_tree(
        drafter.config, drafter.params, parents, draws, drafter.functions.kernels, vocabulary
    )


def dynamic_draft_tree_for(
    target: Model,
    drafter: Model,
    nodes: int = 15,
    depth: int = 5,
    width: int = 4,
    vocabulary: Vocabulary | None = None,
) -> BoundDrafter:
    """Return a drafter that drafts each row's most valuable tree by `drafter` (EAGLE-2).

    Args:
        target: what is drafted for.
        drafter: the draft model, of the target's own vocabulary.
        nodes: drafts a round.
        depth: deepest draft; the draft model runs as often.
        width: nodes of a level that are expanded, and children that each of them may get.
        vocabulary: the only tokens that it proposes; None for all.

    Raises:
        InputError: as `draft_model_for`, or a size is out of range.
    """
    _require_one_vocabulary(target, drafter)
    kernels = drafter.functions.kernels
    return dynamic_tree.dynamic_draft_tree(
        drafter.config, drafter.params, nodes, depth, width, kernels, vocabulary
    )


def _require_one_vocabulary(target: Model, drafter: Model) -> None:
    require_model("target", target)
    require_model("drafter", drafter)
    if target.tokenizer is drafter.tokenizer:
        return
    if target.tokenizer is not None and drafter.tokenizer is not None:
        ours, theirs = target.tokenizer.vocabulary(), drafter.tokenizer.vocabulary()
        if ours != theirs:
            same = sum(theirs.get(token) == index for token, index in ours.items())
            raise InputError(
                "drafter",
                drafter.name,
                f"has another tokenizer than the target: {same} of {len(ours)} tokens agree",
                "use a drafter of the target's family",
            )


def early_exit_of(target: Model, layers: int, vocabulary: Vocabulary | None = None) -> BoundDrafter:
    """Return a drafter that runs the target's first `layers` layers and its head.

    Args:
        target: what is drafted for.
        layers: how many of its layers to run.
        vocabulary: the only tokens that are proposed; None for all.

    Raises:
        InputError: `layers` is no integer below the target's number of layers, or `vocabulary`
            none of its tokens.
    """
    require_model("target", target)
    return draft_model.early_exit(
        target.config, target.params, layers, target.functions.kernels, vocabulary
    )


def early_exit_model(target: Model, layers: int) -> Model:
    """Return the target's first `layers` layers and its head as a model: one that drafts.

    Parameters are shared, not copied.

    Raises:
        InputError: `layers` is no integer below the target's number of layers.
    """
    require_model("target", target)
    config, params = draft_model.first_layers(target.config, target.params, layers)
    name = f"{target.name}, first {layers} layers"
    return dataclasses.replace(target, name=name, config=config, params=params)


def require_model(field: str, value: object) -> None:
    """Raise `InputError` unless `value` is a `Model`."""
    require(isinstance(value, Model), field, value, "is no model", "give what jspec.load returns")
