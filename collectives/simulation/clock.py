"""A virtual clock: schedules of thousands of ranks executed over a simulated network.

The model knows messages and links, not collectives; the time of an all-reduce is a result:

* Segments and rounds overlap as in the executor: round k of segment s belongs to group s * stride + k. A rank begins
  group t + 1 when all its messages of group t are sent and received, and received blocks are reduced; each message
  that it sends also costs it `Network.message`.
* A message leaves when both of its ends have reached its group, takes the latency, and then flows at a rate that
  depends on the messages it shares links with (`links`).

The clock moves from one event (a message begins to flow, or is delivered) to the next. All ranks are in NumPy arrays,
so that ranks that move in step cost no more than one. There is no randomness: equal calls give equal reports.

Source of the model: latency and bandwidth as in R. Hockney, Parallel Computing 20 (1994).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.base.errors import InvalidArgumentError
from collectives.schedules.schedule import Schedule
from collectives.simulation.links import TOLERANCE, Floats, Flows, Ints, Network, Topology
from collectives.simulation.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Fault:
    """A link that changes: from ``at`` seconds on, ``link`` has ``bandwidth`` bytes per second; 0: it is lost."""

    at: float
    link: str
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a simulation.

    Attributes:
        times: seconds until each rank is done; infinity for ranks that wait for a lost link.
        total: seconds until all ranks are done.
        busbw: bytes per second by nccl-tests' definition, comparable between sizes and with a link's bandwidth.
        links: bytes that crossed each used link, by name ("rank 3 out", "rank 3 local in", "host 0 out").
        messages: the number of messages.
    """

    times: Floats
    total: float
    busbw: float
    links: dict[str, int]
    messages: int


def simulate(
    schedules: Iterable[Schedule],
    sizes: Sequence[int],
    network: Network,
    segment: int | None = None,
    *,
    stride: int = 1,
    late: Mapping[int, float] | None = None,
    faults: Sequence[Fault] = (),
) -> Report:
    """Execute the schedules of all ranks, in the order of the ranks.

    Args:
        schedules: one for each rank; an iterator is read once, and its schedules are not kept.
        sizes: bytes of each chunk.
        network: what connects the ranks.
        segment: bytes of a chunk that one pipeline unit moves; None: the whole chunk at once.
        stride: groups between the starts of two segments; from the number of rounds on, segments do not overlap.
        late: by rank, the seconds after which it begins.
        faults: links that change meanwhile.

    Raises:
        InvalidArgumentError: the arguments do not fit together, or a send and its receive do not meet; names what
            differs.
    """
    if segment is not None and segment < 1:
        raise InvalidArgumentError(
            f"segment={segment}: expected a positive number of bytes, or None for whole chunks [U22]"
        )
    if stride < 1:
        raise InvalidArgumentError(f"stride={stride}: expected a positive number of groups [U23]")
    if min(sizes, default=0) < 0:
        raise InvalidArgumentError(f"sizes: expected 0 or more bytes for each chunk, found {min(sizes)} [U24]")
    traffic = Traffic(schedules, sizes, segment, stride)
    links = Topology(network, traffic.size)
    begins = np.zeros(traffic.size)
    for rank, seconds in (late or {}).items():
        if rank not in range(traffic.size):
            raise InvalidArgumentError(f"late: expected ranks from 0 to {traffic.size - 1}, found {rank} [U45]")
        begins[rank] = seconds
    changes = sorted((fault.at, links.number(fault.link), fault.bandwidth) for fault in faults)
    done, crossed, messages = _play(traffic, links, network, begins, changes)
    total = float(done.max())
    nbytes = sum(sizes) / (traffic.size if traffic.collective == "alltoall" else 1)
    busbw = bus_bandwidth(traffic.collective, traffic.size, nbytes, total)
    by_name = {links.names[number]: int(crossed[1 + number]) for number in np.flatnonzero(crossed[1:])}
    return Report(done, total, busbw, by_name, messages)


