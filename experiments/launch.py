"""The launcher: `jspec --experiment=NAME`, also `python -m experiments.launch`.

Bad input ends with one sentence on standard error and status 2.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence

import jax
from absl import flags as absl_flags

from experiments import (
    acceptance,
    batch,
    bench,
    demo,
    dtypes,
    flags,
    generate,
    kernels,
    paths,
    train_drafter,
    tree,
)
from experiments import help as helping
from experiments.experiment import Experiment
from jspec import sampling_params
from jspec.errors import InputError, require
from pallas_kernels.dispatch import UnsupportedError

EXPERIMENTS = (
    demo.EXPERIMENT,
    generate.EXPERIMENT,
    batch.EXPERIMENT,
    bench.EXPERIMENT,
    dtypes.EXPERIMENT,
    tree.EXPERIMENT,
    acceptance.EXPERIMENT,
    kernels.EXPERIMENT,
    train_drafter.EXPERIMENT,
)

_ILLEGAL = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)
_FLAGFILE = re.compile(r"Unable to open flagfile: .*?(\w[\w ]+): '(.*)'", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`, the program's name first; returns the exit status."""
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except InputError as error:
        # What is not given has no value to show.
        missing = f"{error.field} {error.problem}; {error.remedy}"
        sentence = missing if error.value is None else str(error)
        # On one line, whatever a library's message brought along.
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
        return 2
    except UnsupportedError as error:
        print(f"error: {error}; give --kernels=auto to let XLA run it", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; the interpreter must not try to flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv))


def _main(argv: Sequence[str]) -> int:
    rest = _parse(argv)
    if flags.HELP.value:
        print(helping.text(EXPERIMENTS), end="")
        return 0
    if flags.HELP_FULL.value:
        print(absl_flags.FLAGS.get_help())
        return 0
    experiment = _choose(rest)
    _check(experiment)
    for name, default in experiment.defaults.items():
        absl_flags.FLAGS.set_default(name, default)
    _use_compilation_cache(flags.COMPILATION_CACHE.value)
    return experiment.run()


def _parse(argv: Sequence[str]) -> list[str]:
    """Parse the flags; returns the arguments that are none."""
    try:
        return absl_flags.FLAGS(list(argv))[1:]
    except absl_flags.UnrecognizedFlagError as error:
        value = error.flagvalue.partition("=")[2]
        refused = sampling_params.refusal(error.flagname, value)
        if refused is not None:
            raise refused from None
        _, _, guess = str(error).partition("Did you mean: ")
        renamed = sampling_params.renamed(error.flagname)
        if renamed is not None and renamed in absl_flags.FLAGS:
            guess = renamed
        remedy = f"did you mean --{guess.strip(' ?')}" if guess else "see --help for the flags"
        raise InputError("flag", f"--{error.flagname}", "does not exist", remedy) from None
    except absl_flags.IllegalFlagValueError as error:
        raise _illegal(str(error)) from None
    except UnicodeDecodeError as error:  # nothing but flag files is read here
        raise InputError(
            "flagfile", error.object[:80], f"is not UTF-8 (byte {error.start})", "save it as UTF-8"
        ) from None
    except absl_flags.Error as error:
        message = " ".join(str(error).split())
        missing = _FLAGFILE.search(message)
        if missing:
            problem, path = missing.groups()
            raise InputError(
                "flagfile", path, f"cannot be read ({problem})", "check the path"
            ) from None
        name = message.rpartition("--")[2].strip()
        raise InputError("flag", f"--{name}", "lacks its value", f"give --{name}=VALUE") from None


def _illegal(message: str) -> InputError:
    match = _ILLEGAL.fullmatch(message)
    if match is None:
        return InputError("flags", message, "are not valid", "see --help")
    name, value, _ = match.groups()
    flag = absl_flags.FLAGS[name]
    if flag.boolean:
        return InputError(name, value, "is not a yes or no", f"give --{name} or --no{name}")
    values = getattr(flag.parser, "enum_values", None)
    if values:
        return InputError(name, value, "is not a choice", f"give one of {', '.join(values)}")
    kind = {"int": "an integer", "float": "a number"}.get(flag.parser.flag_type(), "a valid value")
    return InputError(name, value, f"is not {kind}", f"give {kind}")


def _choose(rest: Sequence[str]) -> Experiment:
    names = ", ".join(experiment.name for experiment in EXPERIMENTS)
    for argument in rest:
        named = any(argument == experiment.name for experiment in EXPERIMENTS)
        raise InputError(
            "argument",
            argument,
            "is not a flag",
            f"write --experiment={argument}"
            if named
            else "write flags as --name=value, see --help",
        )
    name = flags.EXPERIMENT.value
    require(
        name is not None, "experiment", name, "is not given", f"give one of {names}, see --help"
    )
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise InputError("experiment", name, "does not exist", f"give one of {names}")


def _check(experiment: Experiment) -> None:
    """Refuse flags that would have no effect."""
    for name, owner in helping.of_others(experiment, EXPERIMENTS).items():
        flag = absl_flags.FLAGS[name]
        require(
            not flag.present,
            name,
            flag.value,
            f"is a flag of --experiment={owner.name}, not of {experiment.name}",
            "leave it out, or choose that experiment",
        )
    for name, reason in experiment.refused.items():
        flag = absl_flags.FLAGS[name]
        require(not flag.present, name, flag.value, reason, "leave it out")


def _use_compilation_cache(directory: str) -> None:
    """Keep compiled programs in `directory`; "" leaves JAX's own setting as it is."""
    if not directory:
        return
    path = paths.expanded("compilation_cache", directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK)
        problem = "is not writable"
    except OSError as error:
        usable, problem = False, f"cannot be made ({error.strerror})"
    if not usable:
        # The default must not stand in the way where the home directory is read-only.
        require(
            not flags.COMPILATION_CACHE.present,
            "compilation_cache",
            directory,
            problem,
            "give another folder, or --compilation_cache= for none",
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    # A program of any size is worth keeping if it took a while.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


if __name__ == "__main__":
    run()
