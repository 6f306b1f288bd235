"""What a world says of its GPUs: once when they are first used, and of each choice that is new; on one rank."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.worlds.world import World
from tests.support.emulated.ranks import emulated, on_threads
from tests.support.scenarios.gpu_makers import EmulatedMaker

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(100)]


def test_the_transports_are_said_once_and_each_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(np.full(1000, float(world.rank), np.float32))
        for _ in range(3):
            np.testing.assert_array_equal(maker.host(world.allreduce(tensor, average=False)), 1.0)
        world.allgather(tensor, transport="host")

    with caplog.at_level(logging.DEBUG, "collectives"), emulated(1) as provider:
        on_threads(2, program, provider, config=Config(host_until=0))
    said = [record.getMessage() for record in caplog.records]
    assert (
        len([text for text in said if text.startswith("GPU tensors: 2 ranks on 1 GPUs; CUDA IPC (yes), NCCL (")]) == 1
    ), said
    assert [text for text in said if " on GPUs: " in text] == [
        "allreduce of 4000 bytes on GPUs: direct over cuda-ipc (each block goes straight to the ranks that need it; "
        "ranks of one host)",
        "allgather of 8000 bytes on GPUs: auto over host (transport as requested)",
    ], said


def test_a_timeline_says_how_each_operation_was_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def program(world: World, maker: EmulatedMaker) -> None:
        tensor, empty = maker.device(np.full(8, 1.0, np.float32)), maker.device(np.zeros(0, np.float32))
        world.start_timeline(path)
        for operation in (world.allreduce, world.allgather, world.alltoall):
            operation(tensor)
        world.allreduce(empty)
        world.stop_timeline()

    with emulated(1) as provider:
        on_threads(2, program, provider, config=Config(host_until=0))
    names = {event.get("name", "") for event in json.loads(path.read_text())}
    assert {name for name in names if ": " in name} >= {
        "allreduce: direct over cuda-ipc",
        "allgather: devicerows",
        "alltoall: devicerows",
    }, names
