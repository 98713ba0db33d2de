"""The law of what is decoded at a real vocabulary, with every parameter on: chi-square."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import decoding
from jspec.cache import KVCache
from jspec.config import ModelConfig, Verification
from jspec.decoding import Program
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.protocol import Drafter
from jspec.trees import Topology
from pallas_kernels.dispatch import Kernels
from tests import chi_square, table_models, tiny
from tests.jspec.exact_rounds import params
from tests.oracles import edits as oracle
from tests.oracles import transforms
from tests.oracles.edits import Wishes
from tests.oracles.transforms import Transforms

run_chunk = jax.jit(decoding.decode_chunk, static_argnums=0)

VOCAB = 49152
CELLS = 8


@dataclasses.dataclass(frozen=True)
class Parity:
    """Logits are params[token % 2], params being [2, V]; it can draft from others of the kind."""

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def config(self) -> ModelConfig:
        return tiny.CONFIG

    @property
    def kernels(self) -> Kernels:
        return kv.DEFAULT_KERNELS

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        buffer = (jnp.zeros((batch, 1, 1, 1), dtype),)
        return KVCache(buffer, buffer, jnp.zeros(batch, jnp.int32))

    def forward(
        self,
        params: jax.Array,
        tokens: jax.Array,
        cache: KVCache,
        topology: Topology,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
        return tokens.reshape(1, -1), cache, ()

    def logits(self, params: jax.Array, hidden: jax.Array) -> jax.Array:
        return jnp.take(params, hidden[0] % 2, axis=0)


@dataclasses.dataclass(frozen=True)
class ParityDrafter(table_models.TableDrafter):
    """A `TableDrafter` whose table is [2, V], by the last token's parity."""

    def row(self, params: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.take(params, token % 2, axis=0)


REAL = Wishes(
    bias={10: 2.0, 49000: 1.0},
    repetition=1.2,
    frequency=0.6,
    presence=0.4,
    bad_words=(),
    min_new=2,
    stops=(),
)


TRUNCATED = Transforms(1.1, 250, 0.95, 0.002)
CUT = Transforms(1.1, 0, 1.0, 0.05)  # by min-p alone, which costs a tree's nodes no search


def _real_drafter(name: str, draft: np.ndarray) -> tuple[Drafter, Any, int]:
    """Return a chain or tree drafter, its parameters and gamma."""
    if name in ("dense", "point-mass"):
        return ParityDrafter(name == "point-mass"), draft, 2
    parents = (-1, 0, 0, 1)
    bound = draft_tree(tiny.CONFIG, (), parents, name)  # type: ignore[arg-type]
    drafter = dataclasses.replace(bound.drafter, model=Parity())  # type: ignore[type-var]
    return drafter, dataclasses.replace(bound.params, model=draft), len(parents) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule", "row"),
    [
        ("dense", "token", TRUNCATED),
        ("point-mass", "block", TRUNCATED),
        ("independent", "token", CUT),
        ("without-replacement", "token", CUT),
        ("top-k", "token", CUT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_two_tokens_at_a_real_vocabulary(
    name: str, rule: Verification, row: Transforms
) -> None:
    generator = np.random.default_rng(5)
    target = generator.normal(0, 2.5, (2, VOCAB)).astype(np.float32)
    draft = (target + generator.normal(0, 1.0, target.shape)).astype(np.float32)
    best = np.argsort(-target[1])[:6].tolist()
    # The most probable tokens are a bad word, the end of one, a held-back stop, and in the prompt.
    wishes = REAL._replace(bad_words=((best[0],), (best[1], best[2])), stops=(best[3],))
    prompt = [best[4], 7]
    batch, draws = 32, 640
    emitted, accepted = [], 0
    asked = [params(row, wishes, 4)] * batch
    drafter, given, gamma = _real_drafter(name, draft)
    program = Program(Parity(), drafter, gamma, rule)
    for start in range(0, draws, batch):
        state = table_models.start(
            Parity(),  # type: ignore[arg-type]
            target,
            np.tile(np.array(prompt), (batch, 1)),
            asked,
            np.arange(start, start + batch),
            gamma,
            drafter,
            wishes.stops,
            given,
        )
        # Two rounds commit two tokens at least.
        after, _ = run_chunk(program, target, given, state, np.int32(2), np.bool_(False))
        emitted.append(np.asarray(after.tokens)[:, 2:4])
        accepted += int(np.asarray(after.length).sum()) - batch * (len(prompt) + 2)
    assert accepted > draws / 40
    first, second = np.concatenate(emitted).T

    law = transforms.law(oracle.edited(target[1], wishes, prompt, []), row)
    support = np.flatnonzero(law).tolist()
    after_first = {
        x: transforms.law(oracle.edited(target[x % 2], wishes, prompt, [x]), row) for x in support
    }
    assert set(first) <= set(support)
    assert all(after_first[x][y] > 0 for x, y in zip(first.tolist(), second.tolist(), strict=True))
    # Cells of about equal mass: of the first token, and of the second whatever the first.
    of_second = np.einsum("x,xv->v", law[support], np.stack([after_first[x] for x in support]))
    cell = [chi_square.cells(part, CELLS) for part in (law, of_second)]
    expected = np.zeros((CELLS, CELLS))
    for x in support:
        expected[cell[0][x]] += law[x] * np.bincount(
            cell[1], weights=after_first[x], minlength=CELLS
        )
    observed = np.zeros((CELLS, CELLS))
    np.add.at(observed, (cell[0][first], cell[1][second]), 1)
    assert chi_square.p_value(observed, expected) > chi_square.LEAST_P
