"""A network that exists only as numbers: schedules of thousands of ranks executed on a virtual clock.

Nothing here knows what an all-reduce costs. The steps of all ranks are played message by message, and the time comes
out:

* Segments and rounds overlap as in the executor: round k of segment s belongs to group s * stride + k. A rank begins
group t + 1
  when all its messages of group t are sent and received, and what they brought is reduced.
* A message sets out when both of its ends have reached its group, takes the latency, and then flows.
* Messages that flow at the same time share links: each rank has a link out and a link in, full duplex; with hosts,
ranks of
  one host exchange over faster local links, and what leaves a host also passes the host's uplink, shared by its ranks.
  Rates are max-min fair: each message gets an equal share of its tightest link, and what others leave is divided again.

The clock moves from one event (a message begins to flow, or is delivered) to the next. All ranks are in NumPy arrays,
so that ranks that move in step cost no more than one, and messages that share no link need no events at all. There is
no randomness: the same call gives the same report.

Source of the model: latency and bandwidth as in R. Hockney, Parallel Computing 20 (1994); max-min fairness by
progressive filling, D. Bertsekas and R. Gallager, "Data Networks" (1992).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from collectives.base.errors import InvalidArgumentError
from collectives.schedules.schedule import Schedule, StepKind

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[int, np.ndarray[Any, Any]]

_CODE = {kind.value: number for number, kind in enumerate(StepKind)}
_ROUND, _RANK, _PEER, _CHUNK, _SPAN = range(5)  # the rows of a table of steps
_TOLERANCE = 1e-12  # times this near to each other, relatively, are one event: they differ by rounding only
_UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True)
class Network:
    """What connects the ranks. Times in seconds, bandwidths in bytes per second and direction.

    Without ``hosts`` every rank stands alone. The local figures default to those of the network, the uplink to no limit
    of its own; ``reduction`` is how many bytes a rank combines per second, unlimited by default.
    """

    latency: float
    bandwidth: float
    hosts: Sequence[Sequence[int]] | None = None
    local_latency: float | None = None
    local_bandwidth: float | None = None
    uplink: float = _UNLIMITED
    reduction: float = _UNLIMITED


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulated collective took.

    Attributes:
        times: seconds until each rank was done.
        total: seconds until all were.
        busbw: bytes per second by nccl-tests' definition, comparable between sizes and with a link's bandwidth.
        links: bytes that crossed each link that was used, by name ("rank 3 out", "rank 3 local in", "host 0 out", ...).
        messages: how many messages there were.
        results: with ``data``, the chunks that each rank holds in the end; otherwise None.
    """

    times: Floats
    total: float
    busbw: float
    links: dict[str, int]
    messages: int
    results: list[dict[int, np.ndarray[Any, Any]]] | None


def simulate(
    schedules: Iterable[Schedule],
    sizes: Sequence[int],
    network: Network,
    segment: int | None = None,
    *,
    stride: int = 1,
    data: Sequence[Values] | None = None,
    combine: Callable[[Any, Any], Any] = np.add,
) -> Report:
    """Execute the schedules of all ranks, in the order of the ranks.

    Args:
        schedules: one for each rank, proved by `verify` (peers and chunks are in range); an iterator is read once, and
            its schedules are not kept unless there is data.
        sizes: bytes of each chunk.
        network: what connects the ranks.
        segment: bytes of a chunk that one pipeline unit moves; None: the whole chunk at once.
        stride: how many groups lie between the starts of two segments: with 1 they follow each other closely, from the
            number of rounds on they do not overlap.
        data: the chunks that each rank starts with, as arrays of any dtype; these are then moved and combined, too.
        combine: what a reduction of ``data`` does: called with the own value and the peer's.

    Raises:
        InvalidArgumentError: the arguments do not fit together, or a send and its receive do not meet; names what
            differs.
    """
    if segment is not None and segment < 1:
        raise InvalidArgumentError(f"segment={segment}: expected a positive number of bytes, or None for whole chunks")
    if stride < 1:
        raise InvalidArgumentError(f"stride={stride}: expected a positive number of groups")
    if min(sizes, default=0) < 0:
        raise InvalidArgumentError(f"sizes: expected the bytes of each chunk, found {min(sizes)}")
    if data is not None:
        schedules = list(schedules)
    traffic = _Traffic(schedules, sizes, segment, stride)
    wires = _Wires(network, traffic.size)
    clock = _Clock(traffic, wires, network.reduction)
    clock.run()
    total = float(clock.done.max())
    results = None if data is None else replay(list(schedules), data, combine)
    return Report(
        clock.done, total, _busbw(traffic, sum(sizes), total), wires.named(clock.crossed), clock.messages, results
    )


