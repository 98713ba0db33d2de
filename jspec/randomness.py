"""Random streams that never repeat a draw and depend on nothing but the request.

A key is fold(seed, committed length at the round's start, node index, purpose). The start length
strictly grows, so no draw is used twice; nothing else enters, so a row's draws do not depend on its
slot, its batch neighbours or the order of arrival. Threefry only: "rbg" bits change with the batch.
"""

from __future__ import annotations

import enum
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np


class Purpose(enum.IntEnum):
    """What a draw is for. Streams of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2


def seed_words(seed: int | None, sample: int = 0) -> np.ndarray:
    """Return the stream of a request's sample as [2] uint32.

    Args:
        seed: 64-bit; None takes fresh entropy from the operating system.
        sample: the first one has the seed itself; further ones derive theirs by a hash, so that no
            two samples of seeds near each other share a stream.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    elif sample > 0:
        text = f"{seed}:{sample}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def round_keys(seeds: jax.Array, start_length: jax.Array) -> jax.Array:
    """Return the key of each row's round.

    Args:
        seeds: [B, 2] uint32.
        start_length: [B] int32, the row's committed tokens at the round's start.

    Returns:
        [B] typed threefry keys.
    """
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, start_length)


def node_keys(keys: jax.Array, nodes: jax.Array, purpose: Purpose) -> jax.Array:
    """Return one key a row and node.

    Args:
        keys: [B] round keys.
        nodes: [B, K] int32 node indices.
        purpose: of the draw.

    Returns:
        [B, K] typed keys.
    """

    def one(key: jax.Array, node: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, node), int(purpose))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, nodes)


def uniforms(keys: jax.Array) -> jax.Array:
    """Return one float32 in [0, 1) for each key, in the keys' shape."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (), jnp.float32)

    return jax.vmap(draw)(keys.reshape(-1)).reshape(keys.shape)


def gumbels(keys: jax.Array, size: int) -> jax.Array:
    """Return [B, size] float32 standard Gumbel noise for [B] keys."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
