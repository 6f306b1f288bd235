"""The time of a collective from one round of each kind: 65,536 ranks in milliseconds; `clock` plays every message.

    time = sum over rounds of (latency + bytes of the fullest link / its bandwidth + bytes combined / reduction
                               + messages of the busiest rank * seconds of a message)

The registered algorithms move the same bytes between the same ranks in most of their rounds, so that a few kinds of
rounds describe them; a test compares these with the schedules. The method is exact where every rank does as much as the
others in each round. Elsewhere it is an upper bound: it charges each round for its slowest link and its busiest rank,
while in `clock` a rank may be ahead of another.

Source of the model: R. Thakur, R. Rabenseifner and W. Gropp, IJHPCA 19 (2005), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collectives.base.errors import InvalidArgumentError
from collectives.simulation.links import Floats, Ints, Network, Topology

Hosts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Kind:
    """Rounds that move the same bytes.

    Attributes:
        times: how many there are.
        chunks: of each message.
        ends: senders and receivers, (2, messages); None: every rank and every other one.
        within: of ``ends=None``: the other ranks of the same host only.
        reduced: chunks that the busiest rank combines.
        chain: each message is a round of its own, so that segments follow each other along the chain.
    """

    times: int
    chunks: float
    ends: Ints | None
    within: bool = False
    reduced: int = 0
    chain: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a collective, ``transfer`` of them on the fullest links; ``bytes_out``: of the busiest rank."""

    total: float = 0.0
    transfer: float = 0.0
    messages: int = 0
    bytes_out: float = 0.0


def _neighbours(ranks: Sequence[int]) -> Ints:
    return np.stack([np.asarray(ranks), np.roll(ranks, -1)])


def _ring(size: int, *reduced: int) -> list[Kind]:
    return [Kind(size - 1, 1, _neighbours(range(size)), reduced=count) for count in reduced]


def _doubling(size: int) -> list[Kind]:
    power = 1 << (size.bit_length() - 1)
    ranks, extra = np.arange(power), np.arange(power, size)
    fold = [Kind(1, 1, np.stack([extra, extra - power]), reduced=1)] if len(extra) else []
    steps = [Kind(1, 1, np.stack([ranks, ranks ^ (1 << bit)]), reduced=1) for bit in range(power.bit_length() - 1)]
    return [*fold, *steps, *(Kind(1, 1, np.stack([extra - power, extra])) for _ in fold)]


def _tree(size: int) -> list[Kind]:
    rounds = []
    reach = 1
    while reach < size:
        sender = np.arange(min(reach, size - reach))
        rounds.append(Kind(1, 1, np.stack([sender, sender + reach])))
        reach *= 2
    return rounds


def _bruck(size: int) -> list[Kind]:
    """The allgather by which the words of a round travel, with each rank's tensor in them."""
    rounds = []
    reach, ranks = 1, np.arange(size)
    while reach < size:
        rounds.append(Kind(1, min(reach, size - reach), np.stack([ranks, (ranks - reach) % size])))
        reach *= 2
    return [*rounds[:-1], Kind(1, rounds[-1].chunks, rounds[-1].ends, reduced=size - 1)]


def _hierarchical(hosts: Hosts) -> tuple[int, list[Kind]]:
    width, local = len(hosts), max(map(len, hosts))
    if all(len(host) == local for host in hosts):
        table = np.asarray(hosts)
        across = np.stack([table.ravel(), np.roll(table, -1, axis=0).ravel()])
        into = Kind(1, width, None, within=True, reduced=(local - 1) * width)
        within = (into, Kind(1, width, None, within=True)) if local > 1 else ()
        chunks = 1
    else:
        across = _neighbours([host[0] for host in hosts])
        inward = np.array([[rank, host[0]] for host in hosts for rank in host[1:]]).T
        chunks = local
        whole = width * local
        within = (Kind(1, whole, inward, reduced=(local - 1) * whole), Kind(1, whole, inward[::-1]))
    rings = [Kind(width - 1, chunks, across, reduced=count) for count in (chunks, 0) if width > 1]
    return width * local, [*within[:1], *rings, *within[1:]]


_PAIRS = Kind(1, 1, None)
_KINDS: dict[tuple[str, str], Callable[[int], tuple[int, list[Kind]]]] = {
    ("allreduce", "ring"): lambda n: (n, _ring(n, 1, 0)),
    ("reducescatter", "ring"): lambda n: (n, _ring(n, 1)),
    ("allgather", "ring"): lambda n: (n, _ring(n, 0)),
    ("broadcast", "ring"): lambda n: (1, [Kind(n - 1, 1, _neighbours(range(n))[:, :-1], chain=True)]),
    ("allreduce", "direct"): lambda n: (n, [Kind(1, 1, None, reduced=n - 1), _PAIRS]),
    ("allreduce", "one-shot"): lambda n: (1, [Kind(1, 1, None, reduced=n - 1)]),
    ("reducescatter", "direct"): lambda n: (n, [Kind(1, 1, None, reduced=n - 1)]),
    ("allgather", "direct"): lambda n: (n, [_PAIRS]),
    ("alltoall", "direct"): lambda n: (n * n, [_PAIRS]),
    ("broadcast", "one-shot"): lambda n: (1, [Kind(1, 1, np.stack([np.zeros(n - 1, np.int64), np.arange(1, n)]))]),
    ("allreduce", "recursive-doubling"): lambda n: (1, _doubling(n)),
    ("broadcast", "recursive-doubling"): lambda n: (1, _tree(n)),
    ("allreduce", "inline"): lambda n: (1, _bruck(n)),
}


