"""What --help says: usage and examples, the experiments, and our own flags alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from experiments.experiment import Experiment

_SHARED = "experiments.flags"
_WIDTH = 100
# What a text stands for, where a word says more than TEXT.
_KINDS = {
    "experiment": "NAME",
    "model": "MODEL",
    "draft_model": "MODEL",
    "trained": "DRAFTER",
    "output": "FOLDER",
    "compilation_cache": "FOLDER",
    "input": "FILE",
    "train_input": "FILE",
    "exclude": "FILE",
    "data": "FOLDER",
    "workloads": "FILE",
}
_INTRO = """\
jspec: compiled speculative decoding in JAX

Usage: jspec --experiment=NAME [--flag=value ...]

Examples
  jspec --experiment=demo
  jspec --experiment=generate --prompt="Why is the sky blue?"
  jspec --experiment=generate --input=prompts.jsonl --temperature=0.8 --seed=1
  jspec --experiment=generate --prompt="Once upon a time" --raw --drafter=none
  jspec --experiment=batch --input=prompts.jsonl --output=job      (again to go on after a kill)
  jspec --experiment=tree --tree=3,2,1                  (a token tree as text and picture)
  jspec --flagfile=run.flags        (a file with a flag a line)
"""


def text(experiments: Sequence[Experiment]) -> str:
    """Return the help."""
    lines = [_INTRO, "Experiments"]
    width = max(len(experiment.name) for experiment in experiments)
    lines += [f"  {e.name.ljust(width)}  {e.summary}" for e in experiments]
    lines += ["", "Flags of every experiment", *_describe(_SHARED)]
    owners: dict[str, list[str]] = {}
    for experiment in experiments:
        for module in _modules(experiment):
            owners.setdefault(module, []).append(experiment.name)
    for module, names in owners.items():
        own = _describe(module)
        if own:
            lines += ["", f"Flags of {' and '.join(names)}", *own]
    return "\n".join([*lines, ""])


def ours(experiment: Experiment) -> dict[str, Any]:
    """Return the flags that the experiment goes by, with their values."""
    found = [flag for m in (_SHARED, *_modules(experiment)) for flag in of_module(m)]
    return {flag.name: flag.value for flag in found if flag.name not in ("help", "helpfull")}


def of_others(experiment: Experiment, experiments: Sequence[Experiment]) -> dict[str, Experiment]:
    """Return the flags that belong to other experiments alone, by name."""
    owners: dict[str, Experiment] = {}
    for other in experiments:
        for module in _modules(other):
            if module not in _modules(experiment):
                for flag in of_module(module):
                    owners.setdefault(flag.name, other)
    return owners


def of_module(module: str) -> list[absl_flags.Flag[Any]]:
    """Return the flags that a module defines, in the order of their definition."""
    return list(absl_flags.FLAGS.flags_by_module_dict().get(module, []))


def _modules(experiment: Experiment) -> tuple[str, ...]:
    return (experiment.run.__module__, *experiment.flag_modules)


def _describe(module: str) -> list[str]:
    lines = []
    for flag in of_module(module):
        values = getattr(flag.parser, "enum_values", None)
        # absl puts the choices, and a note on repetition, into the flag's own words.
        words = (flag.help or "").removeprefix(f"<{'|'.join(values)}>: " if values else "")
        words, _, _ = words.partition(";\n")
        default = flag.default
        if default not in (None, [], False):
            words = f"{words} Default: {_shown(default)}."
        lines.append(f"  --{flag.name}{'' if flag.boolean else f'={_values(flag)}'}")
        lines += textwrap.wrap(words, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _values(flag: absl_flags.Flag[Any]) -> str:
    values = getattr(flag.parser, "enum_values", None)
    if values:
        return "|".join(values)
    if flag.name in _KINDS:
        return _KINDS[flag.name]
    kinds = {"int": "N", "float": "X", "string": "TEXT"}
    return kinds.get(flag.parser.flag_type(), "A,B,...")


def _shown(default: object) -> str:
    if isinstance(default, list):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
