"""Which processes an elastic job has, and which of them are its ranks: the decisions, without any process or clock.

A *member* is a process, with a number that is never used again. A *generation* is a world: a number, and its members in
the order of their ranks. The driver is told what members say at the store, which processes and hosts have ended, what
hosts there are, and the time; it answers with actions, which `elastic_agents` carries out.

    here -> in generation 1         ended -> in the next generation         finished -> exits
    here -> alone, warms up -> ready -> in the next generation

A generation ends when one of its members ends or says so. The next one forms when all others have said so too: first
they, in their order, then newcomers that are ready.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from collectives.launch.elastic_hosts import HostTable
from collectives.launch.elastic_terms import Action, Drop, End, Event, Kill, Member, Rules, Set, Start, State
from collectives.launch.elastic_words import how_ended, numbered, ranks_in_words
from collectives.launch.hosts import Host

WAITING_EVERY = 10.0
"""Seconds between lines that say what is waited for."""
FIRST_WITHIN = 60.0
"""Seconds, at least, that the first members have to call ``init()``."""
_KILLED = 128 + signal.SIGKILL
_KILLED_WITHIN = 2.0
"""Seconds in which a process ends that is killed, if its host can be reached."""
_NEW = (State.STARTED, State.HERE, State.ALONE, State.READY)
_ENDS = (State.FINISHED, State.FAILED, State.GONE)
_WAITS = (State.HERE, State.READY, State.WAITING)


class Driver:
    """The decisions of one job.

    Attributes:
        members: the living processes by number.
        generation, ranks: the number of the newest generation (0: none yet), and its members by rank.
        unused: the number of the next new member.
        failed: exit codes of members whose failures no later generation has survived, in order.
        end: how the job has ended; None: it goes on.
    """

    def __init__(self, rules: Rules, now: float, random: Callable[[], float], hosts: HostTable | None = None) -> None:
        self.rules = rules
        self.hosts = hosts or HostTable(rules.cooldown, random)
        self.members: dict[int, Member] = {}
        self.generation = 0
        self.ranks: tuple[int, ...] = ()
        self.failed: dict[int, int] = {}
        self.end: End | None = None
        self._actions: list[Action] = []
        self.unused = 0
        self._recovers = self._finishing = self._closed = False
        """Whether some member can recover from failures, whether one has finished, and whether no more are started."""
        self._waiting_since = now
        """When what is waited for was first missed: hosts, the first generation, or the next one."""
        self._ends_by = math.inf
        """When members that have not ended the generation count as dead; infinity: none has ended it."""
        self._ended = True
        self._why = ""
        self._said_waiting = now
        self._notices = 0
        self._noticed: set[str] = set()
        self._left: set[tuple[str, int]] = set()
        """Places whose members have left, which are not filled unless ranks are missing."""

    # What is told

    def discovered(self, hosts: Iterable[Host], now: float) -> list[Action]:
        """Take note of the hosts that there are."""
        added, removed = self.hosts.update(hosts)
        for name in added:
            slots = self.hosts.slots[name]
            self._event("host_added", f"host {name} takes {ranks_in_words(slots)}", host=name, slots=slots)
        for name in removed:
            self._left = {place for place in self._left if place[0] != name}
            self._event("host_removed", f"host {name} was removed", host=name)
        return self.tick(now)

    def came(self, number: int, host: str, now: float) -> None:
        """Take note of a process that has not been started here."""
        self.members[number] = Member(number, host, 0, now)
        self.unused = max(self.unused, number + 1)

    def resume(self, generation: int, born: Mapping[int, int]) -> None:
        """Go on from another driver's newest generation; ``born`` by member, in the order of ranks. They `came`."""
        self.generation, self.ranks, self._recovers, self._ended = generation, tuple(born), True, False
        for number, since in born.items():
            self.members[number].born, self.members[number].state = since, State.IN

    def said(self, number: int, question: int, thing: Mapping[str, Any], now: float) -> list[Action]:
        """Take note of what a member says; a repetition changes nothing."""
        member = self.members.get(number)
        if member is None or member.state is State.GONE or question <= member.question:
            return []
        what = thing.get("what")
        if what == "alive":
            member.lives_after = int(thing.get("generation", 0))
            return []
        member.question, member.since = question, now
        if what == "failed":
            member.why = str(thing.get("why") or "")
        if self.end is not None:
            if what in ("here", "ready", "ended"):
                text = self.end.text or "the job has ended"
                self._answer(member, {"give_up": text} if self.end.code else {"stop": text})
        elif what == "here" and self.generation:
            member.state = State.ALONE
            self._answer(member, {"alone": True, "place": self._expected_place(member)})
        elif what == "here":
            member.state = State.HERE
        elif what == "runs":
            if not self._recovers:
                self._recovers = True
                self._left.clear()  # now others can take the places of those that have died before
            member.runs = True
            self.hosts.has_trained(member.host)
            if member.state is State.FINISHED:  # the program trains once more
                member.state = State.IN
                self._finishing = self._closed = any(each.state is State.FINISHED for each in self.members.values())
        elif what == "ended" and member.number in self.ranks:
            member.state, member.alone = State.WAITING, bool(thing.get("alone"))
            self._end_generation(f"member {number}: {thing.get('why') or 'it has ended here'}", now, died=False)
            self._ends_by = min(self._ends_by, now + self.rules.grace)
        elif what in ("ready", "ended"):
            member.state = State.READY
            self._event_of(member, "ready", "is ready")
        elif what == "failed" and self._recovers and member.state is State.IN:
            member.state = State.FAILED
            self.failed[number] = 1
            self._end_generation(f"{member} failed: {member.why}", now)
            if self.rules.blacklist_host:
                self._blacklist(member.host, f"member {number} has failed there", now)
        elif what == "finished":
            member.state = State.FINISHED
            if not self._finishing:
                self.failed.clear()  # the others finish without those
            self._finishing = self._closed = True
            self._event_of(member, "finished", "has finished")
        return self.tick(now)

    def exited(self, number: int, code: int, now: float, how: str = "") -> list[Action]:
        """Take note of the end of a process; ``how``: in words, if the code does not say it."""
        member = self.members.pop(number, None)
        if member is None:
            return []
        self._actions += [Drop(f"elastic/said/{number}/"), Drop(f"elastic/answer/{number}/")]
        if self.end is not None:
            if code and number in self.ranks:
                self.failed[number] = code
        elif member.state is not State.GONE:
            self._died(member, code, how or how_ended(code), now)
        return self.tick(now)

    def host_lost(self, host: str, why: str, now: float) -> list[Action]:
        """Take note that nothing runs on a host any more."""
        lost = [member for member in self.members.values() if member.host == host]
        self._event("host_lost", why, host=host)
        for member in lost:
            del self.members[member.number]
            if member.state is not State.GONE:
                self._bury(member, 1, "was lost with its host", now)
        if host in self.hosts.slots:
            self._blacklist(host, "it was lost", now)
        if lost and self._ends_early():
            self._finish(End(1, why))
        return self.tick(now)

    def give_up(self, text: str, now: float) -> list[Action]:
        """End the job, because it cannot go on."""
        self._give_up(text)
        return self.tick(now)

    def waits(self) -> bool:
        """Whether some members have ended the generation, and others have not."""
        return self._ends_by < math.inf and bool(self._missing())

    def reports(self) -> bool:
        """Whether members live that may still say why the job has ended."""
        return any(number in self.ranks or not self.generation for number in self.members)

    def interrupted(self, code: int) -> None:
        """Start and replace no more members: the job is being ended from outside, with this exit code."""
        self._finish(End(code))

    def tick(self, now: float) -> list[Action]:
        """Do what is due, and return what is to be done."""
        if self.end is None:
            self._look_for_end()
        if self.end is None:
            self._clear_places(now)
            self._fill(now)
            self._form(now)
            self._notify(now)
        actions, self._actions = self._actions, []
        return actions

    # Members

    def _expected_place(self, member: Member) -> tuple[int, int, int, int]:
        """Return the rank, size, local rank and local size that a newcomer would have with all who live now."""
        living = sorted(number for number, other in self.members.items() if other.state not in _ENDS)
        size = min(len(living), self.rules.most)
        beside = sum(self.members[number].host == member.host for number in living)
        return min(living.index(member.number), size - 1), size, member.slot, max(beside, member.slot + 1)

    def _died(self, member: Member, code: int, how: str, now: float) -> None:
        """Take note of a process that has ended by itself."""
        host = member.host
        if member.state is State.FINISHED:
            if code:
                self._event_of(member, "died", f"{how} after it had finished", code=code, why=how)
                if code <= 128:
                    self.failed[member.number] = code  # by itself; a killed one has lost nothing that it was asked for
        elif code == 0 and not self._recovers:
            self._closed = True  # a process that needs no others, as in jobs that are not elastic
        else:
            self._bury(member, code, how, now)
            if code and self.rules.blacklist_host:
                if member.state is not State.FAILED:
                    self._blacklist(host, f"member {member.number} has failed there", now)
            elif code == 0 or not self._recovers:
                self._left.add(member.place)
            elif not member.runs and self.hosts.died_early(host):
                self.hosts.close(host)
                text = (
                    f"no more members start on host {host}: several in a row died there before their first commit; "
                    f"the last one: {member.why or how} [E4]"
                )
                self._event("closed", text, host=host)

    def _bury(self, member: Member, code: int, how: str, now: float) -> None:
        """Take note of the end of a member that has not finished, whatever the cause."""
        self._event_of(member, "died" if code else "left", how, code=code, why=how)
        if code and not self._finishing and (member.number in self.ranks or not self._recovers):
            self.failed[member.number] = code
        if member.number in self.ranks:
            self._end_generation(f"{member} {how}", now)

    def _kill(self, member: Member, why: str, now: float) -> None:
        self._bury(member, _KILLED, why, now)
        member.state, member.since = State.GONE, now
        self._actions.append(Kill(member.number))

    def _blacklist(self, host: str, why: str, now: float) -> None:
        seconds = self.hosts.blacklist(host, now)
        time = "" if seconds == math.inf else f" for {seconds:.1f} s"
        self._event("blacklisted", f"host {host} is blacklisted{time}: {why}", host=host, why=why)
        for member in list(self.members.values()):
            if member.host == host and member.state not in _ENDS:
                self._kill(member, "was ended: its host is blacklisted", now)

    def _clear_places(self, now: float) -> None:
        """End newcomers whose hosts are gone, and members that have failed and do not end."""
        for member in list(self.members.values()):
            if member.state is State.FAILED and now >= member.since + self.rules.grace:
                self._kill(member, "was ended: it failed but did not exit", now)
            elif member.state in _NEW and not self.hosts.keeps(member.place, now):
                if member.state is State.READY:
                    self._stop(member, "its host was removed")
                else:
                    self._kill(member, "was ended: its host was removed", now)

    def _fill(self, now: float) -> None:
        """Start members where there is room."""
        free = self.hosts.free({member.place for member in self.members.values()}, now)
        if self.unused == 0:
            if len(free) < self.rules.smallest:
                return
            self._waiting_since = self._said_waiting = now
        elif self._closed or not (self._recovers or self.generation == 0):
            return
        living = [
            each for each in self.members.values() if each.state not in _ENDS and self.hosts.keeps(each.place, now)
        ]
        wanted = self.rules.most + (self.rules.spares if self._recovers else 0) - len(living)
        if len(living) >= self.rules.smallest:
            free = [place for place in free if place not in self._left]
        for host, slot in free[: max(0, wanted)]:
            self._left.discard((host, slot))
            number, self.unused = self.unused, self.unused + 1
            self.members[number] = Member(number, host, slot, now)
            self._actions.append(Start(number, host, slot))
            self._event_of(self.members[number], "started", "starts", slot=slot)

    # Generations

    def _end_generation(self, why: str, now: float, *, died: bool = True) -> None:
        if not self._ended:
            self._ended, self._why = True, why
            self._give_notice(over=why, died=died)
            self._waiting_since = self._said_waiting = now
            self._event("ended", f"generation {self.generation} has ended: {why}", generation=self.generation, why=why)

    def _form(self, now: float) -> None:
        """Form the next generation, if one is due and all are there."""
        if not self._ended:
            return
        missing = self._missing()
        if missing and now >= self._ends_by:
            too_late = now >= self._waiting_since + self.rules.elastic_timeout
            for member in missing:
                if too_late or member.lives_after < self.generation:
                    self._kill(member, f"was declared dead: it did not leave generation {self.generation} in time", now)
            missing = self._missing()
        if self.generation == 0:
            here = self._in_state(State.HERE)
            if missing or len(here) < self.rules.smallest:
                self._wait(missing, len(here), now)
            else:
                self._publish(here, now)
            return
        if missing:
            if now >= self._ends_by:
                self._wait(missing, 0, now)
            return
        living = self._living_ranks()
        if any(member.state is State.GONE and now < member.since + _KILLED_WITHIN for member in living):
            return  # a stopped process that wakes before it dies could write into its peers' memory
        waiting = [member for member in living if member.state is State.WAITING]
        if not waiting:
            return
        staying = [member for member in waiting if self.hosts.keeps(member.place, now)]
        near = {member.host for member in staying}
        ready = [] if self._finishing else self._in_state(State.READY)
        ready.sort(key=lambda member: (member.host not in near, member.since, member.number))
        if len(staying) >= self.rules.smallest and all(member.alone for member in staying):
            ready.clear()
        newcomers = ready[: max(0, self.rules.most - len(staying))]
        newcomers.sort(key=lambda member: (member.host not in near, member.number))
        if len(staying) + len(newcomers) < (1 if self._finishing else self.rules.smallest):
            self._wait(missing, len(staying) + len(newcomers), now)
            return
        if self.rules.majority and (lacking := self._lacking_majority(len(waiting), bool(newcomers))):
            self._wait([], len(waiting), now, lacking)
            return
        for member in waiting:
            if staying and member not in staying:
                self._stop(member, "its host was removed")
        # Where all hosts have been replaced, the old members stay for one more generation: they have the state.
        self._publish((staying or waiting) + newcomers, now)

    def _missing(self) -> list[Member]:
        """Return the members without which the next generation cannot form."""
        if self.generation == 0:
            return self._in_state(State.STARTED)
        return [member for member in self._living_ranks() if member.state is State.IN]

    def _in_state(self, state: State) -> list[Member]:
        return [member for member in self.members.values() if member.state is state]

    def _living_ranks(self) -> list[Member]:
        return [self.members[rank] for rank in self.ranks if rank in self.members]

    def _state(self, number: int) -> State:
        return self.members[number].state if number in self.members else State.GONE

    def _lacking_majority(self, waiting: int, with_newcomer: bool) -> str:
        """Say who is missing to a majority; empty: nobody."""
        finished = sum(self._state(rank) is State.FINISHED for rank in self.ranks)
        if 2 * (waiting + finished) + with_newcomer > len(self.ranks):
            return ""
        absent = [str(rank) for rank in self.ranks if self._state(rank) is State.GONE]
        return (
            f"members {', '.join(absent)}: {waiting} of the {len(self.ranks)} members of generation {self.generation} "
            "are no majority, and the others may be continuing without them (half of the members and a newcomer "
            f"suffice; set COLLECTIVES_QUORUM=any to continue without a majority){self.hosts.astray}"
        )

    def _wait(self, missing: Sequence[Member], size: int, now: float, lacking: str = "") -> None:
        """Say what is missing, now and then; give up in the end."""
        seconds, bound = now - self._waiting_since, self.rules.elastic_timeout
        if lacking:
            pass
        elif not self.unused:
            lacking = f"hosts with room for {ranks_in_words(self.rules.smallest)}"
        elif missing:
            doing = f"leave generation {self.generation} (still computing)" if self.generation else "call init()"
            lacking = f"{numbered(missing)} to {doing}"
            bound = bound if self.generation else max(bound, FIRST_WITHIN)
        else:
            lacking = ranks_in_words(self.rules.smallest - size, "more ")
            new = [member for member in self.members.values() if member.state in (State.STARTED, State.ALONE)]
            lacking += f" ({numbered(new)} starting)" if new else f" ({self.hosts.NO_ROOM}){self.hosts.astray}"
        places = len(list(self.hosts.places(now)))
        if self.rules.fixed and self.rules.cooldown is None and places < self.rules.smallest:
            self._give_up(
                f"the remaining hosts have room for only {ranks_in_words(places)}, but --min-np is "
                f"{self.rules.smallest}; add hosts, or lower --min-np [E5]"
            )
        elif seconds >= bound:
            self._give_up(f"waited {seconds:.0f} s for {lacking}; to wait longer, raise {self.hosts.TIMEOUT} [E6]")
        elif now - self._said_waiting >= WAITING_EVERY:
            self._said_waiting = now
            self._event("waiting", f"has waited {seconds:.0f} s for {lacking}", seconds=seconds)

    def _publish(self, members: Sequence[Member], now: float) -> None:
        limit = self.rules.reset_limit
        if limit is not None and self.generation > limit:
            self._give_up(
                f"Horovod was shutdown because number of resets during elastic job exceeded limit: {limit} [E7]"
            )
            return
        if self.generation:
            for member in members:
                if not member.born:
                    self._event_of(member, "joined", "joins")
            self._actions.append(Drop(f"elastic/g{self.generation}/"))
        self.generation += 1
        self.ranks = tuple(member.number for member in members)
        for member in members:
            member.born = member.born or self.generation
            member.state, member.since = State.IN, now
        answer = {
            "generation": self.generation,
            "members": list(self.ranks),
            "born": [member.born for member in members],
        }
        for member in members:
            self._answer(member, answer)
        seconds = now - self._waiting_since
        self._event(
            "generation",
            f"generation {self.generation}: {ranks_in_words(len(members))}, {numbered(members)}; formed in "
            f"{seconds:.2f} s" + (f" ({self._why})" if self._why else ""),
            **answer,
            hosts=[member.host for member in members],
            seconds=seconds,
            why=self._why,
        )
        self.failed.clear()
        self._ended, self._ends_by, self._why = False, math.inf, ""
        self._noticed.clear()

    def _notify(self, now: float) -> None:
        """Have the members end the generation at their next commit, where there is a reason."""
        if self._ended or self._finishing:
            return
        ranks = self._living_ranks()
        staying = [member for member in ranks if self.hosts.keeps(member.place, now)]
        reasons = {"removed"} if len(staying) < len(ranks) else set()
        ready = self._in_state(State.READY)
        on_the_way = any(member.state in (State.STARTED, State.ALONE) for member in self.members.values())
        fits = bool(ready) and len(staying) < self.rules.most
        # All together, if they come close to each other.
        if fits and (not on_the_way or now >= min(member.since for member in ready) + self.rules.grace):
            reasons.add("added")
        if reasons - self._noticed:
            flags = {word: word in reasons - self._noticed for word in ("added", "removed")}
            self._noticed |= reasons
            self._give_notice(**flags)
            words = " and ".join(word for word, state in flags.items() if state)
            self._event("notice", f"hosts were {words}: generation {self.generation} ends at the next commit", **flags)

    def _give_notice(self, **content: Any) -> None:
        self._notices += 1
        self._actions.append(Set(f"elastic/notice/{self._notices}", {"generation": self.generation, **content}))

    # The end

    def _stop(self, member: Member, why: str) -> None:
        self._answer(member, {"stop": why})
        member.state = State.GONE
        self._event_of(member, "stopped", f"is told to end: {why}", why=why)

    def _give_up(self, text: str) -> None:
        for member in self.members.values():
            if member.state in _WAITS:
                self._answer(member, {"give_up": text})
        self._event("gave_up", text)
        self._finish(End(self._code(1), text))

    def _ends_early(self) -> bool:
        """Whether too few are left of those that were started, and nobody has come as far as to train."""
        living = [member for member in self.members.values() if member.state not in _ENDS]
        return bool(self.failed) and not self._recovers and len(living) < self.rules.smallest

    def _look_for_end(self) -> None:
        ranks = [rank for rank in self.ranks if self._state(rank) is not State.GONE]
        if self._finishing:
            for member in self._in_state(State.READY):
                self._stop(member, "the job is done")
            if not ranks:
                self._finish(End(self._code(0)))
        elif self._ends_early():
            self._finish(End(self._code(1)))
        elif self.generation and not ranks:
            text = (
                "all ranks have ended, so no copy of the state is left; start again from a checkpoint [E8]"
                if self._recovers
                else ""
            )
            self._finish(End(self._code(int(self._recovers)), text))
        elif self.unused and not self.members and self._closed:
            self._finish(End(self._code(0)))

    def _code(self, otherwise: int) -> int:
        """The exit code of the first member whose failure was not survived."""
        return next(iter(self.failed.values()), otherwise)

    def _finish(self, end: End) -> None:
        if self.end is None:
            self.end = end
            self._event("done", f"the job has ended with exit code {end.code}", code=end.code, failed=list(self.failed))

    def _answer(self, member: Member, answer: Mapping[str, Any]) -> None:
        self._actions.append(Set(f"elastic/answer/{member.number}/{member.question}", answer))

    def _event(self, kind: str, text: str, **fields: Any) -> None:
        self._actions.append(Event(kind, text, fields))

    def _event_of(self, member: Member, kind: str, text: str, **fields: Any) -> None:
        self._event(kind, f"{member} {text}", member=member.number, host=member.host, **fields)
