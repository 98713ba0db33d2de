"""Flags that the experiments share, and the settings that they stand for."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import TypeVar, get_args

from absl import flags

from jspec import hub
from jspec.config import SpeculationConfig, Verification
from jspec.errors import InputError
from jspec.sampling_params import SamplingParams

_Number = TypeVar("_Number", int, float)

EXPERIMENT = flags.DEFINE_string("experiment", None, "What to run, one of the list above.")

MODEL = flags.DEFINE_string(
    "model",
    hub.DEFAULT_MODEL,
    "Target: a directory (Hugging Face or written by jspec), a GGUF file, a Hugging Face id "
    "organisation/name, or smollm2.",
)
DTYPE = flags.DEFINE_enum(
    "dtype",
    "float32",
    ["float32", "bfloat16", "float16"],
    "Of weights, activations and (but not on a CPU) cache. float16 is slow on a CPU.",
)
WEIGHTS = flags.DEFINE_enum(
    "weights",
    "same",
    ["same", "int8"],
    "Matrices of target and draft model: of --dtype as they are, or int8 with a scale a channel.",
)
KERNELS = flags.DEFINE_string(
    "kernels",
    "auto",
    "What runs attention, cache and verification: auto (the platform's Pallas kernels where they "
    "can run, XLA elsewhere), xla, or one by name; for single ops as tree_attention:xla, separated "
    "by commas.",
)

DRAFTER = flags.DEFINE_enum(
    "drafter",
    "ngram",
    ["none", "ngram", "trained", "draft-model", "early-exit"],
    "What proposes tokens: nothing; the text's own earlier words (prompt lookup); heads or a small "
    "model trained for the target; a smaller model; or the target's first layers.",
)
TRAINED = flags.DEFINE_string(
    "trained",
    None,
    "Trained drafter: eagle, medusa or draft, which come with jspec for smollm2; or a directory "
    "with EAGLE, EAGLE-3 or Medusa heads or a draft model; for --drafter=trained.",
)
LOOKUP = flags.DEFINE_boolean(
    "lookup",
    False,
    "Draft what followed earlier in the text where it matches, as --drafter=ngram does, and what "
    "was trained elsewhere; for --drafter=trained.",
)
DRAFTER_WEIGHTS = flags.DEFINE_enum(
    "drafter_weights",
    "same",
    ["same", "int8"],
    "int8 rounds the drafter's matrices: drafts cost less where memory is what they wait for, and "
    "the output's law stays; for --drafter=trained.",
)
MIN_CONFIDENCE = flags.DEFINE_float(
    "min_confidence",
    0.0,
    "End a chain before the first draft whose highest probability is below this; a round that is "
    "left without drafts costs a plain step, and the output's law stays. For --drafter=trained, "
    "draft-model and early-exit.",
)
DRAFT_MODEL = flags.DEFINE_string(
    "draft_model", None, "Model that drafts, named as for --model; for --drafter=draft-model."
)
EXIT_LAYERS = flags.DEFINE_integer(
    "exit_layers", None, "Layers of the target that draft; for --drafter=early-exit."
)
NGRAM_MAX = flags.DEFINE_integer(
    "ngram_max", 3, "Longest run of last tokens looked up; for --drafter=ngram."
)
NGRAM_MIN = flags.DEFINE_integer(
    "ngram_min", 2, "Shortest run of last tokens that counts as a match; for --drafter=ngram."
)
GAMMA = flags.DEFINE_integer(
    "gamma", SpeculationConfig.gamma, "Draft tokens a round, 0 to 127; a tree has its own number."
)
TREE = flags.DEFINE_string(
    "tree",
    None,
    "Draft a tree, not a chain: children by level (3,2,1), each node's parent "
    "(parents:-1,0,0,1,2), dynamic (grown anew in every round where the drafter is surest; of "
    "--drafter=ngram, several continuations), or in --experiment=tree optimal.",
)
TREE_NODES = flags.DEFINE_integer(
    "tree_nodes", None, "Drafts of a dynamic tree, at most those of an optimal one; else 15."
)
TREE_DEPTH = flags.DEFINE_integer(
    "tree_depth", None, "Deepest level of a dynamic tree (else 5) or of an optimal one."
)
TREE_WIDTH = flags.DEFINE_integer(
    "tree_width",
    None,
    "Nodes of a dynamic tree's level that grow on, and children of each; most children a node of "
    "an optimal tree (else 4); of --drafter=ngram, continuations looked at (else 8).",
)
DRAWS = flags.DEFINE_enum(
    "draws",
    "without-replacement",
    ["without-replacement", "independent", "top-k"],
    "How a draft model chooses the children of a node of a tree: drawn from its distribution, or "
    "its most probable tokens. Greedy decoding takes the most probable ones.",
)
VERIFICATION = flags.DEFINE_enum(
    "verification",
    SpeculationConfig.verification,
    list(get_args(Verification)),
    "Rule by which drafts are accepted. Under token and block the output's law is exactly the "
    "target's. typical (Medusa's) is LOSSY: it accepts more, and the output has another law; all "
    "results say so.",
)

TEMPERATURE = flags.DEFINE_float(
    "temperature", SamplingParams.temperature, "0 decodes greedily, higher samples more freely."
)
TOP_K = flags.DEFINE_integer(
    "top_k", SamplingParams.top_k, "Sample from the k most probable tokens; 0 keeps all."
)
TOP_P = flags.DEFINE_float(
    "top_p", SamplingParams.top_p, "Sample from the fewest tokens whose probability reaches this."
)
MIN_P = flags.DEFINE_float(
    "min_p", SamplingParams.min_p, "Sample from tokens with this share of the best one's chance."
)
REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty",
    SamplingParams.repetition_penalty,
    "Above 1 makes tokens of prompt and text so far less likely.",
)
FREQUENCY_PENALTY = flags.DEFINE_float(
    "frequency_penalty",
    SamplingParams.frequency_penalty,
    "Taken from a token's logit for every time it was generated; -2 to 2.",
)
PRESENCE_PENALTY = flags.DEFINE_float(
    "presence_penalty",
    SamplingParams.presence_penalty,
    "Taken once from the logit of every token generated; -2 to 2.",
)
LOGIT_BIAS = flags.DEFINE_list(
    "logit_bias", [], "Added to logits: ID:BIAS, several separated by commas."
)
BAD_WORD = flags.DEFINE_multi_string(
    "bad_word", [], "A text that must not be generated; give it again for more."
)
STOP = flags.DEFINE_multi_string(
    "stop", [], "A text before which the output ends; give it again for more."
)
SEED = flags.DEFINE_integer(
    "seed", None, "Of the samples; prompt i takes seed + i. Drawn and recorded when not given."
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", SamplingParams.max_new_tokens, "Most tokens to generate for a prompt."
)
MIN_NEW_TOKENS = flags.DEFINE_integer(
    "min_new_tokens", SamplingParams.min_new_tokens, "No stop ends the text before so many tokens."
)
STOP_TOKEN_IDS = flags.DEFINE_list(
    "stop_token_ids", [], "Token ids that end the text as well, separated by commas."
)
IGNORE_EOS = flags.DEFINE_boolean(
    "ignore_eos", SamplingParams.ignore_eos, "Go on where the model would end the text."
)
LOGPROBS = flags.DEFINE_integer(
    "logprobs",
    None,
    "Write every generated token's log probabilities, and those of this many most probable ones.",
)
PROMPT_LOGPROBS = flags.DEFINE_integer("prompt_logprobs", None, "The same for the prompt's tokens.")
SAMPLES = flags.DEFINE_integer(
    "n", SamplingParams.n, "Samples of every prompt, which is read once for all of them."
)

BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Most prompts decoded together.")
ROUNDS_PER_CHUNK = flags.DEFINE_integer(
    "rounds_per_chunk",
    None,
    "Rounds on the device between two looks of the host; 2 where text is streamed, else "
    f"{SpeculationConfig.rounds_per_chunk}. It never changes the tokens.",
)
OUTPUT = flags.DEFINE_string(
    "output", "results", "Where the run's own folder is made; of batch, that folder itself."
)
PROFILE = flags.DEFINE_boolean(
    "profile", False, "Write a jax.profiler trace into the run's folder, for XProf or Perfetto."
)
COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache",
    "~/.cache/jspec/xla",
    "Where compiled programs are kept, so that the next run starts at once; empty keeps none.",
)
HELP = flags.DEFINE_boolean("help", False, "Show this help.", short_name="h")
HELP_FULL = flags.DEFINE_boolean("helpfull", False, "Show all flags, absl's own too.")


def listed(name: str, items: Sequence[str], kind: type[_Number]) -> list[_Number]:
    """Return a flag's list of numbers of a kind.

    Raises:
        InputError: one is none.
    """
    try:
        return [kind(item) for item in items]
    except ValueError:
        noun = "integers" if kind is int else "numbers"
        raise InputError(
            name, ",".join(items), f"is not a list of {noun}", f"separate {noun} by commas"
        ) from None


def sampling_params() -> SamplingParams:
    """Return what the flags say about sampling, with a seed drawn where none is given.

    Raises:
        InputError: a flag is out of its range.
    """
    try:
        stop_token_ids = tuple(int(item) for item in STOP_TOKEN_IDS.value)
    except ValueError:
        raise InputError(
            "stop_token_ids",
            ",".join(STOP_TOKEN_IDS.value),
            "is not a list of integers",
            "give token ids separated by commas",
        ) from None
    return SamplingParams(
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        min_p=MIN_P.value,
        repetition_penalty=REPETITION_PENALTY.value,
        frequency_penalty=FREQUENCY_PENALTY.value,
        presence_penalty=PRESENCE_PENALTY.value,
        logit_bias=_logit_bias(LOGIT_BIAS.value),
        bad_words=tuple(BAD_WORD.value),
        min_new_tokens=MIN_NEW_TOKENS.value,
        stop=tuple(STOP.value),
        stop_token_ids=stop_token_ids,
        ignore_eos=IGNORE_EOS.value,
        max_new_tokens=MAX_NEW_TOKENS.value,
        logprobs=LOGPROBS.value,
        prompt_logprobs=PROMPT_LOGPROBS.value,
        n=SAMPLES.value,
        seed=secrets.randbits(64) if SEED.value is None else SEED.value,
    )


def _logit_bias(items: list[str]) -> list[tuple[int, float]]:
    try:
        pairs = [item.split(":") for item in items]
        return [(int(token), float(value)) for token, value in pairs]
    except ValueError:
        raise InputError(
            "logit_bias", ",".join(items), "is not a list of ID:BIAS", "write --logit_bias=12:1.5"
        ) from None


def of_prompt(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of prompt `index`: the same, with a seed of its own."""
    return dataclasses.replace(sampling, seed=((sampling.seed or 0) + index) % 2**64)