def replay(
    schedules: Sequence[Schedule], data: Sequence[Values], combine: Callable[[Any, Any], Any] = np.add
) -> list[dict[int, np.ndarray[Any, Any]]]:
    """Move and combine real arrays, round by round: what the words of a schedule mean, as a program.

    Segments are disjoint, so that cutting chunks into them changes no value.

    Args:
        data: for each rank, the chunks that it starts with.

    Returns:
        For each rank, the chunks that it holds in the end.
    """
    held = [dict(chunks) for chunks in data]
    for number in range(len(schedules[0].rounds)):
        before = [dict(chunks) for chunks in held]
        for rank, schedule in enumerate(schedules):
            for step in schedule.rounds[number]:
                for chunk in range(step.chunk, step.chunk + step.span):
                    if step.kind is StepKind.REDUCE:
                        held[rank][chunk] = combine(held[rank][chunk], before[step.peer][chunk])
                    elif step.kind is not StepKind.SEND:
                        held[rank][chunk] = before[step.peer][chunk].copy()
    return held


def _busbw(traffic: _Traffic, nbytes: int, total: float) -> float:
    n = traffic.size
    factor = {"allreduce": 2 * (n - 1) / n, "broadcast": 1.0, "alltoall": (n - 1) / n / n}.get(
        traffic.collective, (n - 1) / n
    )
    return nbytes * factor / total if total else 0.0


