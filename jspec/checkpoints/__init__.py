"""Checkpoints: Hugging Face directories, GGUF files, and the project's own Orbax directories."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jax.typing import DTypeLike

from jspec.checkpoints import huggingface, huggingface_config
from jspec.checkpoints.assembly import assemble
from jspec.checkpoints.gguf_header import MAGIC, read_header
from jspec.config import ModelConfig
from jspec.errors import InputError, require
from jspec.models.parameters import TransformerParams
from jspec.quantization import Weights, check_weights

if TYPE_CHECKING:
    from jspec.tokenizers import Tokenizer

__all__ = ["Checkpoint", "find", "load", "read_config", "save"]

Format = Literal["orbax", "huggingface", "gguf"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    Attributes:
        config: its architecture.
        params: its parameters, in the tree of `jspec.models.parameters.declare(config, weights)`.
        eos_token_ids: ids that end a sequence; () where the checkpoint names none.
    """

    config: ModelConfig
    params: TransformerParams
    eos_token_ids: tuple[int, ...]


def load(
    path: str | Path,
    dtype: DTypeLike,
    *,
    weights: Weights = "same",
    shardings: TransformerParams | None = None,
) -> Checkpoint:
    """Load a model.

    Tensors are read, converted and placed one at a time, so that the peak of host memory is the
    model as it is returned plus a few copies of its largest tensor. (An Orbax directory of another
    dtype is read as a whole before it is quantised.)

    Args:
        path: a GGUF file, a directory with one, a Hugging Face directory with safetensors, or a
            directory that `save` wrote.
        dtype: dtype of the parameters: float32, bfloat16 or float16.
        weights: "int8" quantises the matrices from their float32 numbers; norms and biases stay in
            `dtype`. "same" leaves them as the checkpoint has them, so a quantised one stays int8.
        shardings: a `jax.sharding.Sharding` for each parameter, in the parameters' tree; None
            places them on the default device.

    Raises:
        InputError: the path, a file, the architecture, a tensor or its storage is not supported.
    """
    check_weights(weights)
    kind, path = find(path)
    if kind == "gguf":
        from jspec.checkpoints import gguf, gguf_config

        header = read_header(path)
        config = gguf_config.read_config(header)
        params = assemble(gguf.GgufSource(header, config), config, dtype, shardings, weights)
        eos_token_ids = gguf_config.read_eos_token_ids(header)
    elif kind == "huggingface":
        config = huggingface_config.read_config(path)
        source = huggingface.SafetensorsSource(path)
        params = assemble(source, config, dtype, shardings, weights)
        eos_token_ids = huggingface_config.read_eos_token_ids(path)
    else:
        from jspec.checkpoints import orbax

        config, eos_token_ids = orbax.read_manifest(path)
        params = orbax.load_params(path, config, dtype, shardings, weights)
    for token in eos_token_ids:
        require(
            0 <= token < 2**31,
            "eos_token_id",
            token,
            "is no token id",
            "use the files that were published with these weights",
        )
    return Checkpoint(config, params, eos_token_ids)


def read_config(path: str | Path) -> ModelConfig:
    """Return the architecture of the checkpoint at `path` without reading its weights.

    Raises:
        InputError: as `load`.
    """
    kind, path = find(path)
    if kind == "gguf":
        from jspec.checkpoints import gguf_config

        return gguf_config.read_config(read_header(path))
    if kind == "huggingface":
        return huggingface_config.read_config(path)
    from jspec.checkpoints import orbax

    return orbax.read_manifest(path)[0]


def save(
    directory: str | Path,
    config: ModelConfig,
    params: TransformerParams,
    *,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a checkpoint that `load` reads; the directory appears only when it is complete.

    Args:
        directory: where to; it must not exist, or be empty. One writer at a time.
        config: the architecture.
        params: the parameters, in any dtype and placement; they are stored as they are.
        eos_token_ids: ids that end a sequence.
        tokenizer: written beside the parameters, so that the directory is complete in itself.

    Raises:
        InputError: the directory is taken, or the parameters are not those of `config`.
    """
    from jspec.checkpoints import orbax

    orbax.save(Path(directory), config, params, eos_token_ids, tokenizer)


def find(path: str | Path) -> tuple[Format, Path]:
    """Return the format of the checkpoint at `path` and its file (GGUF) or directory.

    Raises:
        InputError: nothing there that can be loaded.
    """
    require(isinstance(path, str | os.PathLike), "path", path, "is no path", "give a str or a Path")
    path = Path(path)
    try:
        return _find(path)
    except OSError as error:
        raise InputError(
            "path", str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from None


def _find(path: Path) -> tuple[Format, Path]:
    if path.is_dir():
        return _find_in_directory(path)
    if not path.exists():
        raise InputError("path", str(path), "does not exist", "check the spelling")
    require(path.is_file(), "path", str(path), "is neither a file nor a directory", "give one")
    if path.suffix in huggingface.PICKLE_SUFFIXES:
        raise huggingface.pickle_refusal(path)
    if path.suffix == ".safetensors":
        raise InputError(
            "path", str(path), "is a file of weights alone", "give its directory, with config.json"
        )
    with path.open("rb") as file:
        if path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC:
            return "gguf", path
    raise InputError(
        "path", str(path), "is no checkpoint", "give a .gguf file or a checkpoint's directory"
    )


def _find_in_directory(directory: Path) -> tuple[Format, Path]:
    names = sorted(entry.name for entry in directory.iterdir())
    if "jspec.json" in names:
        return "orbax", directory
    if "config.json" in names:
        return "huggingface", directory
    files = [name for name in names if name.endswith(".gguf")]
    if len(files) == 1:
        return "gguf", directory / files[0]
    if files:
        raise InputError(
            "path", str(directory), f"holds several GGUF files: {', '.join(files)}", "give one"
        )
    pickles = [name for name in names if Path(name).suffix in huggingface.PICKLE_SUFFIXES]
    if pickles:
        raise huggingface.pickle_refusal(directory / pickles[0])
    raise InputError(
        "path",
        str(directory),
        "holds no checkpoint" if names else "is an empty directory",
        "give a directory with config.json and safetensors, a .gguf file, or one that save wrote",
    )
