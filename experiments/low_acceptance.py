"""The warning about a drafter that is of no use: when, and what it says.

A drafter that is wired up wrongly (another tokenizer, a head of another model, features of another
layer) still gives correct output, only slowly. So acceptance near 0 must not pass in silence.
"""

from __future__ import annotations

from jspec import metrics
from jspec.metrics import Counts

# An acceptance rate below this is near 0. An i.i.d. alpha of 0.25 at gamma = 7 is still above it.
THRESHOLD = 0.05
# Fewer drafts, or rounds, are no evidence.
LEAST_PROPOSED = 50
LEAST_ROUNDS = 20

_CAUSES = {
    "ngram": (
        "the text hardly repeats its prompt or itself, which is usual in free chat; "
        "try a higher --ngram_min, a lower --gamma, or another --drafter"
    ),
    "draft-model": (
        "a draft model of another family, tokenizer or chat template, one without fine-tuning "
        "beside a fine-tuned target, or broken weights; try it alone with --model"
    ),
    "early-exit": (
        "too few layers before the exit, or a model that was not trained to exit early; "
        "try more --exit_layers"
    ),
    "": "the wrong head, the wrong tokenizer, or features of the wrong layer",
}


def warning(counts: Counts, drafter: str | None) -> str | None:
    """Return the warning that the counts deserve, None if they deserve none.

    Args:
        counts: the sum over a run.
        drafter: name of the drafter; None decoded plainly.
    """
    if drafter is None or counts.rounds < LEAST_ROUNDS:
        return None
    kind = next((kind for kind in _CAUSES if kind and drafter.startswith(kind)), "")
    proposed = int(counts.proposed.sum())
    if proposed == 0:
        return (
            f"WARNING: the drafter {drafter} proposed nothing in {counts.rounds} rounds, so it "
            f"gained nothing. Likely causes: {_CAUSES[kind]}."
        )
    rate = metrics.acceptance_rate(counts)
    if rate is None or proposed < LEAST_PROPOSED or rate >= THRESHOLD:
        return None
    return (
        f"WARNING: only {100 * rate:.1f} % of {proposed} drafts of {drafter} were accepted, so "
        f"speculation costs more than it saves. Likely causes: {_CAUSES[kind]}."
    )
