"""Device tensors with ranks as processes, on an emulated GPU whose memory they map: CUDA IPC, what is done without it,
and hosts between which MPI carries what was staged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import TransportError
from collectives.base.reduce_op import Op
from collectives.cuda import backend
from collectives.device import selection
from collectives.transport.mpi import mpi_groups
from collectives.worlds.world import World
from tests.support.emulated.cuda import EmulatedDevice
from tests.support.emulated.memory import SPACE
from tests.support.emulated.ranks import PATIENCE, check, own_device, own_stream
from tests.support.scenarios import gpu as scenarios
from tests.support.scenarios.gpu import QUICK, Scenario
from tests.support.scenarios.gpu_makers import EmulatedMaker
from tests.support.scenarios.worlds import expected, sample

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("kernels")]
RANKS = {"openmpi": (3,)}

UNPACKED = [
    scenarios.every_size,
    scenarios.odd_addresses_and_layouts,
    scenarios.broadcasts,
    scenarios.allgathers,
    scenarios.reducescatters,
]
"""In which peers would look at the tensors themselves."""
FLOAT = np.dtype(np.float32)


def size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One GPU that all ranks share."""
    from mpi4py import MPI

    device = own_device(delays=MPI.COMM_WORLD.rank)
    yield device
    selection.use(None)
    device.close()


@contextlib.contextmanager
def connected(device: EmulatedDevice, **settings: object) -> Iterator[World]:
    """A world whose program works on a stream of its own, and which leaves nothing behind on the device."""
    from mpi4py import MPI

    config = Config(timeout=PATIENCE, **({"host_until": 0} | settings))  # type: ignore[arg-type]
    world = World(mpi_groups.connect(MPI.COMM_WORLD, config), config)
    with own_stream(device):
        yield world
        world.shutdown()
    check(device)


@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.__name__)
def test_memory_of_other_processes(scenario: Scenario, device: EmulatedDevice) -> None:
    with connected(device) as world:
        scenario(world, EmulatedMaker(device), {"transport": "cuda-ipc"})
        assert device.held()["imports"] >= world.size - 1, "nothing of the peers was mapped"


@pytest.mark.parametrize(
    "scenario",
    [scenarios.every_size, scenarios.fused_buckets, scenarios.asynchronous, scenarios.broadcasts],
    ids=lambda scenario: scenario.__name__,
)
def test_hosts_between_which_messages_travel(scenario: Scenario, device: EmulatedDevice) -> None:
    """Of three ranks two are on one host."""
    with connected(device, local_size=size() - 1) as world:
        scenario(world, EmulatedMaker(device), {})


