"""The peer is only given what it computes alike."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments import peers
from jspec.config import RopeConfig
from jspec.errors import InputError
from tests import tiny


def test_a_llama_in_float32_is_alike() -> None:
    peers._refuse_unlike(tiny.model())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"logit_softcap": 30.0}, "logit_softcap"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope": RopeConfig(scaling="linear", factor=2.0)}, "rope"),
    ],
)
def test_what_the_peer_would_leave_out_is_refused(changes: dict[str, object], name: str) -> None:
    model = tiny.model()
    config = dataclasses.replace(model.config, **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"has {name}, which the peer"):
        peers._refuse_unlike(dataclasses.replace(model, config=config))


def test_other_weights_are_refused() -> None:
    model = tiny.model()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    with pytest.raises(InputError, match="not float32"):
        peers._refuse_unlike(dataclasses.replace(model, params=params))
