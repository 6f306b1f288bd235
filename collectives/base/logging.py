"""The package's messages: ``logging.getLogger("collectives")``, at the configured level.

Every record has its origin: ``record.place`` is "rank 3 on host1", or "process 4711 on host1" before `init`, when
``record.rank`` is None. As a library should, the package leaves the root logger alone. If the program configures no
handler, the one defined here prints messages to stderr.
"""

from __future__ import annotations

import _thread
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from collectives.base.wake_up import WakeUp

LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

SAY_EVERY = 10.0
"""Seconds between two messages about one wait."""

logger = logging.getLogger("collectives")


class _Origin(logging.Filter):
    """Adds rank and host to each record; rejects none."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = rank = rank_of_thread.get(self.rank)
        record.host = host = platform.node()
        record.place = f"{f'process {os.getpid()}' if rank is None else f'rank {rank}'} on {host}"
        return True


class _LastResort(logging.Handler):
    """Prints messages to stderr unless another handler is installed."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        print(self.format(record), file=sys.stderr)


_origin = _Origin()

rank_of_thread: ContextVar[int] = ContextVar("rank")
"""Of threads that are ranks; unset elsewhere, where the rank is the process's."""


def configure(level: str) -> None:
    """Set the level of the package's logger, and install its handler and filter.

    Args:
        level: one of ``collectives.base.config.LOG_LEVELS``.
    """
    logging.addLevelName(LEVELS["trace"], "TRACE")
    logger.setLevel(LEVELS[level])
    logger.addFilter(_origin)
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        handler = _LastResort()
        # A logger's filter does not apply to records of its child loggers.
        handler.addFilter(_origin)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s [%(place)s]: %(message)s"))
        logger.addHandler(handler)


def place(rank: int | None) -> None:
    """Set this process's name in all later records: its rank, or with None its process number."""
    _origin.rank = rank


@contextmanager
def saying_what_is_tried(describe: Callable[[], str], seconds: float) -> Iterator[None]:
    """Log every 10 seconds what the body tries, and for how long yet.

    Args:
        describe: what; called in another thread.
        seconds: the bound of the body's wait.
    """
    ended, end = WakeUp(), time.monotonic() + seconds

    def say() -> None:
        while not ended.wait(SAY_EVERY):
            logger.warning("%s; trying for another %.0f s", describe(), max(0.0, end - time.monotonic()))

    _thread.start_new_thread(say, ())
    try:
        yield
    finally:
        ended.set()


def warn_on_first_rank(message: str, *arguments: object) -> None:
    """Log a message that is the same on every rank: a warning on rank 0 or without a rank, information elsewhere."""
    logger.log(logging.INFO if rank_of_thread.get(_origin.rank) else logging.WARNING, message, *arguments)