class _Traffic:
    """All messages of a collective, and what each rank reduces, in arrays sorted by round."""

    def __init__(self, schedules: Iterable[Schedule], sizes: Sequence[int], segment: int | None, stride: int) -> None:
        sends: list[Ints] = []
        receives: list[Ints] = []
        reductions: list[Ints] = []
        self.size, self.rounds = 0, 0
        for rank, schedule in enumerate(schedules):
            if schedule.rank != rank or schedule.chunks != len(sizes):
                raise InvalidArgumentError(
                    f"schedules, sizes: expected a schedule of rank {rank} over {len(sizes)} chunks, one size for "
                    f"each, "
                    f"found rank {schedule.rank} over {schedule.chunks}"
                )
            self.collective, self.size = schedule.collective, schedule.size
            self.rounds = max(self.rounds, len(schedule.rounds))
            kind, steps = _flatten(schedule)
            sends.append(steps[:, kind == _CODE[StepKind.SEND.value]])
            reductions.append(steps[:, kind == _CODE[StepKind.REDUCE.value]])
            arrives = (kind == _CODE[StepKind.RECEIVE.value]) | (kind == _CODE[StepKind.REDUCE.value])
            receives.append(steps[:, arrives & (steps[_PEER] != rank)])
        if len(sends) != self.size or not sends:
            raise InvalidArgumentError(f"schedules: expected one for each of {self.size} ranks, found {len(sends)}")
        self._sends = self._sorted(sends, (_ROUND, _RANK, _PEER))
        self._reductions = self._sorted(reductions, (_ROUND,))
        self._check(self._sends, self._sorted(receives, (_ROUND, _PEER, _RANK)))
        rounds = np.arange(self.rounds + 1)
        self._send_bounds = np.searchsorted(self._sends[_ROUND], rounds)
        self._reduction_bounds = np.searchsorted(self._reductions[_ROUND], rounds)
        self._sizes = np.asarray(sizes, np.int64)
        self._segment = segment or max(1, int(self._sizes.max(initial=0)))
        self._segments = max(1, -(-int(self._sizes.max(initial=0)) // self._segment))
        self._stride = max(1, min(stride, self.rounds))
        self.groups = self.rounds + (self._segments - 1) * self._stride if self.rounds else 0

    def _sorted(self, parts: list[Ints], by: Sequence[int]) -> Ints:
        """All ranks' steps in one table, sorted by some of its rows and then by their order in the schedule."""
        table = np.concatenate(parts, axis=1)
        parts.clear()
        key = np.zeros(table.shape[1], np.int64)
        for row in by:
            key = key * max(self.size, 1) + table[row]
        return table[:, np.argsort(key, kind="stable")]

    def _check(self, sends: Ints, receives: Ints) -> None:
        """The k-th send from a to b meets the k-th receive by b from a in the same round, over the same chunks."""
        receives = receives[[_ROUND, _PEER, _RANK, _CHUNK, _SPAN]]
        count = min(sends.shape[1], receives.shape[1])
        differs = (sends[:, :count] != receives[:, :count]).any(axis=0)
        if sends.shape == receives.shape and not differs.any():
            return
        first = int(differs.argmax()) if differs.any() else count
        sent, received = (
            "nothing"
            if first >= table.shape[1]
            else "in round {} from rank {} to rank {} chunk {}, span {}".format(*table[:, first])
            for table in (sends, receives)
        )
        raise InvalidArgumentError(
            f"schedules: a send and its receive do not meet: sent is {sent}; received is {received}"
        )

    def group(self, number: int) -> tuple[Ints, Ints, Floats, Floats]:
        """Sender, receiver and bytes of each message of a group, and the bytes that each rank reduces in it."""
        messages: list[tuple[Ints, Ints, Floats]] = []
        reduced = np.zeros(self.size)
        stride = self._stride
        first = max(number % stride, number - (self._segments - 1) * stride)
        for now in range(first, min(number + 1, self.rounds), stride):
            done = (number - now) // stride * self._segment
            sums = np.concatenate([[0], np.cumsum(np.clip(self._sizes - done, 0, self._segment))])
            steps = self._sends[:, self._send_bounds[now] : self._send_bounds[now + 1]]
            nbytes = sums[steps[_CHUNK] + steps[_SPAN]] - sums[steps[_CHUNK]]
            moving = nbytes > 0
            messages.append((steps[_RANK, moving], steps[_PEER, moving], nbytes[moving].astype(np.float64)))
            steps = self._reductions[:, self._reduction_bounds[now] : self._reduction_bounds[now + 1]]
            reduced += np.bincount(steps[_RANK], sums[steps[_CHUNK] + steps[_SPAN]] - sums[steps[_CHUNK]], self.size)
        sender, receiver, nbytes = (
            messages[0] if len(messages) == 1 else map(np.concatenate, zip(*messages, strict=True))
        )
        return sender, receiver, nbytes, reduced


def _flatten(schedule: Schedule) -> tuple[Ints, Ints]:
    """The kinds of a schedule's steps, and a table of their round, rank, peer, chunk and span."""
    steps = list(chain.from_iterable(schedule.rounds))
    kinds = np.fromiter(map(_CODE.__getitem__, map(attrgetter("kind._value_"), steps)), np.int32, len(steps))
    table = np.empty((5, len(steps)), np.int32)
    table[_ROUND] = np.repeat(np.arange(len(schedule.rounds)), [len(r) for r in schedule.rounds])
    table[_RANK] = schedule.rank
    for row, name in ((_PEER, "peer"), (_CHUNK, "chunk"), (_SPAN, "span")):
        table[row] = np.fromiter(map(attrgetter(name), steps), np.int32, len(steps))
    return kinds, table


class _Wires:
    """The links of a network by number, and the path of each message over them; link 0 is no link, and has no limit."""

    def __init__(self, network: Network, size: int) -> None:
        hosts = [[rank] for rank in range(size)] if network.hosts is None else network.hosts
        if sorted(chain.from_iterable(hosts)) != list(range(size)):
            raise InvalidArgumentError(
                f"network.hosts={hosts!r}: expected each of the ranks 0 to {size - 1} on one host"
            )
        self._size, self._hosts = size, len(hosts)
        self._host_of = np.empty(size, np.int64)
        for number, ranks in enumerate(hosts):
            self._host_of[list(ranks)] = number
        local = network.bandwidth if network.local_bandwidth is None else network.local_bandwidth
        latencies = [network.latency, network.latency if network.local_latency is None else network.local_latency]
        self._latency = np.array(latencies)
        limits = [network.bandwidth] * 2 + [local] * 2
        self.capacity = np.concatenate(
            [[_UNLIMITED], np.repeat(limits, size), np.repeat([network.uplink] * 2, len(hosts))]
        ).astype(float)
        self.uplinks_are_limited = not np.isinf(network.uplink)
        self.hops = 4 if self.uplinks_are_limited or network.hosts is not None else 2
        if not (self.capacity > 0).all() or not network.reduction > 0 or not (self._latency >= 0).all():
            raise InvalidArgumentError(
                f"{network!r}: expected bandwidths and reduction above 0, and latencies from 0 on"
            )

    def paths(self, ends: Ints) -> tuple[Ints, Floats]:
        """The links that each message passes, and its latency; from its two ends, sender and receiver."""
        sender, receiver = ends
        n, home, away = self._size, self._host_of[sender], self._host_of[receiver]
        local = home == away
        uplinks = 1 + 4 * n
        path = np.stack(
            [
                np.where(local, 2 * n, 0) + 1 + sender,
                np.where(local, 2 * n, 0) + 1 + n + receiver,
                np.where(local, 0, uplinks + home),
                np.where(local, 0, uplinks + self._hosts + away),
            ]
        )
        return path[: self.hops], self._latency[local.astype(np.int64)]

    def named(self, crossed: Floats) -> dict[str, int]:
        """The bytes that crossed each link, by its name, without the links that nothing crossed."""
        names = [f"rank {rank} {way}" for way in ("out", "in", "local out", "local in") for rank in range(self._size)]
        names += [f"host {host} {way}" for way in ("out", "in") for host in range(self._hosts)]
        return {name: int(nbytes) for name, nbytes in zip(names, crossed[1:], strict=True) if nbytes}


def _fair_rates(path: Ints, capacity: Floats) -> Floats:
    """Max-min fair rates of messages over shared links: raise all alike; whoever meets a full link keeps what it
    has."""
    rates = np.full(path.shape[1], _UNLIMITED)
    left = capacity.copy()
    rising = np.arange(path.shape[1])
    while rising.size:
        used = path[:, rising]
        counts = np.bincount(used.ravel(), minlength=len(left))
        share = np.divide(left, counts, out=np.full(len(left), _UNLIMITED), where=counts > 0)
        mine = share[used].min(axis=0)
        tightest = mine.min()
        if np.isinf(tightest):
            break
        full = mine <= tightest * (1 + _TOLERANCE)
        rates[rising[full]] = tightest
        left -= np.bincount(used[:, full].ravel(), minlength=len(left)) * tightest
        np.maximum(left, 0, out=left)
        rising = rising[~full]
    return rates


class _Flows:
    """Messages under way: some still in their latency, the others flowing at fair rates."""

    def __init__(self, capacity: Floats, hops: int, rows: int) -> None:
        self._capacity = capacity
        self._labels: Ints = np.empty((rows, 0), np.int64)
        self._paths: Ints = np.empty((hops, 0), np.int64)
        self._left: Floats = np.empty(0)
        self._begins: Floats = np.empty(0)
        """When each begins to flow; minus infinity once it does."""
        self._rates: Floats = np.empty(0)
        self._stale = False

    def add(self, labels: Ints, paths: Ints, nbytes: Floats, begins: Floats) -> None:
        """Messages set out; the labels, one column for each, come back when it is delivered."""
        self._labels = np.concatenate([self._labels, labels], axis=1)
        self._paths = np.concatenate([self._paths, paths], axis=1)
        self._left = np.concatenate([self._left, nbytes])
        self._begins = np.concatenate([self._begins, begins])
        self._stale = True

    def next_event(self, now: float) -> float:
        """When the next message begins to flow or is delivered; infinity if none is under way."""
        if self._stale:
            flowing = self._begins == -np.inf
            self._rates = np.zeros(len(self._left))
            self._rates[flowing] = _fair_rates(self._paths[:, flowing], self._capacity)
            self._stale = False
        return float(self._times(now).min(initial=np.inf))

    def _times(self, now: float) -> Floats:
        delivered = now + np.divide(self._left, self._rates, out=np.zeros(len(self._left)), where=self._rates > 0)
        return np.where(self._begins == -np.inf, delivered, self._begins)

    def advance(self, now: float, moment: float) -> Ints:
        """Let the time pass until ``moment``, the next event or before; returns the labels of what is delivered
        then."""
        reached = self._times(now) <= moment * (1 + _TOLERANCE)
        flowing = self._begins == -np.inf
        still, delivered = flowing & ~reached, flowing & reached
        self._left[still] -= self._rates[still] * (moment - now)
        self._begins[reached & ~flowing] = -np.inf
        self._stale |= bool(reached.any())
        labels = self._labels[:, delivered]
        if delivered.any():
            keep = ~delivered
            self._labels, self._paths = self._labels[:, keep], self._paths[:, keep]
            self._left, self._begins = self._left[keep], self._begins[keep]
        return labels


class _Group:
    """The messages of one group, and which of their ends have reached it."""

    def __init__(self, sender: Ints, receiver: Ints, nbytes: Floats, reduced: Floats) -> None:
        self.ends = np.stack([sender, receiver])
        self.nbytes = nbytes
        self.reduced = reduced
        self.counts = np.bincount(self.ends.ravel(), minlength=len(reduced))
        """Messages that each rank sends or receives."""
        self.reached = np.zeros(len(reduced), np.bool_)
        self.remaining = len(reduced)
        """Ranks that have not finished the group."""

    def enter(self, ranks: Ints) -> tuple[Ints, Floats]:
        """Some ranks reach the group; returns the ends and bytes of what has both of its ends there only now."""
        were = self.reached[self.ends].all(axis=0)
        self.reached[ranks] = True
        leaving = self.reached[self.ends].all(axis=0) & ~were
        return self.ends[:, leaving], self.nbytes[leaving]


class _Clock:
    """Plays the groups of all ranks; `done` says when each rank was through.

    A rank's own links carry messages of no group but the one that it is in. So the groups can be played one after the
    other, whenever each rank comes to them, unless ranks that are in different groups share a limited uplink.
    """

    def __init__(self, traffic: _Traffic, wires: _Wires, reduction: float) -> None:
        self._traffic, self._wires, self._reduction = traffic, wires, reduction
        self.done = np.zeros(traffic.size)
        self.crossed = np.zeros(len(wires.capacity))
        self.messages = 0

    def run(self) -> None:
        if self._wires.uplinks_are_limited:
            self._run_together()
        else:
            self._run_in_turn()

    def _send(self, ends: Ints, nbytes: Floats) -> tuple[Ints, Floats]:
        """Count messages that set out; returns their paths and latencies."""
        paths, latency = self._wires.paths(ends)
        self.crossed += np.bincount(paths.ravel(), np.tile(nbytes, len(paths)), len(self.crossed))
        self.messages += len(nbytes)
        return paths, latency

    def _run_in_turn(self) -> None:
        for number in range(self._traffic.groups):
            group = _Group(*self._traffic.group(number))
            paths, latency = self._send(group.ends, group.nbytes)
            delivered = self._deliver(paths, group.nbytes, self.done[group.ends].max(axis=0) + latency)
            for ranks in group.ends:
                np.maximum.at(self.done, ranks, delivered)
            self.done += group.reduced / self._reduction

    def _deliver(self, paths: Ints, nbytes: Floats, begins: Floats) -> Floats:
        """When messages are delivered that share links with each other only."""
        capacity = self._wires.capacity
        loads = np.bincount(paths.ravel(), minlength=len(capacity))
        sharing = np.flatnonzero(((loads[paths] > 1) & np.isfinite(capacity[paths])).any(axis=0))
        times: Floats = begins + nbytes / capacity[paths].min(axis=0)
        flows = _Flows(capacity, len(paths), 1)
        flows.add(sharing[np.newaxis], paths[:, sharing], nbytes[sharing], begins[sharing])
        now = 0.0
        while (moment := flows.next_event(now)) < np.inf:
            times[flows.advance(now, moment)[0]] = moment
            now = moment
        return times

    def _run_together(self) -> None:
        size = self._traffic.size
        flows = _Flows(self._wires.capacity, self._wires.hops, 2)
        at = np.zeros(size, np.int64)  # which group each rank is in, or about to begin
        begins = np.full(size, 0.0 if self._traffic.groups else np.inf)  # when it will begin it; infinity once it has
        waits = np.zeros(size, np.int64)  # for how many messages of it the rank still waits
        groups: dict[int, _Group] = {}
        now = 0.0
        while True:
            ready = np.flatnonzero(begins <= now * (1 + _TOLERANCE))
            begins[ready] = np.inf
            for number in np.unique(at[ready]).tolist():
                members = ready[at[ready] == number]
                if number not in groups:
                    groups[number] = _Group(*self._traffic.group(number))
                waits[members] = groups[number].counts[members]
                ends, nbytes = groups[number].enter(members)
                paths, latency = self._send(ends, nbytes)
                flows.add(ends, paths, nbytes, now + latency)
            if not len(ready):
                moment = min(float(begins.min()), flows.next_event(now))
                if moment == np.inf:
                    return
                ends = flows.advance(now, moment)
                now = moment
                ready = np.unique(ends)
                waits -= np.bincount(ends.ravel(), minlength=size)
            through = ready[waits[ready] == 0]
            for number in np.unique(at[through]).tolist():
                members = through[at[through] == number]
                then = now + groups[number].reduced[members] / self._reduction
                last = number == self._traffic.groups - 1
                (self.done if last else begins)[members] = then
                groups[number].remaining -= len(members)
                if not groups[number].remaining:
                    del groups[number]
            at[through] += 1
