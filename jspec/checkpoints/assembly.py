"""From separately stored matrices to the fused parameter tree, one tensor at a time.

The plan knows the Hugging Face names of the supported families and where each stored row belongs in
`TransformerParams`; it knows no file format. A format is a `WeightSource`: shapes by name, and the
rows of one matrix at a time, so that beside the model itself only one fused tensor and a block of
its rows are ever in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.config import ModelConfig
from jspec.errors import InputError, require
from jspec.models.parameters import TransformerParams, declare, is_spec, named
from jspec.quantization import Weights, check_weights, is_int8, is_matrix_name, quantize_matrix

_BLOCK_ELEMENTS = 1 << 22  # rows are converted in blocks of about this many elements
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers, computed again from the config
_DTYPES = ("float32", "bfloat16", "float16")


class WeightSource(Protocol):
    """The stored tensors of one checkpoint, by Hugging Face name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""

    def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows start:stop of tensor `name`, in any floating dtype."""

    def stored_name(self, name: str) -> str:
        """Return what the file itself calls tensor `name`, for messages."""

    def release(self) -> None:
        """Let go of the memory that backs what was read so far."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows start:stop of the stored tensor `name` fill `index` of the fused tensor."""

    name: str
    start: int
    stop: int
    index: tuple[int | slice, ...]


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of `config` must hold, by name."""
    d, h = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, d),
        "model.norm.weight": (d,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: (d,) for name in _stream_norms(config).values()}
        shapes |= block_shapes(config, prefix, d)
        if config.qk_norm:
            shapes |= {
                prefix + "self_attn.q_norm.weight": (h,),
                prefix + "self_attn.k_norm.weight": (h,),
            }
    return shapes


def block_shapes(config: ModelConfig, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's matrices and biases, by name.

    Args:
        config: the architecture.
        prefix: of the layer's names.
        inputs: numbers that query, key and value are computed from.
    """
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    n, g = config.num_heads, config.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        prefix + "self_attn.q_proj.weight": (n * h, inputs),
        prefix + "self_attn.k_proj.weight": (g * h, inputs),
        prefix + "self_attn.v_proj.weight": (g * h, inputs),
        prefix + "self_attn.o_proj.weight": (d, n * h),
        prefix + "mlp.gate_proj.weight": (f, d),
        prefix + "mlp.up_proj.weight": (f, d),
        prefix + "mlp.down_proj.weight": (d, f),
    }
    if config.attention_bias:
        shapes |= {
            prefix + "self_attn.q_proj.bias": (n * h,),
            prefix + "self_attn.k_proj.bias": (g * h,),
            prefix + "self_attn.v_proj.bias": (g * h,),
        }
    return shapes


def plan(config: ModelConfig) -> dict[str, list[Piece]]:
    """Return the pieces of every fused tensor, by its dotted path as in `parameters.named`."""
    d = config.hidden_size
    pieces = {
        "embedding": [Piece("model.embed_tokens.weight", 0, config.vocab_size, ())],
        "final_norm": [Piece("model.norm.weight", 0, d, ())],
    }
    if not config.tie_embeddings:
        pieces["head"] = [Piece("lm_head.weight", 0, config.vocab_size, ())]
    for layer in range(config.num_layers):
        stored, fused = f"model.layers.{layer}.", f"layers.{layer}."
        pieces |= block_plan(config, stored, fused)
        pieces |= {
            fused + ours: [Piece(stored + theirs, 0, d, ())]
            for ours, theirs in _stream_norms(config).items()
        }
        if config.qk_norm:
            pieces |= {
                fused + name: [Piece(f"{stored}self_attn.{name}.weight", 0, config.head_dim, ())]
                for name in ("q_norm", "k_norm")
            }
    return pieces


def block_plan(config: ModelConfig, stored: str, fused: str) -> dict[str, list[Piece]]:
    """Return the pieces of one layer's matrices and biases; `stored` and `fused` are prefixes."""
    d, f = config.hidden_size, config.intermediate_size
    pieces = {
        fused + "qkv": _grouped(config, stored, "weight"),
        fused + "attention_out": [Piece(stored + "self_attn.o_proj.weight", 0, d, ())],
        fused + "gate_up": [
            Piece(stored + "mlp.gate_proj.weight", 0, f, (0,)),
            Piece(stored + "mlp.up_proj.weight", 0, f, (1,)),
        ],
        fused + "down": [Piece(stored + "mlp.down_proj.weight", 0, d, ())],
    }
    if config.attention_bias:
        pieces[fused + "qkv_bias"] = _grouped(config, stored, "bias")
    return pieces


def assemble(
    source: WeightSource,
    config: ModelConfig,
    dtype: DTypeLike,
    shardings: TransformerParams | None = None,
    weights: Weights = "same",
) -> TransformerParams:
    """Read, convert, fuse and place the parameters.

    Args:
        source: the stored tensors.
        config: the architecture they must have.
        dtype: dtype of every returned tensor: float32, bfloat16 or float16.
        shardings: a `jax.sharding.Sharding` a tensor, in the tree of `declare(config, weights)`;
            None places everything on the default device.
        weights: "int8" quantises each matrix from its float32 numbers as it is read.

    Returns:
        The tree of `declare(config, weights)` with committed or default-placed `jax.Array` leaves.

    Raises:
        InputError: a tensor is missing, has another shape, or would be dropped though it matters.
    """
    numpy_dtype = checked_dtype(dtype)
    check_weights(weights)
    _check(source, config)
    placements = placements_of(config, shardings, weights)
    pieces = plan(config)
    values = []
    for (path, spec), placement in zip(named(declare(config)).items(), placements, strict=True):
        quantized = weights == "int8" and is_matrix_name(path)
        fused = np.empty(spec.shape, np.float32 if quantized else numpy_dtype)
        for piece in pieces[path]:
            fill(fused[piece.index], source, piece)
        tensor: Any = fused
        if quantized:
            # Back to the host: a mesh of several processes takes no array of one device.
            tensor = jax.tree.map(np.asarray, quantize_matrix(jnp.asarray(fused)))
        # Waiting keeps at most one host copy alive: device_put only starts the transfer.
        values.append(jax.block_until_ready(jax.device_put(tensor, placement)))
        source.release()
    treedef = jax.tree.structure(declare(config), is_leaf=is_spec)
    return cast(TransformerParams, jax.tree.unflatten(treedef, values))


