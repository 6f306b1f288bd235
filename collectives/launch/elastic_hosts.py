"""The hosts of an elastic job: their order, their slots, and which are blacklisted for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from collectives.launch.hosts import Host

EARLY_DEATHS = 3
"""Members in a row that may die on a host before their first commit; then none is started there any more."""


class HostTable:
    """The hosts that discovery has named last. Known hosts keep their place, new ones are appended.

    Args:
        cooldown: seconds for which a host is blacklisted at least and at most; None: for ever.
        random: a number from 0 to 1, which spreads the ends of several hosts' times.
    """

    NO_ROOM, TIMEOUT = "no host has room", "--elastic-timeout"
    """For messages: why no more members come, and the setting that bounds the wait for them."""
    astray = ""
    """For messages: why newcomers cannot reach the job; empty: they can."""

    def __init__(self, cooldown: tuple[float, float] | None, random: Callable[[], float]) -> None:
        self.slots: dict[str, int] = {}
        self._cooldown, self._random = cooldown, random
        self._blacklisted: dict[str, float] = {}
        self._times: dict[str, int] = {}
        self._early_deaths: dict[str, int] = {}
        self._shut: set[str] = set()

    def update(self, hosts: Iterable[Host]) -> tuple[list[str], list[str]]:
        """Take over what discovery has found; return the hosts that are new and those that are gone."""
        found = {host.name: host.slots for host in hosts}
        added = [name for name in found if name not in self.slots]
        removed = [name for name in self.slots if name not in found]
        self.slots = {name: found[name] for name in [*self.slots, *added] if name in found}
        return added, removed

    def usable(self, host: str, now: float) -> bool:
        """Whether a host is there and not blacklisted."""
        return host in self.slots and now >= self._blacklisted.get(host, -math.inf)

    def places(self, now: float) -> Iterator[tuple[str, int]]:
        """Yield all usable places: a host and a slot."""
        for host, slots in self.slots.items():
            if self.usable(host, now):
                yield from ((host, slot) for slot in range(slots))

    def free(self, taken: Collection[tuple[str, int]], now: float) -> list[tuple[str, int]]:
        """Return the usable places that are not taken, of hosts that still get members."""
        return [place for place in self.places(now) if place not in taken and place[0] not in self._shut]

    def close(self, host: str) -> None:
        """Have no more members started on a host; those that are there stay."""
        self._shut.add(host)

    def keeps(self, place: tuple[str, int], now: float) -> bool:
        """Whether a member may stay at its place."""
        return self.usable(place[0], now) and place[1] < self.slots[place[0]]

    def blacklist(self, host: str, now: float) -> float:
        """Blacklist a host; return for how many seconds: each time for twice as long."""
        self._early_deaths.pop(host, None)
        seconds = math.inf
        if self._cooldown is not None:
            shortest, longest = self._cooldown
            self._times[host] = self._times.get(host, 0) + 1
            doubled = shortest * 2.0 ** min(self._times[host], 64) + self._random() * shortest
            seconds = min(max(doubled, shortest), longest)
        self._blacklisted[host] = now + seconds
        return seconds

    def died_early(self, host: str) -> bool:
        """Note that a member has died before its first commit; return whether too many have, in a row."""
        self._early_deaths[host] = self._early_deaths.get(host, 0) + 1
        return self._early_deaths[host] >= EARLY_DEATHS

    def has_trained(self, host: str) -> None:
        """Note that a member has come as far as to train."""
        self._early_deaths.pop(host, None)


class AnyHosts(HostTable):
    """The hosts of processes that come by themselves: all may stay, and none are started."""

    NO_ROOM, TIMEOUT = "none has started", "COLLECTIVES_ELASTIC_TIMEOUT"

    def __init__(self) -> None:
        super().__init__(None, lambda: 0.0)

    def keeps(self, place: tuple[str, int], now: float) -> bool:
        """Whether a member may stay at its place."""
        return True

    def died_early(self, host: str) -> bool:
        """Whether too many members have died on a host."""
        return False
