"""Plain decoding of one model in float32, bfloat16 and int8, interleaved, as ratios to float32."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags as absl_flags

import jspec
from experiments import flags, models, runs, tables, timing
from experiments.demo_prompts import PROMPTS
from experiments.experiment import Experiment
from experiments.help import of_module, ours
from experiments.status import Status
from jspec import trees
from jspec.config import SpeculationConfig
from jspec.errors import InputError, require
from jspec.models.transformer import Transformer
from jspec.quantization import Weights
from jspec.requests import Request
from jspec.sampling_params import SamplingParams

_TURNS = absl_flags.DEFINE_integer("turns", 9, "Interleaved turns; turn i decodes prompt i.")
_TEXT = absl_flags.DEFINE_string(
    "text", None, "File of text that is scored in every dtype; the prompts are where not given."
)

# What is compared: name, dtype, weights. The first is what the others are compared with.
VARIANTS: tuple[tuple[str, str, Weights], ...] = (
    ("float32", "float32", "same"),
    ("bfloat16", "bfloat16", "same"),
    ("int8", "float32", "int8"),
)
BASE = VARIANTS[0][0]
TABLE = "table.txt"

_NODES = (1, 8)  # tokens of the passes whose cost is compared: plain decoding and 7 drafts
_STEPS = 8
_WINDOW = 128  # tokens scored in one pass
_USED = ("experiment", "model", "max_new_tokens", "output", "compilation_cache", "help", "helpfull")
_NOTE = (
    "Ratios are medians over turns. T(8)/T(1): a pass of 8 tokens against one of 1. Agreement: "
    "share of the\ntext's positions with float32's most probable token; logprob: mean change of "
    "its own tokens."
)


@dataclasses.dataclass(frozen=True)
class Quality:
    """How one variant scores a text, against float32.

    Attributes:
        agreement: share of positions with the same most probable token.
        logprob_change: mean change of the log probability of the token that follows.
        divergence: mean Kullback-Leibler divergence from float32's distribution, in nats.
        positions: how many were compared.
    """

    agreement: float
    logprob_change: float
    divergence: float
    positions: int


@functools.partial(jax.jit, static_argnames=("target", "dtype"))
def _log_probs(target: Transformer, dtype: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Return log probabilities [T, V] after each of tokens [1, T]."""
    cache = target.init_cache(1, tokens.shape[1], dtype)
    hidden, _, _ = target.forward(params, tokens, cache, trees.chain(tokens.shape[1] - 1))
    return jax.nn.log_softmax(target.logits(params, hidden))


def quality(model: jspec.Model, base: jspec.Model, token_ids: Sequence[int]) -> Quality:
    """Score the windows of a text by both models; what fills no window is left out.

    Args:
        model: the variant.
        base: of the same vocabulary.
        token_ids: the text, at least two tokens.
    """
    width = min(_WINDOW, len(token_ids), model.config.max_context)
    count = len(token_ids) // width
    windows = np.array(token_ids[: count * width], np.int32).reshape(count, width)
    same, changes, divergences = [], [], []
    for window in windows:
        tokens = jnp.asarray(window[None])
        ours, theirs = (
            np.asarray(_log_probs(m.functions, m.cache_dtype, m.params, tokens), np.float64)
            for m in (model, base)
        )
        same.append(np.mean(ours.argmax(-1) == theirs.argmax(-1)))
        following = np.arange(width - 1), window[1:]
        changes.append(np.mean(ours[following] - theirs[following]))
        # An id that only pads the embedding has probability 0 in both.
        gap = np.where(np.isfinite(theirs), theirs - ours, 0)
        divergences.append(np.mean(np.sum(np.exp(theirs) * gap, axis=-1)))
    return Quality(
        float(np.mean(same)), float(np.mean(changes)), float(np.mean(divergences)), windows.size
    )


def run() -> int:
    """Run the experiment; returns the exit status."""
    turns = _TURNS.value
    require(turns >= 1, "turns", turns, "is below 1", "take at least one turn")
    budget = flags.MAX_NEW_TOKENS.value
    require(budget >= 2, "max_new_tokens", budget, "leaves nothing to time", "decode at least 2")
    text = _read(_TEXT.value)
    status = Status()
    with runs.create("dtypes", ours(EXPERIMENT), flags.OUTPUT.value) as run:
        found: dict[str, jspec.Model] = {}
        for name, dtype, weights in VARIANTS:
            status.busy(f"Loading {flags.MODEL.value} in {name} ...")
            found[name] = models.load(flags.MODEL, dtype, weights)
        prompts = [jspec.to_token_ids(found[BASE], prompt) for _, prompt in PROMPTS]
        seconds = _measure(found, prompts, turns, budget, run, status)
        summary: dict[str, Any] = {"turns": turns, "variants": {}}
        scored_text = [token for ids in prompts for token in ids]
        if text is not None:
            scored_text = list(jspec.to_token_ids(found[BASE], text))
        for name, model in found.items():
            status.busy(f"Scoring the prompts in {name} ...")
            scored = quality(model, found[BASE], scored_text)
            summary["variants"][name] = _figures(name, model, seconds, scored)
        status.clear()
        run.write_text(TABLE, f"{_table(summary['variants'])}\n{_NOTE}\n")
        run.summarize(summary)
    status.say((run.folder / TABLE).read_text(encoding="utf-8"))
    status.say(f"Results: {run.folder}")
    return 0


