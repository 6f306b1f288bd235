"""What documents name is there: files that pages link to, the navigation's pages, what the guide for contributors links
to, its commands, and the tests of recipes, which the table of docs/horovod.md names as they name it."""

from __future__ import annotations

import re
from pathlib import Path

from collectives.base.config import Config

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = {"contributing.md", "changelog.md"}
"""Pages of the site that are not in docs/, besides the folders ``reference`` and ``errors``."""


def test_every_link_of_a_page_leads_to_a_file() -> None:
    links = [
        (page.relative_to(ROOT), link)
        for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for link in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", page.read_text())
    ]
    assert len(links) > 100
    assert [(page, link) for page, link in links if not (ROOT / page.parent / link).exists()] == []


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    generated = [page for page in listed if page in GENERATED or page.startswith(("reference/", "errors/"))]
    assert sorted(listed) == sorted([*written, *generated])


def test_the_table_of_settings_has_every_setting() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    listed = {f"COLLECTIVES_{name}" for names in table for name in re.findall(r"`(\w+)`", names)}
    variables = {field.metadata.get("variable", "") for field in Config.__dataclass_fields__.values()} - {""}
    assert variables - listed == set()


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
