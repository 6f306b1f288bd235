"""Plans of every algorithm over every medium, against NumPy, with the ranks in any order: versions of values, lowering,
binding, the executor, its fast paths, and the loops for mapped tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.plan import binder, blocks, builder
from collectives.plan.builder import Plans
from collectives.plan.executor import Executor
from collectives.plan.plan import Plan
from collectives.plan.planner import Choice, Placement
from collectives.plan.program import Medium
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.schedule import Schedule, StepKind
from collectives.tensors.arrays import address
from collectives.transport.base import Array
from collectives.transport.group import Group
from tests.support.turns import INT, SEEDS, Turns, groups, numbers, triple

ALGORITHMS = [
    registry.find(collective, name)
    for collective in registry.COLLECTIVES
    for name in registry.on_host(collective)
    if not registry.find(collective, name).native
]
HOSTS = (((0, 1),), ((0, 1, 2),), ((0, 1, 2, 3),), ((0,), (1,)), ((0, 1), (2,)), ((0, 2), (1, 3)))


@dataclass
class Case:
    """One collective of one plan.

    Attributes:
        sizes: elements of the tensor (one number), of each rank's share, or from each rank to each.
        root: of a broadcast.
        choice: for the builder.
    """

    algorithm: Algorithm
    hosts: tuple[tuple[int, ...], ...]
    sizes: list[int]
    root: int
    choice: Choice

    @property
    def ranks(self) -> int:
        return sum(map(len, self.hosts))

    def plan(self, plans: Plans) -> Plan:
        collective, sizes, choice = self.algorithm.collective, self.sizes, self.choice
        if collective == "broadcast":
            return plans.broadcast((sizes[0],), INT, self.root, choice)
        if collective in ("allgather", "alltoall"):
            return getattr(plans, collective)(sizes, INT, choice)
        return getattr(plans, collective)((sizes[0], 1), INT, choice, np.add, triple)

    def tensors(self, call: int) -> tuple[list[Array], list[Array]]:
        """Every rank's input, and the result that it must get."""
        collective, sizes, ranks = self.algorithm.collective, self.sizes, range(self.ranks)
        if collective == "allgather":
            inputs = [numbers(sizes[rank], call, rank) for rank in ranks]
            return inputs, [np.concatenate(inputs)] * len(ranks)
        if collective == "alltoall":
            table = np.array(sizes).reshape(len(ranks), -1)
            blocks = [[numbers(table[rank, peer], call, rank, peer) for peer in ranks] for rank in ranks]
            results = [np.concatenate([blocks[peer][rank] for peer in ranks]) for rank in ranks]
            return [np.concatenate(row) for row in blocks], results
        inputs = [numbers(sizes[0], call, rank) for rank in ranks]
        if collective == "broadcast":
            return inputs, [inputs[self.root]] * len(ranks)
        total = 3 * np.sum(inputs, axis=0)
        return inputs, np.array_split(total, len(ranks)) if collective == "reducescatter" else [total] * len(ranks)


@st.composite
def cases(draw: st.DrawFn, algorithm: Algorithm, hosts: tuple[tuple[int, ...], ...]) -> Case:
    ranks, collective = sum(map(len, hosts)), algorithm.collective
    media = [Medium.WINDOW]
    if algorithm.by_messages:
        media += [Medium.MESSAGE] + [Medium.DIRECT] * (not algorithm.versioned)
    if len(hosts) == 1 and not algorithm.versioned:
        media.append(Medium.MAPPED)
    medium = draw(st.sampled_from(media))
    shares = {"allgather": ranks, "alltoall": ranks**2}.get(collective, 1)
    sizes = draw(st.lists(st.integers(0 if shares > 1 else 1, 70), min_size=shares, max_size=shares).filter(any))
    block_bytes = draw(st.sampled_from((8, 40, 64, 128, 1 << 20)))
    overlaps = draw(st.booleans()) and (algorithm.overlaps or not medium.in_place)
    return Case(
        algorithm,
        hosts,
        sizes,
        draw(st.integers(0, ranks - 1)),
        Choice(algorithm.name, medium, block_bytes, overlaps),
    )


@st.composite
def programs(draw: st.DrawFn, algorithm: Algorithm) -> tuple[list[Case], int]:
    """Calls of one executor, which leaves windows, slots and progress to the next; and the seed of all else."""
    hosts = draw(st.sampled_from([hosts for hosts in HOSTS if algorithm.by_messages or len(hosts) == 1]))
    other = draw(st.sampled_from([each for each in ALGORITHMS if each.by_messages or len(hosts) == 1]))
    kinds = [draw(cases(each, hosts)) for each in (algorithm, algorithm, other)]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6)), draw(SEEDS)


