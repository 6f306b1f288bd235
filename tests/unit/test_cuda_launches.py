"""Device plans, carried out by NumPy: every algorithm for many sizes, ranks in random turns, memory overwritten as
early as allowed."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from collectives.base.reduce_op import Op
from collectives.cuda.builder import DevicePlans
from collectives.cuda.launches import SPACES, DevicePlan, Message, entry_of
from collectives.cuda.planner import DeviceChoice
from collectives.device.kernel_sources import JOBS, WAYS
from collectives.plan.planner import Placement
from collectives.plan.program import Space
from collectives.schedules import partition

Array = np.ndarray[Any, np.dtype[Any]]
Make = Callable[[DevicePlans, DeviceChoice], DevicePlan]

DTYPE = np.dtype(np.int64)
SIZES = [2, 3, 4, 5, 8, 9, 11]
PIPELINED = DeviceChoice("ring", "nccl", segments=3, pipelined=True)
FINISH: Any = "finish"
"""Stands for a scaling: every result is scaled once."""
HOSTS = [((0, 1), (2, 3)), ((0, 1), (2,)), ((0, 1, 2, 3), (4, 5)), ((0,), (1,)), ((0, 2), (1, 3), (4,))]


class Jobs:
    """A combination that adds with NumPy: jobs of a launch in any order, because they run at once."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], finish: bool) -> None:
        assert all(1 <= sources <= WAYS and 1 <= targets <= WAYS and count > 0 for sources, targets, count in shapes)
        self.shapes, self.finish = shapes, finish
        self.pointers = np.zeros((len(shapes), 2 * WAYS), np.int64)
        self.launches = -(-len(shapes) // JOBS)

    def run(self, random: Random) -> None:
        jobs = list(self._jobs())
        for number, (sources, targets, nbytes) in enumerate(jobs):
            for others, theirs, length in jobs[:number] + jobs[number + 1 :]:
                assert not any(a < b + length and b < a + nbytes for a in targets for b in (*others, *theirs)), (
                    "jobs of a launch interfere"
                )
            assert not any(a != b and abs(a - b) < nbytes for a in targets for b in sources), (
                "source and target overlap in part"
            )
        random.shuffle(jobs)
        for sources, targets, nbytes in jobs:
            total = sum(memory(source, nbytes) for source in sources)
            for target in targets:
                memory(target, nbytes)[...] = total * 10 if self.finish else total

    def _jobs(self) -> Iterator[tuple[list[int], list[int], int]]:
        for row, (sources, targets, count) in zip(self.pointers.tolist(), self.shapes, strict=True):
            yield row[:sources], row[WAYS : WAYS + targets], count * DTYPE.itemsize


class Kernels:
    """Instead of `kernels.Kernels`."""

    def combination(
        self,
        op: Op | None,
        dtype: np.dtype[Any],
        shapes: Sequence[tuple[int, int, int]],
        scaling: Any,
        stepwise: bool,
        ranks: Sequence[Sequence[int]],
    ) -> Jobs:
        return Jobs(shapes, scaling is not None)


def memory(address: int, nbytes: int) -> Array:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), DTYPE)


class Rank:
    """One rank at work on its plan."""

    def __init__(self, rank: int, plan: DevicePlan, source: Array, out: Array) -> None:
        self.rank, self.plan, self.source, self.out = rank, plan, source, out
        self.window, self.scratch = np.full(plan.window_bytes, 99, np.uint8), np.full(plan.scratch_bytes, 99, np.uint8)
        self.finished = 0
        self.sent = self.left = False
        self.result: Array | None = None

    def addresses(self) -> tuple[int, int, int]:
        return self.source.ctypes.data, self.out.ctypes.data, self.window.ctypes.data


def placement(rank: int, hosts: Sequence[Sequence[int]]) -> Placement:
    return Placement(rank, sum(map(len, hosts)), tuple(map(tuple, hosts)), True, True)


