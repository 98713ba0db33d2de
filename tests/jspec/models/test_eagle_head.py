"""EAGLE heads against their definition in float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import trees
from jspec.models.eagle import low_middle_high
from jspec.models.eagle_head import EagleHead
from tests import tiny_eagle
from tests.tiny_eagle import KINDS, VOCAB, Variant

# Two branches; the nodes from 3 on are run by themselves.
TREE = trees.from_parents((-1, 0, 0, 1, 2, 2))
EARLIER = 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_then_a_tree_level_by_level(kind: Variant) -> None:
    head, params = EagleHead(tiny_eagle.config(kind)), tiny_eagle.params(kind)
    oracle, rng = tiny_eagle.to_numpy(kind), np.random.default_rng(2)
    row, nodes = (rng.integers(0, VOCAB, size).tolist() for size in (9, TREE.size))
    forward = jax.jit(head.forward)
    given = rng.normal(size=(9, head.target_width))
    guesses = rng.normal(size=(TREE.size, head.config.layer.hidden_size))

    def columns(rows: np.ndarray) -> jax.Array:
        return jnp.asarray(rows.T, jnp.float32)

    def tokens(ids: list[int]) -> jax.Array:
        return jnp.asarray([ids], jnp.int32)

    cache = head.init_cache(1, 32, jnp.float32)
    features = jax.jit(head.fuse)(params, columns(given))
    output, cache = forward(params, tokens(row), features, cache, trees.chain(8))
    entered = oracle.fused(given)
    np.testing.assert_allclose(output.T, oracle.run(row, entered), rtol=1e-4, atol=1e-4)
    logits = jax.jit(head.draft_logits)(params, output)
    expected = [oracle.logits(x, VOCAB)[list(oracle.vocabulary)] for x in np.asarray(output.T)]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)

    cache = kv.commit(cache, jnp.full(1, 9, jnp.int32))
    found = []
    for start, end in ((0, EARLIER), (EARLIER, TREE.size)):
        some = slice(start, end)
        output, cache = forward(
            params, tokens(nodes[some]), columns(guesses[some]), cache, TREE, jnp.int32(start)
        )
        found.append(output.T)
    assert cache.length.tolist() == [9]
    for node, output in enumerate(np.concatenate(found)):
        way = [node]
        while (parent := int(TREE.parents[way[0]])) >= 0:
            way.insert(0, parent)
        whole = oracle.run(
            [*row, *(nodes[n] for n in way)], np.concatenate([entered, guesses[way]])
        )
        np.testing.assert_allclose(output, whole[-1], rtol=1e-4, atol=1e-4)


def test_the_layers_that_eagle3_reads() -> None:
    # As in its authors' code: layers of the output before 2, L / 2 and L - 3.
    assert low_middle_high(32) == (1, 15, 28)
