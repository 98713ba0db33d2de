"""What the packages may import, and which idioms and sizes they keep to."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Package -> the packages of ours that it may import beside itself.
BELOW = {
    "pallas_kernels": frozenset[str](),
    "jspec": frozenset({"pallas_kernels"}),
    "sharding": frozenset({"jspec", "pallas_kernels"}),
    "experiments": frozenset({"jspec", "pallas_kernels", "sharding"}),
}
OURS = frozenset(BELOW) | {"tests"}
# Heavy and optional: only there, and only inside functions.
LAZY = {
    "torch": "experiments/peers",
    "transformers": "experiments/peers",
    "jax_triton": "pallas_kernels/",
}
# Imported on demand alone, so what their extra brings may stand at their top.
WITH_EXTRA = {"experiments/lm_evaluation.py": "lm-eval"}
KERNELS_USE = frozenset({"jax", "numpy"})
RETIRED = (
    "jax.experimental.pallas.dot",
    "jax.experimental.pjit",
    "jax.experimental.shard_map",
    "jax.pmap",
    "jax.tree_map",
)
MOST_LINES = 500


class Import(NamedTuple):
    module: str
    line: int
    in_function: bool


def imports(node: ast.AST, package: str, in_function: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, in_function)
    elif isinstance(node, ast.ImportFrom):
        # A relative import stays in its own package: Python refuses to climb out of it.
        yield Import(package if node.level else node.module or "", node.lineno, in_function)
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, package, inside)


def import_faults(path: str, source: str) -> list[str]:
    """Imports of `path` (relative, with slashes) that go against the layers."""
    package = path.split("/")[0]
    faults = []
    for module, line, in_function in imports(ast.parse(source), package):
        top = module.split(".")[0]
        where = f"{path}:{line}: {module}"
        if top == package or top in sys.stdlib_module_names:
            continue
        if top in OURS:
            if top not in BELOW[package]:
                faults.append(f"{where}: {package} must not import {top}")
        elif top in LAZY:
            if not path.startswith(LAZY[top]):
                faults.append(f"{where}: belongs in {LAZY[top]}")
            elif not in_function:
                faults.append(f"{where}: import it inside the function that needs it")
        elif package == "pallas_kernels" and top not in KERNELS_USE:
            faults.append(f"{where}: kernels use {' and '.join(sorted(KERNELS_USE))} alone")
    return faults


def retired_names(path: str, source: str) -> list[str]:
    """Uses of JAX names that are deprecated or gone, whatever alias they go by."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
                used.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                used.append((node.lineno, full))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in bound:
                used.append((node.lineno, f"{bound[first]}.{rest}"))
    return [
        f"{path}:{line}: {name}"
        for line, name in used
        if any(name == old or name.startswith(f"{old}.") for old in RETIRED)
    ]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def packaged() -> Iterator[tuple[str, str]]:
    for path in python_files(*BELOW):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_dependencies_point_one_way() -> None:
    assert [fault for path, source in packaged() for fault in import_faults(path, source)] == []


def test_no_retired_jax_name() -> None:
    files = [*packaged(), *((str(path), path.read_text()) for path in python_files("tests"))]
    assert [fault for path, source in files for fault in retired_names(path, source)] == []


def test_files_hold_one_idea() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(*BELOW, "tests")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert long == {}


def test_every_folder_is_a_package() -> None:
    # One without __init__.py would be missing from the wheel.
    folders = {path.parent for path in python_files(*BELOW)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_imports_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    def names(lines: list[str]) -> set[str]:
        return {normal(re.split(r"[^\w.-]", line)[0]) for line in lines}

    declared = names(project["dependencies"])
    providers = importlib.metadata.packages_distributions()
    undeclared = set()
    for path, source in packaged():
        for module, line, _ in imports(ast.parse(source), path.split("/")[0]):
            top = module.split(".")[0]
            if top in OURS or top in LAZY or top in sys.stdlib_module_names:
                continue
            extra = WITH_EXTRA.get(path)
            also = names(project["optional-dependencies"][extra]) if extra else set()
            found = {normal(name) for name in providers.get(top, [top])}
            if not (declared | also) & found:
                undeclared.add(f"{path}:{line}: {module}")
    assert undeclared == set()


def test_only_the_four_packages_are_installed() -> None:
    try:
        installed = importlib.metadata.distribution("jspec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jspec runs from its sources here; make test installs it")
    top_level = installed.read_text("top_level.txt") or ""
    assert set(top_level.split()) == set(BELOW)


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("jspec/a.py", "import experiments.launch", "must not import experiments"),
        ("jspec/a.py", "def f():\n    from sharding import rules", "must not import sharding"),
        ("sharding/a.py", "from experiments import launch", "must not import experiments"),
        ("pallas_kernels/a.py", "from jspec.errors import InputError", "must not import jspec"),
        ("experiments/a.py", "from tests.oracles import law", "must not import tests"),
        ("pallas_kernels/a.py", "import scipy.special", "jax and numpy alone"),
        ("jspec/a.py", "def f():\n    import torch", "belongs in experiments/peers"),
        ("experiments/peers.py", "import transformers", "inside the function"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, word: str) -> None:
    (fault,) = import_faults(path, source)
    assert word in fault


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jspec/a.py", "import jax\nfrom pallas_kernels import dispatch\nfrom . import cache"),
        ("sharding/a.py", "from jspec.models import parameters"),
        ("experiments/peers.py", "def f():\n    import torch"),
        ("pallas_kernels/a/gpu.py", "import functools\nimport jax.numpy as jnp"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert import_faults(path, source) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import jax\njax.tree_map(f, x)", "jax.tree_map"),
        ("import jax as j\nj.pmap(f)", "jax.pmap"),
        ("from jax import pmap", "jax.pmap"),
        ("from jax.experimental.shard_map import shard_map", "jax.experimental.shard_map"),
        ("from jax.experimental import pjit as p", "jax.experimental.pjit"),
        ("from jax.experimental import pallas as pl\npl.dot(a, b)", "jax.experimental.pallas.dot"),
    ],
)
def test_a_retired_name_is_found(source: str, name: str) -> None:
    (fault,) = retired_names("a.py", source)
    assert name in fault


def test_a_name_in_use_is_not_retired() -> None:
    source = "import jax\njax.tree.map(f, x)\njax.shard_map(g)\njax.tree_util.tree_map(f, x)"
    assert retired_names("a.py", source) == []