def checked_dtype(dtype: DTypeLike, field: str = "dtype") -> np.dtype[Any]:
    """Return `dtype` as a numpy dtype; raise `InputError` unless parameters can have it."""
    try:
        result: np.dtype[Any] = jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise InputError(field, dtype, "is not a dtype", f"use one of {_DTYPES}") from None
    require(
        result.name in _DTYPES,
        field,
        result.name,
        "cannot hold weights, keys or values",
        f"use one of {_DTYPES}",
    )
    return result


def placements_of(
    config: ModelConfig, shardings: TransformerParams | None, weights: Weights
) -> list[Any]:
    """Return what places each tensor of `declare(config)`, in tree order.

    Returns:
        A sharding, an `Int8Matrix` of two, or None for the default device.

    Raises:
        InputError: `shardings` is not the tree of `declare(config, weights)`.
    """
    if shardings is None:
        return [None] * len(named(declare(config)))
    wanted: Any = jax.tree.structure(declare(config, weights), is_leaf=is_spec)
    require(
        wanted == jax.tree.structure(shardings),
        "shardings",
        shardings,
        "is not the tree of the model's parameters",
        "map over jspec.models.parameters.declare(config, weights) to build it",
    )
    return jax.tree.leaves(shardings, is_leaf=is_int8)


def _stream_norms(config: ModelConfig) -> dict[str, str]:
    """The stored names of a layer's norms over D, by our own."""
    norms = {"attention_norm": "input_layernorm.weight"}
    if not config.post_norms:  # "post attention" is then before the feed-forward block
        return norms | {"mlp_norm": "post_attention_layernorm.weight"}
    return norms | {
        "post_attention_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "post_mlp_norm": "post_feedforward_layernorm.weight",
    }


def _grouped(config: ModelConfig, stored: str, kind: str) -> list[Piece]:
    """Pieces of a fused [G, N/G + 2, H, ...] tensor: each group's queries, key and value."""
    per, h = config.queries_per_kv, config.head_dim
    attention = stored + "self_attn."
    pieces = []
    for g in range(config.num_kv_heads):
        kv = (g * h, (g + 1) * h)
        pieces += [
            Piece(f"{attention}q_proj.{kind}", per * kv[0], per * kv[1], (g, slice(0, per))),
            Piece(f"{attention}k_proj.{kind}", *kv, (g, per)),
            Piece(f"{attention}v_proj.{kind}", *kv, (g, per + 1)),
        ]
    return pieces


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_ELEMENTS // width)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def fill(target: np.ndarray[Any, Any], source: WeightSource, piece: Piece) -> None:
    """Read a piece, block by block, into the part of the fused tensor that it is for."""
    rows = target.reshape(piece.stop - piece.start, -1)  # a view: `target` is contiguous
    for start, stop in _blocks(*rows.shape):
        block = source.read(piece.name, piece.start + start, piece.start + stop)
        rows[start:stop] = block.reshape(stop - start, -1)


def _check(source: WeightSource, config: ModelConfig) -> None:
    found = source.shapes
    require(  # before anything is built for so many layers
        config.num_layers <= len(found),
        "num_layers",
        config.num_layers,
        f"is more than the {len(found)} tensors that are stored",
        "use the config that was published with these weights",
    )
    expected = stored_shapes(config)
    for name, shape in expected.items():
        stored = source.stored_name(name)
        if name not in found:
            raise InputError(
                "tensor", stored, "is missing", "fetch the checkpoint again, with all its files"
            )
        if found[name] != shape:
            raise InputError(
                "tensor",
                stored,
                f"has shape {found[name]}, expected {shape}",
                "use the config that was published with these weights",
            )
    for name in found:
        if name in expected or name.endswith(_IGNORED_SUFFIXES):
            continue
        if name == "lm_head.weight":
            _check_tied_head(source, expected["model.embed_tokens.weight"])
        elif not _is_zero_bias(source, name):
            raise InputError(
                "tensor",
                source.stored_name(name),
                "is not part of the architecture that the config names, so leaving it out would "
                "change the result",
                "use a checkpoint of that architecture as it was published",
            )


def _check_tied_head(source: WeightSource, shape: tuple[int, ...]) -> None:
    """A stored head is redundant beside a tied embedding only where both are equal."""
    equal = source.shapes["lm_head.weight"] == shape and all(
        np.array_equal(
            source.read("lm_head.weight", start, stop),
            source.read("model.embed_tokens.weight", start, stop),
        )
        for start, stop in _blocks(*shape)
    )
    source.release()
    require(
        equal,
        "tensor",
        source.stored_name("lm_head.weight"),
        "differs from the embedding that the config ties it to",
        "set tie_word_embeddings to false, or remove the tensor",
    )


def _is_zero_bias(source: WeightSource, name: str) -> bool:
    """Llama conversions of other families store biases of zeros, which change nothing."""
    shape = source.shapes[name]
    return name.endswith(".bias") and len(shape) == 1 and not source.read(name, 0, shape[0]).any()
