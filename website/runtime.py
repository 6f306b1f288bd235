"""Static analysis knows nothing of functions that are made of descriptions: signatures of `collectives` come from the
program, those of its adapters, whose frameworks may be missing, from the source."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

from collectives import api, point_to_point

OP = re.compile(r"<Op\.(\w+): [^>]*>")
EXAMPLE = re.compile(r"^Example:\n(?! *```)((?:[ ]{4}.*\n|\n)*(?:[ ]{4}.*)?)", re.MULTILINE)


class Runtime(griffe.Extension):  # type: ignore[misc]
    """Replace what modules assign and define by the functions that they have, and mark examples as code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for made in (api, point_to_point):
            module, stub = pkg[made.__name__.removeprefix("collectives.")], ""
            for name, function in inspect.getmembers(made, inspect.isfunction):
                signature = OP.sub(lambda match: match[1].title(), str(inspect.signature(function)))
                stub += f"def {name}{signature}:\n    {inspect.getdoc(function)!r}\n"
            for name, member in griffe.visit(made.__name__, filepath=module.filepath, code=stub).members.items():
                if name in module.members and not name.startswith("_"):
                    module.set_member(name, member)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_class and "__doc__" in obj.members:  # it is set to that of the first base
            obj.docstring = obj.resolved_bases[0].docstring
        if obj.docstring and not obj.is_module:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    language = "pycon" if match[1].lstrip().startswith(">>>") else "python"
    return f"Example:\n    ```{language}\n{match[1]}\n    ```"
