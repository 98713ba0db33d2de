"""Drafting with a smaller language model of its own cache, and early exit from the target itself.

Early exit runs the target's first layers and its head as a draft model: the same code, parameters
shared with the target.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, chain_draws
from jspec.drafting.chain_draws import Drafted
from jspec.drafting.protocol import Context, Outcome, Proposal
from jspec.drafting.vocabulary import Vocabulary, checked, prune, spread
from jspec.errors import require, require_integer
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from pallas_kernels.dispatch import Kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftParams:
    """What a draft model runs with.

    Attributes:
        model: its parameters; a head of Vd rows where it has a vocabulary of its own.
        vocabulary: [Vd] int32, rising, the tokens that it can propose; None where these are all.
    """

    model: TransformerParams
    vocabulary: jax.Array | None = None

    def known(self, config: ModelConfig) -> int:
        """Return how many tokens a draft model of this configuration can propose."""
        return config.vocab_size if self.vocabulary is None else self.vocabulary.size


def pruned(
    config: ModelConfig, params: TransformerParams, ids: Vocabulary | None
) -> tuple[ModelConfig, DraftParams]:
    """Return a draft model that proposes only the tokens `ids`; None leaves it as it is.

    Raises:
        InputError: `ids` is no vocabulary of the model's tokens.
    """
    if ids is None:
        return config, DraftParams(params)
    tokens = config.vocab_size if config.token_count is None else config.token_count
    params, kept = prune(params, checked(ids, tokens))
    # The head has no rows left that only pad it.
    config = dataclasses.replace(config, token_count=None, tie_embeddings=False)
    return config, DraftParams(params, kept)


@dataclasses.dataclass(frozen=True)
class DraftModelDrafter:
    """Drafts a chain, token by token, from a language model with a cache of its own.

    Its cache lags the committed tokens by one entry (the pending token) or, after a full
    acceptance, by two: the last draft was sampled but never run. The first step of the next round
    runs both, so the cache has no hole.

    Attributes:
        model: the draft model.
        min_confidence: below it a chain ends; see `chain_draws`.
    """

    model: Transformer
    min_confidence: float = 0.0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """It has features of its own."""
        return ()

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache."""
        return self.model.init_cache(batch, capacity, dtype)

    def synced(self, state: KVCache, length: jax.Array) -> jax.Array:
        """Return the cache's own length."""
        return state.length

    def extend(
        self,
        params: DraftParams,
        state: KVCache,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> KVCache:
        """Run the tokens through the draft model."""
        _, state, _ = self.model.forward(
            params.model, tokens, state, trees.chain(tokens.shape[1] - 1)
        )
        return kv.commit(state, count)

    def propose(
        self, params: DraftParams, state: KVCache, context: Context, gamma: int
    ) -> tuple[Proposal, KVCache]:
        """Draw `gamma` drafts a row under the row's own transforms."""
        batch = context.length.shape[0]

        def choose(step: jax.Array, hidden: jax.Array, drafted: Drafted) -> Drafted:
            logits = self.model.logits(params.model, hidden)
            logits = spread(logits, params.vocabulary, context.vocab_size)
            return chain_draws.choose(context, step, logits, drafted, self.min_confidence)

        def step(index: jax.Array, carry: tuple[Drafted, KVCache]) -> tuple[Drafted, KVCache]:
            drafted, state = carry
            last = drafted.last[:, None]
            hidden, state, _ = self.model.forward(params.model, last, state, trees.chain(0))
            state = kv.commit(state, jnp.ones(batch, jnp.int32))
            return choose(index, hidden, drafted), state

        # Catch up on the one or two committed tokens that the cache lacks.
        behind = context.length - state.length
        slot = state.length[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(context.tokens, slot, axis=1, mode="clip")
        hidden, state, _ = self.model.forward(params.model, tokens, state, trees.chain(1))
        state = kv.commit(state, behind)
        column = jnp.arange(batch, dtype=jnp.int32) * 2 + jnp.clip(behind - 1, 0, 1)
        nothing = chain_draws.nothing(context, gamma)
        first = choose(jnp.int32(0), jnp.take(hidden, column, axis=1), nothing)
        drafted, state = chain_draws.go_on(1, gamma, step, (first, state))

        # Beyond its own context the draft model knows no positions.
        return drafted.proposal(self.model.config.max_context - context.length + 1), state

    def absorb(self, state: KVCache, outcome: Outcome) -> KVCache:
        """Cut the cache to the committed tokens short of the pending one."""
        return kv.truncate(state, outcome.length - 1)

    def permute_rows(self, state: KVCache, source: jax.Array) -> KVCache:
        """Move rows."""
        return kv.permute_rows(state, source)


def draft_model(
    config: ModelConfig,
    params: TransformerParams,
    kernels: Kernels = kv.DEFAULT_KERNELS,
    vocabulary: Vocabulary | None = None,
    min_confidence: float = 0.0,
) -> BoundDrafter:
    """Return a drafter that runs a language model of the target's tokenizer.

    Args:
        config: of the draft model.
        params: of the draft model.
        kernels: what its programs ask for.
        vocabulary: the only tokens that it proposes; None for all.
        min_confidence: the chain ends before the first draft that the model is less sure of.

    Raises:
        InputError: `vocabulary` is none of the model's tokens, or `min_confidence` no probability.
    """
    chain_draws.check_confidence(min_confidence)
    config, draft_params = pruned(config, params, vocabulary)
    name, functions = f"draft-model-{config.num_layers}l", Transformer(config, kernels)
    return BoundDrafter(name, DraftModelDrafter(functions, min_confidence), draft_params)


def first_layers(
    config: ModelConfig, params: TransformerParams, layers: int
) -> tuple[ModelConfig, TransformerParams]:
    """Return the model that is the target's first layers and its head.

    Args:
        config: of the target.
        params: of the target; shared, not copied.
        layers: how many layers to run, below the target's number.

    Raises:
        InputError: `layers` is out of range.
    """
    require_integer("layers", layers)
    require(
        1 <= layers < config.num_layers,
        "layers",
        layers,
        f"is outside 1..{config.num_layers - 1}",
        "exit after fewer layers than the target has",
    )
    config = dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])
    return config, dataclasses.replace(params, layers=params.layers[:layers])


def early_exit(
    config: ModelConfig,
    params: TransformerParams,
    layers: int,
    kernels: Kernels = kv.DEFAULT_KERNELS,
    vocabulary: Vocabulary | None = None,
) -> BoundDrafter:
    """Return a drafter that runs the target's first `layers` layers and its head.

    Args:
        config: of the target.
        params: of the target; shared, not copied.
        layers: how many layers to run, below the target's number.
        kernels: what its programs ask for.
        vocabulary: the only tokens that it proposes; None for all.

    Raises:
        InputError: `layers` is out of range, or `vocabulary` none of the model's tokens.
    """
    bound = draft_model(*first_layers(config, params, layers), kernels, vocabulary)
    return dataclasses.replace(bound, name=f"early-exit-{layers}l")
