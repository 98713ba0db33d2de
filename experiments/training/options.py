"""Flags of a training, and the settings that they stand for."""

from __future__ import annotations

from typing import Any, cast

from absl import flags as absl_flags

from experiments import flags
from experiments.training.loop import Settings
from experiments.training.losses import Kind
from experiments.training.methods import Wish
from experiments.training.optimizer import Plan
from experiments.training.text import Recipe
from jspec.errors import is_finite, require

KIND = absl_flags.DEFINE_enum(
    "kind", None, ["eagle3", "eagle", "medusa", "draft-model"], "What is trained."
)
DATA = absl_flags.DEFINE_string(
    "data", None, "Folder of text and features, which several kinds can share; else OUTPUT/data."
)
TEXT_TOKENS = absl_flags.DEFINE_integer(
    "text_tokens", 200_000, "Tokens that the target writes to train on, at least."
)
TRAIN_INPUT = absl_flags.DEFINE_multi_string(
    "train_input",
    [],
    "File to train on, given again for more: .jsonl with prompt, turns or messages, which the "
    "target answers, or text a line; .txt as it stands.",
)
EXCLUDE = absl_flags.DEFINE_multi_string(
    "exclude", [], "Evaluation file: conversations that share 8 words in a row with it are dropped."
)
STEPS = absl_flags.DEFINE_integer("steps", 2000, "Steps of the optimiser.")
BATCH_TOKENS = absl_flags.DEFINE_integer(
    "batch_tokens", 4096, "Tokens of a training batch, padding included."
)
ACCUMULATE = absl_flags.DEFINE_integer("accumulate", 1, "Batches whose gradients make a step.")
LEARNING_RATE = absl_flags.DEFINE_float("learning_rate", 5e-4, "The highest; a cosine follows.")
WARMUP = absl_flags.DEFINE_integer("warmup", 50, "Steps over which the learning rate rises.")
WEIGHT_DECAY = absl_flags.DEFINE_float("weight_decay", 0.0, "AdamW's, of matrices.")
CLIP = absl_flags.DEFINE_float("clip", 0.5, "Largest norm of a gradient.")
PROMPT_WEIGHT = absl_flags.DEFINE_float(
    "prompt_weight", 0.2, "What guessing a prompt's token counts; one of the answer counts 1."
)
DRAFTS = absl_flags.DEFINE_integer(
    "drafts", 4, "Drafts in a row that a head is trained for; of medusa, its heads."
)
LOWER = absl_flags.DEFINE_bool(
    "lower_layers", False, "An eagle head reads low, middle and high layers too, as eagle3 does."
)
FEATURE_WEIGHT = absl_flags.DEFINE_float(
    "feature_weight", 0.1, "What an eagle head's error of features counts beside its guesses'."
)
LAYERS = absl_flags.DEFINE_list(
    "layers", [], "Target layers that a draft-model begins with; else the first and the last."
)
DRAFT_VOCAB = absl_flags.DEFINE_integer(
    "draft_vocab", 16384, "Tokens that can be proposed, the most frequent ones; 0 for all."
)
TRAIN_DTYPE = absl_flags.DEFINE_enum(
    "train_dtype",
    "bfloat16",
    ["float32", "bfloat16"],
    "Of the products of training; sums, weights and their moves are float32.",
)
SAVE_EVERY = absl_flags.DEFINE_integer("save_every", 100, "Steps between two checkpoints.")
KEEP = absl_flags.DEFINE_integer("keep", 2, "Checkpoints that stay.")
MEASURE_EVERY = absl_flags.DEFINE_integer(
    "measure_every", 200, "Steps between two measurements on held-out conversations."
)
MEASURE_PROMPTS = absl_flags.DEFINE_integer(
    "measure_prompts", 8, "Held-out prompts decoded in each measurement; 0 for none."
)
MESH_DATA = absl_flags.DEFINE_integer("mesh_data", 1, "Devices that share a batch.")

