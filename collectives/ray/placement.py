"""Where workers are placed: a group of bundles, one for each worker or for each host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError


class Shape(NamedTuple):
    """How many workers, and what each of them needs.

    Attributes:
        workers: their number; or, if it is None, ``hosts`` times ``workers_per_host``, as many on each host.
        cpus, gpus: of each worker.
        use_current_group: take the placement group in which the program runs, if there is one.
    """

    workers: int | None
    hosts: int | None
    workers_per_host: int
    cpus: float
    gpus: int
    use_current_group: bool

    def check(self) -> None:
        """InvalidArgumentError: there is no such shape."""
        if (self.workers is None) == (self.hosts is None):
            raise InvalidArgumentError(
                "RayExecutor: expected either num_workers, or num_hosts with num_workers_per_host; got "
                f"num_workers={self.workers}, num_hosts={self.hosts} [L104]"
            )
        for name, number in (("num_workers", self.workers), ("num_hosts", self.hosts)):
            if number is not None and number < 1:
                raise InvalidArgumentError(f"RayExecutor: {name}={number}: expected at least 1 [L105]")

    @property
    def needs(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


class Group:
    """A placement group, made or found; `close` removes it if it was made."""

    def __init__(self, shape: Shape, timeout: float) -> None:
        self._shape = shape
        current = get_current_placement_group() if shape.use_current_group else None
        self._is_own = current is None
        self._group = current or self._make(timeout)

    def _make(self, timeout: float) -> Any:
        shape = self._shape
        if shape.hosts is None:
            bundles, strategy = [shape.needs] * (shape.workers or 1), "PACK"
        else:
            of_host = {name: number * shape.workers_per_host for name, number in shape.needs.items()}
            bundles, strategy = [of_host] * shape.hosts, "STRICT_SPREAD"
        group = placement_group(bundles, strategy=strategy)
        try:
            ray.get(group.ready(), timeout=timeout)
        except BaseException as error:
            remove_placement_group(group)
            if not isinstance(error, GetTimeoutError):
                raise
            there = {name: number for name, number in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            raise CollectiveTimeoutError(
                f"RayExecutor: Ray found no room for {len(bundles)} times {bundles[0]} ({strategy}) within "
                f"{timeout:g} s; the cluster has {there}, of which "
                f"{ {name: ray.available_resources().get(name, 0) for name in there} } are free. Ask for less, add "
                "nodes, or raise placement_group_timeout_s [L106]"
            ) from None
        return group

    def places(self) -> Sequence[PlacementGroupSchedulingStrategy]:
        """The place of each worker."""
        shape = self._shape
        number = shape.workers or (shape.hosts or 1) * shape.workers_per_host
        per_bundle = shape.workers_per_host if shape.hosts is not None and self._is_own else 0
        # In a group of the program's, whose bundles may have any sizes, Ray finds the bundle.
        bundles = [each // per_bundle if per_bundle else each if self._is_own else -1 for each in range(number)]
        return [PlacementGroupSchedulingStrategy(self._group, bundle, True) for bundle in bundles]

    def close(self) -> None:
        if self._is_own:
            remove_placement_group(self._group)
