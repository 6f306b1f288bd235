"""The guide for contributors: every link goes to the line that defines what it names, and every command exists.

python tests/unit/test_contributing.py        # writes the right line numbers into the guide
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "CONTRIBUTING.md"
LINK = re.compile(r"\[(`?)([^\]`]+)`?\]\(([^)#\s]+)(?:#L\d+)?\)")


def with_lines(guide: str) -> str:
    """The guide with the line of each definition in the links whose text is a function, a class or ``Class.method``."""
    return LINK.sub(_link, guide)


def _link(link: re.Match[str]) -> str:
    quote, text, file = link.groups()
    bare = f"[{quote}{text}{quote}]({file})"
    if not quote:
        return bare
    lines = (ROOT / file).read_text().splitlines()
    *outer, name = text.split(".")
    if name == Path(file).stem:  # the module itself
        return bare
    begin = _definition(outer[-1], lines, 0) if outer and outer[-1] != Path(file).stem else 0
    return f"{bare[:-1]}#L{_definition(name, lines, begin) + 1})"


def _definition(name: str, lines: list[str], begin: int) -> int:
    """The index of the line that defines a name; of overloads the last."""
    found = [at for at in range(begin, len(lines)) if re.match(rf"\s*(?:def|class) {name}\b", lines[at])]
    assert found, f"{name} is not defined where the guide says"
    return next((at for at in found if "@overload" not in lines[at - 1]), found[-1])


def test_every_link_goes_to_what_it_names() -> None:
    guide = GUIDE.read_text()
    assert len(LINK.findall(guide)) > 20
    assert guide == with_lines(guide), f"run python {Path(__file__).relative_to(ROOT)}"


def test_every_command_is_one_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)", GUIDE.read_text(), re.MULTILINE)
    assert named and set(named) <= set(targets)


if __name__ == "__main__":
    GUIDE.write_text(with_lines(GUIDE.read_text()))
