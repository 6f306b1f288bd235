"""Collective communication in pure Python: ``allreduce(tensor, average=True)`` for any array framework.

    import collectives as hvd

    hvd.init()
    mean = hvd.allreduce(gradient)

Importing this package loads nothing else. The first use of a name loads NumPy and the engine, but no framework, and
starts no MPI.
"""

import importlib.machinery
import typing

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    # mypy and editors take these names for the package's own.
    from collectives import elastic as elastic
    from collectives.api import poll as poll
    from collectives.api import synchronize as synchronize
    from collectives.public import *  # noqa: F403
else:
    # NumPy and the engine take a tenth of a second or two, and the launcher needs neither.
    def __getattr__(name: str) -> object:
        """Import the public names when the first of them is asked for."""
        # Python asks for attributes of its own, and for a module of the package before it imports it.
        module = importlib.machinery.PathFinder.find_spec(f"{__name__}.{name}", __spec__.submodule_search_locations)
        if module is None and (name == "__all__" or not name.startswith("__")):
            _import_names()
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        _import_names()
        return sorted(globals())

    def _import_names() -> None:
        interrupts = importlib.import_module("collectives.base.interrupts")
        with interrupts.deferred():  # an import that is cut short may leave a module that can never be imported again
            public = importlib.import_module("collectives.public")
            importlib.import_module("collectives.elastic")  # is an attribute then
        if "__all__" not in globals():
            names = {name: getattr(public, name) for name in (*public.__all__, "poll", "synchronize")}
            globals().update(names, __all__=["__version__", *public.__all__])
            globals().pop("__getattr__", None)  # each use of a module that has one takes 20 ns more
