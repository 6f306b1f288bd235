"""Run programs written for Horovod unchanged: ``import horovod`` imports collectives if Horovod is not installed.

``import collectives.horovod as hvd`` has the names of `collectives`, and those that Horovod alone has: its questions
about the build (`mpi_built` and others), and `is_homogeneous`.

    collectivesrun --as-horovod -np 2 python their_script.py
    PYTHONPATH="$(python -m collectives.horovod)" mpirun -np 2 python their_script.py
    import collectives.horovod                # in the program itself, before it imports horovod

`FOLDER` contains a package ``horovod`` with the names of Horovod's modules and the contents of collectives. All three
commands add the folder to Python's module search path; importing this module does so for the running program, and for
processes that ``multiprocessing`` spawns from it. There the folder is last, so an installed Horovod is found first. On
PYTHONPATH it is first, and the package itself looks for an installed Horovod to hand over to.

Importing `horovod` selects Horovod's gradients (``COLLECTIVES_GRADIENTS``) unless the environment selects others,
because programs' learning rates were tuned for them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from collectives import *  # noqa: F403
from collectives import poll as poll
from collectives import synchronize as synchronize
from collectives.horovod.unavailable import Finder
from collectives.worlds.capabilities import *  # noqa: F403
from collectives.worlds.runtime import is_homogeneous as is_homogeneous
from collectives.worlds.runtime import is_initialized, world

FOLDER = Path(__file__).parent / "site"
"""The folder with the package ``horovod``, for ``sys.path`` or PYTHONPATH."""
VERSION = "0.28.1"
"""The version of Horovod whose names are provided."""

if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.append(Finder(str(FOLDER / "horovod")))


def hand_over() -> bool:
    """Replace the module ``horovod`` by an installed Horovod. Returns False if there is none.

    The package in `FOLDER` calls it while it is imported.
    """
    spec = _installed()
    if spec is None or spec.loader is None:
        return False
    sys.modules["horovod"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if str(FOLDER / "horovod") not in module.__path__:
        sys.path[:] = [entry for entry in sys.path if not _is_ours(Path(entry))]
        message = (
            f"collectives: Horovod is installed ({spec.origin}), and is used instead of collectives; to use "
            "collectives, run: pip uninstall horovod [F110]"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return True


def choose_gradients() -> None:
    """Make Horovod's gradients the default of this process and its children, as of the next `init`."""
    if not os.environ.get("COLLECTIVES_GRADIENTS"):
        os.environ["COLLECTIVES_GRADIENTS"] = "horovod"
        if is_initialized() and world().config.gradients != "horovod":
            message = (
                "collectives: horovod was imported after init(), so gradients through allgather, broadcast, "
                "reducescatter and others differ from Horovod's; import horovod before init(), or set "
                "COLLECTIVES_GRADIENTS to horovod or exact on every rank [F111]"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _installed() -> ModuleSpec | None:
    """Find an installed Horovod; a folder without modules that has its name, as of a data set, does not count."""
    elsewhere = [entry for entry in sys.path if not _is_ours(Path(entry))]
    for finder in sys.meta_path:
        spec = PathFinder.find_spec("horovod", elsewhere) if finder is PathFinder else finder.find_spec("horovod", None)
        if spec is None or spec.origin is None or spec.submodule_search_locations is None:
            continue
        if not _is_ours(Path(spec.origin).parent.parent):
            return spec
    return None


def _is_ours(folder: Path) -> bool:
    """Whether a folder is `FOLDER` of this or another installation of collectives."""
    return folder.parts[-3:] == ("collectives", "horovod", "site")
