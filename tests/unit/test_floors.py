"""The house stands: a module imports only from its own floor or from below, without cycles, and importing starts
nothing."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import collectives
from collectives.frontends import ADAPTERS

PACKAGE = Path(collectives.__file__).parent

ORDER = (
    "schedules",
    "base",
    "device",
    "tensors",
    "transport",
    "plan",
    "engine",
    "tuning",
    "cuda",
    "worlds",
    "face",
    "frontends",
    "elastic",
    "adapters",
    "programs",
)
"""The floors, from the lowest up. A folder is a floor, and so is each of these:"""
FLOOR_OF = {
    "__init__": "elastic",
    "ring": "schedules",
    "fusion": "plan",
    **dict.fromkeys(ADAPTERS, "adapters"),
    **dict.fromkeys(("launch", "horovod", "simulation", "dask", "ray", "spark", "notebook", "tools"), "programs"),
    "__main__": "programs",
}
"""Modules and folders whose floor is called otherwise. All other modules beside the folders are the face."""
HANDED_ON = {"__init__": {"elastic"}}
"""What a module hands on from above, for users alone."""
GPU = ("device", "cuda")
"""Floors of which nothing is imported where there are no tensors on GPUs."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``collectives``; a package is named like its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, for_types: bool) -> Iterator[str]:
    """The package's own modules that a file imports, anywhere in it; with ``for_types`` those under TYPE_CHECKING as
    well."""
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


def floor(module: str) -> str:
    """The floor of a module: its folder, where the table says nothing else."""
    top = module.split(".")[0]
    return FLOOR_OF.get(top, top if (PACKAGE / top).is_dir() else "face")


@pytest.mark.parametrize("module", MODULES)
def test_imports_come_from_the_same_floor_or_below(module: str) -> None:
    assert floor(module) in ORDER, (
        f"{module}: give its folder a place in the order of {Path(__file__).name}, and in the architecture's table"
    )
    height = ORDER.index(floor(module))
    above = {target for target in imports(MODULES[module], for_types=True) if ORDER.index(floor(target)) > height}
    above -= HANDED_ON.get(module, set())
    assert not above, f"{module} ({floor(module)}) imports from above: {sorted(above)}"


def test_the_architecture_names_every_floor_in_this_order() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    told = re.findall(r"^\| \d+ \| ([a-z]+) \|", text, re.MULTILINE)
    assert tuple(reversed(told)) == ORDER


def test_there_are_no_cycles() -> None:
    graph = {module: set(imports(path, for_types=False)) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


@pytest.mark.parametrize("script", ["launch.rank", "launch.agent"])
def test_the_programs_before_each_rank_import_nothing_of_the_package(script: str) -> None:
    assert list(imports(MODULES[script], for_types=True)) == []


def test_what_uses_the_cpu_only_imports_nothing_of_gpus_and_no_framework() -> None:
    program = """
import json, sys
import numpy
import collectives, collectives.horovod
from collectives.tensors.arrays import view
from collectives.transport.threads.thread_groups import run
from collectives.worlds.world import World

def of_a_rank(world):
    tensor = numpy.ones(1000, numpy.float32)
    world.allreduce(tensor), world.allreduce_(tensor), world.allgather(tensor), world.broadcast(tensor, 0)
    world.alltoall(tensor)
    world.grouped_allreduce([tensor, tensor]), world.reducescatter(tensor), world.barrier()

run(2, of_a_rank, make_world=World)
view(1.0), view(bytearray(3))
heavy = {"mpi4py.MPI", "cupy", "jax", "jaxlib", "keras", "ml_dtypes", "numkong", "tensorflow", "torch"}
own = ("collectives.device", "collectives.cuda")
print(json.dumps([name for name in sys.modules if name in heavy or name.startswith(own)]))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(shown.stdout) == []