def _read(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("text", path, f"cannot be read ({error})", "give a UTF-8 file") from error
    require(len(text.split()) > 1, "text", path, "has no two words", "give some text")
    return text


def _measure(
    found: dict[str, jspec.Model],
    prompts: Sequence[tuple[int, ...]],
    turns: int,
    budget: int,
    run: runs.Run,
    status: Status,
) -> dict[tuple[str, str], list[float]]:
    """Return seconds by variant and what was timed ("token", or the nodes of a pass), by turn."""
    sampling = SamplingParams(max_new_tokens=budget, ignore_eos=True)
    decoders = {
        name: jspec.Decoder(model, None, SpeculationConfig(gamma=0), batch_size=1)
        for name, model in found.items()
    }
    capacity = -(-(max(map(len, prompts)) + budget) // 128) * 128
    passes = {
        (name, str(nodes)): timing.step_timer(
            model, 1, nodes, capacity, max(map(len, prompts)), _STEPS
        )
        for name, model in found.items()
        for nodes in _NODES
    }
    for name, decoder in decoders.items():
        status.busy(f"Compiling {name} ...")
        decoder.generate([Request(ids, sampling) for ids in prompts[:turns]])
        for nodes in _NODES:
            passes[name, str(nodes)]()
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(turns):
        status.busy(f"Turn {turn + 1} of {turns} ...")
        for name, decoder in decoders.items():
            (done,) = decoder.generate([Request(prompts[turn % len(prompts)], sampling)])
            spent = (done.timing.end - done.timing.first) / (len(done.token_ids) - 1)
            timed = {"token": spent} | {str(n): passes[name, str(n)]() for n in _NODES}
            for what, value in timed.items():
                seconds.setdefault((name, what), []).append(value)
            line = {"turn": turn, "variant": name, "seconds_a_token": spent}
            run.append(runs.METRICS, line | {f"pass_of_{n}": timed[str(n)] for n in _NODES})
    return seconds


def _figures(
    name: str,
    model: jspec.Model,
    seconds: dict[tuple[str, str], list[float]],
    scored: Quality,
) -> dict[str, Any]:
    def ratio(over: tuple[str, str], under: tuple[str, str]) -> float:
        return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))

    one, many = (str(nodes) for nodes in _NODES)
    return {
        "weight_bytes": timing.weight_bytes(model.params),
        "tokens_per_second": 1 / statistics.median(seconds[name, "token"]),
        "speedup": ratio((BASE, "token"), (name, "token")),
        "pass_seconds": {n: statistics.median(seconds[name, n]) for n in (one, many)},
        "pass_ratio": ratio((name, many), (name, one)),
        "pass_of_8_against_float32": ratio((name, many), (BASE, many)),
        **dataclasses.asdict(scored),
    }


def _table(variants: dict[str, dict[str, Any]]) -> str:
    header = [
        "weights",
        "MB",
        "tokens/s",
        "against\nfloat32",
        "T(8)/T(1)",
        "T(8) against\nfloat32",
        "agreement",
        "logprob",
    ]
    rows = [
        [
            name,
            f"{found['weight_bytes'] / 1e6:.0f}",
            tables.rate(found["tokens_per_second"]),
            tables.ratio(found["speedup"]),
            tables.ratio(found["pass_ratio"]),
            tables.ratio(found["pass_of_8_against_float32"]),
            f"{100 * found['agreement']:.1f} %",
            f"{found['logprob_change']:+.4f}",
        ]
        for name, found in variants.items()
    ]
    return tables.render(header, rows)


EXPERIMENT = Experiment(
    name="dtypes",
    summary="plain decoding in float32, bfloat16 and int8, as ratios in one run",
    run=run,
    defaults={"max_new_tokens": 32},
    refused={
        flag.name: "has no effect here: the same prompts are decoded greedily in every dtype"
        for flag in of_module(flags.__name__)
        if flag.name not in _USED
    },
)