_LEAST = (
    (STEPS, 1),
    (BATCH_TOKENS, 1),
    (ACCUMULATE, 1),
    (WARMUP, 0),
    (DRAFTS, 1),
    (DRAFT_VOCAB, 0),
    (SAVE_EVERY, 1),
    (KEEP, 1),
    (MEASURE_EVERY, 1),
    (MEASURE_PROMPTS, 0),
    (MESH_DATA, 1),
    (TEXT_TOKENS, 0),
)


def check() -> None:
    """Raise `InputError` where a flag is out of its range or has no effect; reads no model."""
    require(KIND.value is not None, "kind", None, "is not given", "give one, as --kind=eagle3")
    for counted, least in _LEAST:
        _require(counted, counted.value >= least, f"is below {least}", f"give at least {least}")
    for rate in (LEARNING_RATE, CLIP):
        fits = is_finite(rate.value) and rate.value > 0
        _require(rate, fits, "is no number above 0", "give one, as 0.001")
    for share in (WEIGHT_DECAY, PROMPT_WEIGHT):
        fits = is_finite(share.value) and 0 <= share.value <= 1
        _require(share, fits, "is outside [0, 1]", "give a share of 1")
    require(flags.GAMMA.value >= 1, "gamma", flags.GAMMA.value, "drafts nothing", "give at least 1")
    draft_model = KIND.value == "draft-model"
    eagle = KIND.value == "eagle"
    for flag, used in (
        (LAYERS, draft_model),
        (DRAFTS, not draft_model),
        (LOWER, eagle),
        (FEATURE_WEIGHT, eagle),
    ):
        require(
            used or not flag.present,
            flag.name,
            flag.value,
            f"has no effect with --kind={KIND.value}",
            "leave it out",
        )
    require(
        KIND.value != "medusa" or flags.GAMMA.value <= DRAFTS.value,
        "gamma",
        flags.GAMMA.value,
        f"is more than the {DRAFTS.value} heads",
        "give at most --drafts",
    )
    require(
        TEXT_TOKENS.value > 0 or bool(TRAIN_INPUT.value),
        "text_tokens",
        TEXT_TOKENS.value,
        "leaves nothing to train on",
        "ask for some, or give --train_input=FILE",
    )


def wish(default_layers: tuple[int, ...]) -> Wish:
    """Return what is to be trained.

    Args:
        default_layers: of a draft model where the flag does not say.
    """
    layers = tuple(flags.listed(LAYERS.name, LAYERS.value, int)) or default_layers
    kind = cast("Kind", KIND.value)
    return Wish(
        kind,
        DRAFTS.value,
        layers,
        DRAFT_VOCAB.value,
        TRAIN_DTYPE.value,
        LOWER.value,
        FEATURE_WEIGHT.value,
    )


def recipe() -> Recipe:
    """Return what text the target writes.

    Raises:
        InputError: it would be none.
    """
    seed = _seed()
    require(
        flags.BATCH_SIZE.value >= 1,
        "batch_size",
        flags.BATCH_SIZE.value,
        "is below 1",
        "write at least one",
    )
    return Recipe(
        seed=seed, conversations=flags.BATCH_SIZE.value, answer_tokens=flags.MAX_NEW_TOKENS.value
    )


def settings() -> Settings:
    """Return what the loop goes by."""
    plan = Plan(
        steps=STEPS.value,
        warmup=min(WARMUP.value, STEPS.value - 1),
        learning_rate=LEARNING_RATE.value,
        weight_decay=WEIGHT_DECAY.value,
        clip=CLIP.value,
    )
    return Settings(
        plan=plan,
        batch_tokens=BATCH_TOKENS.value,
        accumulate=ACCUMULATE.value,
        prompt_weight=PROMPT_WEIGHT.value,
        seed=_seed(),
        save_every=SAVE_EVERY.value,
        measure_every=MEASURE_EVERY.value,
        keep=KEEP.value,
    )


def _require(flag: absl_flags.FlagHolder[Any], fits: bool, problem: str, remedy: str) -> None:
    require(fits, flag.name, flag.value, problem, remedy)


def _seed() -> int:
    seed = flags.SEED.value
    assert seed is not None  # it has a default here
    return seed