def bus_bandwidth(collective: str, size: int, nbytes: float, seconds: float) -> float:
    """Bytes per second by nccl-tests' definition; ``nbytes``: of a rank's input, an allgather's: of the result."""
    factor = {"allreduce": 2 * (size - 1) / size, "broadcast": 1.0}.get(collective, (size - 1) / size)
    return nbytes * factor / seconds if seconds else 0.0


class _Messages:
    """The messages of one step group, and the ranks that have reached it."""

    def __init__(self, sender: Ints, receiver: Ints, nbytes: Floats, reduced: Floats) -> None:
        self.ends = np.stack([sender, receiver])
        self.nbytes = nbytes
        self.reduced = reduced
        self.counts = np.bincount(self.ends.ravel(), minlength=len(reduced))
        """Messages that each rank sends or receives."""
        self.sent = np.bincount(sender, minlength=len(reduced))
        self.reached = np.zeros(len(reduced), np.bool_)
        self.remaining = len(reduced)
        """Ranks that have not finished the step group."""

    def enter(self, ranks: Ints) -> tuple[Ints, Floats]:
        """Note that ranks reach the step group. Returns the ends and bytes of the messages that can leave now."""
        were = self.reached[self.ends].all(axis=0)
        self.reached[ranks] = True
        leaving = self.reached[self.ends].all(axis=0) & ~were
        return self.ends[:, leaving], self.nbytes[leaving]


def _play(
    traffic: Traffic, links: Topology, network: Network, begins: Floats, changes: list[tuple[float, int, float]]
) -> tuple[Floats, Floats, int]:
    """Play the groups of all ranks: when each is done, the bytes that crossed each link, the number of messages.

    Args:
        begins: when each rank begins its next step group; infinity once it has.
        changes: moments, links and their new bandwidths, in order.
    """
    size = traffic.size
    if not traffic.groups:
        return begins, np.zeros(len(links.capacity)), 0
    done, crossed, messages = np.full(size, np.inf), np.zeros(len(links.capacity)), 0
    flows = Flows(links.capacity)
    at = np.zeros(size, np.int64)  # the step group that each rank is in, or begins next
    waits = np.zeros(size, np.int64)  # messages of it that the rank still waits for
    groups: dict[int, _Messages] = {}
    now = 0.0
    while True:
        ready = np.flatnonzero(begins <= now * (1 + TOLERANCE))
        begins[ready] = np.inf
        for number in np.unique(at[ready]).tolist():
            members = ready[at[ready] == number]
            if number not in groups:
                groups[number] = _Messages(*traffic.group(number))
            waits[members] = groups[number].counts[members]
            ends, nbytes = groups[number].enter(members)
            paths, latency = links.paths(ends)
            crossed += np.bincount(paths.ravel(), np.tile(nbytes, len(paths)), len(crossed))
            messages += len(nbytes)
            flows.add(ends, paths, nbytes, now + latency)
        if not len(ready):
            moment = min(float(begins.min()), flows.next_event(now))
            if changes and changes[0][0] <= moment:
                moment, link, bandwidth = changes.pop(0)
                ends = flows.advance(now, moment)
                flows.change(link, bandwidth)
            elif moment < np.inf:
                ends = flows.advance(now, moment)
            else:
                return done, crossed, messages
            now = moment
            ready = np.unique(ends)
            waits -= np.bincount(ends.ravel(), minlength=size)
        through = ready[waits[ready] == 0]
        for number in np.unique(at[through]).tolist():
            members = through[at[through] == number]
            group = groups[number]
            then = now + group.reduced[members] / network.reduction + group.sent[members] * network.message
            last = number == traffic.groups - 1
            (done if last else begins)[members] = then
            groups[number].remaining -= len(members)
            if not groups[number].remaining:
                del groups[number]
        at[through] += 1
