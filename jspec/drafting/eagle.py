"""Drafting a chain with an EAGLE head (arXiv 2401.15077, 2503.01840), which goes on with features.

`jspec.drafting.eagle_state` says which features enter the head when.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, chain_draws
from jspec.drafting.chain_draws import Drafted
from jspec.drafting.eagle_state import EagleState, EagleStateDrafter
from jspec.drafting.protocol import MOST_NODES, Context, Proposal
from jspec.errors import require
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.eagle_head import EagleHead
from pallas_kernels.dispatch import Kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleChainParams:
    """What `EagleDrafter` runs with.

    Attributes:
        head: the head's.
    """

    head: EagleParams


@dataclasses.dataclass(frozen=True)
class EagleDrafter(EagleStateDrafter[EagleChainParams]):
    """Drafts a chain: `gamma` passes of the head, the first over all features that wait.

    Attributes:
        min_confidence: below it a chain ends; see `chain_draws`.
    """

    min_confidence: float = 0.0

    def propose(
        self, params: EagleChainParams, state: EagleState, context: Context, gamma: int
    ) -> tuple[Proposal, EagleState]:
        """Draw `gamma` drafts a row under the row's own transforms."""
        batch = context.length.shape[0]
        output, true = self.take_in(params, state, context, gamma + 1)

        def choose(step: jax.Array, output: jax.Array, drafted: Drafted) -> Drafted:
            logits = self.logits(params, output, context.vocab_size)
            return chain_draws.choose(context, step, logits, drafted, self.min_confidence)

        def step(
            index: jax.Array, carry: tuple[Drafted, tuple[jax.Array, KVCache]]
        ) -> tuple[Drafted, tuple[jax.Array, KVCache]]:
            drafted, (guess, cache) = carry
            guess, cache = self.head.forward(
                params.head, drafted.last[:, None], guess, cache, trees.chain(0)
            )
            cache = kv.commit(cache, jnp.ones(batch, jnp.int32))
            return choose(index, guess, drafted), (guess, cache)

        first = choose(jnp.int32(0), output, chain_draws.nothing(context, gamma))
        drafted, (_, cache) = chain_draws.go_on(1, gamma, step, (first, (output, true)))
        proposal = drafted.proposal(self.deepest(true, context))
        return proposal, self.without_guesses(state, cache, true)


def checked(target: ModelConfig, config: EagleConfig) -> EagleConfig:
    """Return a head's configuration if it fits its target.

    Args:
        target: of the target.
        config: of the head.

    Raises:
        InputError: the head is of another hidden size, or reads layers that the target lacks.
    """
    require(
        config.layer.hidden_size == target.hidden_size,
        "hidden_size",
        config.layer.hidden_size,
        f"is not the target's {target.hidden_size}",
        "use a head that was trained for this target",
    )
    outside = [layer for layer in config.feature_layers if not 0 <= layer <= target.num_layers]
    require(
        not outside,
        "feature_layers",
        config.feature_layers,
        f"has layers beyond the target's {target.num_layers}",
        "use a head that was trained for this target",
    )
    return config


def eagle(
    target_config: ModelConfig,
    config: EagleConfig,
    params: EagleParams,
    kernels: Kernels = kv.DEFAULT_KERNELS,
    min_confidence: float = 0.0,
) -> BoundDrafter:
    """Return a drafter that drafts a chain with an EAGLE head.

    Args:
        target_config: of the target that it was trained for.
        config: of the head.
        params: of the head; embedding and head may be the target's arrays.
        kernels: what its programs ask for.
        min_confidence: the chain ends before the first draft that the head is less sure of.

    Raises:
        InputError: the head does not fit the target, or `min_confidence` is no probability.
    """
    chain_draws.check_confidence(min_confidence)
    head = EagleHead(checked(target_config, config), kernels)
    drafter = EagleDrafter(head, MOST_NODES, min_confidence)
    return BoundDrafter(config.kind, drafter, EagleChainParams(params))
