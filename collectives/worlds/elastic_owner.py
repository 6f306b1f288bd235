"""The driver of an elastic job in one of its members, where no launcher watches the processes.

The member serves the store at which the others say things (`collectives.worlds.elastic_jobs`), and decides by the rules
of launchers (`collectives.launch.elastic_driver`). It sees of the others what they set there:

    knock     a process has come; it is welcomed with its number, a newcomer once there is a generation
    beat      a member lives. It counts as dead if it has been silent for the peer timeout, or if its connection was
              closed and it has missed a beat since
    said      what it asks the driver
    moved     the job goes on elsewhere: this process was rank 0 of it before, or so, and was started again, or was
              stopped. Whoever has come here is sent there

With each generation goes its *roll*: what a successor needs in order to go on from there, if this member dies.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from collectives.base.logging import logger
from collectives.transport.stores.event_log import EventLog
from collectives.transport.stores.store import StoreServer

BEAT_EVERY = 0.5
"""Seconds between the beats of a member."""
_MISSED = 2 * BEAT_EVERY
"""Seconds of silence that count once a connection was closed."""
_TICK = 0.25
"""Seconds between two looks at what is due. No more count as silence at a time: this process may itself have stood."""
_SUCCESSORS_NUMBERS = 100
"""Numbers that a successor leaves out: the dead owner may have given them to newcomers."""
_PATIENCE = 0.02
_LOUD = ("died", "ended", "gave_up", "waiting")
"""Events that are warnings."""

Heard = SimpleQueue[tuple[str, bytes | None]]
"""Keys that members have set and their values; None: the connection has ended on which this key was set last."""


class Owner:
    """Decides who is in the generations, for as long as this process lives.

    Args:
        server: of the store.
        heard: what it hears.
        address: of the store; what is known of a member that has the same one is not asked of its beats.
        rules: keywords of the driver's rules; ``grace`` is also how long a member may be silent.

    Attributes:
        finished: whether this process has said that its training is done.
    """

    def __init__(
        self,
        server: StoreServer,
        heard: Heard,
        address: Sequence[Any],
        rules: Mapping[str, Any],
    ) -> None:
        # The driver is on a higher floor, and only the process that decides needs it.
        self._terms: Any = importlib.import_module("collectives.launch.elastic_terms")
        driver: Any = importlib.import_module("collectives.launch.elastic_driver")
        hosts: Any = importlib.import_module("collectives.launch.elastic_hosts")
        self._server, self._heard, self._address = server, heard, list(address)
        self._lease = float(rules["grace"])
        self._driver: Any = driver.Driver(self._terms.Rules(**rules), time.monotonic(), lambda: 0.0, hosts.AnyHosts())
        self._size = 0
        self._expected: set[int] = set()
        """Ranks of the first generation that have not come."""
        self._early: list[tuple[str, Mapping[str, Any]]] = []
        """Newcomers that are welcomed when there is a generation."""
        self._addresses: dict[int, Sequence[Any]] = {}
        self._silence: dict[int, float] = {}
        """Seconds since the last beat, of those that beat."""
        self._closed: set[int] = set()
        self._dead: dict[int, str] = {}
        self._tokens: dict[int, str] = {}
        """Of members that have not said anything since they were welcomed."""
        self._roll: dict[str, Any] = {}
        self._moved: dict[str, Any] = {}
        """What is answered if the job goes on elsewhere."""
        self._events = EventLog(server)
        self.finished = False

    def begin(self, size: int) -> None:
        """Wait for the first generation, of so many ranks, whose numbers as members are the same."""
        self._size, self._expected = size, set(range(size))
        for rank in range(size):
            self._driver.came(rank, "an unknown host", time.monotonic())

    def resume(self, roll: Mapping[str, Any], dead: Mapping[int, str]) -> None:
        """Go on from a generation's roll; ``dead``: which of its members have died, and how that was seen."""
        now = time.monotonic()
        self._driver.unused = roll["unused"] + _SUCCESSORS_NUMBERS
        for member, host, address in zip(roll["members"], roll["hosts"], roll["addresses"], strict=True):
            self._know(member, host, address, now)
        self._driver.resume(roll["generation"], dict(zip(roll["members"], roll["born"], strict=True)))
        self._set("elastic/roll", roll)
        for member, why in dead.items():
            self._lose(member, why, now)

    def say_astray(self, why: str) -> None:
        """Say, where members wait, why newcomers do not find this store; empty: they do."""
        self._driver.hosts.astray = f"; {why}" if why else ""

    def run(self) -> None:
        """Decide, for ever; if that fails, the store is not served any more, and a successor decides."""
        try:
            self._decide()
        except Exception:
            logger.exception("elastic job: this member can no longer lead the job; another member takes over [E42]")
            self._server.close()

    def _decide(self) -> None:
        last = time.monotonic()
        while True:
            with suppress(Empty):
                self._hear_of(*self._heard.get(timeout=_TICK))
                while True:
                    self._hear_of(*self._heard.get_nowait())
            now = time.monotonic()
            if not self._moved:
                self._count_silence(min(now - last, _TICK), now)
                self._carry_out(self._driver.tick(now))
            last = now

    def linger(self) -> None:
        """Where this process has finished, serve the store until the other ranks have, for a bounded time."""
        end = time.monotonic() + self._lease
        while self.finished and not self._others_are_done() and time.monotonic() < end:
            time.sleep(_PATIENCE)

    def _others_are_done(self) -> bool:
        busy = (self._terms.State.IN, self._terms.State.WAITING)
        return all(member.state not in busy for member in list(self._driver.members.values()))

    # ---- what is heard

    def _hear_of(self, key: str, value: bytes | None) -> None:
        """Take what was set, unless it is nothing that a member sets."""
        try:
            self._take(key, value)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning(
                "elastic job: ignored an unexpected value of %r: %s [E40]", key, f"{type(error).__name__}: {error}"
            )

    def _take(self, key: str, value: bytes | None) -> None:
        now = time.monotonic()
        _, kind, name, *rest = key.split("/")
        if kind == "moved" and value is not None:
            if not self._leads():
                self._send_to(json.loads(value))
        elif self._moved:
            if kind in ("knock", "said"):
                self._set("/".join(("elastic", "welcome" if kind == "knock" else "answer", name, *rest)), self._moved)
        elif kind == "beat":
            self._note_beat(int(name), value is None)
        elif kind == "knock" and value is not None:
            self._server.forget(key)
            self._welcome(name, json.loads(value), now)
        elif kind == "said" and value is not None:
            self._hear(int(name), int(rest[0]), json.loads(value), now)

    def _leads(self) -> bool:
        """Whether most members of the generation are here. If not, as where this process was stopped and they have gone
        on without it, newcomers would wait here for nothing."""
        ranks = self._driver.ranks
        return 2 * sum(rank in self._driver.members for rank in ranks) > len(ranks)

    def _send_to(self, address: Sequence[Any]) -> None:
        """Send who has come to the address where the job goes on."""
        if not self._moved:
            logger.warning("elastic job: the job continues at %s; joining it there [E31]", address)
        self._moved = {"moved": address}
        for token, _ in self._early:
            self._set(f"elastic/welcome/{token}", self._moved)
        for member in self._driver.members.values():
            if member.question:
                self._set(f"elastic/answer/{member.number}/{member.question}", self._moved)

    def _note_beat(self, member: int, closed: bool) -> None:
        if closed:
            self._closed.add(member)
        elif member in self._silence:
            self._silence[member] = 0.0
            self._closed.discard(member)

    def _welcome(self, token: str, knock: Mapping[str, Any], now: float) -> None:
        """Give a process its number: its rank, if it is one of the first, or the next one that is free."""
        rank, size = knock["rank"], knock["size"]
        if self._driver.generation:
            rank = self._driver.unused
        elif self._driver.end is None and rank not in self._expected and size in (None, self._size):
            self._early.append((token, knock))
            return
        answer: dict[str, Any] = {"member": rank}
        if self._driver.end is not None:
            answer = {"refused": self._driver.end.text or "the job has ended"}
        elif not self._driver.generation and size != self._size:
            answer = {
                "refused": f"the job begins with {size} ranks according to rank {rank} on {knock['host']}, and with "
                f"{self._size} according to rank 0; set COLLECTIVES_SIZE to the same number on all first ranks"
            }
        else:
            self._expected.discard(rank)
            self._know(rank, knock["host"], knock["address"], now)
            self._tokens[rank] = token
        self._set(f"elastic/welcome/{token}", answer)

    def _know(self, member: int, host: str, address: Sequence[Any], now: float) -> None:
        self._driver.came(member, host, now)
        self._addresses[member] = address
        if list(address) != self._address:
            self._silence[member] = 0.0

    def _hear(self, member: int, question: int, thing: Mapping[str, Any], now: float) -> None:
        if member in self._dead:
            text = f"the job continues without member {member}, because it {self._dead[member]}; start it again"
            self._set(f"elastic/answer/{member}/{question}", {"give_up": text})
            return
        if member not in self._driver.members:
            self._know(member, thing["host"], thing["address"], now)  # of a generation that this process does not know
        self._server.forget(f"elastic/welcome/{self._tokens.pop(member, '')}")
        if thing["what"] == "ended":
            self._driver.generation = max(self._driver.generation, thing["generation"])
        self._carry_out(self._driver.said(member, question, thing, now))

    def _count_silence(self, seconds: float, now: float) -> None:
        for member in list(self._silence):
            self._silence[member] += seconds
            if member in self._closed and self._silence[member] > _MISSED:
                self._lose(member, "closed its connection to the store, and gave no further sign of life [E21]", now)
            elif self._silence[member] > self._lease:
                self._lose(member, f"gave no sign of life for {self._lease:g} s (COLLECTIVES_PEER_TIMEOUT) [E22]", now)

    def _lose(self, number: int, why: str, now: float) -> None:
        """Take note that a member has died, or has ended."""
        self._silence.pop(number, None)
        self._closed.discard(number)
        self._server.forget(f"elastic/beat/{number}")
        self._server.forget(f"elastic/welcome/{self._tokens.pop(number, '')}")
        member = self._driver.members.get(number)
        if member is None:
            return
        has_ended = member.state in (self._terms.State.FINISHED, self._terms.State.GONE)
        if not has_ended:
            self._dead[number] = why
        self._carry_out(self._driver.exited(number, 0 if has_ended else 1, now, why))

    # ---- what is to be done

    def _carry_out(self, actions: Sequence[Any]) -> None:
        for action in actions:
            if isinstance(action, self._terms.Set):
                self._set(action.key, self._enrolled(action.value) if "members" in action.value else action.value)
            elif isinstance(action, self._terms.Drop):
                self._server.drop(action.prefix)
            elif isinstance(action, self._terms.Kill):
                self._dead[action.member] = "did not end its generation in time"
                self._lose(action.member, "", time.monotonic())
            elif isinstance(action, self._terms.Event):
                self._tell(action)

    def _set(self, key: str, value: Mapping[str, Any] | str) -> None:
        self._server.set(key, json.dumps(value).encode())

    def _enrolled(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The roll of a generation, of which a member is told. The first time it also lets in those that came early."""
        if answer["generation"] != self._roll.get("generation"):
            members = answer["members"]
            self._roll = {
                **answer,
                "hosts": [self._driver.members[member].host for member in members],
                "addresses": [self._addresses[member] for member in members],
                "unused": self._driver.unused,
            }
            self._set("elastic/roll", self._roll)
            early, self._early = self._early, []
            for token, knock in early:
                self._welcome(token, knock, time.monotonic())
        return self._roll

    def _tell(self, event: Any) -> None:
        (logger.warning if event.kind in _LOUD else logger.info)("elastic job: %s", event.text)
        self._events.append(event.line(time.time()).encode())
        if event.kind == "done" and event.fields["code"]:
            if not self._driver.end.text:
                members = ", ".join(map(str, event.fields["failed"]))
                text = f"members {members} died before any of the members could recover from that"
                self._carry_out(self._driver.give_up(text, time.monotonic()))
            for token, knock in self._early:
                self._welcome(token, knock, time.monotonic())
