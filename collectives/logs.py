"""The package's messages: ``logging.getLogger("collectives")``, at the level that the settings ask for.

A library leaves it to the program where messages go, so nothing is set up on the root logger. Where the program sets nothing up
either, Python itself shows warnings and errors on stderr, but never less than warnings; only for these is there a handler here.
"""

from __future__ import annotations

import logging
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


class _LastResort(logging.Handler):
    """Shows messages on stderr as long as nobody else takes them."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        print(self.format(record), file=sys.stderr)


def configure(level: str) -> None:
    """Let messages of this level and above through.

    Args:
        level: one of ``collectives.config.LOG_LEVELS``.
    """
    logging.addLevelName(LEVELS["trace"], "TRACE")
    logger.setLevel(LEVELS[level])
    if logger.level < logging.WARNING and not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        handler = _LastResort()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
