"""Which stored tensors a trained drafter is made of, and where their rows belong.

A drafter's own tensors are all there or it is refused; what the target has as well (embedding and
head) may be left out and is then lent by it. `d2t` names a reduced vocabulary (the target's id of
token i is i + d2t[i]), `t2d` says of each of the target's tokens whether it is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import assembly
from jspec.checkpoints.assembly import Piece
from jspec.checkpoints.heads_config import OTHER
from jspec.checkpoints.huggingface import SafetensorsSource
from jspec.config import ModelConfig
from jspec.errors import InputError, require
from jspec.models import eagle, medusa, parameters
from jspec.models.eagle import EagleConfig
from jspec.models.medusa import MedusaConfig
from jspec.models.parameters import is_spec, named

D2T, T2D = "d2t", "t2d"
FILENAMES = ("model.safetensors", "medusa_lm_head.safetensors")
_PUBLISHED = "use the files that were published together"
_AGAIN = "fetch the files again"

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A drafter's tensors.

    Attributes:
        declared: the tree of `TensorSpec`, None for what the target may lend.
        shapes: of the stored tensors that must be there, by name.
        pieces: where they belong, by our tensor's dotted path.
        embedding: the stored name of the embedding, None where there is none.
        heads: the stored names of the heads, one, or in Medusa one for each head.
    """

    declared: Any
    shapes: Shapes
    pieces: dict[str, list[Piece]]
    embedding: str | None
    heads: tuple[str, ...]


def of(config: EagleConfig | MedusaConfig | ModelConfig) -> Layout:
    """Return the layout of a drafter of this architecture."""
    if isinstance(config, EagleConfig):
        return _eagle(config)
    return _medusa(config) if isinstance(config, MedusaConfig) else _draft_model(config)


def _eagle(config: EagleConfig) -> Layout:
    declared, layer = eagle.declare(config), config.layer
    d, fused = layer.hidden_size, config.kind == "eagle3"
    prefix = "midlayer." if fused else "layers.0."
    shapes = assembly.block_shapes(layer, prefix, 2 * d if fused else d)
    shapes["fc.weight"] = declared.fc.shape
    pieces = assembly.block_plan(layer, prefix, "layer.")
    pieces["fc"] = [Piece("fc.weight", 0, d, ())]
    if declared.fuse is not None:
        shapes["fuse.weight"] = declared.fuse.shape
        pieces["fuse"] = [Piece("fuse.weight", 0, d, ())]
    vectors = {"layer.mlp_norm": f"{prefix}post_attention_layernorm.weight"}
    if declared.layer.attention_norm is not None:
        vectors["layer.attention_norm"] = f"{prefix}input_layernorm.weight"
    if config.fc_bias:
        vectors["fc_bias"] = "fc.bias"
    if fused:
        vectors |= {
            "embedding_norm": f"{prefix}input_layernorm.weight",
            "feature_norm": f"{prefix}hidden_norm.weight",
            "norm": "norm.weight",
        }
    shapes |= dict.fromkeys(vectors.values(), (d,))
    pieces |= {path: [Piece(name, 0, d, ())] for path, name in vectors.items()}
    return Layout(declared, shapes, pieces, "embed_tokens.weight", ("lm_head.weight",))


def _medusa(config: MedusaConfig) -> Layout:
    d, places = (
        config.hidden_size,
        [(k, j) for k in range(config.heads) for j in range(config.blocks)],
    )
    linear = {place: "{}.{}.linear".format(*place) for place in places}
    shapes: Shapes = {f"{name}.weight": (d, d) for name in linear.values()}
    shapes |= {f"{name}.bias": (d,) for name in linear.values()}
    pieces = {
        "weights": [Piece(f"{linear[place]}.weight", 0, d, place) for place in places],
        "biases": [Piece(f"{linear[place]}.bias", 0, d, place) for place in places],
    }
    heads = tuple(f"{k}.{config.blocks}.weight" for k in range(config.heads))
    return Layout(medusa.declare(config), shapes, pieces, None, heads)


def _draft_model(config: ModelConfig) -> Layout:
    lent = ("model.embed_tokens.weight", "lm_head.weight")
    shapes = {
        name: shape for name, shape in assembly.stored_shapes(config).items() if name not in lent
    }
    pieces = {
        path: of_path
        for path, of_path in assembly.plan(config).items()
        if path not in ("embedding", "head")
    }
    declared = dataclasses.replace(parameters.declare(config), embedding=None, head=None)
    return Layout(declared, shapes, pieces, lent[0], lent[1:])


