"""Drafters in published layouts: every number where it belongs, and every misfit named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jspec.checkpoints import heads
from jspec.checkpoints.heads import TrainedDrafter
from jspec.checkpoints.heads_config import Kind
from jspec.errors import InputError
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.models.parameters import TransformerParams
from tests import tiny
from tests.oracles import tiny_heads
from tests.oracles.tiny_heads import Arrays

TARGET = dataclasses.replace(tiny.CONFIG, num_layers=6)
PARAMS = tiny.params(TARGET)
IDS = np.arange(2, 60, 4)
Made = tuple[dict[str, Any], Arrays]
MAKERS: dict[Kind, Callable[[], Made]] = {
    "eagle": lambda: tiny_heads.eagle(TARGET),
    "eagle3": lambda: tiny_heads.eagle3(TARGET, IDS),
    "medusa": lambda: tiny_heads.medusa(TARGET),
    "draft-model": lambda: tiny_heads.draft_model(TARGET, IDS),
}


def load(folder: Path, **more: Any) -> TrainedDrafter:
    return heads.load(folder, TARGET, PARAMS, more.pop("dtype", "float32"), **more)


def made(folder: Path, config: dict[str, Any], tensors: Arrays) -> TrainedDrafter:
    return load(tiny_heads.write(folder, config, tensors))


def changed(drafter: TrainedDrafter, **changes: Any) -> TrainedDrafter:
    params: Any = drafter.params
    return dataclasses.replace(drafter, params=dataclasses.replace(params, **changes))


def check_block(layer: Any, tensors: Arrays, prefix: str) -> None:
    np.testing.assert_array_equal(layer.qkv, tiny_heads.grouped(tensors, prefix))
    np.testing.assert_array_equal(layer.attention_out, tensors[f"{prefix}self_attn.o_proj.weight"])
    gate, up = tensors[f"{prefix}mlp.gate_proj.weight"], tensors[f"{prefix}mlp.up_proj.weight"]
    np.testing.assert_array_equal(layer.gate_up, np.stack([gate, up]))
    np.testing.assert_array_equal(layer.down, tensors[f"{prefix}mlp.down_proj.weight"])
    np.testing.assert_array_equal(
        layer.mlp_norm, tensors[f"{prefix}post_attention_layernorm.weight"]
    )


@pytest.mark.parametrize("bias", [True, False])
def test_eagle(bias: bool, tmp_path: Path) -> None:
    config, tensors = tiny_heads.eagle(TARGET, bias)
    found = made(tmp_path / "head", config, tensors)
    params = found.params
    assert isinstance(found.config, EagleConfig)
    assert isinstance(params, EagleParams)
    assert (found.name, found.kind, found.vocabulary) == ("head", "eagle", None)
    assert found.config.feature_layers == (6,)  # the normed output
    assert found.config.fc_bias is bias
    assert found.config.layer.vocab_size == TARGET.vocab_size
    check_block(params.layer, tensors, "layers.0.")
    np.testing.assert_array_equal(params.fc, tensors["fc.weight"])
    if bias:
        np.testing.assert_array_equal(params.fc_bias, tensors["fc.bias"])
    np.testing.assert_array_equal(params.embedding, tensors["embed_tokens.weight"])
    assert params.head is PARAMS.head
    assert params.layer.attention_norm is params.norm is params.embedding_norm is None


def test_eagle_with_lower_layers(tmp_path: Path) -> None:
    config, tensors = tiny_heads.lower(TARGET)
    found = made(tmp_path / "head", config, tensors)
    params = found.params
    assert isinstance(found.config, EagleConfig)
    assert isinstance(params, EagleParams)
    assert found.config.feature_layers == (1, 4, 6)
    np.testing.assert_array_equal(params.fuse, tensors["fuse.weight"])
    np.testing.assert_array_equal(
        params.layer.attention_norm, tensors["layers.0.input_layernorm.weight"]
    )
    heads.save(tmp_path / "again", changed(found, head=None), TARGET)
    again = load(tmp_path / "again")
    assert again.config == found.config
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again.params, params)))

    for layers, problem in (([6], "0..5"), ("1", "no list"), ([True], "no list")):
        with pytest.raises(InputError, match=problem) as caught:
            made(tmp_path / "other", config | {"lower_layers": layers}, tensors)
        assert caught.value.field == "lower_layers"
    with pytest.raises(InputError, match=r"expected \(32, 32\)"):
        made(tmp_path / "other", config | {"lower_layers": [1]}, tensors)


def test_eagle3(tmp_path: Path) -> None:
    config, tensors = tiny_heads.eagle3(TARGET, IDS)
    found = made(tmp_path, config, tensors)
    params = found.params
    assert isinstance(found.config, EagleConfig)
    assert isinstance(params, EagleParams)
    assert found.kind == found.config.kind == "eagle3"
    assert found.config.feature_layers == (0, 1, 2)
    assert found.config.layer.vocab_size == len(IDS)
    check_block(params.layer, tensors, "midlayer.")
    for leaf, name in (
        (params.fc, "fc.weight"),
        (params.embedding_norm, "midlayer.input_layernorm.weight"),
        (params.feature_norm, "midlayer.hidden_norm.weight"),
        (params.norm, "norm.weight"),
        (params.head, "lm_head.weight"),
    ):
        np.testing.assert_array_equal(leaf, tensors[name], name)
    assert params.embedding is PARAMS.embedding
    np.testing.assert_array_equal(params.vocabulary, IDS)
    np.testing.assert_array_equal(cast(jax.Array, found.vocabulary), IDS)
    # Without a head of its own, the target's rows stand in.
    del tensors["lm_head.weight"]
    lent = made(tmp_path / "lent", config, tensors)
    np.testing.assert_array_equal(cast(EagleParams, lent.params).head, PARAMS.head[IDS])


def test_the_layers_that_eagle3_reads(tmp_path: Path) -> None:
    config, tensors = tiny_heads.eagle3(TARGET, IDS)

    def layers(**changes: Any) -> tuple[int, ...]:
        changed = {k: v for k, v in (config | changes).items() if v is not ...}
        return cast(EagleConfig, made(tmp_path, changed, tensors).config).feature_layers

    assert layers(eagle_config=...) == (1, 2, 2)  # as the authors chose them, of 6 layers
    ids = "eagle_aux_hidden_state_layer_ids"
    # hidden_states[0] is the embedding, so index j is the output of layer j - 1.
    assert layers(eagle_config=..., **{ids: [1, 3, 6]}) == (0, 2, 5)
    assert layers(eagle_config={ids: [5, 4, 3]}, **{ids: [1, 3, 6]}) == (5, 4, 3)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("filename", ["medusa_lm_head.safetensors", "model.safetensors"])
def test_medusa(own: bool, filename: str, tmp_path: Path) -> None:
    config, tensors = tiny_heads.medusa(TARGET, own=own)
    found = load(tiny_heads.write(tmp_path, config, tensors, filename))
    params = found.params
    assert isinstance(params, MedusaParams)
    assert found.config == MedusaConfig(3, 2, TARGET.hidden_size, TARGET.vocab_size, 6)
    for k in range(3):
        for j in range(2):
            np.testing.assert_array_equal(params.weights[k, j], tensors[f"{k}.{j}.linear.weight"])
            np.testing.assert_array_equal(params.biases[k, j], tensors[f"{k}.{j}.linear.bias"])
        if own:
            np.testing.assert_array_equal(params.heads[k], tensors[f"{k}.2.weight"])
    if not own:
        assert params.heads is PARAMS.head


def test_a_draft_model_that_the_target_lends_its_head(tmp_path: Path) -> None:
    config, tensors = tiny_heads.draft_model(TARGET, IDS)
    found = made(tmp_path, config, tensors)
    params = found.params
    assert isinstance(params, TransformerParams)
    assert params.embedding is PARAMS.embedding
    np.testing.assert_array_equal(params.head, PARAMS.head[IDS])
    check_block(params.layers[0], tensors, "model.layers.0.")
    norm = tensors["model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(params.layers[0].attention_norm, norm)
    whole = made(
        tmp_path / "whole", config, {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    )
    assert cast(TransformerParams, whole.params).head is PARAMS.head
    assert whole.vocabulary is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_converted(dtype: str, tmp_path: Path) -> None:
    config, tensors = tiny_heads.eagle3(TARGET, IDS)
    found = load(tiny_heads.write(tmp_path, config, tensors), dtype=dtype)
    fc = cast(EagleParams, found.params).fc
    assert fc.dtype == dtype
    np.testing.assert_array_equal(fc, tensors["fc.weight"].astype(jnp.dtype(dtype)))
    half = {k: v.astype(ml_dtypes.bfloat16) if v.dtype == "f" else v for k, v in tensors.items()}
    wide = made(tmp_path / "wide", config, half)
    np.testing.assert_array_equal(
        cast(EagleParams, wide.params).fc, half["fc.weight"].astype(np.float32)
    )


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_is_saved_is_what_was_loaded(kind: Kind, tmp_path: Path) -> None:
    config, tensors = MAKERS[kind]()
    first = made(tmp_path / "first", config, tensors)
    own = first
    if "model.embed_tokens.weight" not in tensors and kind in ("eagle3", "draft-model"):
        lent: dict[str, Any] = {"embedding": None}
        if "lm_head.weight" not in tensors:
            lent["head"] = None
        own = changed(first, **lent)
    if kind == "eagle":
        own = changed(first, head=None)
    heads.save(tmp_path / "first-again", own, TARGET, target_name="tiny")
    stored = load_file(tmp_path / "first-again" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(stored[name], value, name)
    again = load(tmp_path / "first-again", kind=kind)
    assert again.config == first.config
    same = jax.tree.map(np.array_equal, again.params, first.params)
    assert all(jax.tree.leaves(same))
    heads.save(tmp_path / "half", own, TARGET, dtype="bfloat16")
    small = load_file(tmp_path / "half" / "model.safetensors")
    assert {v.dtype.name for v in small.values()} <= {"bfloat16", "int64", "bool"}


def test_a_drafter_of_another_target_is_refused_by_what_it_records(tmp_path: Path) -> None:
    config, tensors = tiny_heads.medusa(TARGET, own=False)
    found = made(tmp_path / "a", config, tensors)
    heads.save(tmp_path / "b", changed(found, heads=None), TARGET, target_name="six")
    other = dataclasses.replace(TARGET, num_layers=5, windows=())
    with pytest.raises(InputError, match=r"target.num_layers=6 is not the 5 .* 'six'"):
        heads.load(tmp_path / "b", other, tiny.params(other), "float32")


def without(*names: str) -> Callable[[dict[str, Any], Arrays], None]:
    def change(config: dict[str, Any], tensors: Arrays) -> None:
        for name in names:
            del tensors[name]

    return change


def sets(name: str, value: Callable[[Arrays], Any]) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, tensors: tensors.update({name: value(tensors)})


def says(**changes: Any) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, tensors: config.update(changes)


def spoiled(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array.flat[5] = value
    return array


_IDS = "eagle_aux_hidden_state_layer_ids"
# Kind, what is done to it, field, words of the problem.
MISFITS: list[tuple[Kind, Callable[[dict[str, Any], Arrays], None], str, str]] = [
    ("eagle3", says(hidden_size=64), "hidden_size", "is not the target's 32"),
    ("eagle3", says(target_hidden_size=64), "target_hidden_size", "is not the target's 32"),
    ("eagle3", says(vocab_size=99), "vocab_size", "is not the target's 61"),
    ("eagle3", says(draft_vocab_size=99), "draft_vocab_size", "more than the target's 61"),
    ("eagle3", says(draft_vocab_size=16), "tensor", "has shape (15,), expected (16,)"),
    ("eagle3", says(num_hidden_layers=2), "num_hidden_layers", "more than the one layer"),
    ("eagle3", says(norm_before_residual=True), "norm_before_residual", "not supported"),
    ("eagle3", says(eagle_config=[1]), "eagle_config", "is no object"),
    ("eagle3", says(eagle_config={_IDS: "1"}), _IDS, "is no list of layers"),
    ("eagle3", says(eagle_config={_IDS: []}), _IDS, "is no list of layers"),
    ("eagle3", says(eagle_config={_IDS: [1, 2, 6]}), _IDS, "the target's are 0..5"),
    ("eagle3", says(eagle_config=None, **{_IDS: [0, 2, 3]}), _IDS, "the target's are 0..5"),
    ("eagle3", says(eagle_config={_IDS: [1, 2]}), "tensor", "expected (32, 64)"),
    ("eagle3", says(architectures=["GPT"]), "architectures", "is not supported as eagle3"),
    ("eagle3", says(architectures=[]), "architectures", "is not supported as eagle3"),
    ("eagle3", says(num_attention_heads=2), "tensor", "expected (16, 64)"),
    ("eagle3", says(head_dim=7), "head_dim", "is odd"),
    ("eagle3", without("norm.weight"), "tensor", "is missing"),
    ("eagle3", without("d2t", "t2d"), "tensor", "is missing, to map 15 tokens"),
    ("eagle3", without("d2t"), "tensor", "is missing beside t2d"),
    ("eagle3", sets("more.weight", lambda t: t["fc.weight"]), "tensor", "is not part of"),
    ("eagle3", sets("d2t", lambda t: t["d2t"] + 3), "tensor", "maps to token 61"),
    ("eagle3", sets("d2t", lambda t: t["d2t"] - 3), "tensor", "maps to token -1"),
    ("eagle3", sets("d2t", lambda t: t["d2t"][::-1].copy()), "tensor", "does not rise"),
    ("eagle3", sets("d2t", lambda t: t["d2t"].astype(np.float32)), "tensor", "dtype F32"),
    ("eagle3", sets("d2t", lambda t: t["d2t"][None]), "tensor", "has shape (1, 15)"),
    ("eagle3", sets("t2d", lambda t: ~t["t2d"]), "tensor", "does not name the 15 tokens"),
    ("eagle3", sets("t2d", lambda t: t["t2d"][:-1]), "tensor", "does not name the 15 tokens"),
    ("eagle3", sets("lm_head.weight", lambda t: t["fc.weight"]), "tensor", "expected (15, 32)"),
    (
        "eagle3",
        sets("embed_tokens.weight", lambda t: np.ones((60, 32), "f")),
        "tensor",
        "expected (61, 32)",
    ),
    (
        "eagle3",
        sets("fc.weight", lambda t: spoiled(t["fc.weight"], np.nan)),
        "tensor",
        "float32 does not hold",
    ),
    (
        "eagle3",
        sets("lm_head.weight", lambda t: spoiled(t["lm_head.weight"], np.inf)),
        "tensor",
        "float32 does not hold",
    ),
    ("eagle", says(draft_vocab_size=61), "kind", "tensors are those of eagle"),
    ("eagle", says(bias=False), "bias", "but fc.bias is stored"),
    ("eagle", says(bias="yes"), "bias", "is no boolean"),
    ("eagle", without("fc.bias"), "bias", "but fc.bias is not stored"),
    ("eagle", says(num_hidden_layers=2), "num_hidden_layers", "more than the one layer"),
    (
        "eagle",
        sets("layers.1.mlp.up_proj.weight", lambda t: t["fc.weight"]),
        "tensor",
        "is not part of",
    ),
    ("eagle", says(architectures=["Qwen2ForCausalLM"]), "architectures", "not supported as eagle"),
    ("medusa", says(medusa_num_heads=2), "medusa_num_heads", "is not the 3 that are stored"),
    ("medusa", says(medusa_num_layers=10**9), "medusa_num_layers", "is not the 2 that are stored"),
    ("medusa", says(medusa_num_heads=None), "medusa_num_heads", "is no integer"),
    ("medusa", says(hidden_size=64), "hidden_size", "is not the target's 32"),
    ("medusa", says(vocab_size=64), "vocab_size", "is not the target's 61"),
    ("medusa", without("1.2.weight"), "tensor", "is missing, though other heads have theirs"),
    ("medusa", without("1.1.linear.bias"), "tensor", "is missing"),
    ("medusa", sets("0.2.weight", lambda t: t["0.2.weight"][:9]), "tensor", "expected (61, 32)"),
    ("draft-model", says(vocab_size=64), "vocab_size", "is not the target's 61"),
    ("draft-model", says(num_hidden_layers=2), "tensor", "is missing"),
    ("draft-model", says(num_hidden_layers=10**9), "num_hidden_layers", "is above 10000"),
    ("draft-model", says(architectures=["GPT"]), "architecture", "is not supported yet"),
    ("draft-model", says(medusa_num_heads=2), "kind", "tensors are those of draft-model"),
    ("draft-model", says(eagle_config={}), "kind", "tensors are those of draft-model"),
]


@pytest.mark.parametrize("row", range(len(MISFITS)))
def test_a_misfit_is_named(row: int, tmp_path: Path) -> None:
    kind, change, field, problem = MISFITS[row]
    config, tensors = MAKERS[kind]()
    change(config, tensors)
    with pytest.raises(InputError) as caught:
        made(tmp_path, config, tensors)
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_a_draft_model_of_another_width_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    wide = dataclasses.replace(TARGET, hidden_size=48)
    config, tensors = tiny_heads.draft_model(wide, IDS)
    with pytest.raises(InputError, match=r"cannot lend the model.embed_tokens.weight"):
        made(tmp_path, config, tensors)
    tensors["model.embed_tokens.weight"] = np.ones((61, 48), np.float32)
    with pytest.raises(InputError, match=r"cannot lend the lm_head.weight"):
        made(tmp_path, config, tensors)
    tensors["lm_head.weight"] = np.ones((len(IDS), 48), np.float32)
    assert made(tmp_path, config, tensors).kind == "draft-model"


def test_kinds_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    for actual, maker in MAKERS.items():
        folder = tiny_heads.write(tmp_path / actual, *maker())
        for kind in get_args(Kind):
            if kind == actual:
                assert load(folder, kind=kind).kind == kind
            else:
                with pytest.raises(InputError, match=f"which is {actual}; load it as {actual}"):
                    load(folder, kind=kind)


def test_no_directory_no_file_and_pickles(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no directory"):
        load(tmp_path / "none")
    with pytest.raises(InputError, match="is no path"):
        load(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"config.json.* does not exist"):
        load(tmp_path)
    config, _ = tiny_heads.medusa(TARGET)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"holds neither model.safetensors nor"):
        load(tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(InputError, match="is a pickle"):
        load(tmp_path)


DAMAGES = st.tuples(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=3),
    st.floats(0, 1) | st.just(1.0),
)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kind=st.sampled_from(get_args(Kind)), damage=DAMAGES)
def test_a_damaged_file_is_refused_or_does_no_harm(
    name: str, kind: Kind, damage: tuple[list[tuple[float, bytes]], float], tmp_path: Path
) -> None:
    folder = tiny_heads.write(tmp_path / kind, *MAKERS[kind]())
    changes, end = damage
    data = bytearray((folder / name).read_bytes())
    for place, value in changes:
        start = int(place**4 * len(data))
        data[start : start + len(value)] = value
    (folder / name).write_bytes(data[: int(end * len(data))])
    message = "it was; harmless"
    try:
        found = load(folder)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found.params))
    except InputError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    assert "; " in message
