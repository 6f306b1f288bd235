"""A process that a test starts by itself, and whose output it waits for."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Mapping, Sequence

PATIENCE = 30.0
"""Seconds that anything may take."""


class Process:
    """A process that a test watches and signals, and what it has printed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.printed = ""
        self._news = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.printed += line
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def prints(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed something."""
        with self._news:
            self._news.wait_for(lambda: re.search(pattern, self.printed) or self._ended, PATIENCE)
        match = re.search(pattern, self.printed)
        assert match is not None, f"not {pattern!r} in: {self.printed}"
        return match

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ends(self, code: int = 0) -> str:
        """Wait for its end, and return what it has printed."""
        assert self._process.wait(PATIENCE) == code, self.printed
        with self._news:
            assert self._news.wait_for(lambda: self._ended, PATIENCE)
        return self.printed

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
