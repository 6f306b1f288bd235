"""A job without a launcher: its processes are started here, and newcomers in the place of those that die."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.deaths import Death, Plan
from benchmarks.chaos.job import ELASTIC_TIMEOUT, NEWCOMER, PATIENCE, ROOT, SMALLEST, Hang, Job, Lines, Record, Strike
from benchmarks.chaos.rank import IS_NEWCOMER, PROCESS

_PEER_TIMEOUT = 8.0
"""Seconds of silence that end a member; no late stop lasts as long."""
_UNKNOWN = -100
"""What is subtracted from this is the number of a process, in the place of a member's that it does not have yet."""


class ByHand(Job):
    """Such a job. What a launcher's driver would report is taken from what the ranks record."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder, None)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[int] = []
        self._lines: list[Lines] = []
        self._read: list[int] = []
        self._over: set[int] = set()
        """Processes that have ended."""
        self._generations: dict[int, Record] = {}
        self._born: dict[int, int] = {}
        self._replaces = True

    # ---- what is known

    def look(self) -> None:
        records: dict[int, list[Record]] = {}
        for number, lines in enumerate(self._lines):
            seen = lines.look()
            member = self._member(number)
            if member in records:
                self._wrong(f"two processes are member {member}")
            records[member] = seen
            for record in seen[self._read[number] :]:
                if record["what"] in ("starts", "renewed", "joined"):
                    self._note_generation(record)
            self._read[number] = len(seen)
        self.outcome.records = records
        for number, process in enumerate(self._processes):
            if number not in self._over and process.poll() is not None:
                self._over.add(number)
                self._note_end(number, process.returncode)

    def _member(self, number: int) -> int:
        """The member that a process is, or was last."""
        for record in reversed(self._lines[number].records):
            if "member" in record:
                return int(record["member"])
        return _UNKNOWN - number

    def _note_generation(self, record: Record) -> None:
        generation, members = record["generation"], record["members"]
        if generation not in self._generations:
            born = [self._born.setdefault(member, generation) for member in members]
            event = {"event": "generation", "generation": generation, "members": members, "born": born, "why": ""}
            self._generations[generation] = {**event, "hosts": ["localhost"] * len(members), "time": record["time"]}
            self.outcome.events.append(self._generations[generation])
            self.outcome.events.sort(key=lambda one: int(one.get("generation", 0)))
        event = self._generations[generation]
        event["why"] = event["why"] or record.get("why", "")
        if event["members"] != members:
            self._wrong(f"generation {generation} is of members {event['members']} and of {members}")

    def _note_end(self, number: int, code: int) -> None:
        member = self._member(number)
        told = {record["what"] for record in self._lines[number].look()}
        if "done" in told:
            if code:
                self._wrong(f"member {member} was done, and has ended with {code}")
            return
        self.outcome.events.append({"event": "died" if code else "left", "member": member, "time": time.time()})
        if code and self._replaces:
            if "dies" not in told:
                self._wrong(f"member {member} has ended with {code}, although it was not to die")
            self._start(self._ranks[number], is_newcomer=True)

    def _wrong(self, text: str) -> None:
        if text not in self.outcome.problems:
            self.outcome.problems.append(text)

    def ended(self) -> str:
        return "has ended" if len(self._over) == len(self._processes) else ""

    def least(self, death: Death) -> int:
        # One that is lost leaves a majority, and two half of them, with a newcomer to break the tie.
        return super().least(death) + (not self.plan.retry)

    def next_newcomer(self) -> int:
        return NEWCOMER

    def processes(self, member: int | None = None) -> list[int]:
        if member is None:
            return super().processes()
        return [self._processes[number].pid for number in range(len(self._lines)) if self._member(number) == member]

    # ---- what is done

    def wake(self, strike: Strike) -> None:
        victim = strike.victim
        if strike.death.row != "long stop":
            super().wake(strike)
            return
        self.until(
            lambda: self.settled(victim, since=strike.time) or self._keeps_newcomers_away(victim),
            f"the others go on without member {victim}, or say that it keeps newcomers away",
        )
        for process in self.processes(victim):
            # In memory that is shared it may go on with an operation that the others have left: see docs/elastic.md.
            wakes = self.plan.tcp and self.settled(victim, since=strike.time)
            os.kill(process, signal.SIGCONT if wakes else signal.SIGKILL)
        self.until(lambda: self.gone(victim), f"member {victim}, which was declared dead, ends")

    def _keeps_newcomers_away(self, victim: int) -> bool:
        """Whether the others, of whom another one has died, wait for a newcomer, which a stopped member that listens
        where the members meet keeps from them; and say what to do."""
        waits = rf"has waited .* for members (.*, )?{victim}\b.*newcomers cannot reach.*is stopped, kill it"
        return bool(re.search(waits, (self.folder / "output").read_text(errors="replace")))

    def end(self) -> None:
        self.until(self._complete, "all processes are ranks")
        self._replaces = False
        super().end()

    def _complete(self) -> bool:
        """Whether the processes that live are the newest generation."""
        newest = self.settled()
        living = {self._member(number) for number in range(len(self._processes)) if number not in self._over}
        return newest is not None and {*newest["members"]} == living

    def code(self) -> int:
        end = time.monotonic() + PATIENCE * self.slow
        living = [process for number, process in enumerate(self._processes) if number not in self._over]
        try:
            return max(abs(process.wait(max(0.0, end - time.monotonic()))) for process in living)
        except subprocess.TimeoutExpired:
            raise Hang(f"the job has not ended within {PATIENCE * self.slow:g} s") from None

    @contextlib.contextmanager
    def running(self, smallest: int = SMALLEST, places: str = "") -> Iterator[None]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._variables = {
            **self.environment(),
            "COLLECTIVES_ELASTIC": "1",
            "COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{port}",
            "COLLECTIVES_KEY": secrets.token_hex(32),
            "COLLECTIVES_PEER_TIMEOUT": f"{_PEER_TIMEOUT:g}",
            "COLLECTIVES_ELASTIC_TIMEOUT": f"{ELASTIC_TIMEOUT * self.slow:g}",
            "COLLECTIVES_MIN_SIZE": str(smallest),
            "COLLECTIVES_MAX_SIZE": str(self.plan.largest),
            "COLLECTIVES_QUORUM": "any" if self.plan.retry else "majority",
        }
        try:
            for rank in range(self.plan.largest):
                self._start(rank)
            yield
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            self.outcome.output = (self.folder / "output").read_text(errors="replace")

    def _start(self, rank: int, is_newcomer: bool = False) -> None:
        """Start a process; a newcomer in every other job as if it were the dead one, with its rank."""
        number = len(self._processes)
        variables = {**self._variables, PROCESS: str(number), **({IS_NEWCOMER: "1"} if is_newcomer else {})}
        if not is_newcomer or self.plan.number % 2 == 0:
            variables |= {"COLLECTIVES_RANK": str(rank), "COLLECTIVES_SIZE": str(self.plan.largest)}
        command = self.program()
        with (self.folder / "output").open("ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=variables
            )
        self._processes.append(process)
        self._ranks.append(rank)
        self._lines.append(Lines(self.folder / f"log-{number}"))
        self._read.append(0)