def kinds(collective: str, algorithm: str, hosts: Hosts) -> tuple[int, list[Kind]]:
    """The number of chunks and the kinds of rounds of an algorithm, rank 0 the root.

    Raises:
        InvalidArgumentError: the algorithm is not among those described here.
    """
    if (collective, algorithm) == ("allreduce", "hierarchical"):
        return _hierarchical(hosts)
    if (collective, algorithm) not in _KINDS:
        raise InvalidArgumentError(
            f"algorithm={algorithm!r}: this {collective} can only be simulated exactly; run: collectives simulate "
            "collective --exact [U37]"
        )
    return _KINDS[collective, algorithm](sum(map(len, hosts)))


def estimate(
    collective: str,
    algorithm: str,
    nbytes: int,
    network: Network,
    segment: int | None = None,
    *,
    overlap: bool = True,
    topology: Topology | None = None,
) -> Estimate:
    """Estimate a collective's time.

    Args:
        nbytes: bytes of all chunks together, as for `clock.simulate`; for an all-to-all those of all ranks.
        network: with `Network.hosts`.
        segment: bytes of a chunk that one pipeline unit moves; None: whole chunks.
        overlap: whether the rounds of different segments overlap.
        topology: of the network, if it is known already.

    Raises:
        InvalidArgumentError: as of `kinds`.
    """
    hosts = network.hosts or ()
    size = sum(map(len, hosts))
    if size < 2:
        return Estimate()
    topology = topology or Topology(network, size)
    chunks, every = kinds(collective, algorithm, hosts)
    chunk = nbytes / chunks
    segments = max(1, -(-int(chunk) // segment)) if segment else 1
    latency = transfer = reduction = messages_time = last = bytes_out = 0.0
    messages = 0
    for kind in every:
        nbytes_each = kind.chunks * chunk
        if kind.chain and kind.ends is not None:
            paths, latencies = topology.paths(kind.ends)
            seconds = nbytes_each / segments / topology.capacity[paths].min(axis=0)
            # The last message that a rank sends delays nobody.
            latencies = latencies + (network.message if segments > 1 else 0.0)
            latency += float(latencies.sum()) + (segments - 1) * float(latencies.max())
            transfer += float(seconds.sum()) + (segments - 1) * float(seconds.max())
            messages += len(seconds) * segments
            bytes_out = max(bytes_out, nbytes)
            continue
        loads, last, count = _loads(topology, kind)
        sent = loads[1 : 1 + size] + loads[1 + 2 * size : 1 + 3 * size]
        messages_time += kind.times * segments * float(sent.max()) * network.message
        seconds_each = float(np.divide(loads * nbytes_each, topology.capacity).max())
        latency += kind.times * last * (1 if overlap else segments)
        transfer += kind.times * seconds_each
        reduction += kind.times * kind.reduced * chunk / network.reduction
        messages += kind.times * count * segments
        bytes_out += kind.times * float(sent.max()) * nbytes_each
    if overlap and segments > 1:
        latency += (segments - 1) * last
    return Estimate(latency + messages_time + transfer + reduction, transfer, messages, bytes_out)


def _loads(topology: Topology, kind: Kind) -> tuple[Floats, float, int]:
    """Messages of a round over each link, the latency of its slowest message, and the number of its messages."""
    capacity = topology.capacity
    if kind.ends is not None:
        paths, latencies = topology.paths(kind.ends)
        loads = np.bincount(paths.ravel(), minlength=len(capacity)).astype(np.float64)
        loads[0] = 0
        return loads, float(latencies.max()), len(latencies)
    host_of, leaf_of = topology.host_of, topology.leaf_of
    size, per_host = len(host_of), np.bincount(host_of)
    per_leaf = np.bincount(leaf_of, per_host)
    neighbours = per_host[host_of] - 1
    none = np.zeros(size)
    away = none if kind.within else size - 1 - neighbours
    counts = [away, away, neighbours, neighbours]
    crossing = ((per_host, size - per_host), (per_leaf, size - per_leaf))
    counts += [inside * (0 if kind.within else outside) for inside, outside in crossing for _ in range(2)]
    loads = np.concatenate([[0], *counts]).astype(np.float64)
    across = bool(np.any(away))
    return loads, float(topology.latencies[int(not across)]), int((away + neighbours).sum())


def fullest_link(collective: str, algorithm: str, network: Network) -> str:
    """The name of the link whose bytes take the longest; arguments and errors as of `estimate`."""
    hosts = network.hosts or ()
    topology = Topology(network, sum(map(len, hosts)))
    every = kinds(collective, algorithm, hosts)[1]
    seconds = sum(kind.times * kind.chunks * _loads(topology, kind)[0] for kind in every) / topology.capacity
    return topology.names[int(np.argmax(seconds[1:]))]


def host_lists(ranks: int, local: int) -> list[range]:
    """The ranks of each host, ``local`` to a host; the last one may have fewer."""
    return [range(first, end) for first, end in pairwise([*range(0, ranks, local), ranks])]
