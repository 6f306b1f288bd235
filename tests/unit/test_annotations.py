"""Every public function says what it returns. `tests/typing_checks.py` says what that is, and mypy checks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import collectives
from collectives.frontends import ADAPTERS

PACKAGE = Path(collectives.__file__).parent
PUBLIC = (
    "collectives.public",
    *(f"collectives.{adapter}" for adapter in ADAPTERS),
    "collectives.tensorflow.keras",
    "collectives.launch",
)


@cache
def tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def exported(module: str) -> list[str]:
    """The names in ``__all__``, those of another module that are added to it included."""
    found: list[str] = []
    for node in tree(module).body:
        if isinstance(node, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(node):
            other = ast.unparse(node.value).removesuffix(".__all__")
            sources = [each for each in tree(module).body if isinstance(each, ast.ImportFrom)]
            names = {alias.name: f"{each.module}.{alias.name}" for each in sources for alias in each.names}
            found += exported(names[other]) if other in names else ast.literal_eval(node.value)
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


def definitions(module: str, name: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Where a name is defined, whichever modules pass it on; all of its overloads, and all of its alternatives."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node.col_offset == 0:
            yield node
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("collectives"):
            for alias in node.names:
                if alias.name == "*" and name in exported(str(node.module)):
                    yield from definitions(str(node.module), name)
                elif (alias.asname or alias.name) == name and not is_module(f"{node.module}.{name}"):
                    yield from definitions(str(node.module), alias.name)


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for name in exported(module):
        for node in definitions(module, name):
            if isinstance(node, ast.FunctionDef):
                yield name, node
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield f"{name}.{method.name}", method


@pytest.mark.parametrize("module", PUBLIC)
def test_no_public_function_returns_anything_at_all(module: str) -> None:
    found = list(functions(module))
    assert len(found) > (1 if module == "collectives.launch" else 4)
    wrong = [name for name, node in found if node.returns is None or ast.unparse(node.returns) == "Any"]
    assert not wrong


def test_a_breach_is_seen() -> None:
    assert "allreduce" in dict(functions("collectives.tensorflow.keras"))
    (node,) = ast.parse("def f(tensor) -> Any: ...").body
    assert isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "Any"


def test_names_that_another_module_lists_are_looked_at() -> None:
    assert "local_rank" in dict(functions("collectives.torch"))
