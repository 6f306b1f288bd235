"""A job of our launcher: it is started, its ranks die, it ends, and what it leaves behind is looked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.deaths import GRADIENTS, HOST_CUT, HOST_ENDS, HOST_OFF, SAVE_TO, STOPS, TRIGGERED, Death, Plan
from benchmarks.chaos.hosts import Hosts
from benchmarks.chaos.rank import ARMED, FILE, STOP, written
from benchmarks.chaos.training import NUMPY
from collectives import InvalidArgumentError

ROOT = Path(__file__).resolve().parent.parent.parent
PEER_TIMEOUT = 4.0
"""Seconds after which agents kill a rank that is stopped; also the grace that the driver gives members that have not
ended a generation."""
_TIMEOUT = 1.5
"""Seconds, and another one, after which ranks give up waiting for one that is stopped; not so where hosts are lost,
whose silence is to be noticed."""
PATIENCE = 45.0
"""Seconds for one death with everything that follows; a job that needs longer hangs."""
_SLOW = 4
"""By how much longer jobs take whose processes import a framework."""
ELASTIC_TIMEOUT = 30.0
_END_WITHIN = 20.0
SMALLEST = 2
_EVERYONE, NEWCOMER, NOBODY = -2, -1, -1
POLL = 0.02
MARK = "COLLECTIVES_TEST_CHAOS"

Record = dict[str, Any]


class Hang(Exception):
    """Something has not happened in time."""


@dataclass
class Strike:
    """A death that was armed: which member, in which generation, and which records belong to it."""

    death: Death
    number: int
    victim: int = NOBODY
    time: float = 0.0
    generation: int = 0


@dataclass
class Outcome:
    """What a job has done.

    Attributes:
        code: of the launcher; None: it was ended, because it hung.
        records: by member.
        events: of the driver.
        problems: what was wrong so far.
        seconds: from the last death to the end of the job, where that ends it.
        file: what the state's file has at the end; None: it is not looked at.
    """

    plan: Plan
    code: int | None = None
    records: dict[int, list[Record]] = field(default_factory=dict)
    events: list[Record] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0
    file: Record | None = None

    def document(self) -> dict[str, Any]:
        """Everything, ready for ``json.dump``."""
        return asdict(self)


class Lines:
    """The lines of JSON of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self.records = path, 0, list[Record]()

    def look(self) -> list[Record]:
        """Return all records so far."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            whole, mark, _ = file.read().rpartition(b"\n")
            self._at += len(whole) + len(mark)
            self.records += [json.loads(line) for line in whole.splitlines()]
        return self.records


class Job:
    """A running job, and what it has recorded."""

    def __init__(self, plan: Plan, folder: Path, hosts: Hosts | None) -> None:
        self.plan, self.folder, self._hosts = plan, folder, hosts
        self.mark = uuid.uuid4().hex
        self.outcome = Outcome(plan)
        self._logs: dict[int, Lines] = {}
        self._events = Lines(folder / "events")
        self.slow = 1 if plan.framework == NUMPY else _SLOW

    # ---- what is known

    def look(self) -> None:
        """Read what has been recorded."""
        for path in self.folder.glob("log-*"):
            member = int(path.name.removeprefix("log-"))
            self._logs.setdefault(member, Lines(path))
            self.outcome.records[member] = self._logs[member].look()
        self.outcome.events = self._events.look()

    def events(self, kind: str) -> list[Record]:
        return [event for event in self.outcome.events if event["event"] == kind]

    def ended(self) -> str:
        """How the job has ended; empty if it has not."""
        code = self.process.poll()
        return "" if code is None else f"has ended with {code}"

    def until(self, done: Callable[[], Any], what: str) -> Any:
        """Wait until ``done`` returns something true; Hang if the time is over, or the job."""
        seconds = PATIENCE * self.slow
        end = time.monotonic() + seconds
        while True:
            ended = self.ended()
            self.look()
            value = done()
            if value:
                return value
            if ended:
                raise Hang(f"the job {ended}, while waiting until {what}")
            if time.monotonic() > end:
                raise Hang(f"waited {seconds:g} s until {what}")
            time.sleep(POLL)

    def settled(
        self, without: int = NOBODY, least: int = 1, since: float = 0.0, exactly: int = 0, elsewhere: bool = False
    ) -> Record | None:
        """The newest generation, if every member has committed in it twice, after a time; ``elsewhere``: if some of
        them are on other hosts than the first."""
        newest = self.events("generation")[-1:]
        if not newest or without in newest[0]["members"] or len(newest[0]["members"]) < least:
            return None
        if (exactly and len(newest[0]["members"]) != exactly) or (elsewhere and {*newest[0]["hosts"]} == {"host1"}):
            return None
        for member in newest[0]["members"]:
            commits = 0
            for record in reversed(self.outcome.records.get(member, [])):
                if record["time"] < since or record["what"] in ("starts", "ended"):
                    break
                commits += record["what"] == "saved"
            if commits < 2:
                return None
        return newest[0]

    def find(self, member: int, what: str, since: float = 0.0, **fields: Any) -> Record | None:
        """A member's first record of a kind, from a time on."""
        for record in self.outcome.records.get(member, []):
            if record["what"] == what and record["time"] >= since and fields.items() <= record.items():
                return record
        return None

    # ---- what is done

    def arm(self, number: int, death: Death, victim: int, first: int = NOBODY) -> None:
        """Tell the ranks who is to die next."""
        part = self.folder / f".{ARMED}"
        part.write_text(json.dumps({**asdict(death), "number": number, "victim": victim, "first": first}))
        part.rename(self.folder / ARMED)

    def strike(self, number: int, death: Death) -> None:
        """Have one rank die, and wait until the others have gone on."""
        strike = Strike(death, number)
        self.outcome.strikes.append(strike)
        # Who survives must hold the state, and be enough.
        least = self.least(death)
        generation = self.until(lambda: self.settled(least=least), f"{least} ranks train")
        members, first = generation["members"], NOBODY
        victim = members[int(death.rank * len(members)) if death.column != SAVE_TO else 0]  # rank 0 writes the file
        if death.column in TRIGGERED:
            others = [member for member in members if member != victim]
            first = others[int(death.trigger * len(others))]
        if death.column == "init":
            victim = self.next_newcomer()
        elif death.column == "transfer" and death.newcomer:
            victim = NEWCOMER
        self.arm(number, death, victim, first)
        record = self.until(lambda: self._dying(number), f"{death} strikes")
        (self.folder / ARMED).unlink()
        strike.victim, strike.time, strike.generation = record["member"], record["time"], record["generation"]
        if death.row in STOPS:
            self.wake(strike)
        woken = 0.0
        if death.row in STOPS:
            self.until(lambda: self.gone(strike.victim) or self._woken(strike), "the stop is over")
            woken = self._woken(strike)
        if woken and not self.gone(strike.victim):
            self.until(partial(self.settled, since=woken), f"the ranks go on after {death}")
            if death.row == "stop" and self.gone(strike.victim):
                self.outcome.problems.append(f"member {strike.victim} was stopped for {death.seconds:.2f} s, and died")
        else:
            self.until(lambda: self.settled(strike.victim, since=strike.time), f"the others go on after {death}")
            self.until(lambda: self.gone(strike.victim), f"member {strike.victim} ends")

    def least(self, death: Death) -> int:
        """How many ranks there must be before a death, for the others to go on."""
        return SMALLEST + (death.column in ("forming", "transfer"))

    def next_newcomer(self) -> int:
        """What a fuse knows the next newcomer by."""
        return 1 + int(max(event["member"] for event in self.events("started")))

    def _dying(self, number: int) -> Record | None:
        for member, records in self.outcome.records.items():
            for record in records:
                if record["what"] == "dies" and record["number"] == number and record["how"] != "first":
                    return {**record, "member": member}
        return None

    def gone(self, member: int) -> bool:
        return any(event["member"] == member for kind in ("died", "left") for event in self.events(kind))

    def _woken(self, strike: Strike) -> float:
        """When a stopped victim has gone on; 0: it has not."""
        record = self.find(strike.victim, "woken", strike.time)
        return float(record["time"]) if record else 0.0

    def wake(self, strike: Strike) -> None:
        """Wait as long as the victim is to be stopped, and wake it."""
        victim, row = strike.victim, strike.death.row
        if row == "long stop":
            self.until(lambda: self.gone(victim), f"member {victim} is declared dead")
        elif row == "late stop" and strike.generation:
            self.until(
                lambda: any(
                    self.find(member, "raised", strike.time) for member in self.outcome.records if member != victim
                ),
                f"the others notice that member {victim} is stopped",
            )
            time.sleep(strike.death.seconds)
        else:
            time.sleep(strike.death.seconds)
        for process in self.processes(victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def processes(self, member: int | None = None) -> list[int]:
        """The job's processes, on all hosts; or those of a member."""
        wanted = [f"{MARK}={self.mark}".encode()]
        if member is not None:
            wanted.append(f"COLLECTIVES_MEMBER={member}".encode())
        numbers = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = path.read_bytes().split(b"\0")
                if all(word in variables for word in wanted):
                    numbers.append(int(path.parent.name))
        return numbers

    def end(self) -> None:
        """Have the job end as planned, and wait for it."""
        end, last = self.plan.end, len(self.plan.deaths)
        strike = Strike(Death(end, "", 0.0, 0.0), last)
        least, early = 2 if end else 1, end == "start"
        generation = self.until(
            lambda: self.settled(1 if early else NOBODY, least=least, elsewhere=end in HOST_ENDS), "the ranks train"
        )
        strike.generation = generation["generation"] - early
        if end:
            self.outcome.strikes.append(strike)
        if end == "launcher killed":
            strike.time = time.time()
            self.process.kill()
        elif end == "all die":
            column = "mapped" if self.plan.framework == NUMPY else GRADIENTS
            self.arm(last, Death(end, column, 0.0, 0.5), _EVERYONE)
        elif end in HOST_ENDS and self._hosts:
            places = [*zip(generation["members"], generation["hosts"], strict=True)]
            # The launcher is on the first host.
            strike.victim, host = next((member, host) for member, host in reversed(places) if host != "host1")
            strike.time = time.time()
            (self._hosts.power_off if end == HOST_OFF else self._hosts.cut)(host)
            self.until(lambda: self.settled(strike.victim, since=strike.time), "the others go on without a host")
            if end == HOST_CUT:  # those who were declared dead are back, and may change nothing
                self._hosts.heal(host)
                self.until(partial(self.settled, strike.victim, since=time.time()), "the others go on beside it")
                self.until(lambda: not self.processes(strike.victim), "the ranks that were cut off have ended")
        if end not in ("launcher killed", "all die"):
            (self.folder / STOP).touch()
        self.outcome.code = self.code()
        self.look()
        if end in ("all die", "start"):
            dying = self._dying(last if end == "all die" else 0)
            strike.time = dying["time"] if dying else time.time()
        self.outcome.seconds = time.time() - strike.time if strike.time else 0.0

    def code(self) -> int:
        """Wait for the end, and return the exit code."""
        seconds = PATIENCE * self.slow
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Hang(f"the job has not ended within {seconds:g} s") from None

    def leftovers(self, shared: set[str]) -> list[str]:
        """What stays behind; ``shared``: what was in shared memory before the job."""
        begun = time.monotonic()
        while (processes := self.processes()) and time.monotonic() - begun < _END_WITHIN:
            time.sleep(POLL)
        if self.plan.end == "launcher killed":
            self.outcome.seconds = time.time() - self.outcome.strikes[-1].time
        left = [f"process {number}: {_command(number)}" for number in processes]
        if self.plan.end not in ("launcher killed", *HOST_ENDS):  # after which no commit comes that would remove drafts
            left += map(str, self.folder.glob(f"{FILE}.*"))
        files = [name for name in {*os.listdir("/dev/shm")} - shared if name.startswith("collectives")]
        return left + [f"/dev/shm/{name}" for name in files if not _is_mapped(name)]

    def read_file(self) -> None:
        """Load the state's file."""
        if self.plan.framework == NUMPY:
            try:
                self.outcome.file = written(self.folder)
            except InvalidArgumentError as error:
                self.outcome.problems.append(str(error))

    @contextlib.contextmanager
    def running(self, smallest: int = SMALLEST, places: str = "") -> Iterator[None]:
        """The job's processes, from their start to their end; ``places``: what discovery finds at first."""
        launcher = [sys.executable, "-m", "collectives.launch", "--min-np", str(smallest), "--max-np"]
        launcher += [str(self.plan.largest), "--elastic-events", str(self.folder / "events")]
        launcher += ["--elastic-timeout", f"{ELASTIC_TIMEOUT * self.slow:g}"]
        launcher += ["--blacklist-cooldown-range", "1", "2"]
        self.place(places or self._places())
        launcher += ["--host-discovery-script", f"cat {self.folder / 'hosts'}"]
        command = [*launcher, *self.program()]
        output = self.folder / "output"
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                self._hosts.on("host1", command) if self._hosts else command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=self.environment(),
                start_new_session=True,
            )
        try:
            yield
        finally:
            for number in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self.outcome.output = output.read_text(errors="replace")

    def program(self) -> list[str]:
        """The command of a rank."""
        recover = "retry" if self.plan.retry else "restore"
        return [sys.executable, "-m", "benchmarks.chaos.rank", str(self.folder), recover, self.plan.framework]

    def place(self, lines: str) -> None:
        """Have discovery find hosts, from now on."""
        part = self.folder / ".hosts"
        part.write_text(lines)
        part.rename(self.folder / "hosts")

    def _places(self) -> str:
        if self._hosts:
            return "".join(f"{host}:2\n" for host in self._hosts.names)
        return f"localhost:2\n127.0.0.1:{self.plan.largest - 2}\n"

    def environment(self) -> dict[str, str]:
        own = {name: text for name, text in os.environ.items() if not name.startswith(("COLLECTIVES_", "HOROVOD_"))}
        variables = {
            MARK: self.mark,
            "COLLECTIVES_PEER_TIMEOUT": f"{PEER_TIMEOUT:g}",
            "COLLECTIVES_TIMEOUT": "60" if self._hosts else f"{_TIMEOUT:g}",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        return {**own, **variables, **({"COLLECTIVES_LOCAL_SIZE": "1"} if self.plan.tcp and not self._hosts else {})}

    def show_stacks(self) -> None:
        """Have all ranks write where they are."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)
                os.kill(number, signal.SIGABRT)
        time.sleep(0.5)


def _command(number: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _is_mapped(name: str) -> bool:
    """Whether a process has a file of /dev/shm mapped: others may run jobs at the same time."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in path.read_text():
                return True
    return not Path("/dev/shm", name).exists()
