"""The pages of troubleshooting, each message under what docs/troubleshooting/ says of its cause and its cure; and the
messages that lack a code."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from collectives.base.errors import CODE
from collectives.tools import error_codes
from collectives.tools.error_codes import WARNINGS, function, is_text, messages, modules, shown, situations

TREE = "CollectivesError"
RAISED = {"AssertionError", "ImportError", "MemoryError", "ModuleNotFoundError", "RuntimeError", "TypeError"}
"""Python's errors, where they are raised with a text."""
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
    ("tools/simulate.py", "…error…"),
    ("worlds/exit_hooks.py", "failed while …doing…:"),
    # These say what goes well, or as asked.
    ("launch/cli.py", "status at"),
    ("launch/kubernetes.py", "its first lines say how to start it"),
    ("launch/output.py", "interrupted along with rank"),
    ("tools/bench/run.py", "# "),
)
"""Texts without a code: by module, some words of each."""
PROGRAM = re.compile(r"^collectives( [a-z]+|run)?: |^…prog…: ")
"""What begins a text that is printed."""


def uncoded() -> list[str]:
    """Texts of errors and warnings, and those that are printed to stderr, that should have a code, as ``path:line:
    text``."""
    named = _subclasses(TREE) | TEXTS
    lacking = {}
    for path, parents in modules():
        for call, parent in parents.items():
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = function(call)
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


def pages() -> dict[str, str]:
    """The Markdown of the pages, by their paths in the site: one for each family, and ``errors/index.md``.

    The heading above the cause and the cure has the codes: their anchors are there, and a search finds it first.
    """
    by_code = {message.code: message for message in messages()}
    texts = {page: error_codes.introduction(page) for page in error_codes.pages()}
    titles = {page: text.partition("\n")[0].removeprefix("# ") for page, text in texts.items()}
    rows = []
    for situation in situations():
        head, *others = situation.codes
        listed = " ".join([head, *(f'<span id="{code}">{code}</span>' for code in others)])
        texts[situation.page] += (
            f'## {situation.title} <small>{listed}</small> {{ #{head} data-toc-label="{situation.title}" }}\n\n'
            f"{situation.body}\n\n"
        )
        for message in (by_code[code] for code in situation.codes):
            kind = f" `{message.kind}`" if message.kind else ""
            texts[situation.page] += (
                f"**{message.code}**{kind} in `collectives/{message.path}`<br>\n{_quoted(message.text)}\n\n"
            )
            target = f"../troubleshooting/{situation.page}.md#{message.code}"
            first = textwrap.shorten(message.text.partition("\n")[0], 120, placeholder=" …")
            rows.append((message, f"[{message.code}]({target}){{ #{message.code} }}", first))
    rows.sort(key=lambda row: row[0])
    index = (
        "# Errors by code\n\nEvery message ends with its code, such as `[R19]`, which stays when the words change. "
        "Click on a code for its cause and cure, or run `collectives explain R19`. You can search for a code or for "
        "words of the message, or go to a page:\n\n"
    )
    index += "".join(f"- [{title}](../troubleshooting/{page}.md)\n" for page, title in titles.items())
    index += "\n| code | error | message |\n|---|---|---|\n"
    index += "".join(f"| {link} | {message.kind} | {_quoted(text)} |\n" for message, link, text in rows)
    made = {f"troubleshooting/{page}.md": text for page, text in texts.items()}
    return {**made, "errors/index.md": index}


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
        case _ if is_text(node):
            yield node


def _own_words(text: str) -> bool:
    """Whether a text says more than whose text it hands on."""
    return len(re.sub(r"…[^…]*…|rank|[^a-z]", "", PROGRAM.sub("", text))) >= 3


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


def _quoted(text: str) -> str:
    """A text as code of Markdown on one line, in a table too."""
    line = " ↵ ".join(part.strip() for part in text.split("\n") if part.strip()).replace("|", "\\|")
    return f"`` {line} ``" if "`" in line else f"`{line}`"
