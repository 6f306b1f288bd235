"""Run parts one after another, each bounded, each with processes of its own, none of which outlives its part.

A part is a command in a session of its own. An MPI launcher puts its ranks into further process groups, so that ending
the command's group would not reach them: every descendant is known by a token in its environment, and looked for in
/proc. When a part's time is up, its Python processes are aborted first, because then each writes where all its threads
were. Then, or when this process is interrupted or ended, its group is asked to end (an MPI launcher then tidies up),
and whatever remains is killed. Should this process itself be killed, the system ends the command in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.figures import RESULT

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "passed", "failed", "timed out", "skipped", "not run"

_TOKEN = "COLLECTIVES_CHECK_TOKEN"
_TO_TIDY_UP = 3.0
"""Seconds that processes have to end when asked to, and those that a part has left behind by themselves."""
_TO_DIE = 10.0
_LEAST = 5.0
"""Seconds of the budget below which no further part is begun."""
_TO_DUMP = 2.0
"""Seconds in which processes that hang write where they are."""
_LAUNCHER = ("collectives.launch ", "launch/rank.py ")
_PR_SET_PDEATHSIG = 1

_ENVIRONMENT = {"COLLECTIVES_TIMEOUT": "20", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
"""Of every part, unless set otherwise: a rank that waits in vain says so before its part's time is up."""


@dataclass(frozen=True)
class Part:
    """One check.

    Attributes:
        name: names its files, too.
        timeout: seconds.
        needs: a program that must be on the PATH.
        cores: that this process must be able to use.
        gpu: whether it needs a GPU.
        rehearsal: the command in place of ``command`` where there is no GPU; empty: there is nothing that it could do
            then.
        lacks: why it cannot run, where that is known beforehand.
    """

    name: str
    command: Sequence[str]
    timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    cores: int = 0
    gpu: bool = True
    rehearsal: Sequence[str] = ()
    lacks: str = ""

    def why_not(self) -> str:
        """What it lacks here; empty if it can run."""
        if self.lacks:
            return self.lacks
        if self.needs and shutil.which(self.needs) is None:
            return f"{self.needs} is not on the PATH"
        cores = len(os.sched_getaffinity(0))
        return f"needs {self.cores} cores, and {cores} can be used" if cores < self.cores else ""

    def rehearsed(self) -> Part:
        """The part as it is run without a GPU."""
        if not self.gpu:
            return self
        if not self.rehearsal:
            return replace(self, lacks=self.lacks or "needs a GPU")
        return replace(self, command=self.rehearsal, needs="")


@dataclass(frozen=True)
class Outcome:
    """What came of a part: ``status`` is one of the words above; ``detail`` says why, or is its last line."""

    name: str
    status: str
    seconds: float = 0.0
    detail: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    """What the part handed over, as JSON: "figures", "skipped", and its own."""

    @property
    def good(self) -> bool:
        """Nothing was found wrong, and nothing remained unchecked that could have been."""
        return self.status in (PASSED, SKIPPED) and all(
            figure["met"] is not False for figure in self.result.get("figures", ())
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_all(parts: Sequence[Part], budget: float, folder: Path, told: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the parts in order within a budget of seconds; none is begun when it is spent. ``told`` follows each."""
    deadline = time.monotonic() + budget
    outcomes = []
    with signals_as_exceptions():
        for part in parts:
            left = deadline - time.monotonic()
            if lacking := part.why_not():
                outcome = Outcome(part.name, SKIPPED, detail=lacking)
            elif left < _LEAST:
                outcome = Outcome(part.name, NOT_RUN, detail=f"the budget of {budget:g} s is spent")
            else:
                outcome = run_part(part, min(part.timeout, left), folder)
            outcomes.append(outcome)
            told(outcome)
    return outcomes


def run_part(part: Part, limit: float, folder: Path) -> Outcome:
    """Run one part for at most ``limit`` seconds; when this returns or raises, none of its processes is left."""
    log, result = folder / f"{part.name}.log", folder / f"{part.name}.json"
    result.unlink(missing_ok=True)
    token = uuid.uuid4().hex
    environment = {**_ENVIRONMENT, **os.environ, **part.environment, _TOKEN: token, RESULT: str(result)}
    start = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None
    left: list[str] = []
    said = ""
    try:
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(part.command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        said = log.read_text(errors="replace").strip()
        _dump_stacks(process, token)
    except OSError as error:
        return Outcome(part.name, FAILED, time.monotonic() - start, str(error))
    finally:
        left = _end(process, token)
    seconds = time.monotonic() - start
    output = said if code is None else log.read_text(errors="replace").strip()
    content = _read(result)
    status, detail = _judge(code, limit, output, content)
    if left and code is not None:
        status, detail = FAILED, f"left behind: {', '.join(left)}"
    return Outcome(part.name, status, seconds, detail, content)


def _judge(code: int | None, limit: float, output: str, content: Mapping[str, Any]) -> tuple[str, str]:
    """A part's status, and one line about it."""
    last = output.splitlines()[-1].strip(" =") if output else ""
    if code is None:
        return TIMED_OUT, f"after {limit:.0f} s; last: {last}"
    if code:
        # What an MPI launcher says last is seldom what went wrong.
        errors = re.findall(r"^(?:E  +)?(\w*(?:Error|Exception|assert)\b.*)$", output, re.MULTILINE)
        return FAILED, f"exit code {code}: {errors[-1] if errors else last}"
    if "skipped" in content:
        return SKIPPED, str(content["skipped"])
    skipped = re.search(r"\d+ skipped", last)
    if skipped and not re.search(r"\d+ passed", last):
        reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", output, re.MULTILINE)
        return SKIPPED, reasons[0] if reasons else last
    return PASSED, last


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def _end(process: subprocess.Popen[bytes] | None, token: str) -> list[str]:
    """End every process that carries the token; returns what outlived the command."""
    if process is not None and process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
    alive = _wait_until_gone(process, token, _TO_TIDY_UP)
    left = [f"{pid} {_command(pid)}" for pid in alive]
    end = time.monotonic() + _TO_DIE
    while alive and time.monotonic() < end:
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        alive = _wait_until_gone(process, token, 0.5)
    return left


def _dump_stacks(process: subprocess.Popen[bytes] | None, token: str) -> None:
    """Abort what hangs, so that ``faulthandler`` writes all stacks; not the launcher's processes, which tidy up."""
    for pid in _carriers(token):
        if _is_python(pid) and not any(word in _command(pid, 1 << 12) for word in _LAUNCHER):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
    _wait_until_gone(process, token, _TO_DUMP)


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python")
    return False


def _wait_until_gone(process: subprocess.Popen[bytes] | None, token: str, patience: float) -> list[int]:
    """The processes that carry the token once all have gone, or the time is up."""
    end = time.monotonic() + patience
    while True:
        if process is not None:
            process.poll()
        alive = _carriers(token)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.05)


def _carriers(token: str) -> list[int]:
    """The processes that were started with the token in their environment; a zombie has none any more."""
    mark, pids = f"{_TOKEN}={token}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes():
                    pids.append(int(entry))
    return pids


def _command(pid: int, most: int = 120) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:most]
    return ""


def _end_with_parent() -> None:
    """In the child: be sent SIGTERM when this process dies; and dump no core, which takes long."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Unwind the stack, once, at SIGINT, SIGTERM or SIGHUP; what then ends the parts is not disturbed again."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def unwind(number: int, frame: FrameType | None) -> None:
        for each in watched:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {each: signal.signal(each, unwind) for each in watched}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
