"""The names of the package: all are there, and importing it loads nothing before the first of them is used."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import collectives

PACKAGE = Path(collectives.__file__).parent


def outcome(program: str) -> Any:
    """What a new process prints as JSON."""
    shown = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{program}"], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(shown.stdout)


LOADED = """
heavy = {"numpy", "mpi4py", "cupy", "jax", "keras", "numkong", "tensorflow", "torch"}
print(json.dumps(sorted({
    ".".join(name.split(".")[:2]) for name in sys.modules if name.split(".")[0] in {"collectives", *heavy}
})))"""


def test_importing_the_package_loads_nothing() -> None:
    assert outcome(f"import collectives, collectives{LOADED}") == ["collectives"]


def test_what_starts_ranks_loads_neither_numpy_nor_the_engine() -> None:
    loaded = outcome(f"import collectives.launch{LOADED}")
    assert set(loaded) == {
        "collectives",
        *(f"collectives.{part}" for part in ("base", "launch", "ring", "schedules", "transport")),
    }


def test_calls_load_no_masked_arrays() -> None:
    """Their import suppresses errors, those of signal handlers too, and takes as long as a thousand calls."""
    program = """
import collectives, numpy as np
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
own = np.arange(9).view(type("Own", (np.ndarray,), {}))
def program(world):
    world.grouped_allreduce([own, np.ones(3)])
    world.grouped_allreduce_([collectives.zeros(9000), collectives.zeros(9000)])
thread_groups.run(2, program, make_world=World)
print(json.dumps("numpy.ma" in sys.modules))"""
    assert outcome(program) is False


@pytest.mark.parametrize(
    "program",
    [
        "import collectives\nnames = dir(collectives)",
        "import collectives\nnames = [*collectives.__all__]",
        "from collectives import *\nnames = dir()",
        "from collectives import MismatchError\nimport collectives\nnames = vars(collectives)",
        "import collectives.worlds.world\nnames = [name for name in collectives.__all__ if hasattr(collectives, name)]",
        "import pickle\npickle.loads(b'ccollectives\\nallreduce\\n.')\nimport collectives\nnames = vars(collectives)",
        "from threading import Thread\nimport collectives\nnames = []\n"
        "use = lambda name: names.extend([name] * callable(getattr(collectives, name)))\n"
        "threads = [Thread(target=use, args=[name]) for name in ('init', 'rank', 'size')]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
        "names = dir(collectives) if len(names) == 3 else names",
    ],
)
def test_all_names_are_there_however_the_first_is_asked_for(program: str) -> None:
    names = outcome(f"{program}\nprint(json.dumps(list(names)))")
    assert not set(collectives.__all__) - set(names)


@pytest.mark.parametrize("already", ["", "collectives.rank\n"], ids=["at first", "when the names are there"])
@pytest.mark.parametrize("name", ["alreduce", "__wrapped__"])
def test_there_are_no_others(name: str, already: str) -> None:
    program = f"import collectives\n{already}try:\n    collectives.{name}\nexcept AttributeError as error:\n"
    assert outcome(f"{program}    print(json.dumps([str(error), error.name]))") == [
        f"module 'collectives' has no attribute '{name}'",
        name,
    ]


def test_the_page_of_names_has_all_and_which_are_only_horovods() -> None:
    ours, methods, horovods = (
        (PACKAGE.parent / "docs" / "api.md").read_text().partition("\n| | names |")[2].split("\n\n")
    )
    listed, others = (re.findall(r"`(\w+)`", text) for text in (ours, horovods))
    assert sorted({*listed} - {"add_done_callback"}) == sorted(collectives.__all__)
    functions = re.findall(r"`(\w+)\(handle\)`", methods)
    assert len(functions) == 2 and {*functions} <= {*dir(collectives)} - {*collectives.__all__}
    assert len(others) == 11 and not {*others} & {*dir(collectives)}
    horovod = importlib.import_module("collectives.horovod")
    assert all(callable(getattr(horovod, name)) for name in (*others, *functions))
    assert all(getattr(horovod, name) is getattr(collectives, name) for name in collectives.__all__)


def test_a_module_of_the_package_is_no_public_name() -> None:
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert "worlds" in modules and not modules & set(collectives.__all__)


def test_programs_use_the_names_at_the_speed_of_any_other() -> None:
    # Python looks up what is in a module with a __getattr__ of its own without the caches of its interpreter.
    assert callable(collectives.allreduce) and "__getattr__" not in vars(collectives)
