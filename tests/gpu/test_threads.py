"""Two ranks as threads of one process on one GPU: the scenarios over NCCL, and over the device's own memory."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import TransportError
from collectives.device.diagnosis import why_not
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios.gpu import SCENARIOS, Scenario
from tests.support.scenarios.gpu_makers import CupyMaker

PROBLEM = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]


@pytest.mark.parametrize("transport", ["nccl", "cuda-ipc"])
def test_scenarios(transport: str) -> None:
    """One world for all of them, each rank on a stream of its own; connecting NCCL is what takes long."""
    thread_groups.run(
        2, lambda world: on_own_stream(world, SCENARIOS, {"transport": transport}), timeout=50, make_world=World
    )


def on_own_stream(world: World, scenarios: list[Scenario], forced: dict[str, Any]) -> None:
    cupy = importlib.import_module("cupy")
    maker = CupyMaker()
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        print(maker.warm(world.rank))
        try:
            world.allreduce(maker.device(np.ones(1, np.float32)), **forced)
        except TransportError as error:
            pytest.skip(str(error))
        for scenario in scenarios:
            scenario(world, maker, forced)
            world.barrier()
