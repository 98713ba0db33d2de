"""Eight CPU devices, JAX at its strictest, and the fixtures that several folders use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Read once, when JAX starts its backends: so before anything here imports it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
# Where libtpu is installed: it compiles without asking for a TPU, in several processes at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# The CUDA plugin compiles without CUDA's libraries.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import hypothesis
import jax
import pytest

_ROOT = Path(__file__).resolve().parents[1]

# The first example of a property compiles, so no deadline holds; continuous integration repeats.
hypothesis.settings.register_profile("jspec", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("jspec")


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_compilation_cache_dir", str(config.rootpath / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # A bounded cache is also a locked one, which parallel workers need.
    jax.config.update("jax_compilation_cache_max_size", 2**30)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Let go of a module's compiled programs: thousands of them use up a process's memory maps."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference outputs and workloads that lies beside the checkout."""
    path = Path(os.environ.get("JSPEC_SHARED") or _ROOT.parent / "shared")
    if not path.is_dir():
        pytest.skip(f"no reference data at {path}; set JSPEC_SHARED to where it is")
    return path
