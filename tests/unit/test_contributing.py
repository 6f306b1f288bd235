"""The guide for contributors: every link goes to the file that defines what it names, and every command exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_link_goes_to_what_it_names() -> None:
    links = re.findall(r"\[`([^\]`]+)`\]\(([^)\s]+)\)", GUIDE)
    assert len(links) > 20
    for text, file in links:
        names = [name for name in text.split(".") if name != Path(file).stem]
        lines = (ROOT / file).read_text()
        assert all(re.search(rf"(?:def|class) {name}\b", lines) for name in names), text


def test_every_command_is_one_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)", GUIDE, re.MULTILINE)
    assert named and set(named) <= set(targets)
