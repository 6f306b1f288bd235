"""Ranks that an MPI launcher starts and ends.

MPI launchers do not end reliably: Open MPI's was seen to hang, ignoring SIGTERM, after a rank had died during start-up.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence

from collectives.launch.agent import die_with_parent
from collectives.launch.output import Output
from collectives.launch.records import Record

_AFTER_FAILURE = 6.0


class MpiRanks:
    """The ranks of one ``mpirun``; see `job.Ranks`.

    Args:
        command, environment: the launcher's.
    """

    ends_within = 1.5

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment = list(command), dict(environment)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._failed_at = 0.0

    @property
    def code(self) -> int:
        code = self.processes[0].returncode
        return code if code >= 0 else 128 - code

    def start(self, output: Output) -> None:
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

    def before_stop(self) -> None:
        """Nothing: the launcher goes on, in a session of its own."""

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
