"""One run: ``collectivesrun -np N`` of a command, its output in a file; nothing of it outlives its time."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType

from collectives.launch.agent import die_with_parent

_GRACE = 20.0
"""Seconds that collectivesrun has to end its ranks after SIGTERM: it needs about 7 where they do not listen."""
_LOOK = 0.2
"""Seconds between two looks whether to stop."""
_OWN = ("-np", "-n", "--num-proc", "-h", "--help", "-v", "--version", "-cb", "--check-build", "--show-plan")
"""Options of collectivesrun that a study sets by itself, or that start nothing."""
_SHOWN = 40
"""Lines of a failed run's output that are shown."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    command: tuple[str, ...]
    status: int | None
    """The exit status; None: its time was up."""
    seconds: float
    output: str
    log: Path

    @property
    def problem(self) -> str:
        """What went wrong; empty: nothing."""
        if self.status == 0:
            return ""
        return (
            f"not finished after {self.seconds:.0f} s, and ended"
            if self.status is None
            else f"exit status {self.status}"
        )

    def tail(self) -> str:
        """The command and the last lines of what it printed."""
        lines = self.output.splitlines()
        left_out = [f"... ({len(lines) - _SHOWN} more lines in {self.log})"] if len(lines) > _SHOWN else []
        return "\n".join([f"$ {shlex.join(self.command)}", *left_out, *lines[-_SHOWN:]])


def launcher(ranks: int, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command line that starts so many ranks."""
    return [sys.executable, "-m", "collectives.launch", "--no-tag", "-np", str(ranks), *options, *command]


def check_options(options: Sequence[str], ranks: int) -> None:
    """Raise ValueError if collectivesrun would not take these options for so many ranks."""
    from collectives.base.errors import InvalidArgumentError
    from collectives.launch.cli import check_arguments

    for word in options:
        if word.split("=")[0] in _OWN:
            raise ValueError(f"{word} cannot be given here; the number of ranks is -np of this program")
    if options and not options[0].startswith("-"):
        raise ValueError(f"expected options of collectivesrun, got {options[0]!r}; the command comes behind --")
    try:
        check_arguments(["-np", str(ranks), *options])
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None


def names_hosts(options: Sequence[str]) -> bool:
    """Whether the ranks go to hosts that are named, of whose cores nothing is known here."""
    return any(word.split("=")[0] in ("-H", "--hosts", "-hostfile", "--hostfile") for word in options)


class Interruption:
    """Notes SIGINT and SIGTERM; an exception out of a handler would be lost where Python ignores them, as in a fork."""

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def run(
    command: Sequence[str],
    log: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    interruption: Interruption | None = None,
) -> Outcome:
    """Run a command to its end, or to the end of its time; its output, errors included, goes into ``log``.

    It has a session of its own. When its time is up, or this process is interrupted, its group gets SIGTERM, upon which
    collectivesrun ends all ranks on all hosts, and SIGKILL if that was in vain.

    Raises:
        KeyboardInterrupt: ``interruption`` has come; the command is ended by then.
    """
    start = perf_counter()
    with log.open("wb") as sink:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={"PYTHONUNBUFFERED": "1", **os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            sink.write(f"{error}\n".encode())
            return Outcome(tuple(command), 127, 0.0, str(error), log)
        status: int | None = None
        try:
            while status is None and (left := start + timeout - perf_counter()) > 0:
                if interruption is not None and interruption.came:
                    raise KeyboardInterrupt
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(left, _LOOK))
        finally:
            if status is None:
                _end(process)
    return Outcome(tuple(command), status, perf_counter() - start, log.read_text(errors="replace"), log)


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    finally:
        # Also what has left its leader behind.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
