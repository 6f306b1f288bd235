"""Whether complete buckets wait for the end of the backward pass.

While the backward pass runs, another thread combines the buckets that have left. Where a rank has a single core, that
thread takes the core from the backward pass, and on one host there is no network to wait for: nothing is hidden, and
every round costs two changes of threads. There hooks move large gradients into the arena, and pack small ones, and all
buckets leave when the backward pass is over.
"""

from __future__ import annotations

import os

from collectives.worlds.world import World


def holds_back(world: World) -> bool:
    """Whether buckets wait for the end of the backward pass: all ranks are on one host, where each has one core."""
    if not world.planner.placement.one_host:
        return False
    # Ranks are bound to cores of their own, or share those of the host.
    cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return min(own, cores // world.local_size) <= 1
