"""From the drafting flags to a drafter."""

from __future__ import annotations

import jspec
from experiments import flags, models
from jspec.errors import InputError, require

# Flag -> the drafter that it belongs to.
_OWNER = {
    "draft_model": "draft-model",
    "exit_layers": "early-exit",
    "ngram_max": "ngram",
    "ngram_min": "ngram",
}


def check_flags() -> None:
    """Raise `InputError` where the drafting flags contradict each other; reads no model."""
    drafter = flags.DRAFTER.value
    for holder in (flags.DRAFT_MODEL, flags.EXIT_LAYERS, flags.NGRAM_MAX, flags.NGRAM_MIN):
        owner = _OWNER[holder.name]
        require(
            not holder.present or drafter == owner,
            holder.name,
            holder.value,
            f"has no effect with --drafter={drafter}",
            f"leave it out, or give --drafter={owner}",
        )
    if drafter == "draft-model":
        require(
            bool(flags.DRAFT_MODEL.value),
            "draft_model",
            flags.DRAFT_MODEL.value,
            "names no model for --drafter=draft-model",
            "give a smaller model of the target's family",
        )
    if drafter == "early-exit":
        require(
            flags.EXIT_LAYERS.value is not None and flags.EXIT_LAYERS.value >= 1,
            "exit_layers",
            flags.EXIT_LAYERS.value,
            "is no number of layers for --drafter=early-exit",
            "give at least 1 and fewer than the target has",
        )
    if drafter == "ngram":
        shortest, longest = flags.NGRAM_MIN.value, flags.NGRAM_MAX.value
        require(shortest >= 1, "ngram_min", shortest, "is below 1", "match at least one token")
        require(
            longest >= shortest,
            "ngram_max",
            longest,
            f"is below ngram_min ({shortest})",
            "give ngram_max >= ngram_min",
        )


def load(target: jspec.Model) -> jspec.BoundDrafter | None:
    """Return the drafter that the flags name, None for plain decoding.

    Raises:
        InputError: the draft model cannot be loaded or does not fit, or the flags are wrong.
    """
    check_flags()
    drafter = flags.DRAFTER.value
    try:
        if drafter == "ngram":
            return jspec.ngram(flags.NGRAM_MAX.value, flags.NGRAM_MIN.value)
        if drafter == "draft-model":
            return jspec.draft_model(target, models.load(flags.DRAFT_MODEL))
        if drafter == "early-exit":
            return jspec.early_exit(target, flags.EXIT_LAYERS.value or 0)
    except InputError as error:
        # The library speaks of its own parameters; here they are flags.
        named = {
            "drafter": flags.DRAFT_MODEL.name,
            "layers": flags.EXIT_LAYERS.name,
            "max_n": flags.NGRAM_MAX.name,
            "min_n": flags.NGRAM_MIN.name,
        }
        field = named.get(error.field, error.field)
        raise InputError(field, error.value, error.problem, error.remedy) from error
    return None