def carry_out(
    make: Make,
    choice: DeviceChoice,
    sources: list[Array],
    outputs: list[int] | None,
    hosts: Sequence[Sequence[int]] | None,
    seed: int,
) -> tuple[list[Array], list[DevicePlan]]:
    """Every rank's result; ``outputs``: elements, None: in place."""
    size, random = len(sources), Random(seed)
    hosts = hosts or (tuple(range(size)),)
    ranks = []
    for rank, values in enumerate(sources):
        plan = make(DevicePlans(placement(rank, hosts), Kernels()), choice)  # type: ignore[arg-type]
        source = values.copy()
        ranks.append(Rank(rank, plan, source, source if outputs is None else np.full(outputs[rank], -1, DTYPE)))
    assert len({len(rank.plan.stages) for rank in ranks}) == 1, "the ranks' groups are counted alike"
    table = np.array([address for rank in ranks for address in rank.addresses()] + [0], np.int64)
    mail: dict[tuple[int, int], deque[Array]] = {(a, b): deque() for a in range(size) for b in range(size)}
    slow = random.randrange(size)
    while not all(rank.left for rank in ranks):
        # One at a time, and one of them hardly ever: the others run as far ahead as their waits let them.
        order = sorted(ranks, key=lambda rank: (rank.rank == slow and random.random() < 0.95, random.random()))
        assert any(advance(rank, ranks, table, mail, random) for rank in order if not rank.left), "nobody can go on"
    assert not any(mail.values()), "messages that nobody received"
    return [result for rank in ranks if (result := rank.result) is not None], [rank.plan for rank in ranks]


def advance(
    rank: Rank, ranks: list[Rank], table: Array, mail: dict[tuple[int, int], deque[Array]], random: Random
) -> bool:
    """A part of a stage, if what it waits for is there."""
    plan = rank.plan

    def reached(waits: Sequence[tuple[int, int]]) -> bool:
        return all(ranks[peer].finished >= group for peer, group in waits)

    def block(message: Message, own: Array) -> Array:
        return memory(int(own[message.location[0]]) + message.location[1], message.count * DTYPE.itemsize)

    if rank.finished == len(plan.stages):
        if reached(plan.leave):
            # Whoever reads any of this later reads garbage, and whoever writes the result later comes too late.
            rank.left, rank.result = True, rank.out.copy()
            for array in (rank.source, rank.out, rank.window.view(DTYPE)):
                array[...] = -(10**9)
        return rank.left
    stage, own = plan.stages[rank.finished], table.copy()
    own[-1] = rank.scratch.ctypes.data
    assert stage.needs < rank.finished
    if not rank.sent:
        if not reached(stage.waits):
            return False
        for message in stage.sends:
            mail[rank.rank, message.peer].append(block(message, own).copy())
        rank.sent = True
        return True
    if any(
        len(mail[message.peer, rank.rank]) < sum(other.peer == message.peer for other in stage.receives)
        for message in stage.receives
    ):
        return False
    for message in stage.receives:
        block(message, own)[...] = mail[message.peer, rank.rank].popleft()
    for launch in stage.launches:
        reach = [entry_of(peer, space) for peer, space in plan.reached]
        mine = [entry_of(rank.rank, space) for space in (Space.INPUT, Space.OUTPUT, Space.WINDOW)]
        known = own.copy()
        known[[entry for entry in range(len(ranks) * SPACES) if entry not in (*reach, *mine)]] = (
            1 << 62
        )  # would be noticed
        launch.place(known)
        launch.combination.run(random)  # type: ignore[attr-defined]
    rank.sent = False
    rank.finished += 1
    return True


def whole(count: int, size: int) -> list[Array]:
    return [np.random.default_rng([rank, count]).integers(0, 1000, count) for rank in range(size)]


DIRECT, RING = DeviceChoice("direct", "cuda-ipc"), DeviceChoice("ring", "cuda-ipc")
CHOICES = [DIRECT, RING, DeviceChoice("direct", "nccl"), DeviceChoice("ring", "nccl"), PIPELINED]


def describe(choice: DeviceChoice) -> str:
    return f"{choice.algorithm}-{choice.transport}" + ("-pipelined" if choice.pipelined else "")


def summing(count: int) -> Make:
    return lambda plans, choice: plans.allreduce((count,), DTYPE, choice, Op.SUM, FINISH)


def scattering(rows: int) -> Make:
    return lambda plans, choice: plans.reducescatter((rows, 5), DTYPE, choice, Op.SUM, FINISH)


def sending(root: int) -> Make:
    return lambda plans, choice: plans.broadcast((1003,), DTYPE, root, choice)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("choice", CHOICES, ids=describe)
