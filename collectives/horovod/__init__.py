"""Programs written for Horovod, unchanged: ``import horovod`` gives them collectives where Horovod itself is not
installed.

    collectivesrun --as-horovod -np 2 python their_script.py
    PYTHONPATH="$(python -m collectives.horovod)" mpirun -np 2 python their_script.py
    import collectives.horovod                # in the program itself, before it imports horovod

`FOLDER` holds a package ``horovod`` like any other, whose modules are named as Horovod's are and take their contents
from collectives. All three have Python look for modules in that folder too; importing this module does it for the
running program, and for processes that ``multiprocessing`` spawns from it. There the folder comes last, so that Horovod
is found before it. On PYTHONPATH it comes first, and the package looks by itself whether there is a Horovod to hand
over to.

Whoever imports `horovod` gets Horovod's gradients (``COLLECTIVES_GRADIENTS``), unless the environment says otherwise:
learning rates have been tuned for them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from collectives.horovod.unavailable import Finder
from collectives.runtime import is_initialized, world

FOLDER = Path(__file__).parent / "site"
"""The folder to look in: for ``sys.path``, or PYTHONPATH."""
VERSION = "0.28.1"
"""The Horovod whose names these are."""

if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.append(Finder(str(FOLDER / "horovod")))


def hand_over() -> bool:
    """Let Horovod itself be the module ``horovod``, if it is installed; whether it is. Called by our package while it
    is imported."""
    spec = _installed()
    if spec is None or spec.loader is None:
        return False
    sys.modules["horovod"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if str(FOLDER / "horovod") not in module.__path__:
        sys.path[:] = [entry for entry in sys.path if not _is_ours(Path(entry))]
        message = (
            f"collectives: Horovod is installed ({spec.origin}) and used; for collectives in its place: pip uninstall "
            f"horovod"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return True


def choose_gradients() -> None:
    """Make Horovod's gradients the default of this process and its children, from the next `init` on."""
    if not os.environ.get("COLLECTIVES_GRADIENTS"):
        os.environ["COLLECTIVES_GRADIENTS"] = "horovod"
        if is_initialized() and world().config.gradients != "horovod":
            message = (
                "collectives: horovod was imported after init(), so that gradients through allgather, broadcast, "
                "reducescatter and others "
                "are not Horovod's; import it first, or set COLLECTIVES_GRADIENTS to horovod or exact on every rank"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _installed() -> ModuleSpec | None:
    """Horovod as it is installed. Folders that only have its name, as a checkout's or a data set's may, are not it."""
    elsewhere = [entry for entry in sys.path if not _is_ours(Path(entry))]
    for finder in sys.meta_path:
        spec = PathFinder.find_spec("horovod", elsewhere) if finder is PathFinder else finder.find_spec("horovod", None)
        if spec is None or spec.origin is None or spec.submodule_search_locations is None:
            continue
        if not _is_ours(Path(spec.origin).parent.parent):
            return spec
    return None


def _is_ours(folder: Path) -> bool:
    """Whether it is the folder of this collectives, or of another one."""
    return folder.parts[-3:] == ("collectives", "horovod", "site")