class Rank:
    """One rank: makes each plan once, and enters and runs the calls."""

    def __init__(self, group: Group, hosts: tuple[tuple[int, ...], ...], tensors: list[Any], seed: int) -> None:
        self.rank, self.group, self.tensors = group.rank, group, tensors
        self.executor = Executor(group)
        self.plans = Plans(Placement(group.rank, group.size, hosts, True, True, True), self.executor, "")
        self.shared, self.own = np.random.default_rng(seed), np.random.default_rng([seed, group.rank])
        """Decide what all ranks do alike, and what each does by itself."""
        self.peers = [(group.rank + distance) % group.size for distance in range(1, group.size)]

    def call(self, plan: Plan, source: Array, out: Array) -> None:
        state, control = self.executor.state, self.group.control
        all_stage, in_vain = self.shared.random(2) < 0.5
        staged = plan.staged and bool(all_stage or self.own.random() < 0.5)
        state.input, state.output = source, out
        state.input_at, state.output_at = address(source), address(out)
        self.tensors[self.rank] = source, out
        if in_vain and plan.staged and self.group.size > 1:
            state.input = source + 1
            self.executor.stage(plan)
            assert not control.agree(self.rank + 1)
            state.input = source
        one = self.executor.one_reduction(plan, self.own.choice([None, lambda function, *blocks: function(*blocks)]))
        if one is not None and all_stage and self.own.random() < 0.7:
            if one.attempt(7, source, out):
                return
            assert control._board.await_entries()
        else:
            if staged:
                self.executor.stage(plan)
            assert control.agree(7, ())
        self.learn_places()
        views = [(state.inputs[peer], state.outputs[peer]) for peer in self.peers]
        if plan.loop is not None and all(view is not None for pair in views for view in pair):
            plan.loop.run(source, out, plan.loop.cut(views))
        else:
            self.executor.run(plan, staged, bool(all_stage and plan.staged))

    def learn_places(self) -> None:
        """Some peers' tensors are arrays here, others are reached by their addresses."""
        state = self.executor.state
        maps_all = self.own.random() < 0.5
        for peer in self.peers:
            pair = self.tensors[peer]
            state.addresses[peer] = [address(array) for array in pair]
            mapped = maps_all or self.own.random() < 0.5
            state.inputs[peer], state.outputs[peer] = pair if mapped else (None, None)


def run(calls: list[Case], seed: int) -> None:
    hosts, ranks = calls[0].hosts, calls[0].ranks
    turns = Turns(ranks, seed)
    made, tensors = groups(turns, hosts), [None] * ranks

    def body(number: int) -> None:
        rank = Rank(made[number], hosts, tensors, seed)
        plans = {id(case): case.plan(rank.plans) for case in calls}
        for call, case in enumerate(calls):
            inputs, results = case.tensors(call)
            wanted = results[number]
            keeps_place = case.algorithm.collective in ("allreduce", "broadcast") and rank.shared.random() < 0.5
            source = inputs[number].copy()
            out = source if keeps_place else np.full(wanted.size, 77)
            rank.call(plans[id(case)], source, out)
            np.testing.assert_array_equal(out, wanted)
            if out is not source:
                np.testing.assert_array_equal(source, inputs[number])
            source.fill(-1)  # the caller may use its memory again at once
            out.fill(-2)

    turns.run(body)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are reduced in several parts, and blocks are cut so that all of a segment fit into a slot."""
    monkeypatch.setattr(binder, "PART_BYTES", 24)
    for each in (blocks, builder):
        monkeypatch.setattr(each, "SLOT_BYTES", 320)


def receives_first(algorithm: Algorithm) -> Algorithm:
    """The algorithm with the steps of each round in another order, which means the same."""

    def build(*arguments: Any) -> Schedule:
        schedule = algorithm.build(*arguments)
        rounds = (sorted(steps, key=lambda step: step.kind is StepKind.SEND) for steps in schedule.rounds)
        return dataclasses.replace(schedule, rounds=tuple(map(tuple, rounds)))

    return dataclasses.replace(algorithm, build=build)


def checked(algorithm: Algorithm) -> Callable[[Any], None]:
    @settings(max_examples=50)
    @given(programs(algorithm), st.booleans())
    def check(program: tuple[list[Case], int], reordered: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if reordered:
                key = algorithm.collective, algorithm.name
                patch.setitem(registry._ALL, key, receives_first(algorithm))
            run(*program)

    return check


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: f"{each.collective}-{each.name}")
def test_every_plan_gives_numpys_result_in_any_order_of_ranks(algorithm: Algorithm) -> None:
    checked(algorithm)()


@settings(max_examples=60)
@given(st.sampled_from(["one-shot", "direct", "ring", "recursive-doubling"]), st.integers(2, 3), SEEDS)
def test_a_small_reduction_leaves_the_slots_that_peers_still_read(broadcast: str, size: int, seed: int) -> None:
    """The root of a broadcast waits for nobody, and is at its next call while the others read its window."""
    hosts = (tuple(range(size)),)
    long = Case(registry.find("broadcast", broadcast), hosts, [60], 0, Choice(broadcast, Medium.WINDOW, 8, True))
    short = Case(registry.find("allreduce", "one-shot"), hosts, [1], 0, Choice("one-shot", Medium.WINDOW, 8, True))
    run([long, short, short] * 2, seed)
