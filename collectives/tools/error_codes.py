"""The library's messages, read from its source by their codes, and what docs/troubleshooting/ says of their causes and
cures.

A message ends with its code, or its first paragraph does: `` [A12]``, a family's letter and a number. Wheels have the
pages of docs/troubleshooting/ beside this module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from collectives.base.errors import CODE

HEADING = re.compile(r"^## (?!Retired)((?:[A-Z]\d+(?:-[A-Z]\d+)?(?:, )?)+): (.+)$", re.MULTILINE)
RETIRED = re.compile(r"^## Retired: (.+)$", re.MULTILINE)
WARNINGS = {"warn", "warning", "exception", "warn_on_first_rank"}
_LIBRARY = Path(__file__).parents[1]


@dataclass(frozen=True, order=True)
class Message:
    """A text with a code.

    Attributes:
        family, number: of the code.
        path: of the module, in the library.
        kind: the class of the error, or ``warning``; empty where the source does not say it beside the text.
        text: placeholders are written as ``…name…``.
    """

    family: str
    number: int
    path: str
    kind: str
    text: str

    @property
    def code(self) -> str:
        return f"{self.family}{self.number}"


@dataclass(frozen=True)
class Situation:
    """A section of docs/troubleshooting/: cause and cure of some messages."""

    page: str
    codes: tuple[str, ...]
    title: str
    body: str


@cache
def modules(containing: str = "") -> list[tuple[str, dict[ast.AST, ast.AST]]]:
    """The modules of the library that may have messages: path in it, and the parent of each node.

    Args:
        containing: only those whose source contains this.
    """
    found = []
    for file in sorted(_LIBRARY.rglob("*.py")):
        source = file.read_text()
        if containing not in source or not re.search(r"Error\(|sys\.stderr|\[[A-Z][1-9][0-9]*\]", source):
            continue
        tree = ast.parse(source)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        found.append((str(file.relative_to(_LIBRARY)), parents))
    return found


@cache
def messages(code: str = "") -> list[Message]:
    """All messages that have a code, or the one that has this code."""
    found = []
    for path, parents in modules(f"[{code}]" if code else ""):
        for node, parent in parents.items():
            if not is_text(node) or isinstance(parent, ast.JoinedStr | ast.FormattedValue | ast.Expr):
                continue
            match = CODE.search(shown(node))
            if match and code in ("", match[1]):
                while isinstance(parents[node], ast.BinOp):
                    node = parents[node]
                text = CODE.sub("", shown(node), count=1).strip()
                found.append(Message(match[1][0], int(match[1][1:]), path, _kind(node, parents), text))
    return sorted(found)


@cache
def pages() -> dict[str, str]:
    """The pages of docs/troubleshooting/, by name."""
    shipped = Path(__file__).with_name("troubleshooting")
    folder = shipped if shipped.exists() else _LIBRARY.parent / "docs" / "troubleshooting"
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.md"))}


def introduction(page: str) -> str:
    """What a page says before its sections."""
    return RETIRED.split(HEADING.split(pages()[page])[0])[0]


def situations() -> list[Situation]:
    """The sections of the pages that are about codes."""
    sections = []
    for page, text in pages().items():
        _, *parts = HEADING.split(RETIRED.split(text)[0])
        for listed, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            sections.append(Situation(page, tuple(_numbers(listed)), title, body.strip()))
    return sections


def retired() -> set[str]:
    """The codes of messages that have gone, which are not used again."""
    return {code for text in pages().values() for listed in RETIRED.findall(text) for code in _numbers(listed)}


def shown(node: ast.AST) -> str:
    """A text as users see it, with ``…name…`` where a value is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(shown(part) for part in parts)
        case ast.FormattedValue(value=value):
            return shown(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return shown(left) + shown(right)
        case _:
            return f"…{_name(node)}…".replace("……", "…")


def _name(node: ast.AST) -> str:
    """The name of a value: the last one in its expression, without calls of built-ins around it."""
    match node:
        case ast.Call(func=ast.Attribute(attr="join"), args=[joined]):
            return _name(joined)
        case ast.Call(
            func=ast.Name(id="len" | "list" | "sorted" | "str" | "tuple" | "type" | "max" | "min"), args=args
        ):
            return _name(args[-1])
        case ast.Call(func=called):
            return _name(called)
        case ast.Attribute(attr="__name__" | "__doc__", value=value) | ast.Subscript(value=value):
            return _name(value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.strip("_")
        case ast.GeneratorExp(generators=[generator]) | ast.ListComp(generators=[generator]):
            return _name(generator.iter)
        case ast.IfExp(body=value) | ast.BinOp(left=value) | ast.BoolOp(values=[value, *_]):
            return _name(value)
        case ast.Constant(value=str()) | ast.JoinedStr():
            return shown(node).strip("… ")
        case _:
            return ""


def function(call: ast.Call) -> str:
    """The name of what is called, without its module or object."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _kind(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The class of the error that is made of a text, or ``warning``."""
    while node in parents and not isinstance(node, ast.stmt):
        node = parents[node]
        if isinstance(node, ast.Call):
            name = function(node)
            if name.endswith("Error"):
                return "" if name.startswith("_") else name
            if name in WARNINGS:
                return "warning"
    return ""


def _numbers(listed: str) -> Iterator[str]:
    """The codes of a heading: ``A1-A3, A7``."""
    for part in listed.split(", "):
        first, _, last = part.partition("-")
        for number in range(int(first[1:]), int((last or first)[1:]) + 1):
            yield f"{first[0]}{number}"
