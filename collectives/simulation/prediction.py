"""What the planner would choose on a cluster, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.cuda.planner import DeviceFacts, DevicePlanner
from collectives.plan.planner import Planner
from collectives.schedules import registry
from collectives.schedules.partition import split
from collectives.schedules.schedule import Schedule
from collectives.simulation import nccl, rounds
from collectives.simulation.clock import Fault, Report, bus_bandwidth, simulate
from collectives.simulation.links import Network, Topology
from collectives.simulation.topology import Cluster

MOST_EXACT = 1024
"""Ranks up to which an algorithm whose rounds are not described is played message by message."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A collective's time. ``busbw`` in bytes per second by nccl-tests' definition; ``why``: the planner's reason."""

    collective: str
    algorithm: str
    nbytes: int
    seconds: float
    busbw: float
    why: str = ""


class Predictor:
    """Predicts the calls of one cluster; what is the same for all of them is made once."""

    def __init__(self, cluster: Cluster, network: Network | None = None) -> None:
        self.cluster = cluster
        self.network = network or cluster.network()
        placement = cluster.placement()
        self._planner, self._device = Planner(placement), DevicePlanner(placement, DeviceFacts())
        self._topology = Topology(self.network, cluster.ranks)
        self._known: dict[tuple[str, int, str | None], Prediction] = {}

    def predict(self, collective: str, nbytes: int, algorithm: str | None = None) -> Prediction:
        """Predict one call.

        Args:
            nbytes: of a rank's input; of an allgather's result.
            algorithm: None: what the planner chooses.

        Raises:
            InvalidArgumentError: the collective has no such algorithm, or it cannot be simulated for so many ranks.
        """
        key = collective, nbytes, algorithm
        if key not in self._known:
            name, seconds, why = self._predict(collective, nbytes, algorithm)
            busbw = bus_bandwidth(collective, self.cluster.ranks, nbytes, seconds)
            self._known[key] = Prediction(collective, name, nbytes, seconds, busbw, why)
        return self._known[key]

    def _predict(self, collective: str, nbytes: int, algorithm: str | None) -> tuple[str, float, str]:
        """The algorithm, its seconds, and why it was chosen."""
        cluster, size = self.cluster, self.cluster.ranks
        every = nbytes * (size if collective == "alltoall" else 1)
        segment: int | None
        if cluster.gpus:
            choice = self._device.choose(collective, nbytes, native=True, algorithm=algorithm)
            name, segment, overlap, why = choice.algorithm, None, True, choice.why
            if choice.native:
                seconds, way = nccl.time(collective, nbytes, cluster)
                return f"NCCL ({way})", seconds, why
            if choice.transport == "host":
                raise InvalidArgumentError(
                    f"algorithm={algorithm!r}: this {collective} of {size} GPUs goes through host memory, which is not "
                    f"simulated ({why}); choose another algorithm [U36]"
                )
        else:
            host = self._planner.choose(collective, nbytes, algorithm=algorithm)
            name, segment, overlap, why = host.algorithm, host.block_bytes or None, host.overlap, host.why
        try:
            seconds = rounds.estimate(
                *(collective, name, every, self.network, segment), overlap=overlap, topology=self._topology
            ).total
        except InvalidArgumentError:
            if size > MOST_EXACT:
                raise
            seconds = exact(collective, name, nbytes, self.network, segment).total
        return name, seconds + cluster.overhead, why

    def every(self, collective: str, nbytes: int) -> list[Prediction]:
        """All algorithms that serve the cluster's tensors, the quickest first."""
        names = registry.on_gpu(collective) if self.cluster.gpus else registry.on_host(collective)
        predictions = []
        for name in (name for name in names if name != registry.REPRODUCIBLE):  # taken for its order, not its speed
            # One that needs another medium, or MPI, does not serve this cluster.
            with suppress(InvalidArgumentError, TransportError):
                predictions.append(self.predict(collective, nbytes, name))
        return sorted(predictions, key=lambda one: one.seconds)


def exact(
    collective: str,
    algorithm: str,
    nbytes: int,
    network: Network,
    segment: int | None = None,
    *,
    late: dict[int, float] | None = None,
    faults: Iterable[Fault] = (),
) -> Report:
    """Play an algorithm's schedules message by message; arguments and errors as of `clock.simulate`.

    Args:
        nbytes: of a rank's input; of an allgather's result.
    """
    every, sizes = schedules(collective, algorithm, nbytes, network.hosts or ())
    return simulate(every, sizes, network, segment, late=late, faults=tuple(faults))


def schedules(
    collective: str, algorithm: str, nbytes: int, hosts: Sequence[Sequence[int]]
) -> tuple[Iterator[Schedule], list[int]]:
    """The schedules of all ranks, and the bytes of each chunk; arguments as of `exact`."""
    size = sum(map(len, hosts))
    schedule = registry.find(collective, algorithm).schedules(hosts)
    return map(schedule, range(size)), split(nbytes * (size if collective == "alltoall" else 1), schedule(0).chunks)
