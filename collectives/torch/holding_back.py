"""Whether complete buckets wait for the end of the backward pass.

During the backward pass a background thread combines the buckets that were submitted. If a rank has a single core, the
two threads take turns on it, and on one host there is no network latency to hide: every round only costs two context
switches. There, hooks move large gradients into the arena and pack small ones, and all buckets are submitted after the
backward pass.
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
