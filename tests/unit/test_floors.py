"""The house stands: a module imports only from its own floor or from below, without cycles, and importing starts nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import collectives

PACKAGE = Path(collectives.__file__).parent

FLOORS = {
    0: ("errors", "config", "launched", "logs", "dtypes", "schedule"),
    1: (
        "arrays",
        "foreign",
        "compression",
        "consistency",
        "reduction",
        "buffers",
        "partition",
        "verify",
        "tracefile",
        "timeline",
        "gaussian",
        "cuda",
        "cuda.device",
        "cuda.libcuda",
        "cuda.compiler",
        "cuda.cupy_device",
        "cuda.diagnosis",
        "cuda.devices",
        "cuda.dlpack",
        "cuda.frameworks",
        "cuda.streams",
        "cuda.tensors",
        "cuda.completion",
        "cuda.kernels_source",
        "cuda.kernels",
        "cuda.packing",
        "cuda.pinned",
    ),
    2: ("transport",),
    3: ("adasum", "ring", "direct", "tree", "hierarchical"),
    4: (
        "program",
        "layouts",
        "fusion",
        "packing",
        "shortcuts",
        "binder",
        "plans",
        "planner",
        "executor",
        "cuda.launches",
        "cuda.planner",
        "cuda.plans",
        "cuda.messages",
        "cuda.executor",
        "cuda.carrier",
    ),
    5: (
        "arguments",
        "negotiation",
        "entries",
        "exits",
        "handles",
        "overlaps",
        "context",
        "tasks",
        "buckets",
        "batch",
        "lead",
        "deadlock",
        "rounds",
        "engine",
        "stall",
        "autotune",
        "steps",
        "tuning",
        "cuda.turn",
        "cuda.entries",
        "cuda.accelerator",
        "cuda.ways",
        "cuda.calibration",
        "cuda.tasks",
    ),
    6: (
        "cuda.door",
        "cuda.side",
        "door",
        "operations",
        "world",
        "membership",
        "first_sets",
        "start",
        "summary",
        "runtime",
        "api",
        "agreement",
        "built",
        "__init__",
    ),
    7: ("torch", "tensorflow", "keras_parts", "keras", "jax"),
    8: ("launch", "horovod", "__main__"),
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
SPREAD = ("cuda",)
"""Packages whose modules are on different floors."""


def named(module: str) -> str:
    """How the table of floors calls a module."""
    package = module.split(".")[0]
    return module if package in SPREAD else package


def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``collectives``; a package is named like its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, for_types: bool) -> Iterator[str]:
    """The package's own modules that a file imports, anywhere in it; with ``for_types`` those under TYPE_CHECKING as well."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "collectives":
                yield _module(name.removeprefix("collectives").removeprefix("."))


def _module(name: str) -> str:
    """The module that a dotted name lies in: the longest prefix that is one, or the package itself."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_floor(module: str) -> None:
    assert named(module) in FLOOR, f"{module}: give it a floor in {Path(__file__).name}, and in the architecture's drawing"


@pytest.mark.parametrize("module", MODULES)
def test_imports_come_from_the_same_floor_or_below(module: str) -> None:
    floor = FLOOR[named(module)]
    above = {target for target in imports(MODULES[module], for_types=True) if FLOOR[named(target)] > floor}
    assert not above, f"{module} (floor {floor}) imports from above: {sorted(above)}"


def test_there_are_no_cycles() -> None:
    graph = {module: set(imports(path, for_types=False)) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


def test_a_breach_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "low.py"
    late = "def late():\n    from collectives import world\n    import collectives.launch.job\n"
    file.write_text(late + "from collectives.errors import CollectivesError\n")
    assert set(imports(file, for_types=False)) == {"world", "launch.job", "errors"}


def test_the_program_before_each_rank_imports_nothing_of_the_package() -> None:
    assert list(imports(MODULES["launch.rank"], for_types=True)) == []


@pytest.mark.parametrize("module", ["collectives", "collectives.launch"])
def test_importing_starts_no_mpi_and_no_framework(module: str) -> None:
    heavy = ["mpi4py.MPI", "cupy", "jax", "keras", "numkong", "tensorflow", "torch"]
    program = f"import {module}, sys, json; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(shown.stdout) == []
