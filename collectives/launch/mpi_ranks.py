"""Ranks that an MPI launcher starts and ends.

MPI launchers do not end reliably: Open MPI's was seen to hang, ignoring SIGTERM, after a rank had died during start-up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from collectives.launch.agent import die_with_parent
from collectives.launch.output import Output
from collectives.launch.records import Record

_AFTER_FAILURE = 6.0
_CLOCKS_DIFFER = 1.0
"""Seconds by which a file system's clock may be behind."""


class MpiRanks:
    """The ranks of one ``mpirun``; see `job.Ranks`."""

    ends_within = 1.5

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment = list(command), dict(environment)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._began = self._failed_at = 0.0

    @property
    def code(self) -> int:
        code = self.processes[0].returncode
        return code if code >= 0 else 128 - code

    def start(self, output: Output) -> None:
        self._began = time.time() - _CLOCKS_DIFFER
        process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self.processes.append(process)
        self._output = output
        assert process.stdout is not None and process.stderr is not None
        output.attach(process.stdout.fileno(), process.stderr.fileno())

    def waiting(self) -> tuple[list[int], list[int]]:
        return [], []

    def turn(self, readable: Sequence[int], writable: Sequence[int]) -> None:
        if self._output.records and not self._failed_at:
            self._failed_at = time.monotonic()

    def running(self) -> bool:
        return self.processes[0].poll() is None

    def failures(self) -> list[Record]:
        return []

    def end_at(self) -> float:
        return self._failed_at + _AFTER_FAILURE if self._failed_at else float("inf")

    def send_signal(self, number: int) -> None:
        self.processes[0].send_signal(number)

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the launcher goes on, in a session of its own

    def end(self) -> None:
        self._output.say("the MPI launcher goes on although the job has ended; ending it")
        self.processes[0].terminate()

    def kill(self) -> None:
        """Nothing: the launcher is a descendant of this process, and ends the ranks on other hosts with itself."""

    def close(self) -> None:
        for process in self.processes:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            process.stderr.close()
            self._remove_session(process.pid)

    def _remove_session(self, pid: int) -> None:
        """Remove the folder of Open MPI's launcher, which leaves it behind where it is killed."""
        base = next((self.environment[name] for name in ("TMPDIR", "TEMP", "TMP") if name in self.environment), "/tmp")
        folder = Path(base, f"ompi.{pid}")
        with contextlib.suppress(OSError):
            status = folder.stat()
            if status.st_uid == os.geteuid() and status.st_mtime >= self._began:  # else another container's
                shutil.rmtree(folder, ignore_errors=True)
