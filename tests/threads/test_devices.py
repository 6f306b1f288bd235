"""Every scenario of device tensors with ranks as threads on emulated GPUs, whose streams dawdle: every transport, and
hosts of several shapes. On a GPU the same scenarios run in tests/gpu."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import MismatchError, TransportError
from collectives.base.reduce_op import Op
from collectives.worlds.world import World
from tests.support.emulated.cuda import EmulatedDevice
from tests.support.emulated.gate import Gate
from tests.support.emulated.memory import SPACE
from tests.support.emulated.nccl import EmulatedNccl
from tests.support.emulated.ranks import PATIENCE, emulated, on_threads
from tests.support.scenarios import gpu as scenarios
from tests.support.scenarios.gpu import SCENARIOS, Scenario
from tests.support.scenarios.gpu_makers import EmulatedMaker
from tests.support.scenarios.worlds import expected, sample

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(100)]


@dataclass(frozen=True)
class Case:
    """Ranks, and what is forced on them."""

    size: int
    forced: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    hosts: tuple[tuple[int, ...], ...] | None = None
    nccl: bool = True
    measures: bool = False
    """Whether small tensors go by whichever way was measured to be the quickest; else never through the host, unless
    that is forced."""

    def __str__(self) -> str:
        notes = {
            "own GPUs": self.devices > 1,
            "no NCCL": not self.nccl,
            "measured": self.measures,
            str(self.hosts): self.hosts is not None,
        }
        return " ".join(
            [f"{self.size} ranks", *self.forced.values(), *(note for note, holds in notes.items() if holds)]
        )


ALL = [
    Case(1),
    Case(2, {"transport": "cuda-ipc"}),
    Case(2, {"transport": "host"}),
    Case(3, {"transport": "nccl"}),
    Case(2, devices=2),
]
"""In each every scenario runs: every transport alone, and what the planner chooses."""

MOST = [Case(3, hosts=((0, 1), (2,)), nccl=False)]
SOME = [
    Case(3, {"transport": "cuda-ipc"}, devices=3),
    Case(2, {"transport": "nccl"}, devices=2),
    Case(5, measures=True),
    Case(3, devices=3, measures=True),
    Case(4, hosts=((0, 1), (2, 3)), nccl=False),
]
"""In each one of five scenarios runs."""

ALGORITHMS = [
    Case(3, {"transport": "cuda-ipc", "algorithm": "ring"}),
    Case(5, {"transport": "cuda-ipc", "algorithm": "ring"}),
    Case(3, {"transport": "nccl", "algorithm": "ring"}),
    Case(5, {"transport": "nccl", "algorithm": "direct"}),
    Case(2, {"transport": "nccl", "algorithm": "native"}, devices=2),
    Case(4, {"transport": "cuda-ipc", "algorithm": "hierarchical"}, hosts=((0, 1), (2, 3))),
    Case(5, {"transport": "cuda-ipc", "algorithm": "hierarchical"}, hosts=((0, 1, 2), (3, 4)), devices=3),
    Case(4, {"transport": "nccl"}, hosts=((0, 1), (2, 3)), devices=4),
]
QUICKER = [scenario for scenario in SCENARIOS if scenario is not scenarios.every_dtype_and_operation]
REDUCING = [
    scenarios.every_size,
    scenarios.odd_addresses_and_layouts,
    scenarios.fused_buckets,
    scenarios.scale_factors,
    scenarios.compressed,
    scenarios.mistakes,
]
"""With nothing but what all of these algorithms have: all-reduces."""


def run(case: Case, scenario: Scenario) -> None:
    library = None if case.nccl else EmulatedNccl(1, missing="NCCL is not here")
    config = Config(timeout=PATIENCE, host_until=-1 if case.measures else 0)
    seed = sum(map(ord, scenario.__name__)) + case.size
    with emulated(case.devices, library=library, delays=seed) as provider:
        on_threads(
            case.size,
            lambda world, maker: scenario(world, maker, case.forced),
            provider,
            hosts=case.hosts,
            config=config,
        )


def sampled(cases: list[Case], every: list[Scenario], share: int, of: int) -> list[Any]:
    """``share`` of ``of`` scenarios for each case, so that each has its turn with some case."""
    chosen = [
        (case, scenario) for i, case in enumerate(cases) for k, scenario in enumerate(every) if (k + i) % of < share
    ]
    assert {id(scenario) for _, scenario in chosen} == {id(scenario) for scenario in every}
    return [pytest.param(case, scenario, id=f"{case}-{scenario.__name__}") for case, scenario in chosen]


@pytest.mark.parametrize(
    ("case", "scenario"), sampled(ALL, SCENARIOS, 1, 1) + sampled(MOST, QUICKER, 1, 1) + sampled(SOME, QUICKER, 1, 5)
)
def test_scenario(case: Case, scenario: Scenario) -> None:
    run(case, scenario)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "scenario"), sampled(ALGORITHMS, REDUCING, 1, 2))
def test_algorithm(case: Case, scenario: Scenario) -> None:
    run(case, scenario)


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reducescatter", "alltoall", "broadcast"])
@pytest.mark.parametrize("transport", ["cuda-ipc", "nccl"])
def test_results_lie_where_the_program_was_still_reading(transport: str, collective: str) -> None:
    """A tensor that the program's stream has still to read is dropped: its memory becomes the result, which must not
    come too early."""
    size, rows = 2, 600

    def program(world: World, maker: EmulatedMaker) -> None:
        device = provider.device(0)
        stream = device.current_stream()
        arguments: dict[str, Any] = {"broadcast": {"root_rank": 0}, "reducescatter": {"op": Op.SUM}}.get(collective, {})
        call = functools.partial(getattr(world, collective), transport=transport, **arguments)
        count = 2 * rows if collective == "reducescatter" else rows
        call(maker.device(np.ones(count)))  # the GPUs meet and memory is made, for which the host waits
        for step in range(3):
            given = maker.device(np.full(count, step + 1.0))
            before = maker.device(np.full(2 * rows if collective == "allgather" else rows, -1.0))
            copied, address, nbytes = maker.device(np.zeros(before.shape)), before.address, before.nbytes
            device.drain(stream)
            gate = Gate(device, stream)
            device.copy(copied.address, address, nbytes, stream)
            del before
            result = call(given)
            assert result.address == address, "the memory was not used again, so nothing is checked"
            gate.open()
            np.testing.assert_array_equal(maker.host(copied), -1)
            wanted = size * (step + 1) if collective == "reducescatter" else step + 1
            np.testing.assert_array_equal(maker.host(result), wanted)

    with emulated(1) as provider:
        on_threads(size, program, provider, config=Config(timeout=PATIENCE, host_until=0))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many graphs were made and launched, and given back."""
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(EmulatedDevice, name)

        def count(device: EmulatedDevice, *arguments: int) -> Any:
            with lock:
                counted[name] += 1
            return method(device, *arguments)

        return count

    for name in ("end_capture", "launch_graph", "destroy_graph"):
        monkeypatch.setattr(EmulatedDevice, name, counting(name))
    return counted


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("count", [1003, 3_300_001], ids=["at once", "pipelined"])
def test_graphs_replay_what_comes_again(algorithm: str, count: int, graphs: Counter[str]) -> None:
    """The tensor's contents are others every time; a graph has only its address."""
    size, steps = 3, 5

    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(np.zeros(count, np.float32))
        for step in range(steps):
            tensor.set(np.full(count, float(world.rank + step), np.float32))
            world.allreduce_(tensor, average=False, transport="nccl", algorithm=algorithm)
            np.testing.assert_array_equal(maker.host(tensor), sum(range(step, step + size)))

    with emulated(size, delays=count) as provider:
        on_threads(size, program, provider, config=Config(cuda_graphs=True, host_until=0))
    assert graphs == {"end_capture": size, "launch_graph": size * (steps - 1), "destroy_graph": size}


