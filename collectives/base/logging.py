"""The package's messages: ``logging.getLogger("collectives")``, at the level that the settings ask for.

Every record says where it comes from: ``record.place`` is "rank 3 on host1", or "process 4711 on host1" before `init`;
``record.rank`` is None then. A library leaves it to the program where messages go, so nothing is set up on the root
logger. Where the program sets nothing up either, the handler here shows them on stderr.
"""

from __future__ import annotations

import logging
import os
import platform
import sys

LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

logger = logging.getLogger("collectives")


class _Origin(logging.Filter):
    """Adds rank and host to each record; lets all pass."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        record.host = host = platform.node()
        record.place = f"{f'process {os.getpid()}' if self.rank is None else f'rank {self.rank}'} on {host}"
        return True


class _LastResort(logging.Handler):
    """Shows messages on stderr as long as nobody else takes them."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        print(self.format(record), file=sys.stderr)


_origin = _Origin()


def configure(level: str) -> None:
    """Let messages of this level and above through.

    Args:
        level: one of ``collectives.base.config.LOG_LEVELS``.
    """
    logging.addLevelName(LEVELS["trace"], "TRACE")
    logger.setLevel(LEVELS[level])
    logger.addFilter(_origin)
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        handler = _LastResort()
        # A logger's filter does not see what comes from those below it.
        handler.addFilter(_origin)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s [%(place)s]: %(message)s"))
        logger.addHandler(handler)


def place(rank: int | None) -> None:
    """Name this process in all records from now on: by its rank, or None, by its number on the host."""
    _origin.rank = rank


def warn_on_first_rank(message: str, *arguments: object) -> None:
    """A warning that is the same on every rank: from the first one, or from a process that has no rank. Information
    from the others."""
    logger.log(logging.INFO if _origin.rank else logging.WARNING, message, *arguments)
