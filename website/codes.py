"""The pages of troubleshooting: the messages of the library, read from its source by their codes, each under what
docs/troubleshooting/ says of its cause and its cure.

A message ends with its code, or its first paragraph does: `` [A12]``, a family's letter and a number.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = re.compile(r" \[([A-Z][1-9][0-9]*)\]")
HEADING = re.compile(r"^## (?!Retired)((?:[A-Z]\d+(?:-[A-Z]\d+)?(?:, )?)+): (.+)$", re.MULTILINE)
RETIRED = re.compile(r"^## Retired: (.+)$", re.MULTILINE)
TREE = "CollectivesError"
RAISED = {"AssertionError", "ImportError", "MemoryError", "ModuleNotFoundError", "RuntimeError", "TypeError"}
"""Python's errors, where they are raised with a text."""
WARNINGS = {"warn", "warning", "exception", "warn_on_first_rank"}
TEXTS = {*WARNINGS, "refused", "_refused", "_give_up"}
"""What takes a text that users see, besides errors of the tree."""
UNSEEN = (
    ("base/user_folder.py", "is not a folder of this user"),
    ("base/interchange.py", "ranks do not exchange values"),
    ("engine/persistent.py", "every start of this operation"),
    ("engine/rows.py", "no call is in progress"),
    ("worlds/persistent.py", "an operation that was freed"),
    # These hand on a text that has a code.
    ("base/logging.py", "trying for another"),
    ("engine/messages/delivery.py", "the receiver has refused it"),
    ("jax/eager.py", "an earlier program has failed"),
    ("ray/executor.py", "RayExecutor: …lost…"),
    ("transport/stores/store_exchange.py", "told by …why…"),
    ("tools/bench/command.py", "…error…"),
    ("worlds/exit_hooks.py", "failed while …doing…:"),
    # These say what goes well, or as asked.
    ("launch/cli.py", "status at"),
    ("launch/kubernetes.py", "its first lines say how to start it"),
    ("launch/output.py", "interrupted as rank"),
    ("tools/bench/run.py", "# "),
)
"""Texts without a code: by module, some words of each."""
PROGRAM = re.compile(r"^collectives( [a-z]+|run)?: |^…prog…: ")
"""What begins a text that is printed."""


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
def modules() -> list[tuple[str, dict[ast.AST, ast.AST]]]:
    """The modules of the library that may have messages: path in it, and the parent of each node."""
    folder, found = ROOT / "collectives", []
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text()
        if not re.search(r"Error\(|sys\.stderr", source) and not CODE.search(source):
            continue
        tree = ast.parse(source)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        found.append((str(file.relative_to(folder)), parents))
    return found


@cache
def messages() -> list[Message]:
    """All messages that have a code."""
    found = []
    for path, parents in modules():
        for node, parent in parents.items():
            if not _is_text(node) or isinstance(parent, ast.JoinedStr | ast.FormattedValue | ast.Expr):
                continue
            match = CODE.search(shown(node))
            if match:
                while isinstance(parents[node], ast.BinOp):
                    node = parents[node]
                text = CODE.sub("", shown(node), count=1).strip()
                found.append(Message(match[1][0], int(match[1][1:]), path, _kind(node, parents), text))
    return sorted(found)


def uncoded() -> list[str]:
    """Texts of errors and warnings, and those that are printed to stderr, that should have a code, as ``path:line:
    text``."""
    named = _subclasses(TREE) | TEXTS
    lacking = {}
    for path, parents in modules():
        for call, parent in parents.items():
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = _function(call)
            is_raised = name in RAISED or (name == "ValueError" and path.startswith(("horovod/", "torch/")))
            is_printed = name == "print" and any(ast.unparse(option.value) == "sys.stderr" for option in call.keywords)
            is_printed |= name == "say" and path.startswith("launch/")
            if name in named or is_printed or (is_raised and isinstance(parent, ast.Raise)):
                for node in _texts(call.args[0], call, parents):
                    lacking[f"{path}:{getattr(node, 'lineno', 0)}: {shown(node)}"] = path, shown(node)
    return [
        line
        for line, (path, text) in lacking.items()
        if not CODE.search(text) and _own_words(text) and not any(path == file and own in text for file, own in UNSEEN)
    ]


def situations() -> list[Situation]:
    """What docs/troubleshooting/ says, section by section."""
    sections = []
    for file in sorted((ROOT / "docs" / "troubleshooting").glob("*.md")):
        _, *parts = HEADING.split(RETIRED.split(file.read_text())[0])
        for listed, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            sections.append(Situation(file.stem, tuple(_numbers(listed)), title, body.strip()))
    return sections


