"""Training of a drafter: text of the target's own, its features, steps, and a drafter to load.

The folder given as --output is the job's own; running the same command again goes on where the last
process ended, however it ended:

    settings.json      what the losses depend on; another run must agree with it
    data/              text and features, unless --data is another folder
    checkpoints/       the last states of weights and optimiser
    progress.jsonl     a line after every step, and one for each measurement
    training.png, .svg loss and acceptance so far
    drafter/           what was trained, with its card, when the training has ended
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import jspec
from experiments import environment, flags, journal, models, paths, runs, tree_plot
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.interrupts import Interrupts, until_interrupted
from experiments.status import Status
from experiments.training import (
    batches,
    binding,
    card,
    corpus,
    exclusion,
    fingerprint,
    measuring,
    methods,
    options,
    plot,
    shards,
    snapshots,
    sources,
)
from experiments.training.corpus import Corpus
from experiments.training.loop import Data, Trainer
from experiments.training.methods import Start
from experiments.training.progress import FILE as PROGRESS
from experiments.training.progress import History
from jspec.errors import require
from jspec.sampling_params import SamplingParams

DRAFTER = "drafter"
_FORMAT = 1
_DECODED = 64  # tokens of each prompt in a measurement
# Flags that a later process may change.
_FREE = (
    "experiment",
    "output",
    "data",
    "rounds_per_chunk",
    "profile",
    "compilation_cache",
    "keep",
    "save_every",
    "mesh_data",
    "kernels",
)
_SAME = "give what it was begun with, or another --output"


@dataclasses.dataclass(frozen=True)
class _Job:
    """A job that this process holds."""

    folder: Path
    given: list[sources.Source]
    excluded: frozenset[tuple[str, ...]]
    sampling: SamplingParams
    status: Status
    interrupts: Interrupts


def run() -> int:
    """Run the experiment; returns the exit status."""
    return until_interrupted(_run)


def _run(interrupts: Interrupts) -> int:
    options.check()
    sampling = flags.sampling_params()
    require(
        flags.OUTPUT.present,
        "output",
        None,
        "is not given",
        "give --output=FOLDER for the job alone; the same folder again goes on with it",
    )
    mesh = _mesh(options.MESH_DATA.value)
    given = sources.read(options.TRAIN_INPUT.value)
    evaluation = [paths.expanded("exclude", path) for path in options.EXCLUDE.value]
    excluded = frozenset[tuple[str, ...]]().union(*map(exclusion.read, evaluation))
    folder = paths.expanded("output", flags.OUTPUT.value)
    with journal.locked(folder):
        _settle(folder, given, evaluation)
        job = _Job(folder, given, excluded, sampling, Status(), interrupts)
        return _train(job, mesh)


def _mesh(devices: int) -> Mesh:
    there = jax.devices()
    require(
        devices <= len(there),
        "mesh_data",
        devices,
        f"is more than the {len(there)} devices here",
        "give at most so many",
    )
    return jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=there[:devices])


def _settle(folder: Path, given: list[sources.Source], evaluation: list[Path]) -> None:
    """Compare the settings with those that the job was begun with."""
    wanted: dict[str, Any] = {
        "format": _FORMAT,
        "flags": {name: value for name, value in ours(EXPERIMENT).items() if name not in _FREE},
        "train_input": [[source.name, source.sha256] for source in given],
        "exclude": [hashlib.sha256(path.read_bytes()).hexdigest() for path in evaluation],
    }
    # Paths may change; what the files hold is compared by itself.
    for name in ("train_input", "exclude"):
        del wanted["flags"][name]
    wanted = json.loads(runs.to_json(wanted))
    path = folder / journal.SETTINGS
    begun = (folder / PROGRESS).exists() or bool(snapshots.steps(folder))
    stored = journal.read_json(path)
    before = (journal.LOCK, f"{journal.SETTINGS}.")
    others = [name for name in sorted(os.listdir(folder)) if not name.startswith(before)]
    require(
        stored is not None or not others,
        "output",
        str(folder),
        f"holds {', '.join(others[:3])} without a {journal.SETTINGS}: it is not of a job like this",
        "give another --output",
    )
    if begun and stored is not None:
        require(
            stored.get("format") == _FORMAT,
            "output",
            str(folder),
            f"was begun with another version of jspec (format {stored.get('format')})",
            "go on with that version, or give another --output",
        )
        journal.require_same(stored["flags"], wanted["flags"], _SAME)
        journal.require_same(
            stored, {name: wanted[name] for name in ("train_input", "exclude")}, _SAME
        )
        return
    journal.write_json(path, wanted)


def _train(job: _Job, mesh: Mesh) -> int:
    status = job.status
    config = job.folder / runs.CONFIG
    if journal.read_json(config) is None:
        now = datetime.datetime.now().astimezone()
        journal.write_json(config, runs.config("train_drafter", ours(EXPERIMENT), now))
    status.busy(f"Loading {flags.MODEL.value} ...")
    target = models.load_target()
    wish = options.wish(methods.default_layers(target.config))
    methods.check(wish, target.config)
    data, said = _data(job, target)
    begun = methods.start(
        wish,
        target,
        data.train,
        job.sampling.seed or 0,
    )
    asked = measuring.requests(
        data.held,
        options.MEASURE_PROMPTS.value,
        dataclasses.replace(job.sampling, max_new_tokens=_DECODED),
    )

    def decode(params: Any) -> dict[str, Any]:
        if not asked:
            return {}
        drafter = binding.bind(target, begun, _on_one_device(params))
        return measuring.block_efficiency(target, drafter, flags.GAMMA.value, asked)

    def draw(history: History) -> None:
        if len(history.measured) < 2:  # a point is no curve
            return
        title = f"{options.KIND.value} for {flags.MODEL.value}"
        for name, content in tree_plot.files(plot.figure(history, title), plot.STEM).items():
            runs.Run(job.folder).write_bytes(name, content)

    parameters = methods.count(begun.params)
    status.say(
        f"Training {parameters:,} parameters on {data.train.total:,} tokens of "
        f"{len(data.train.rows):,} conversations; {len(data.held.rows):,} are held out"
    )
    trainer = Trainer(job.folder, begun, data, options.settings(), mesh, decode, draw)
    with runs.Run(job.folder).profile(flags.PROFILE.value):
        params, history = trainer.run(status, job.interrupts)
    status.clear()
    _export(job, target, begun, params, history, data, said)
    journal.write_json(
        job.folder / runs.SUMMARY,
        {
            "kind": options.KIND.value,
            "parameters": parameters,
            "vocabulary": len(begun.places),
            "steps": options.STEPS.value,
            "tokens": history.tokens,
            "seconds": history.seconds,
            "held_out": history.measured[-1]["held_out"],
            "kernels": environment.kernels(),
        },
    )
    status.say(f"Drafter: {job.folder / DRAFTER}")
    return 0


def _on_one_device(params: Any) -> Any:
    return jax.device_put(params, jax.devices()[0])


def _data(job: _Job, target: jspec.Model) -> tuple[Data, list[str]]:
    """Return the conversations, and for the card what they are."""
    given = options.DATA.value
    folder = job.folder / "data" if given is None else paths.expanded("data", given)
    recipe, tokens = options.recipe(), options.TEXT_TOKENS.value
    layers = methods.feature_layers(target.config)
    wanted = Corpus(folder, target, recipe, tokens, job.given, layers)
    found = batches.corpus([shards.mapped(path) for path in corpus.build(wanted, job.status)])
    said = [f"{source.name} (sha256 {source.sha256[:16]})" for source in job.given]
    if tokens:
        said.insert(
            0,
            "text of the target's own: users' turns that it wrote after a few opening words, and "
            "its answers at temperatures "
            f"{', '.join(f'{t:g}' for t in sorted(set(recipe.temperatures)))} (seed {recipe.seed})",
        )
    said.append(f"{found.total:,} tokens in all, prompts included")
    if job.excluded:
        tokenizer = target.tokenizer
        assert tokenizer is not None
        found, dropped = shards.without(
            found, lambda ids: exclusion.shares(tokenizer.decode(ids.tolist()), job.excluded)
        )
        line = (
            f"{dropped:,} of {dropped + len(found.rows):,} conversations were left out: they "
            f"share {exclusion.RUN} words in a row with an evaluation file"
        )
        job.status.say(line)
        said.append(line)
    train, held = shards.split(found)
    require(
        len(train.rows) > 0 and len(held.rows) > 0,
        "text_tokens",
        tokens,
        f"gives only {len(found.rows)} conversations, too few to train on and to hold out",
        "ask for more, or give more --train_input",
    )
    return Data(train, held, target.config.vocab_size), said


def _export(
    job: _Job,
    target: jspec.Model,
    begun: Start,
    params: Any,
    history: History,
    data: Data,
    said: list[str],
) -> None:
    """Write the drafter as it is loaded, with its card; it appears when it is whole."""
    config = journal.read_json(job.folder / runs.CONFIG) or {}
    versions = dict(config.get("versions") or {})
    written = card.text(
        card.Card(
            kind=options.KIND.value or "",
            lower=bool(options.LOWER.value),
            target=(flags.MODEL.value, fingerprint.of(target)),
            command=["jspec", *(config.get("command") or [""])[1:]],
            data=said,
            parameters=methods.count(params),
            vocabulary=(len(begun.places), target.config.vocab_size),
            conversations=(len(data.train.rows), len(data.held.rows)),
            steps=options.STEPS.value,
            gamma=flags.GAMMA.value,
            temperature=job.sampling.temperature,
            hardware=f"{environment.cores()} cores of {environment.cpu_model()}, "
            f"{environment.devices()}",
            history=history,
            versions={name: versions.get(name) for name in ("jspec", "jax", "numpy")},
        )
    )
    partial = job.folder / f"{DRAFTER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    binding.save(partial, target, flags.MODEL.value, begun, _on_one_device(params))
    (partial / card.FILE).write_text(written, encoding="utf-8")
    shutil.rmtree(job.folder / DRAFTER, ignore_errors=True)
    partial.rename(job.folder / DRAFTER)


_NO_OTHER = "chooses a drafter, and here one is trained"
_NO_TREE = "shapes trees, and here chains are measured"
_NOT_WRITTEN = "would not be written anywhere"
EXPERIMENT = Experiment(
    name="train_drafter",
    summary="train a drafter for a target, as a job that goes on where it was killed",
    run=run,
    defaults={"batch_size": 128, "max_new_tokens": 192, "gamma": 4, "seed": 0},
    refused={
        **dict.fromkeys(
            ("drafter", "draft_model", "exit_layers", "ngram_max", "ngram_min"), _NO_OTHER
        ),
        **dict.fromkeys(("tree", "tree_nodes", "tree_depth", "tree_width", "draws"), _NO_TREE),
        **dict.fromkeys(("logprobs", "prompt_logprobs"), _NOT_WRITTEN),
        "weights": "would have the drafter learn from rounded weights",
        "n": "would measure every prompt several times",
        "verification": "would change what is measured: the standard rule is used",
    },
    flag_modules=(options.__name__,),
)