def test_allreduce(choice: DeviceChoice, size: int, in_place: bool) -> None:
    for count in (1, 2 * size - 1, 1003):
        sources = whole(count, size)
        outputs = None if in_place else [count] * size
        results, _ = carry_out(summing(count), choice, sources, outputs, None, count)
        for result in results:
            np.testing.assert_array_equal(result, 10 * sum(sources))


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_allreduce_over_several_hosts(hosts: Sequence[Sequence[int]]) -> None:
    size, choice = sum(map(len, hosts)), DeviceChoice("hierarchical", "cuda-ipc")
    for count in (1, 1003):
        sources = whole(count, size)
        results, plans = carry_out(summing(count), choice, sources, None, hosts, count)
        for result in results:
            np.testing.assert_array_equal(result, 10 * sum(sources))
        assert len({plan.least_words for plan in plans}) == 1 and plans[0].least_words, (
            "over messages, ranks show each other as many words"
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("choice", CHOICES, ids=describe)
def test_reducescatter(choice: DeviceChoice, size: int) -> None:
    for rows in (1, size - 1, 3 * size + 1):
        sources = whole(rows * 5, size)
        shares = partition.rows(rows, size)
        results, plans = carry_out(scattering(rows), choice, sources, [share * 5 for share in shares], None, rows)
        wanted = np.split(10 * sum(sources), np.cumsum([share * 5 for share in shares])[:-1])
        for result, right in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, right)
        if choice is RING and size > 2 and rows > size:
            assert all(plan.window_bytes for plan in plans), "what travels on is no part of the output"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not choice.pipelined], ids=describe)
def test_what_only_moves(choice: DeviceChoice, size: int) -> None:
    rows = [(rank * 7 + 1) % 4 * 100 for rank in range(size)]
    sources = [np.full(count, rank) for rank, count in enumerate(rows)]
    results, _ = carry_out(
        lambda plans, chosen: plans.allgather(rows, DTYPE, chosen), choice, sources, [sum(rows)] * size, None, 1
    )
    for result in results:
        np.testing.assert_array_equal(result, np.concatenate(sources))
    for root in {0, size - 1}:
        for outputs in (None, [1003] * size):
            given = whole(1003, size)
            results, _ = carry_out(sending(root), choice, given, outputs, None, 2)
            for result in results:
                np.testing.assert_array_equal(result, given[root])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transport", ["cuda-ipc", "nccl"])
def test_alltoall(transport: str, size: int) -> None:
    table = [[(i * 3 + j * 5 + 1) % 4 * 10 for j in range(size)] for i in range(size)]
    sources = [np.concatenate([np.full(count, 100 * i + j) for j, count in enumerate(table[i])]) for i in range(size)]
    flat = [count for row in table for count in row]
    results, _ = carry_out(
        lambda plans, chosen: plans.alltoall(flat, DTYPE, chosen), DeviceChoice("direct", transport), sources,
        [sum(row[rank] for row in table) for rank in range(size)], None, 3,
    )  # fmt: skip
    for j, result in enumerate(results):
        np.testing.assert_array_equal(result, np.concatenate([np.full(table[i][j], 100 * i + j) for i in range(size)]))


@pytest.mark.parametrize("size", range(2, WAYS + 1))
def test_a_direct_allreduce_is_one_launch(size: int) -> None:
    """Every source is read once and every result written once, by one job."""
    for rank in range(size):
        plans = DevicePlans(placement(rank, (tuple(range(size)),)), Kernels())  # type: ignore[arg-type]
        plan = plans.allreduce((10_000,), DTYPE, DIRECT, Op.AVERAGE, FINISH)
        assert (len(plan.stages), plan.messages) == (1, False)
        (launch,) = plan.stages[0].launches
        assert launch.combination.launches == 1
        assert [(sources, targets) for sources, targets, _ in launch.combination.shapes] == [(size, size)]  # type: ignore[attr-defined]
        assert launch.combination.finish and plan.least_words == 0  # type: ignore[attr-defined]
        assert plan.partners == tuple(peer for peer in range(size) if peer != rank)


def test_more_ranks_than_a_job_has_ways_take_a_round_more() -> None:
    plans = DevicePlans(placement(0, (tuple(range(WAYS + 1)),)), Kernels())  # type: ignore[arg-type]
    plan = plans.allreduce((10_000,), DTYPE, DIRECT, Op.SUM, None)
    assert len(plan.stages) == 2
    assert [peer for peer, _ in plan.leave] == list(range(1, WAYS + 1))


def test_a_table_with_other_addresses_moves_the_launches() -> None:
    plans = DevicePlans(placement(0, ((0, 1),)), Kernels())  # type: ignore[arg-type]
    (launch,) = plans.allreduce((64,), DTYPE, DIRECT, Op.SUM, None).stages[0].launches
    for base in (1 << 20, 1 << 30):
        launch.place(np.arange(2 * SPACES + 1) * 4096 + base)
        row = launch.combination.pointers[0].tolist()
        assert row[:2] == [base + 4096 * entry_of(rank, Space.INPUT) for rank in (0, 1)]
        assert row[WAYS : WAYS + 2] == [base + 4096 * entry_of(rank, Space.OUTPUT) for rank in (0, 1)]
