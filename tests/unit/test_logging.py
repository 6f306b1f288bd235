"""The package's messages: at the level asked for, and never through anybody else's handlers."""

from __future__ import annotations

import logging
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from collectives.base import logging as logs
from collectives.base.config import LOG_LEVELS


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    level, handlers, filters = logs.logger.level, list(logs.logger.handlers), list(logs.logger.filters)
    yield
    logs.place(None)
    logs.logger.setLevel(level)
    logs.logger.handlers[:], logs.logger.filters[:] = handlers, filters


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
    assert len(logs.logger.handlers) == len(logs.logger.filters) == 1


def shown(setup: str) -> list[str]:
    """What a program shows on stderr that logs an item of information and a warning."""
    program = (
        f"import logging\nfrom collectives.base import logging as logs\n{setup}\nlogs.logger.info('one')\n"
        f"logs.logger.warning('two')"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stderr.splitlines()


def test_warnings_are_shown_where_a_program_sets_nothing_up() -> None:
    (line,) = shown("logs.configure('warning')")
    assert re.search(rf" collectives WARNING \[process \d+ on {re.escape(platform.node())}\]: two$", line)


def test_less_is_shown_where_it_is_asked_for() -> None:
    lines = shown("logs.configure('debug')\nlogs.place(3)")
    where = f"[rank 3 on {platform.node()}]"
    assert [line.partition(" collectives ")[2] for line in lines] == [f"INFO {where}: one", f"WARNING {where}: two"]


def test_every_record_says_where_it_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    logs.configure("info")
    logs.logger.info("before init")
    logs.place(3)
    logs.logger.info("after it")
    assert [vars(record)["rank"] for record in caplog.records] == [None, 3]
    assert {vars(record)["host"] for record in caplog.records} == {platform.node()}


@pytest.mark.parametrize(("rank", "level"), [(None, "WARNING"), (0, "WARNING"), (1, "INFO")])
def test_what_is_alike_everywhere_is_a_warning_on_one_rank(
    rank: int | None, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs.configure("info")
    logs.place(rank)
    logs.warn_on_first_rank("%s is missing", "it")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [(level, "it is missing")]


@pytest.mark.parametrize("logger", ["", "collectives"])
def test_a_programs_own_handler_is_the_only_one(logger: str) -> None:
    own = f"logging.getLogger({logger!r}).addHandler(logging.StreamHandler())"
    assert shown(f"logs.configure('info')\n{own}") == shown(f"{own}\nlogs.configure('info')") == ["one", "two"]


def test_what_a_wait_tries_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    twice, counted = threading.Event(), iter(range(1, 1000))

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if len(said) == 2:
                twice.set()

    monkeypatch.setattr(logs, "SAY_EVERY", 0.01)
    monkeypatch.setattr(logs.logger, "handlers", [Notes()])
    with logs.saying_what_is_tried(lambda: f"attempt {next(counted)}", 60):
        assert twice.wait(60)
    assert said[0].startswith("attempt 1; trying for another ") and said[1].startswith("attempt 2; ")
