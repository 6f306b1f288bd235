"""The hosts of an elastic job: fixed ones, or what a script prints now and then.

The script prints lines ``host`` or ``host:slots``; one with 0 slots is as if it were not there. It is run every second,
in a thread. A run that takes too long, fails, or prints too much or anything else is said once, and the hosts stay as
they were.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from collectives.base.errors import InvalidArgumentError
from collectives.launch.agent import die_with_parent
from collectives.launch.hosts import Host, parse_lines

EVERY = 1.0
"""Seconds between two runs."""
RUN_WITHIN = 10.0
MOST_BYTES = 1 << 20
_DRAINED = re.compile(r"\s*\S+(:|\s+slots\s*=\s*)0+\s*(#.*)?")
"""A line that says that a host takes no ranks."""
_SHOWN = 200
"""Characters of a script's error message."""

Found = Sequence[Host] | str
"""Hosts; or why there are none, in words."""


def run_script(command: str, slots: int) -> Found:
    """Run a discovery script once.

    Args:
        command: for the shell.
        slots: of a host for which the script says none.
    """
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    except OSError as error:
        return f"cannot run the script: {error.strerror}"
    assert process.stdout and process.stderr
    data = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    out, err = data
    sources = selectors.DefaultSelector()
    for file in data:
        sources.register(file, selectors.EVENT_READ)
    end = time.monotonic() + RUN_WITHIN
    try:
        while sources.get_map() and len(data[out]) <= MOST_BYTES:
            left = end - time.monotonic()
            if left <= 0:
                return f"the script did not end within {RUN_WITHIN:g} s"
            for source in [key.fd for key, _ in sources.select(left)]:
                piece = os.read(source, 64 << 10)
                data[source] = data[source] + piece if source == out else (data[source] + piece)[-_SHOWN:]
                if not piece:
                    sources.unregister(source)
        if len(data[out]) > MOST_BYTES:
            return f"the script printed more than {MOST_BYTES >> 20} MiB"
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"the script did not end within {RUN_WITHIN:g} s"
        if code:
            said = data[err].decode(errors="replace").strip()
            return f"the script ended with exit code {code}" + (f": {said}" if said else "")
        lines = data[out].decode(errors="replace").splitlines()
        return parse_lines([line for line in lines if not _DRAINED.fullmatch(line)], "line", slots)
    except InvalidArgumentError as error:
        return f"the script printed something other than hosts: {str(error)[:_SHOWN]}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        sources.close()
        process.stdout.close()
        process.stderr.close()
        process.wait()


class Discovery:
    """Runs a script in a thread until `close`.

    Args:
        look: finds the hosts.
        found: is called in the thread with what is new.
    """

    def __init__(self, look: Callable[[], Found], found: Callable[[Found], object]) -> None:
        self._look, self._found = look, found
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collectives-discovery", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last: Found | None = None
        while True:
            try:
                found = self._look()
            except Exception as error:  # a function of the user's
                found = f"it raised {type(error).__name__}: {error}"
            if self._closed.is_set():
                return
            if found != last:
                self._found(found)
            last = found
            if self._closed.wait(EVERY):
                return

    def close(self) -> None:
        """End the thread; a script that runs is ended with this process."""
        self._closed.set()