def check(
    source: SafetensorsSource, layout: Layout, optional: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `InputError` unless the stored tensors are the layout's, and some of the optional.

    Args:
        source: the stored tensors.
        layout: what must be there.
        optional: the shapes of what may be there too, by name.
    """
    found = source.shapes
    for name, shape in (layout.shapes | dict(optional)).items():
        if name not in found:
            require(name in optional, "tensor", name, "is missing", _PUBLISHED)
            continue
        require(
            found[name] == shape,
            "tensor",
            name,
            f"has shape {found[name]}, expected {shape}",
            "use the config.json that was published with the weights, and the target's",
        )
    for name in found:
        require(
            name in layout.shapes or name in optional or name.endswith("inv_freq"),
            "tensor",
            name,
            "is not part of what config.json describes",
            _PUBLISHED,
        )


def read(source: SafetensorsSource, layout: Layout, dtype: np.dtype[Any]) -> Any:
    """Return the tree of `layout.declared`, filled.

    Raises:
        InputError: a number is not finite.
    """
    values = []
    for path, spec in named(layout.declared).items():
        fused = np.empty(spec.shape, dtype)
        for piece in layout.pieces[path]:
            assembly.fill(fused[piece.index], source, piece)
            _require_finite(piece.name, fused[piece.index])
        values.append(jnp.asarray(fused))
    source.release()
    treedef = jax.tree.structure(layout.declared, is_leaf=is_spec)
    return jax.tree.unflatten(treedef, values)


def read_matrix(source: SafetensorsSource, name: str, dtype: np.dtype[Any]) -> jax.Array:
    """Return a stored matrix (its shape is checked) in `dtype`.

    Raises:
        InputError: a number is not finite.
    """
    rows, columns = source.shapes[name]
    matrix = np.empty((rows, columns), dtype)
    assembly.fill(matrix, source, Piece(name, 0, rows, ()))
    _require_finite(name, matrix)
    source.release()
    return jnp.asarray(matrix)


def _require_finite(name: str, values: np.ndarray[Any, Any]) -> None:
    finite = bool(np.isfinite(values.astype(np.float32)).all())
    require(finite, "tensor", name, f"has numbers that {values.dtype} does not hold", _AGAIN)


def read_vocabulary(
    source: SafetensorsSource, target: ModelConfig, known: int
) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """Return [Vd] ids of the tokens that a drafter can propose, rising; None for all.

    Args:
        source: the stored tensors.
        target: of the target.
        known: Vd as config.json has it, V where it does not say.

    Raises:
        InputError: `d2t` leaves the target's tokens or does not rise, or `t2d` says otherwise.
    """
    shapes, vocab = source.shapes, target.vocab_size
    if D2T not in shapes:
        for name in (T2D,) if T2D in shapes else ():
            raise InputError("tensor", D2T, f"is missing beside {name}", _PUBLISHED)
        require(known == vocab, "tensor", D2T, f"is missing, to map {known} tokens", _PUBLISHED)
        return None
    (count,) = shapes[D2T] if len(shapes[D2T]) == 1 else (0,)
    require(
        count >= 1 and (known in (count, vocab)),
        "tensor",
        D2T,
        f"has shape {shapes[D2T]}, expected ({known},)",
        _PUBLISHED,
    )
    stored = source.read(D2T, 0, count)
    require(stored.dtype != bool, "tensor", D2T, "has no integers", _AGAIN)
    offsets = stored.astype(np.int64)
    ids = np.arange(count) + offsets
    tokens = vocab if target.token_count is None else target.token_count
    outside = ids[(ids < 0) | (ids >= tokens)]
    if outside.size:
        problem = f"maps to token {outside[0]}, but the target has {tokens}"
        raise InputError("tensor", D2T, problem, OTHER)
    require(bool((np.diff(ids) > 0).all()), "tensor", D2T, "does not rise", _AGAIN)
    if T2D in shapes:
        member = np.zeros(vocab, bool)
        member[ids] = True
        same = shapes[T2D] == (vocab,) and np.array_equal(
            source.read(T2D, 0, vocab).astype(bool), member
        )
        require(same, "tensor", T2D, f"does not name the {count} tokens of {D2T}", _PUBLISHED)
    return None if count == vocab else ids.astype(np.int32)


def tensors(params: Any, layout: Layout) -> dict[str, np.ndarray[Any, Any]]:
    """Return a drafter's own tensors as they are stored.

    Raises:
        InputError: they are not those of the layout.
    """
    stored: dict[str, np.ndarray[Any, Any]] = {}
    ours = named(params)
    for path, spec in named(layout.declared).items():
        leaf = ours.get(path)
        shape = getattr(leaf, "shape", None)
        require(
            shape == spec.shape,
            path,
            shape,
            f"is not the shape of the architecture, {spec.shape}",
            "give the parameters that belong to the configuration",
        )
        fused = np.asarray(leaf)
        for piece in layout.pieces[path]:
            rows = layout.shapes[piece.name]
            target = stored.setdefault(piece.name, np.empty(rows, fused.dtype))
            target[piece.start : piece.stop] = fused[piece.index].reshape(-1, *rows[1:])
    return stored