@pytest.mark.parametrize("refusing", ["one rank", "all ranks"])
def test_without_shared_memory_tensors_go_through_the_host(
    refusing: str, device: EmulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Every rank does the same, whichever could not share; the user is told once."""
    with connected(device) as world, caplog.at_level(logging.WARNING, "collectives"):
        device.refuse_sharing = refusing == "all ranks" or world.rank == world.size - 1
        maker = EmulatedMaker(device)
        for scenario in (scenarios.every_size, scenarios.allgathers):
            scenario(world, maker, {})
        with pytest.raises(TransportError, match="does not let processes share"):
            world.allreduce(maker.device(np.ones(3)), transport="cuda-ipc")
        np.testing.assert_array_equal(maker.host(world.allreduce(maker.device(np.ones(3)))), 1)
    told = [record for record in caplog.records if "CUDA IPC cannot be used" in record.getMessage()]
    assert len(told) == (1 if world.rank == 0 else 0), caplog.text
    assert "through host memory" in told[0].getMessage() if told else True


@pytest.mark.parametrize("refusing", ["one rank", "all ranks"])
@pytest.mark.parametrize("scenario", UNPACKED, ids=lambda scenario: scenario.__name__)
def test_tensors_that_cannot_be_shared_are_copied(
    refusing: str, scenario: Scenario, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some allocators make memory piecemeal, which has no name for other processes; the engine's own memory has."""
    refused = []
    export = device.export_memory

    def refuse(base: int) -> bytes:
        if SPACE.allocation(base).blocks is not None:
            refused.append(base)
            raise TransportError("memory that is mapped piecemeal has no name")
        return export(base)

    with connected(device) as world:
        if refusing == "all ranks" or world.rank == 0:
            monkeypatch.setattr(device, "export_memory", refuse)
        scenario(world, EmulatedMaker(device), {"transport": "cuda-ipc"})
        assert bool(refused) == (refusing == "all ranks" or world.rank == 0)


def test_peers_that_are_done_keep_what_others_still_read(device: EmulatedDevice) -> None:
    """Each rank drops its tensor as soon as it has its own result; allocations at the same addresses come and go
    meanwhile."""
    with connected(device) as world:
        maker = EmulatedMaker(device)
        for step in range(30):
            parts = [sample(FLOAT, 20_011 + step, rank, step) for rank in range(world.size)]
            result = world.allreduce(maker.device(parts[world.rank]), average=False, transport="cuda-ipc")
            junk = [maker.device(np.full(20_011 + step, np.nan, FLOAT)) for _ in range(1 + world.rank)]
            np.testing.assert_allclose(maker.host(result), expected(Op.SUM, parts), rtol=1e-5, atol=1e-5)
            del junk, result


def mapped_and_freed(world: World, device: EmulatedDevice, maker: EmulatedMaker) -> None:
    """8 MB of each rank's are mapped by its peers, and freed."""
    tensor = maker.device(np.ones(1_000_000))
    world.allreduce_(tensor, transport="cuda-ipc")
    np.testing.assert_array_equal(maker.host(tensor), 1)
    del tensor
    world.broadcast_(
        maker.device(np.ones(3)), 0, transport="cuda-ipc"
    )  # the engine keeps the latest operation's tensors
    device._trim()
    assert SPACE.still_mapped(device) >= 8_000_000


def test_memory_is_released_that_is_mapped_but_not_in_use(device: EmulatedDevice) -> None:
    """Of the peers, and what the engine has outgrown itself; whatever is needed again is mapped again."""
    with connected(device) as world:
        maker = EmulatedMaker(device)
        assert world.empty_cache() == 0
        mapped_and_freed(world, device, maker)
        for count in (10_000, 100_000):  # the bucket is outgrown
            world.grouped_allreduce([maker.device(np.ones(count, np.float32)) for _ in range(2)], transport="cuda-ipc")
        imports, allocations = device.held()["imports"], device.held()["allocations"]
        released = world.empty_cache()
        assert released > 8_000_000 * (world.size - 1) and SPACE.still_mapped(device) == 0
        assert device.held()["imports"] == 0 < imports and device.held()["allocations"] == allocations - 1
        assert world.empty_cache() == 0
        parts = [sample(FLOAT, 20_011, rank, 0) for rank in range(world.size)]
        result = world.allreduce(maker.device(parts[world.rank]), average=False, transport="cuda-ipc")
        np.testing.assert_allclose(maker.host(result), expected(Op.SUM, parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_of_memory", ["one rank", "all ranks"])
@pytest.mark.parametrize("first", [True, False], ids=["first task", "later task"])
def test_memory_is_released_before_there_is_said_to_be_none(
    first: bool, out_of_memory: str, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed memory is not free while peers have it mapped; once they have not, what is asked for a second time is there
    or is not."""
    monkeypatch.setattr(backend, "_ALONE_FROM", 1 << 20)
    with connected(device) as world:
        maker = EmulatedMaker(device)
        counts = (200_000, 180_000) if first else (400_000, 200_000, 180_000)
        tensors = [maker.device(np.full(count, float(world.rank), np.float32)) for count in counts]
        mapped_and_freed(world, device, maker)
        if out_of_memory == "all ranks" or world.rank == world.size - 1:
            device._capacity = device._used + (3 << 20)
        for tensor in world.grouped_allreduce_(tensors, average=False, transport="cuda-ipc"):
            np.testing.assert_array_equal(maker.host(tensor), sum(range(world.size)))
        assert SPACE.still_mapped(device) == 0
        device._capacity = None
