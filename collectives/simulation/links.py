"""Links of a simulated network: the path of each message, and max-min fair rates of messages that share links.

Every rank has a link out and a link in, full duplex. With hosts, ranks of one host exchange over faster local links,
and messages between hosts also pass the uplinks of their hosts, and those of their leaf switches if these differ. Each
message gets an equal share of its tightest link, and what others leave of a link is divided again.

Source: max-min fairness by progressive filling, D. Bertsekas and R. Gallager, "Data Networks" (1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from collectives.base.errors import InvalidArgumentError

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[Any]]

TOLERANCE = 1e-12
"""Times that differ by less, relatively, are one event: they differ by rounding only."""
_UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True)
class Network:
    """A network. Times in seconds, bandwidths in bytes per second and direction.

    Attributes:
        hosts: the ranks on each host; None: every rank on a host of its own.
        local_latency, local_bandwidth: between ranks of one host; default to those of the network.
        uplink: bandwidth of each host's uplink.
        reduction: bytes that a rank combines per second.
        leaf: hosts of each leaf switch; 0: one switch connects all.
        leaf_uplink: bandwidth from each leaf switch to the switches above.
        message: seconds that a rank spends on each message that it sends.
        lowered: by a link's name ("rank 3 out", "host 0 in"), the share of its bandwidth that is left, above 0.
    """

    latency: float
    bandwidth: float
    hosts: Sequence[Sequence[int]] | None = None
    local_latency: float | None = None
    local_bandwidth: float | None = None
    uplink: float = _UNLIMITED
    reduction: float = _UNLIMITED
    leaf: int = 0
    leaf_uplink: float = _UNLIMITED
    message: float = 0.0
    lowered: Mapping[str, float] = field(default_factory=dict)


class Topology:
    """The links of a network by number, and the path of each message over them. Link 0 stands for no link."""

    def __init__(self, network: Network, size: int) -> None:
        hosts = [[rank] for rank in range(size)] if network.hosts is None else network.hosts
        if sorted(chain.from_iterable(hosts)) != list(range(size)):
            raise InvalidArgumentError(
                f"network.hosts={hosts!r}: expected each of the ranks 0 to {size - 1} on one host [U25]"
            )
        self._size, self._hosts = size, len(hosts)
        self.host_of = np.empty(size, np.int64)
        for number, ranks in enumerate(hosts):
            self.host_of[list(ranks)] = number
        self.leaf_of = np.arange(len(hosts)) // (network.leaf or len(hosts) or 1)
        self._leaves = int(self.leaf_of[-1]) + 1 if len(hosts) else 0
        local = network.bandwidth if network.local_bandwidth is None else network.local_bandwidth
        within = network.latency if network.local_latency is None else network.local_latency
        self.latencies = np.array([network.latency, within])
        limits = [network.bandwidth] * 2 + [local] * 2
        self.capacity = np.concatenate(
            [
                [_UNLIMITED],
                np.repeat(limits, size),
                np.repeat([network.uplink] * 2, len(hosts)),
                np.repeat([network.leaf_uplink] * 2, self._leaves),
            ]
        ).astype(float)
        for name, share in network.lowered.items():
            self.capacity[self.number(name)] *= share
        if not (self.capacity > 0).all() or not network.reduction > 0 or not (self.latencies >= 0).all():
            raise InvalidArgumentError(
                f"{network!r}: expected bandwidths and reduction above 0, and latencies of 0 or more [U26]"
            )

    @cached_property
    def names(self) -> list[str]:
        """The names of links 1, 2, ..."""
        both = ("out", "in")
        kinds = (("rank", (*both, "local out", "local in"), self._size), ("host", both, self._hosts))
        return [
            f"{kind} {number} {direction}"
            for kind, directions, count in (*kinds, ("leaf", both, self._leaves))
            for direction in directions
            for number in range(count)
        ]

    def number(self, name: str) -> int:
        """The number of a link by its name; InvalidArgumentError if there is none."""
        if name not in self.names:
            raise InvalidArgumentError(
                f"link {name!r}: expected 'rank N out', 'rank N in', 'rank N local out', 'rank N local in', 'host N "
                f"out', 'host N in', 'leaf N out' or 'leaf N in', of {self._size} ranks on {self._hosts} hosts [U35]"
            )
        return 1 + self.names.index(name)

    def paths(self, ends: Ints) -> tuple[Ints, Floats]:
        """The links that each message passes, an array (6, messages), and its latency; ``ends``: senders, receivers."""
        sender, receiver = ends
        n, home, away = self._size, self.host_of[sender], self.host_of[receiver]
        local = home == away
        below, above = self.leaf_of[home], self.leaf_of[away]
        uplinks = 1 + 4 * n
        leaves = uplinks + 2 * self._hosts
        path = np.stack(
            [
                np.where(local, 2 * n, 0) + 1 + sender,
                np.where(local, 2 * n, 0) + 1 + n + receiver,
                np.where(local, 0, uplinks + home),
                np.where(local, 0, uplinks + self._hosts + away),
                np.where(below == above, 0, leaves + below),
                np.where(below == above, 0, leaves + self._leaves + above),
            ]
        )
        return path, self.latencies[local.astype(np.int64)]


def _fair_rates(path: Ints, capacity: Floats) -> Floats:
    """Max-min fair rates of messages over shared links: all rates rise alike until a link of the message is full."""
    rates = np.full(path.shape[1], _UNLIMITED)
    left = capacity.copy()
    rising = np.arange(path.shape[1])
    while rising.size:
        used = path[:, rising]
        counts = np.bincount(used.ravel(), minlength=len(left))
        share = np.divide(left, counts, out=np.full(len(left), _UNLIMITED), where=counts > 0)
        limits = share[used].min(axis=0)
        tightest = limits.min()
        if np.isinf(tightest):
            break
        full = limits <= tightest * (1 + TOLERANCE)
        rates[rising[full]] = tightest
        left -= np.bincount(used[:, full].ravel(), minlength=len(left)) * tightest
        np.maximum(left, 0, out=left)
        rising = rising[~full]
    return rates


class Flows:
    """Messages in flight: some in their latency, the others flowing at fair rates."""

    def __init__(self, capacity: Floats) -> None:
        self._capacity = capacity
        self._ends: Ints = np.empty((2, 0), np.int64)
        self._paths: Ints = np.empty((6, 0), np.int64)
        self._left: Floats = np.empty(0)
        self._begins: Floats = np.empty(0)
        """When each message begins to flow; minus infinity once it does."""
        self._rates: Floats = np.empty(0)
        self._stale = False

    def add(self, ends: Ints, paths: Ints, nbytes: Floats, begins: Floats) -> None:
        """Add messages: senders and receivers, paths, bytes, and when each begins to flow."""
        self._ends = np.concatenate([self._ends, ends], axis=1)
        self._paths = np.concatenate([self._paths, paths], axis=1)
        self._left = np.concatenate([self._left, nbytes])
        self._begins = np.concatenate([self._begins, begins])
        self._stale = True

    def next_event(self, now: float) -> float:
        """The time at which the next message begins to flow or is delivered; infinity if none is in flight."""
        if self._stale:
            flowing = self._begins == -np.inf
            self._rates = np.zeros(len(self._left))
            self._rates[flowing] = _fair_rates(self._paths[:, flowing], self._capacity)
            self._stale = False
        return float(self._times(now).min(initial=np.inf))

    def _times(self, now: float) -> Floats:
        left = np.full(len(self._left), np.inf)  # of messages whose link is lost
        delivered = now + np.divide(self._left, self._rates, out=left, where=self._rates > 0)
        return np.where(self._begins == -np.inf, delivered, self._begins)

    def change(self, link: int, bandwidth: float) -> None:
        """Change a link's bandwidth for what is still to flow; 0: it is lost."""
        self._capacity[link] = bandwidth
        self._stale = True

    def advance(self, now: float, moment: float) -> Ints:
        """Advance to ``moment``, at most the next event. Returns the ends of the messages delivered then."""
        reached = self._times(now) <= moment * (1 + TOLERANCE)
        flowing = self._begins == -np.inf
        still, delivered = flowing & ~reached, flowing & reached
        self._left[still] -= self._rates[still] * (moment - now)
        self._begins[reached & ~flowing] = -np.inf
        self._stale |= bool(reached.any())
        ends = self._ends[:, delivered]
        if delivered.any():
            keep = ~delivered
            self._ends, self._paths = self._ends[:, keep], self._paths[:, keep]
            self._left, self._begins = self._left[keep], self._begins[keep]
        return ends
