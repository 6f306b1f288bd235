"""Many operations on GPU tensors at once, again and again, while streams dawdle and memory comes and goes: every bit
must be right."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.reduce_op import Op
from collectives.worlds.world import World
from tests.support.emulated.ranks import PATIENCE, emulated, on_threads
from tests.support.scenarios.gpu_makers import Array, EmulatedMaker
from tests.support.scenarios.worlds import sample

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(100)]

FLOAT = np.dtype(np.float32)
TENSORS = 6
STEPS = 2


def values(size: int, rank: int, step: int, k: int) -> Array:
    """Of which two ranks' sums are the same in either order; and of more ranks those of whole numbers, which are
    exact."""
    numbers = sample(FLOAT, (7, 300, 1003, 5_000, 20_011)[k % 5] + k, rank, 100 * step + k)
    return numbers if size == 2 else np.rint(1000 * numbers)


def stress(world: World, maker: EmulatedMaker, seed: int, forced: dict[str, Any]) -> dict[tuple[int, int], bytes]:
    """Named operations in another order on every rank. Results are looked at late, or dropped unseen; tensors are
    dropped as soon as they were passed, and their memory is written by others. The bytes of what was seen."""
    own = Random(f"{seed} {world.rank}")
    seen: dict[tuple[int, int], bytes] = {}
    waiting: deque[tuple[int, int, Any]] = deque()
    junk: deque[Any] = deque(maxlen=6)
    for step in range(STEPS):
        handles = {}
        for k in own.sample(range(TENSORS), TENSORS):
            tensor = maker.device(values(world.size, world.rank, step, k))
            submit = world.allreduce_async_ if own.random() < 0.5 else world.allreduce_async
            handles[k] = submit(tensor, op=Op.SUM, name=f"tensor {k}", **forced)
            tensor = maker.device(values(world.size, world.rank, step, k))
            submit(tensor, op=Op.SUM, name=f"tensor {k} of step {step}, which nobody waits for", **forced)
            del tensor
            junk.append(maker.device(np.full(own.choice((300, 1007, 20_015)), np.nan, FLOAT)))
        for k in own.sample(range(TENSORS), TENSORS):
            result = world.synchronize(handles.pop(k))
            if own.random() < 0.7:
                waiting.append((step, k, result))
            del result
            while len(waiting) > own.randrange(TENSORS):
                number, which, late = waiting.popleft()
                seen[number, which] = maker.host(late).tobytes()
                del late
        if own.random() < 0.5:
            junk.clear()
    for number, which, late in waiting:
        seen[number, which] = maker.host(late).tobytes()
    world.barrier()  # behind the operations that nobody waited for, which a shutdown would give up
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "devices", "runs", "forced"),
    [
        (2, 1, 20, {"transport": "cuda-ipc"}),
        (2, 2, 10, {}),
        (3, 1, 6, {}),
        (3, 3, 6, {"transport": "nccl", "algorithm": "ring"}),
        (4, 2, 6, {"transport": "cuda-ipc", "algorithm": "ring"}),
    ],
    ids=["2 ranks", "2 GPUs", "3 ranks", "NCCL", "ring"],
)
def test_every_bit_is_right(size: int, devices: int, runs: int, forced: dict[str, Any]) -> None:
    inputs = {
        (step, k): [values(size, rank, step, k) for rank in range(size)]
        for step in range(STEPS)
        for k in range(TENSORS)
    }
    wanted = {key: sum(parts[1:], parts[0]).tobytes() for key, parts in inputs.items()}
    config = Config(timeout=PATIENCE, host_until=0, cuda_graphs=True)
    looked_at = 0
    for seed in range(runs):
        # Now and then a freed allocation's address is given out anew, as the driver does.
        with emulated(devices, delays=seed, reuse_addresses=seed % 2 == 0) as provider:
            results = on_threads(
                size, lambda world, maker, seed=seed: stress(world, maker, seed, forced), provider, config=config
            )  # type: ignore[misc]
        for rank, seen in enumerate(results):
            wrong = [key for key, got in seen.items() if got != wanted[key]]
            assert not wrong, f"seed {seed}, rank {rank}: (step, tensor) {wrong}"
            looked_at += len(seen)
    assert looked_at > runs * size * STEPS * TENSORS / 2