def test_graphs_are_of_all_ranks_or_of_none(graphs: Counter[str]) -> None:
    """One rank has its tensor where it was, the other has a new one in each of the first calls: NCCL wants both to
    capture, or neither."""
    size, steps = 2, 6

    def program(world: World, maker: EmulatedMaker) -> None:
        kept = []
        for step in range(steps):
            if world.rank == 0 or step < 3:
                kept.append(
                    maker.device(np.full(500, float(world.rank + step), np.float32))
                    if world.rank or not step
                    else kept[0]
                )
            tensor = kept[-1]
            tensor.set(np.full(500, float(world.rank + step), np.float32))
            world.allreduce_(tensor, average=False, transport="nccl", algorithm="ring")
            np.testing.assert_array_equal(maker.host(tensor), 2.0 * step + 1)

    with emulated(size, delays=11) as provider:
        on_threads(size, program, provider, config=Config(cuda_graphs=True, host_until=0))
    # Calls 0 to 2 are new to rank 1; call 3 has come before on both, and is captured; 4 and 5 replay it.
    assert graphs == {"end_capture": size, "launch_graph": 3 * size, "destroy_graph": size}


def test_more_graphs_than_are_kept(graphs: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors at many addresses take turns; results that are dropped leave their addresses to others."""
    monkeypatch.setattr("collectives.cuda.executor._MOST_CAPTURES", 4)
    size, steps = 2, 3

    def program(world: World, maker: EmulatedMaker) -> None:
        tensors = [maker.device(np.zeros(500, np.float32)) for _ in range(7)]
        for step in range(steps):
            for k, tensor in enumerate(tensors):
                for repeat in range(3):
                    values = [
                        sample(np.dtype(np.float32), 500, rank, 100 * step + 10 * k + repeat) for rank in range(size)
                    ]
                    tensor.set(values[world.rank])
                    world.allreduce_(tensor, average=False, transport="nccl", algorithm="direct")
                    np.testing.assert_allclose(maker.host(tensor), values[0] + values[1], rtol=1e-6)

    with emulated(size, delays=5) as provider:
        on_threads(size, program, provider, config=Config(cuda_graphs=True, host_until=0))
    assert graphs["end_capture"] == graphs["destroy_graph"] > size * 7, "none was ever dropped, so nothing was checked"
    assert graphs["launch_graph"] >= 2 * graphs["end_capture"]


def test_ranks_that_share_a_gpu_have_no_graphs(graphs: Counter[str]) -> None:
    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(np.ones(100, np.float32))
        for _ in range(4):
            world.allreduce_(tensor, transport="nccl", algorithm="ring")
        np.testing.assert_array_equal(maker.host(tensor), 1)

    with emulated(1) as provider:
        on_threads(2, program, provider, config=Config(cuda_graphs=True, host_until=0))
    assert not graphs


def test_fused_tensors_on_graphs(graphs: Counter[str]) -> None:
    """Packing happens before the graph, and unpacking after it."""

    def program(world: World, maker: EmulatedMaker) -> None:
        for step in range(5):
            parts = [
                [sample(np.dtype(np.float32), 50 + k, rank, k + step) for k in range(4)] for rank in range(world.size)
            ]
            tensors = [maker.device(part) for part in parts[world.rank]]
            for k, result in enumerate(
                world.grouped_allreduce(tensors, average=False, name="group", transport="nccl", algorithm="ring")
            ):
                wanted = expected(Op.SUM, [part[k] for part in parts])
                np.testing.assert_allclose(maker.host(result), wanted, rtol=1e-5, atol=1e-5)

    with emulated(2, delays=8) as provider:
        on_threads(2, program, provider, config=Config(cuda_graphs=True, host_until=0))
    assert graphs["launch_graph"] == 2 * 4


def test_nccl_that_cannot_connect_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    """It is found out while there is another way, and said once; a call that insists fails on every rank, and the next
    one works."""

    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(np.full(1003, float(world.rank), np.float32))
        for _ in range(2):
            np.testing.assert_array_equal(maker.host(world.allreduce(tensor, average=False)), 1.0)
            with pytest.raises(TransportError, match="cannot connect these ranks"):
                world.allreduce_(tensor, transport="nccl")
            np.testing.assert_array_equal(maker.host(tensor), float(world.rank))

    for devices in (
        2,
        1,
    ):  # of their own, where NCCL would be chosen; or shared, where it is connected when it is asked for
        caplog.clear()
        with emulated(devices, library=EmulatedNccl(1)) as provider:
            on_threads(2, program, provider, config=Config(timeout=PATIENCE, host_until=0))
        said = [record.getMessage() for record in caplog.records if "cannot connect" in record.getMessage()]
        assert len(said) == (devices == 2), said


@pytest.mark.parametrize("nccl", [True, False], ids=["NCCL", "no NCCL"])
def test_gpus_whose_kernels_cannot_reach_each_other(nccl: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Copies between them work, so only a kernel finds out; the ranks go another way, and the user is told why."""

    def program(world: World, maker: EmulatedMaker) -> None:
        for count in (3, 100_003):
            tensor = maker.device(np.full(count, float(world.rank), np.float32))
            np.testing.assert_array_equal(maker.host(world.allreduce(tensor, average=False)), 1.0)
        with pytest.raises(TransportError, match=r"kernels of device . cannot reach the memory of device"):
            world.allreduce(tensor, transport="cuda-ipc")

    library = None if nccl else EmulatedNccl(1, missing="NCCL is not here")
    with emulated(2, library=library, refuse_peers=True) as provider:
        on_threads(2, program, provider, config=Config(timeout=PATIENCE, host_until=0))
    (told,) = [text for record in caplog.records if "CUDA IPC cannot be used" in (text := record.getMessage())]
    assert "cannot reach the memory" in told and ("through NCCL" if nccl else "through host memory") in told


def test_memory_that_is_no_plain_allocation_is_copied_between_gpus_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peer access holds for what cudaMalloc gave; memory that was mapped piecemeal has its own rules."""
    exported = EmulatedDevice.export_memory
    refused = threading.Event()

    def export(device: EmulatedDevice, base: int) -> bytes:
        if SPACE.allocation(base).blocks is not None:
            refused.set()
            raise TransportError("memory that is mapped piecemeal has no name")
        return exported(device, base)

    def program(world: World, maker: EmulatedMaker) -> None:
        scenarios.odd_addresses_and_layouts(world, maker, {"transport": "cuda-ipc"})

    monkeypatch.setattr(EmulatedDevice, "export_memory", export)
    with emulated(2) as provider:
        on_threads(2, program, provider, config=Config(timeout=PATIENCE, host_until=0))
    assert refused.is_set()


def test_unused_memory_is_released_by_all_ranks_together() -> None:
    """Also where some rank has never seen a GPU tensor, in a process set, and alone; and refused while a rank has run
    out of data."""

    def program(world: World, maker: EmulatedMaker) -> None:
        device = provider.device(0)
        assert world.empty_cache() == 0
        child = world.add_process_set([0, 1])
        if child is not None:
            for count in (10_000, 100_000):
                tensors = [maker.device(np.full(count, float(world.rank), np.float32)) for _ in range(2)]
                child.grouped_allreduce_(tensors, average=False, transport="cuda-ipc")
            allocations = device.held()["allocations"]
            child.barrier()
            assert child.empty_cache() == 128 << 10
            child.barrier()
            assert device.held()["allocations"] == allocations - 2  # of the device that the ranks share
            child.barrier()
            for result in child.grouped_allreduce_(tensors, average=False, transport="cuda-ipc"):
                np.testing.assert_array_equal(maker.host(result), 2.0)
        world.remove_process_set([0, 1], child)
        if world.rank:
            with pytest.raises(MismatchError, match=r"empty_cache.* needs every rank, but rank 0 has called join"):
                world.empty_cache()
        world.join()

    with emulated(1) as provider:
        on_threads(3, program, provider, config=Config(timeout=PATIENCE, host_until=0))
    with emulated(1) as provider:
        assert on_threads(
            1, lambda world, maker: (world.allreduce(maker.device(np.ones(3))), world.empty_cache())[1], provider
        ) == [0]
