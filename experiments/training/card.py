"""The model card that goes with a trained drafter."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import tables
from experiments.training.progress import History

FILE = "README.md"

_WORDS = {
    "eagle": "EAGLE head (one decoder layer on the target's normed output; arXiv 2401.15077)",
    "eagle of lower layers": "EAGLE head (one decoder layer on the target's normed output and, as "
    "in EAGLE-3, on low, middle and high layers; arXiv 2401.15077, 2503.01840)",
    "eagle3": "EAGLE-3 head (one decoder layer on fused low, middle and high features of the "
    "target; arXiv 2503.01840)",
    "medusa": "Medusa heads (a residual block each on the target's normed output; arXiv "
    "2401.10774)",
    "draft-model": "draft model (some of the target's own layers, distilled from all of them)",
}


@dataclasses.dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        kind: of drafter.
        lower: an EAGLE head reads lower layers too.
        target: the model it drafts for, and its fingerprint.
        command: that made it, as arguments.
        data: what it was trained on, a sentence or phrase each.
        parameters: numbers that are trained.
        vocabulary: tokens that can be proposed, and those of the target.
        conversations: trained on, and held out.
        steps: of the optimiser.
        gamma: drafts a round, where it was measured.
        temperature: where it was measured.
        hardware: in words.
        history: of the training.
        versions: of the packages that made it.
    """

    kind: str
    lower: bool
    target: tuple[str, str]
    command: Sequence[str]
    data: Sequence[str]
    parameters: int
    vocabulary: tuple[int, int]
    conversations: tuple[int, int]
    steps: int
    gamma: int
    temperature: float
    hardware: str
    history: History
    versions: Mapping[str, str | None]


def text(card: Card) -> str:
    """Return the card as Markdown."""
    tokens = card.history.tokens
    name, fingerprint = card.target
    own, all_tokens = card.vocabulary
    words = f"{card.kind} of lower layers" if card.lower else card.kind
    known = [f"{package} {version}" for package, version in card.versions.items() if version]
    lines = [
        f"# {card.kind} drafter for {name}",
        "",
        f"{_WORDS[words]}. It proposes tokens for speculative decoding with jspec; what is "
        "emitted keeps the target's law exactly, whatever it proposes.",
        "",
        "| | |",
        "|---|---|",
        f"| target | {name} (fingerprint {fingerprint}) |",
        f"| trained parameters | {card.parameters:,} |",
        f"| tokens it can propose | {own:,} of {all_tokens:,} |",
        f"| trained on | {tokens:,} tokens in {card.steps:,} steps |",
        f"| conversations | {card.conversations[0]:,}, and {card.conversations[1]:,} held out |",
        f"| time | {tables.seconds(card.history.seconds)} on {card.hardware} |",
        f"| made with | {', '.join(known)} |",
        "",
        "## Data",
        "",
        *[f"- {line}" for line in card.data],
        "",
        "## Command",
        "",
        "```",
        shlex.join(card.command),
        "```",
        "",
        "## Measured",
        "",
        *_measured(card),
    ]
    return "\n".join(lines) + "\n"


def _measured(card: Card) -> list[str]:
    """Say what was measured on held-out conversations."""
    if not card.history.measured:
        return ["Nothing was measured."]
    found = card.history.measured[-1]["held_out"]
    lines = [
        "On held-out conversations of the same kind as those trained on, teacher-forced:",
        "",
        "| draft | agreement with the target's choice | overlap, sum of min(p, q) |",
        "|---|---|---|",
    ]
    for place, (agree, overlap) in enumerate(
        zip(found["agree"], found["overlap"], strict=True), start=1
    ):
        lines.append(f"| {place} | {agree:.3f} | {overlap:.3f} |")
    if found.get("block_efficiency") is not None:
        rates = ", ".join("-" if r is None else f"{r:.2f}" for r in found["acceptance"])
        lines += [
            "",
            f"Decoding held-out prompts in chains of {card.gamma} at temperature "
            f"{card.temperature:g}: block efficiency {found['block_efficiency']:.2f} tokens a "
            f"target pass over {found['decoded_tokens']:,} tokens; drafts accepted by position, "
            f"of those examined: {rates}.",
        ]
    return [*lines, *_curve(card.history)]


def _curve(history: History) -> list[str]:
    """Say how block efficiency grew."""
    decoded: list[tuple[int, Any]] = [
        (line["tokens"], line["held_out"].get("block_efficiency")) for line in history.measured
    ]
    decoded = [(tokens, value) for tokens, value in decoded if value is not None]
    if len(decoded) < 2:
        return []
    shown = decoded[:: max(1, -(-len(decoded) // 12))]
    shown = shown if shown[-1] == decoded[-1] else [*shown, decoded[-1]]
    return [
        "",
        "| tokens trained on | block efficiency |",
        "|---|---|",
        *[f"| {tokens:,} | {value:.2f} |" for tokens, value in shown],
    ]
