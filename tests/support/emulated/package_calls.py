"""What the package's source calls of CuPy, nccl4py, CUDA's loader of libraries and the driver, read from its syntax.

Names are followed from imports through assignments, whatever the order; what a call returns is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOTS = ("cupy", "nccl", "cuda")
"""Packages; what mentions none of them, or of libcuda, uses none."""
IMPORTERS = ("importlib.import_module", "_import", "sys.modules.get")
ALIASES = {
    "nccl_binding.load()": "cupy.cuda.nccl",
    "self._binding()": "cupy.cuda.nccl",
    "communicator": "cupy.cuda.nccl.NcclCommunicator",
}
"""What the binding of NCCL is, whose calls both bindings have: see `collectives.device.nccl_binding`."""

BY_NAME = {"_call": "libcuda", "self._issue": "cupy.cuda.nccl.NcclCommunicator"}
"""Functions of ours that call what their first argument names."""


class Use(NamedTuple):
    """A place where something of another package is mentioned.

    Attributes:
        path: its full name.
        count: of its positional arguments; None where it is not called, or its arguments are starred.
    """

    path: str
    count: int | None
    keywords: tuple[str, ...]
    line: int


class _Names:
    def __init__(self, tree: ast.AST) -> None:
        self._names = dict(ALIASES) if "nccl_binding" in ast.unparse(tree) else {}
        for _ in range(2):  # an alias may stand before what it is an alias of
            for node in ast.walk(tree):
                self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self._names |= {alias.asname or alias.name: alias.name for alias in node.names if _foreign(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and _foreign(node.module):
            self._names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            path = self.path(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if path is not None:
                    self._names[ast.unparse(target)] = path

    def path(self, node: ast.AST) -> str | None:
        """The full name of what an expression denotes, if it belongs to another package."""
        text = ast.unparse(node)
        if text in self._names:
            return self._names[text]
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("cu") and node.attr[2:3].isupper():
                return f"libcuda.{node.attr}"
            base = self.path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        argument: ast.AST | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            argument = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            argument = node.slice
        if isinstance(argument, ast.Constant) and _foreign(str(argument.value)):
            return str(argument.value)
        return None


def uses(source: str) -> Iterator[Use]:
    """Everything of the other packages that a module's text mentions."""
    tree = ast.parse(source)
    names = _Names(tree)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        caller = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if caller in BY_NAME and isinstance(node.args[0], ast.Constant):
            yield Use(f"{BY_NAME[caller]}.{node.args[0].value}", len(node.args) - 1, (), node.lineno)
        path = names.path(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
        if path is None:
            continue
        call = called.get(id(node))
        if call is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            yield Use(path, None, (), node.lineno)
        else:
            keywords = tuple(keyword.arg or "**" for keyword in call.keywords)
            yield Use(path, len(call.args), keywords, node.lineno)


def all_uses(folder: Path) -> Iterator[tuple[str, Use]]:
    """Of all modules of a folder, with the places."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if any(root in text for root in ROOTS):
            for use in uses(text):
                yield f"{file.relative_to(folder)}:{use.line}", use


def _foreign(module: str) -> bool:
    return module.partition(".")[0] in ROOTS
