"""jspec: a compiled speculative decoder for JAX.

    import jspec

    target = jspec.load()
    prompt = [{"role": "user", "content": "Why is the sky blue?"}]
    for delta in jspec.stream(target, [prompt], drafter=jspec.ngram()):
        print(delta.text, end="", flush=True)

Researchers who bring their own model function or drafter use the pure pieces: `jspec.decoding` (the
round and the chunk), `jspec.verification`, `jspec.sampling`, `jspec.drafting.protocol`,
`jspec.trees`, `jspec.tree_shapes`, `jspec.cache`.
"""

from jspec.api import Prompt, generate, stream, to_token_ids
from jspec.config import ModelConfig, RopeConfig, SpeculationConfig
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
    "draft_model",
    "draft_tree",
    "dynamic_draft_tree",
    "early_exit",
    "early_exit_model",
    "generate",
    "load",
    "ngram",
    "ngram_tree",
    "stream",
    "to_token_ids",
]
