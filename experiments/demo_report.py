"""What the demo says at its end: table, verdict, and when speculation lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments import low_acceptance, results, tables
from experiments.differences import Difference
from experiments.results import Measured
from jspec import metrics
from jspec.generation import Decoder

# A ratio closer to 1 than this is the machine's noise.
NOISE = 0.03


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt, decoded both ways.

    Attributes:
        name: of the prompt.
        plain: without speculation.
        speculative: with it.
        difference: where the outputs part, None if they are identical.
    """

    name: str
    plain: Measured
    speculative: Measured
    difference: Difference | None = None

    @property
    def both(self) -> tuple[Measured, Measured]:
        """Plain and speculative."""
        return self.plain, self.speculative

    @property
    def identical(self) -> str:
        """Yes, or where the outputs part."""
        return "yes" if self.difference is None else f"no ({self.difference})"

    @property
    def speedup(self) -> float | None:
        """Tokens a second with speculation over tokens a second without."""
        return _speedup([self])


def line(pair: Pair) -> str:
    """Return one prompt's comparison in a line."""
    return (
        f"[plain {tables.rate(_rate([pair.plain]))} tokens/s, "
        f"speculative {tables.rate(_rate([pair.speculative]))}: "
        f"{tables.ratio(pair.speedup)}; identical: {pair.identical}]"
    )


def make(pairs: Sequence[Pair], decoder: Decoder) -> tuple[str, dict[str, Any]]:
    """Return the report as text and as summary.json has it.

    Args:
        pairs: all prompts.
        decoder: the speculative one.
    """
    plain, speculative = [p.plain for p in pairs], [p.speculative for p in pairs]
    counts = metrics.total([m.completion.counts for m in speculative])
    drafter = decoder.drafter.name if decoder.drafter else None
    warning = low_acceptance.warning(counts, drafter)
    same = sum(pair.difference is None for pair in pairs)
    lost = [pair for pair in pairs if pair.speedup is not None and pair.speedup < 1 - NOISE]
    speedup = _speedup(pairs)
    parts = [
        _table(pairs),
        "tokens/s: generated tokens over the time from the end of the prefill. TPOT: time a token "
        "after the first;\nin the last row its median (p50) over the prompts. Measured.\n"
        f"{results.TERMS}",
        f"Speculation was {tables.ratio(speedup)} as fast as plain decoding; "
        f"{same} of {len(pairs)} outputs are identical.",
        _why(pairs, lost),
    ]
    disturbed = [pair.name for pair in pairs if (_round_cost([pair]) or 1) < 1 - 2 * NOISE]
    if disturbed:
        parts.append(
            f"On {', '.join(disturbed)} a round of speculation seems cheaper than a plain step: "
            "the machine was\nprobably busy, so run this again when it is quiet."
        )
    if same < len(pairs):
        parts.append(
            "A difference can only begin where the target's two best tokens lie within rounding: "
            "verifying\nseveral tokens at once adds numbers in another order."
        )
    if warning:
        parts.append(warning)
    sums = {
        "label": "measured",
        "drafter": drafter,
        "gamma": decoder.speculation.gamma,
        "speedup": speedup,
        "identical": same,
        "prompts": {
            pair.name: {
                "speedup": pair.speedup,
                "difference": pair.difference and dataclasses.asdict(pair.difference),
            }
            for pair in pairs
        },
        "lost": [pair.name for pair in lost],
        "round_cost": _round_cost(pairs),
        "disturbed": disturbed,
        "plain": results.summary(plain) | {"tokens_per_second": _rate(plain)},
        "speculative": results.summary(speculative) | {"tokens_per_second": _rate(speculative)},
        "warnings": [warning] if warning else [],
    }
    return "\n\n".join(parts), sums


def _table(pairs: Sequence[Pair]) -> str:
    header = [
        "prompt",
        "tokens",
        "tokens/s\nplain",
        "tokens/s\nspec.",
        "speedup",
        "TPOT\nplain",
        "TPOT\nspec.",
        "block\nefficiency",
        "acceptance",
        "identical\noutput",
    ]
    same = sum(pair.difference is None for pair in pairs)
    rows = [_row(pair.name, [pair], pair.identical) for pair in pairs]
    return tables.render(header, [*rows, _row("all", pairs, f"{same} of {len(pairs)}")], total=True)


def _row(name: str, pairs: Sequence[Pair], identical: str) -> list[str]:
    plain, speculative = [p.plain for p in pairs], [p.speculative for p in pairs]
    counts = metrics.total([m.completion.counts for m in speculative])
    return [
        name,
        str(_tokens(speculative)),
        tables.rate(_rate(plain)),
        tables.rate(_rate(speculative)),
        tables.ratio(_speedup(pairs)),
        tables.milliseconds(results.quantile([m.tpot for m in plain], 0.5)),
        tables.milliseconds(results.quantile([m.tpot for m in speculative], 0.5)),
        tables.number(metrics.block_efficiency(counts)),
        tables.percent(metrics.acceptance_rate(counts)),
        identical,
    ]


def _why(pairs: Sequence[Pair], lost: Sequence[Pair]) -> str:
    """Say when it lost. Speedup = block efficiency / round cost, so that is the reason."""
    if not lost:
        return "It lost on none of these prompts, but it does where too few drafts are accepted."
    names = ", ".join(f"{pair.name} ({tables.ratio(pair.speedup)})" for pair in lost)
    counts = metrics.total([pair.speculative.completion.counts for pair in lost])
    return (
        f"It lost on {len(lost)} of {len(pairs)}: {names}. A round took "
        f"{tables.number(_round_cost(lost))} plain steps there and gave only "
        f"{tables.number(metrics.block_efficiency(counts))} tokens,\nsince "
        f"{tables.percent(metrics.acceptance_rate(counts))} of the drafts were accepted."
    )


def _tokens(measured: Sequence[Measured]) -> int:
    return sum(len(m.completion.token_ids) for m in measured)


def _seconds(measured: Sequence[Measured]) -> float:
    """Decode time, the prefill left out; everything is compiled before."""
    return sum(m.completion.timing.end - m.completion.timing.prefill for m in measured)


def _rate(measured: Sequence[Measured]) -> float | None:
    seconds = _seconds(measured)
    return _tokens(measured) / seconds if seconds > 0 else None


def _speedup(pairs: Sequence[Pair]) -> float | None:
    ours, theirs = _rate([p.speculative for p in pairs]), _rate([p.plain for p in pairs])
    return ours / theirs if ours and theirs else None


def _round_cost(pairs: Sequence[Pair]) -> float | None:
    """Return the mean time of a speculative round in plain steps."""
    plain, speculative = [p.plain for p in pairs], [p.speculative for p in pairs]
    rounds = metrics.total([m.completion.counts for m in speculative]).rounds
    step = _seconds(plain) / max(_tokens(plain), 1)
    return _seconds(speculative) / rounds / step if rounds and step > 0 else None
