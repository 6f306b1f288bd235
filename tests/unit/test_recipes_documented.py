"""The table of recipes in docs/horovod.md and the tests of recipes name each other."""

from __future__ import annotations

import re

from tests.support.launching.mpirun import ROOT


def test_every_row_is_a_test_and_every_test_has_a_row() -> None:
    section = re.search(
        r"^## Recipes\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "horovod.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert section
    rows = [line for line in section[1].splitlines() if line.startswith("|") and not re.match(r"\| recipe |\|-", line)]
    named = [re.findall(r"`(test_\w+)`", row.split(" | ")[-1]) for row in rows]
    assert all(named), f"rows without a test: {[row for row, tests in zip(rows, named, strict=True) if not tests]}"
    sources = (path.read_text() for path in (ROOT / "tests" / "adapters").glob("test_*_recipes*.py"))
    tests = sorted(
        test for source in sources for test in re.findall(r"^(?:def )?(test_\w+)(?:\(| = )", source, re.MULTILINE)
    )
    assert sorted(test for row in named for test in row) == tests
