"""The examples of docstrings, run on every rank of a job: ``collectivesrun -np 2 python -m tests.support.examples``."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

NAMES = {"np": "numpy", "torch": "torch", "tf": "tensorflow", "keras": "keras", "jnp": "jax.numpy"}
"""What examples call modules, besides ``hvd`` for the one that they are of."""


def functions(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of a module that it does not share with `collectives`, and that take arguments."""
    shared = () if module.__name__ == "collectives" else vars(importlib.import_module("collectives.public")).values()
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        function = getattr(module, name)
        own = inspect.isfunction(function) and function.__module__.startswith("collectives") and function not in shared
        if own and inspect.signature(function).parameters:
            yield name, function


def main(paths: list[str]) -> int:
    bad, tried = [], 0
    for path in paths:
        module: Any = importlib.import_module(path)
        if hasattr(module, "init"):
            module.init()
        modules = {name: importlib.import_module(each) for name, each in NAMES.items() if each in sys.modules}
        for name, function in functions(module):
            documentation, scope = inspect.getdoc(function) or "", {**modules, "hvd": module, name: function}
            test = doctest.DocTestParser().get_doctest(documentation, scope, f"{path}.{name}", None, None)
            result = doctest.DocTestRunner().run(test)
            tried += result.attempted
            if result.failed or not ("Example:\n" in documentation or "::\n" in documentation):
                bad.append(f"{path}.{name}")
    print(f"{tried} lines of examples were run; without one, or failed: {', '.join(bad) or 'none'}")
    return len(bad) > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
