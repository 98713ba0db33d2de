"""What a result depends on beside the flags: versions, devices, machine, revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("jspec", "jax", "jaxlib", "numpy")
_VARIABLES = ("JAX_", "XLA_", "JSPEC_", "LIBTPU_", "OMP_NUM_THREADS")


def describe() -> dict[str, Any]:
    """Return the environment, ready for JSON. It starts JAX's backend."""
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "devices": [
            {"id": device.id, "platform": device.platform, "kind": device.device_kind}
            for device in jax.devices()
        ],
        "processes": jax.process_count(),
        "cpu": {"model": cpu_model(), "cores": cores(), "system": platform.platform()},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "git": _git(),
    }


def kernels() -> list[str]:
    """Return which implementations ran the ops of the programs traced so far, a line each."""
    return [str(choice) for choice in dispatch.choices(jax.default_backend())]


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def devices() -> str:
    """Return the devices in words, as "1 x cpu"."""
    kinds = [device.device_kind for device in jax.devices()]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds)))


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return revision and state of the checkout that this file belongs to, None outside one."""
    # A file in site-packages may lie inside somebody else's checkout: it must be tracked.
    if _run_git("ls-files", "--error-unmatch", "experiments/__init__.py") is None:
        return None
    changes = _run_git("status", "--porcelain")
    return {"revision": _run_git("rev-parse", "HEAD"), "dirty": changes != ""}


def _run_git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
