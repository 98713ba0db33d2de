"""jspec: a compiled speculative decoder for JAX.

    import jspec

    target = jspec.load()
    prompt = [{"role": "user", "content": "Why is the sky blue?"}]
    for delta in jspec.stream(target, [prompt], drafter=jspec.ngram()):
        print(delta.text, end="", flush=True)

Researchers who bring their own model function or drafter use the pure pieces: `jspec.decoding` (the
round and the chunk), `jspec.verification`, `jspec.sampling`, `jspec.drafting.protocol`,
`jspec.trees`, `jspec.tree_shapes`, `jspec.cache`.

What is named here is imported when it is first used, so that one piece, `jspec.errors` say, comes
without the readers of checkpoints and tokenizers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.api import Prompt, generate, stream, to_token_ids
    from jspec.config import ModelConfig, RopeConfig, SpeculationConfig, TypicalAcceptance
    from jspec.drafting import BoundDrafter
    from jspec.drafting.ngram import ngram
    from jspec.drafting.ngram_tree import ngram_tree
    from jspec.errors import InputError
    from jspec.generation import Decoder
    from jspec.model import Model, early_exit_model, load
    from jspec.model import draft_model_for as draft_model
    from jspec.model import draft_tree_for as draft_tree
    from jspec.model import dynamic_draft_tree_for as dynamic_draft_tree
    from jspec.model import early_exit_of as early_exit
    from jspec.requests import Completion, Delta, Request, TokenLogProbs
    from jspec.sampling_params import SamplingParams
    from jspec.trained import load_drafter

# Name -> the module that has it, and its name there.
_HOMES = {
    "BoundDrafter": ("jspec.drafting", "BoundDrafter"),
    "Completion": ("jspec.requests", "Completion"),
    "Decoder": ("jspec.generation", "Decoder"),
    "Delta": ("jspec.requests", "Delta"),
    "InputError": ("jspec.errors", "InputError"),
    "Model": ("jspec.model", "Model"),
    "ModelConfig": ("jspec.config", "ModelConfig"),
    "Prompt": ("jspec.api", "Prompt"),
    "Request": ("jspec.requests", "Request"),
    "RopeConfig": ("jspec.config", "RopeConfig"),
    "SamplingParams": ("jspec.sampling_params", "SamplingParams"),
    "SpeculationConfig": ("jspec.config", "SpeculationConfig"),
    "TypicalAcceptance": ("jspec.config", "TypicalAcceptance"),
    "TokenLogProbs": ("jspec.requests", "TokenLogProbs"),
    "draft_model": ("jspec.model", "draft_model_for"),
    "draft_tree": ("jspec.model", "draft_tree_for"),
    "dynamic_draft_tree": ("jspec.model", "dynamic_draft_tree_for"),
    "early_exit": ("jspec.model", "early_exit_of"),
    "early_exit_model": ("jspec.model", "early_exit_model"),
    "generate": ("jspec.api", "generate"),
    "load": ("jspec.model", "load"),
    "load_drafter": ("jspec.trained", "load_drafter"),
    "ngram": ("jspec.drafting.ngram", "ngram"),
    "ngram_tree": ("jspec.drafting.ngram_tree", "ngram_tree"),
    "stream": ("jspec.api", "stream"),
    "to_token_ids": ("jspec.api", "to_token_ids"),
}

__all__ = [
    "BoundDrafter",
    "Completion",
    "Decoder",
    "Delta",
    "InputError",
    "Model",
    "ModelConfig",
    "Prompt",
    "Request",
    "RopeConfig",
    "SamplingParams",
    "SpeculationConfig",
    "TokenLogProbs",
    "TypicalAcceptance",
    "draft_model",
    "draft_tree",
    "dynamic_draft_tree",
    "early_exit",
    "early_exit_model",
    "generate",
    "load",
    "load_drafter",
    "ngram",
    "ngram_tree",
    "stream",
    "to_token_ids",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("_"):
        raise missing
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise missing from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
