"""A training step: gradients that become ready one after the other, fused, and all-reduced while others are computed.

    forward  |  backward: gradient 0 (the last layer) ... gradient n-1 ready  |
                          [ bucket ][ bucket ]      ...              [ bucket ]
                                                                     |-------| exposed

One collective runs at a time. Whenever none runs, all gradients that are ready make the next bucket, up to the
threshold. The step ends when the last bucket does. Left out: cores or memory that computing and communicating share,
the optimizer's own time, and jitter between ranks beyond `Settings.slower` and `Settings.late`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from collectives.base.config import in_units
from collectives.simulation.prediction import Predictor
from collectives.simulation.topology import Cluster

_FORWARD = 1 / 3
"""Of the time of a step that computes only: a backward pass takes about twice a forward pass."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step computes and sends.

    Attributes:
        gradients: bytes, in the order in which they become ready: the last layer first.
        compute: seconds of a step without communication.
    """

    gradients: tuple[int, ...]
    compute: float

    def ready_at(self) -> list[float]:
        """Seconds after which each gradient is ready: evenly over the backward pass."""
        count = len(self.gradients)
        return [(_FORWARD + (1 - _FORWARD) * (place + 1) / count) * self.compute for place in range(count)]


@dataclass(frozen=True, slots=True)
class Settings:
    """How the gradients are sent, and what the slowest rank does.

    Attributes:
        fusion: most bytes of a bucket.
        cycle: seconds between two looks at what is ready.
        overlap: whether buckets are sent while others are computed.
        compression: bytes sent, as a share of the gradients'.
        algorithm: None: the planner's choice.
        slower: the slowest rank's computing time, as a multiple of the others'; how many are so slow does not matter.
        late: seconds by which some rank begins the step later.
    """

    fusion: int = 128 << 20
    cycle: float = 1e-3
    overlap: bool = True
    compression: float = 1.0
    algorithm: str | None = None
    slower: float = 1.0
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """A simulated step, in seconds. ``communication``: all collectives; ``exposed``: after computing has ended."""

    step: float
    compute: float
    communication: float
    exposed: float
    buckets: tuple[int, ...]

    @property
    def efficiency(self) -> float:
        """The share of a step without communication or stragglers in this one."""
        return self.compute / self.step


def simulate_step(workload: Workload, predictor: Predictor, settings: Settings | None = None) -> Step:
    """Play one step; errors as of `Predictor.predict`."""
    settings = settings or Settings()
    end = workload.compute * settings.slower + settings.late
    if predictor.cluster.ranks == 1:
        return Step(end, workload.compute, 0.0, 0.0, ())
    ready = [settings.late + at * settings.slower if settings.overlap else end for at in workload.ready_at()]
    sizes = [max(1, int(nbytes * settings.compression)) for nbytes in workload.gradients]
    now = busy = 0.0
    buckets: list[int] = []
    first = 0
    while first < len(sizes):
        now = max(now, ready[first]) + (settings.cycle if now < ready[first] else 0.0)
        bucket, last = sizes[first], first + 1
        while last < len(sizes) and ready[last] <= now and bucket + sizes[last] <= settings.fusion:
            bucket += sizes[last]
            last += 1
        seconds = predictor.predict("allreduce", bucket, settings.algorithm).seconds
        now, busy, first = now + seconds, busy + seconds, last
        buckets.append(bucket)
    total = max(now, end)
    return Step(total, workload.compute, busy, total - end, tuple(buckets))


def changes(workload: Workload, cluster: Cluster, settings: Settings | None = None) -> dict[str, Step]:
    """What would help most: the step after each of some changes, the quickest first; `simulate_step` has the errors."""
    settings, now = settings or Settings(), Predictor(cluster)
    thresholds = (1 << shift for shift in range(20, 29))
    best = min(thresholds, key=lambda size: simulate_step(workload, now, replace(settings, fusion=size)).step)
    wider = {name: 2 * getattr(cluster, name) for name in ("bandwidth", "uplink", "leaf_uplink")}
    every = {
        "twice the bandwidth between hosts": (Predictor(replace(cluster, **wider)), settings),
        "half the latency between hosts": (Predictor(replace(cluster, latency=cluster.latency / 2)), settings),
        "gradients sent in 16 bits": (now, replace(settings, compression=settings.compression / 2)),
        "no overlap with computing": (now, replace(settings, overlap=False)),
        f"fusion up to {in_units(best)}, the best of 1 to 256 MiB": (now, replace(settings, fusion=best)),
    }
    for one in now.every("allreduce", sum(workload.gradients)):
        if not one.algorithm.startswith("NCCL"):
            every[f"algorithm {one.algorithm}"] = now, replace(settings, algorithm=one.algorithm)
    if settings.slower > 1 or settings.late:
        every["no straggler"] = now, replace(settings, slower=1.0, late=0.0)
    steps = {what: simulate_step(workload, *changed) for what, changed in every.items()}
    return dict(sorted(steps.items(), key=lambda change: change[1].step))