def retired() -> set[str]:
    """The codes of messages that have gone, which are not used again."""
    files = (ROOT / "docs" / "troubleshooting").glob("*.md")
    return {code for file in files for listed in RETIRED.findall(file.read_text()) for code in _numbers(listed)}


def pages() -> dict[str, str]:
    """The Markdown of the pages, by their paths in the site: one for each family, and ``errors/index.md``."""
    by_code = {message.code: message for message in messages()}
    files = sorted((ROOT / "docs" / "troubleshooting").glob("*.md"))
    texts = {file.stem: RETIRED.split(HEADING.split(file.read_text())[0])[0] for file in files}
    families = {page: text.partition("\n")[0].removeprefix("# ") for page, text in texts.items()}
    rows = []
    for situation in situations():
        texts[situation.page] += f"## {situation.title}\n\n{situation.body}\n\n"
        for message in (by_code[code] for code in situation.codes):
            kind = f" {message.kind}" if message.kind else ""
            texts[situation.page] += (
                f"#### {message.code}{kind} {{ #{message.code} }}\n\n{_quoted(message.text)}<br>\n"
                f"in `collectives/{message.path}`\n\n"
            )
            target = f"../troubleshooting/{situation.page}.md#{message.code}"
            first = textwrap.shorten(message.text.partition("\n")[0], 120, placeholder=" …")
            rows.append((message, f"[{message.code}]({target}){{ #{message.code} }}", first))
    rows.sort(key=lambda row: row[0])
    index = (
        "# Errors by code\n\nEvery message ends with its code, such as `[R19]`. The code stays when the words change. "
        "Search for it or for words of the message, or go to a page:\n\n"
    )
    index += "".join(f"- [{title}](../troubleshooting/{page}.md)\n" for page, title in families.items())
    index += "\n| code | error | message |\n|---|---|---|\n"
    index += "".join(f"| {link} | {message.kind} | {_quoted(text)} |\n" for message, link, text in rows)
    made = {f"troubleshooting/{page}.md": text for page, text in texts.items()}
    return {**made, "errors/index.md": index}


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
            return f"…{_name(node)}…"


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


def _function(call: ast.Call) -> str:
    """The name of what is called, without its module or object."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _texts(node: ast.AST, call: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """The texts that an argument of a call can be: itself, alternatives, or what its function assigns to the name."""
    match node:
        case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]):
            yield from _texts(one, call, parents)
            yield from _texts(other, call, parents)
        case ast.Name(id=name):
            scope = call
            while not isinstance(scope, ast.FunctionDef | ast.Module):
                scope = parents[scope]
            for assignment in ast.walk(scope):
                if not isinstance(assignment, ast.Assign) or isinstance(assignment.value, ast.Name):
                    continue
                if name in map(ast.unparse, assignment.targets):
                    yield from _texts(assignment.value, call, parents)
        case ast.Call(func=ast.Attribute(attr="sentence"), args=[*_, text]):
            yield from _texts(text, call, parents)
        case ast.BinOp():
            yield node
        case _ if _is_text(node):
            yield node


def _own_words(text: str) -> bool:
    """Whether a text says more than whose text it hands on."""
    return len(re.sub(r"…[^…]*…|rank|[^a-z]", "", PROGRAM.sub("", text))) >= 3


def _kind(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The class of the error that is made of a text, or ``warning``."""
    while node in parents and not isinstance(node, ast.stmt):
        node = parents[node]
        if isinstance(node, ast.Call):
            name = _function(node)
            if name.endswith("Error"):
                return name
            if name in WARNINGS:
                return "warning"
    return ""


def _subclasses(root: str) -> set[str]:
    """The names of a class and of all that derive from it."""
    bases: dict[str, set[str]] = {}
    for _, parents in modules():
        for node in parents:
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    tree = {root}
    while more := {name for name, own in bases.items() if own & tree} - tree:
        tree |= more
    return tree


def _numbers(listed: str) -> Iterator[str]:
    """The codes of a heading: ``A1-A3, A7``."""
    for part in listed.split(", "):
        first, _, last = part.partition("-")
        for number in range(int(first[1:]), int((last or first)[1:]) + 1):
            yield f"{first[0]}{number}"


def _quoted(text: str) -> str:
    """A text as code of Markdown on one line, in a table too."""
    line = " ↵ ".join(part.strip() for part in text.split("\n") if part.strip()).replace("|", "\\|")
    return f"`` {line} ``" if "`" in line else f"`{line}`"
