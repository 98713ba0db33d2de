"""Compilers for chips that are not here: TPUs by libtpu, an H100 by Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

# Name -> topology, and how to describe one chip where a topology can be that small.
TPUS: dict[str, tuple[str, dict[str, Any]]] = {
    "v5e": ("v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "v6e": ("v6e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    "v5p": ("v5p:2x2x1", {}),
}
# Bytes that one block may have on an H100.
H100_SHARED_MEMORY = 232_448


class UnavailableError(Exception):
    """A compiler is not here; the message says why, and how to get it where that helps."""


@functools.cache
def tpu(name: str) -> jax.Device:
    """Return a described TPU chip to compile for.

    Raises:
        UnavailableError: libtpu is not installed, or cannot describe the chip.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UnavailableError(
            "libtpu is not installed; in the checkout, pip install '.[compile-tpu]'"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    topology, more = TPUS[name]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices[
            0
        ]
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise UnavailableError(f"libtpu cannot describe a {name} here: {error}") from error


def as_on(chip: jax.Device) -> contextlib.AbstractContextManager[Any]:
    """Trace as if the described chip were there, which kernels ask for."""
    mesh = jax.sharding.Mesh(
        np.array([chip]), ("chip",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@functools.cache
def h100() -> jax.Device:
    """Return a described H100 to compile whole programs for, with `h100_options`.

    What XLA is told of the chip is from its data sheet (`h100_sxm.txtpb`): a target to compile for,
    and nothing to predict a speed from.

    Raises:
        UnavailableError: the CUDA plugin is missing.
    """
    # What is in a package that is not there can't be asked for.
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise UnavailableError(
            "JAX's CUDA plugin is not installed; pip install --no-deps jax-cuda13-plugin "
            "jax-cuda13-pjrt of JAX's own version"
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology="1x1x1",
            target_config=Path(__file__).with_name("h100_sxm.txtpb").read_text(encoding="utf-8"),
        ).devices[0]
    except (OSError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise UnavailableError(f"XLA cannot describe an H100 here: {error}") from error


@contextlib.contextmanager
def h100_options() -> Iterator[dict[str, str]]:
    """Give what a program compiled for `h100` is compiled with: where libdevice and ptxas are.

    Raises:
        UnavailableError: Triton, whose wheel brings both, is not installed.
    """
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        raise UnavailableError("triton is not installed; pip install triton")
    nvidia = Path(found.origin).parent / "backends" / "nvidia"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "bin").mkdir()
        (root / "nvvm" / "libdevice").mkdir(parents=True)
        # The newest of those bundled knows every version of the assembly.
        (root / "bin" / "ptxas").symlink_to(sorted((nvidia / "bin").glob("ptxas*"))[-1])
        library = "libdevice.10.bc"
        (root / "nvvm" / "libdevice" / library).symlink_to(nvidia / "lib" / library)
        yield {"xla_gpu_cuda_data_dir": folder}


def as_on_an_h100() -> contextlib.AbstractContextManager[Any]:
    """Trace and lower as if an H100 were there, which Pallas asks for from JAX 0.11 on."""
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh(
        (1,), ("chip",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    return jax.sharding.use_abstract_mesh(mesh)


class TritonKernel(NamedTuple):
    """A Pallas kernel lowered to Triton, as it lies in a lowered program."""

    name: str
    ir: str
    warps: int
    stages: int


class Resources(NamedTuple):
    """What ptxas says that a kernel takes."""

    registers: int
    spilled: int
    shared_memory: int


def triton_kernels(lowered: Any) -> Iterator[TritonKernel]:
    """Yield the Triton kernels of a program lowered for cuda."""
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    dialect: Any = importlib.import_module("jaxlib.triton.dialect")

    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            if "triton" in attributes["call_target_name"].value:
                found.append(attributes["mhlo.backend_config"])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    for config in found:
        with ir.Context() as context:
            dialect.register_dialect(context)
            context.load_all_available_dialects()
            text = str(ir.Module.parse(config["ir"].value_bytes).operation.get_asm())
        yield TritonKernel(
            config["name"].value, text, config["num_warps"].value, config["num_stages"].value
        )


def compile_for_h100(kernel: TritonKernel, folder: Path) -> Resources:
    """Compile a kernel to machine code, by files in a folder.

    Raises:
        UnavailableError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None or sys.platform != "linux":
        raise UnavailableError(
            "triton is not installed; in the checkout, pip install '.[compile-gpu]'"
        )
    # jax-triton, once imported, leaves Triton without a folder for its cache.
    cache = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder))
    with cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        triton: Any = importlib.import_module("triton")
        gpu_target: Any = importlib.import_module("triton.backends.compiler").GPUTarget

        source = folder / f"{kernel.name}.ttir"
        source.write_text(kernel.ir, encoding="utf-8")
        compiled = triton.compile(
            str(source),
            target=gpu_target("cuda", 90, 32),
            options={"num_warps": kernel.warps, "num_stages": kernel.stages},
        )
    assembly = folder / f"{kernel.name}.ptx"
    assembly.write_text(compiled.asm["ptx"], encoding="utf-8")
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target is not None
    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    # The newest of those bundled knows every version of the assembly that Triton writes.
    ptxas = sorted(programs.glob("ptxas*"))[-1]
    said = subprocess.run(
        [ptxas, "-v", f"--gpu-name={target[1]}", assembly, "-o", folder / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    )
    registers = re.search(r"Used (\d+) registers", said.stderr)
    spilled = re.findall(r"(\d+) bytes spill", said.stderr)
    assert registers is not None, said.stderr
    assert spilled, said.stderr
    return Resources(int(registers[1]), sum(map(int, spilled)), int(compiled.metadata.shared))
