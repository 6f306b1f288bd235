"""One persistent operation for all gradients of a step.

While the backward pass runs, another thread combines the buckets that have left. Where a rank has a single core, that
thread takes the core from the backward pass, and on one host there is no network to wait for: nothing is hidden, and
every round costs two changes of threads. There the buckets wait until the backward pass is over, and leave together.

    backward       hooks move large gradients into the arena, and pack small ones       bucket by bucket
    tally          do all ranks' gradients lie where the operation is bound to?         the ranks sum this, and more
    start          it combines all of them; or each bucket has an ordinary operation    alike on all ranks

The tally comes before the start, so that the ranks decide alike. If a gradient lies elsewhere on any rank (the program
holds an earlier one, a rank has no gradient or has joined), this step's operations are ordinary ones. An operation is
bound once the gradients of all ranks have been where they were in the step before.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

from collectives.base.errors import MismatchError
from collectives.frontends.gradient_options import GradientOptions
from collectives.persistent import PersistentOperation
from collectives.torch.buckets import GradientBucket
from collectives.worlds import World


def holds_back(world: World) -> bool:
    """Whether buckets wait for the end of the backward pass: all ranks are on one host, where each has one core."""
    if not world.planner.placement.one_host:
        return False
    # Ranks are bound to cores of their own, or share those of the host.
    cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return min(own, cores // world.local_size) <= 1


class StepOperation:
    """The persistent operation of one reducer's gathered buckets, made anew when their memory has changed.

    Args:
        options: how gradients are combined; ``name`` goes before the name of the operation.
    """

    def __init__(self, options: GradientOptions) -> None:
        self._keywords: dict[str, Any] = {"op": options.op, "name": f"{options.name}gradients", **options.factors}
        self._operation: PersistentOperation[Any] | None = None
        self._world: World | None = None
        """That the operation belongs to."""
        self._bound: list[Any] = []
        self._seen: list[Any] = []
        """The tensors of the latest step; empty if they cannot be bound."""
        self._refused = False

    def look(self, world: World, buckets: Sequence[GradientBucket]) -> tuple[bool, bool]:
        """Look where the gathered gradients lie.

        Returns:
            Whether that is where the operation is bound to, and whether it is where they were at the call before.
        """
        found: list[Any] = []
        for bucket in buckets:
            if not bucket.gathered:
                continue
            places = bucket.places()
            if places is None:
                found = []
                break
            found += places
        before, self._seen = self._seen, found
        bound = self._operation is not None and self._world is world and _same(found, self._bound)
        return bound, not self._refused and bool(found) and _same(found, before)

    def run(self, world: World, all_bound: bool, all_steady: bool) -> bool:
        """Combine the gathered gradients, if all ranks can; every rank calls once all have gathered or submitted all.

        Args:
            all_bound, all_steady: what `look` has returned is true on every rank.

        Returns:
            False if nothing was combined, on any rank.

        Raises:
            RankFailedError, CollectiveTimeoutError: as from any operation.
        """
        if not all_bound:
            self.free()
            if not all_steady:
                return False
            try:
                self._operation = world.grouped_allreduce_init(self._seen, **self._keywords)
            except MismatchError:  # the ranks' buckets have different devices, and meet in ordinary operations only
                self._refused = True
                return False
            self._world, self._bound = world, self._seen
        assert self._operation is not None
        self._operation()
        return True

    def free(self) -> None:
        """Let go of the operation and of the memory that it is bound to."""
        operation, self._operation = self._operation, None
        self._world, self._bound = None, []
        if operation is not None:
            operation.free()


def _same(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether two lists contain the same tensors."""
    return len(found) == len(known) and all(map(operator.is_, found, known))
