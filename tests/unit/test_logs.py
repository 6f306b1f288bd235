"""The package's messages: at the level asked for, and never through anybody else's handlers."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from collectives import logs
from collectives.config import LOG_LEVELS


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    level, handlers = logs.logger.level, list(logs.logger.handlers)
    yield
    logs.logger.setLevel(level)
    logs.logger.handlers[:] = handlers


def test_every_level_of_the_settings_has_its_own() -> None:
    assert tuple(logs.LEVELS) == LOG_LEVELS
    assert sorted(logs.LEVELS.values()) == list(logs.LEVELS.values())


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_what_is_less_severe_than_the_level_is_held_back(level: str, caplog: pytest.LogCaptureFixture) -> None:
    logs.configure(level)
    for number in logs.LEVELS.values():
        logging.getLogger("collectives.stall").log(number, "%d", number)
    assert [record.levelno for record in caplog.records] == [n for n in logs.LEVELS.values() if n >= logs.LEVELS[level]]


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_the_root_logger_is_left_alone(level: str) -> None:
    before = logging.root.level, list(logging.root.handlers)
    logs.configure(level)
    logs.configure(level)
    assert (logging.root.level, logging.root.handlers) == before
    assert len(logs.logger.handlers) == (1 if logs.LEVELS[level] < logging.WARNING else 0)


def shown(setup: str) -> list[str]:
    """What a program shows on stderr that logs an item of information and a warning."""
    program = f"import logging\nfrom collectives import logs\n{setup}\nlogs.logger.info('one')\nlogs.logger.warning('two')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stderr.splitlines()


def test_warnings_are_shown_where_a_program_sets_nothing_up() -> None:
    assert shown("logs.configure('warning')") == ["two"]


def test_less_is_shown_where_it_is_asked_for() -> None:
    lines = shown("logs.configure('debug')")
    assert [line.partition(" collectives ")[2] for line in lines] == ["INFO: one", "WARNING: two"]


@pytest.mark.parametrize("logger", ["", "collectives"])
def test_a_programs_own_handler_is_the_only_one(logger: str) -> None:
    own = f"logging.getLogger({logger!r}).addHandler(logging.StreamHandler())"
    assert shown(f"logs.configure('info')\n{own}") == shown(f"{own}\nlogs.configure('info')") == ["one", "two"]
