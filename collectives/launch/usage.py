"""A parser of arguments whose errors take one line."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An error ends the program with status 2 and one line, which names ``--help``."""

    def error(self, message: str) -> NoReturn:
        self._print_message(f"{self.prog}: error: {message}; --help shows the arguments [U1]\n", sys.stderr)
        sys.exit(2)
