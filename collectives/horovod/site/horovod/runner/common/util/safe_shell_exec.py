"""Run a shell command that is ended with all its processes on an event, or when this process dies."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import IO, Any, Protocol

from collectives.launch.agent import die_with_parent
from horovod.runner.util.threads import in_thread  # type: ignore[import-not-found]

GRACEFUL_TERMINATION_TIME_S = 5
_LOOK = 0.1
"""Seconds between checks of the events."""
_SHELL = 'trap "trap : TERM; kill -TERM 0; wait" TERM; eval "$1" & wait $!'
"""Passes SIGTERM on to the whole group. A shell that ran the command in the foreground would do so only after its
end."""


class _HasFileno(Protocol):
    def fileno(self) -> int: ...

    def close(self) -> None: ...


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    index: int | None = None,
    events: Iterable[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run the command to its end and return its exit code, 128 + N after signal N.

    Args:
        command: as in a shell.
        env: its environment; this process's by default.
        stdout, stderr: streams of text that get its output; this process's by default.
        index: prefix of each line, with the stream's name.
        events: any of them ends the command: by SIGTERM, then by SIGKILL after ``GRACEFUL_TERMINATION_TIME_S``.
        prefix_output_with_timestamp: whether lines with an index begin with the time.
    """
    process = subprocess.Popen(
        ["/bin/sh", "-c", _SHELL, "sh", command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    streams = ((process.stdout, stdout or sys.stdout, "stdout"), (process.stderr, stderr or sys.stderr, "stderr"))
    readers = [
        in_thread(prefix_connection, (source, *to, index, prefix_output_with_timestamp)) for source, *to in streams
    ]
    watched = list(events or ())
    try:
        while process.poll() is None and not any(event.is_set() for event in watched):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK if watched else None)
    finally:
        _end(process)
    for reader in readers:
        reader.join()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a running command and all its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACEFUL_TERMINATION_TIME_S)


def prefix_connection(
    src_connection: _HasFileno,
    dst_stream: Any,
    prefix: str | None,
    index: int | None,
    prefix_output_with_timestamp: bool,
) -> None:
    """Copy UTF-8 bytes as text, line by line, until the other end is closed; then close this one.

    With an index and a prefix each line becomes ``[index]<prefix>:line``. A carriage return also ends a line, so that
    progress bars are shown at once.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = ""
    while True:
        data = os.read(src_connection.fileno(), 4096)
        *lines, begun = re.split(r"(?<=[\r\n])", begun + decoder.decode(data, final=not data))
        for line in lines if data else [*lines, begun]:
            if not line:
                continue
            if index is not None and prefix is not None:
                when = time.asctime(time.localtime(time.time())) if prefix_output_with_timestamp else ""
                line = f"{when}[{index}]<{prefix}>:{line}"
            dst_stream.write(line)
            dst_stream.flush()
        if not data:
            break
    src_connection.close()
