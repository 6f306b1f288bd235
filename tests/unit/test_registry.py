"""The registry of algorithms: every schedule is proved for every size, races only where that is known, and has the
properties that it is registered with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collectives.base.config import ALGORITHMS
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.proof.races import races
from collectives.schedules.proof.replay import counted, replay, tree
from collectives.schedules.proof.verify import verify
from collectives.schedules.schedule import Schedule, Step, StepKind

REGISTERED = [
    registry.find(collective, name)
    for collective in registry.COLLECTIVES
    for name in registry.NAMES
    if name in registry.on_host(collective) + registry.on_gpu(collective)
]
WITH_SCHEDULE = [algorithm for algorithm in REGISTERED if not algorithm.native]
SIZES = [*range(1, 34), 47, 64, 67, 96, 128]
HOSTS = [((0,),), ((0, 1),), ((0, 1, 2),), ((0, 1), (2, 3)), ((0, 1, 2), (3, 4)), (tuple(range(8)),)]


def name(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


def roots(size: int) -> list[int]:
    return list(range(size)) if size <= 9 else [0, size // 2, size - 1]


def schedules(algorithm: Algorithm, hosts: tuple[tuple[int, ...], ...], root: int = 0) -> list[Schedule]:
    of_rank = algorithm.schedules(hosts, root)
    return [of_rank(rank) for rank in range(sum(map(len, hosts)))]


def chunks_of(steps: Iterable[Step]) -> set[int]:
    return {chunk for step in steps for chunk in range(step.chunk, step.chunk + step.span)}


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_schedules_are_right_and_named_as_registered(algorithm: Algorithm, hosts: tuple[tuple[int, ...], ...]) -> None:
    for root in (0, len(hosts[0]) - 1):
        found = schedules(algorithm, hosts, root)
        verify(found)
        assert {(schedule.collective, schedule.algorithm) for schedule in found} == {
            (algorithm.collective, algorithm.name)
        }


@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_every_size_is_proved_from_every_root(algorithm: Algorithm) -> None:
    for size in SIZES:
        for root in roots(size) if algorithm.collective == "broadcast" else (0,):
            verify(schedules(algorithm, (tuple(range(size)),), root))


@pytest.mark.parametrize("algorithm", [each for each in WITH_SCHEDULE if "reduce" in each.collective], ids=name)
def test_steps_know_how_many_contributions_they_combine(algorithm: Algorithm) -> None:
    leaders = ((0, 1, 2), (3,), (4, 5), (6,))
    for hosts in (*[(tuple(range(size)),) for size in SIZES[:20]], *HOSTS, ((0, 2), (1, 3)), leaders):
        found = schedules(algorithm, hosts)
        for schedule, wanted in zip(found, counted(found), strict=True):
            for steps, right in zip(schedule.rounds, wanted.rounds, strict=True):
                reductions = [[step for step in each if step.kind is StepKind.REDUCE] for each in (steps, right)]
                assert reductions[0] == reductions[1], (hosts, schedule.rank)


@pytest.mark.parametrize("aliased", [True, False])
@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_nothing_races_but_what_needs_its_versions_kept(algorithm: Algorithm, aliased: bool) -> None:
    """One-shot may not overwrite its input; partners of recursive doubling write while they are read: in place always,
    and out of place from the second exchange on."""
    races_from = {("one-shot", True): 2, ("recursive-doubling", True): 2, ("recursive-doubling", False): 3}
    least = races_from.get((algorithm.name, aliased), 100) if algorithm.collective == "allreduce" else 100
    for size in range(1, 11):
        for root in roots(size) if algorithm.collective == "broadcast" else (0,):
            found = races(schedules(algorithm, (tuple(range(size)),), root), aliased)
            assert bool(found) == (size >= least), found


@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_pushed_chunks_are_not_used_again_and_may_as_well_be_pulled(algorithm: Algorithm) -> None:
    """So nobody waits for a push within a call: two ranks that did, each for the other's, could wait for ever. Where
    ranks share windows, what could be pushed is pulled like the rest, without a race that there was not before."""
    for hosts in [(tuple(range(size)),) for size in range(1, 6)] + HOSTS:
        for root in (0, len(hosts[0]) - 1):
            found = schedules(algorithm, hosts, root)
            for schedule in found:
                pushed: set[int] = set()
                for steps in schedule.rounds:
                    own = {StepKind.SEND, StepKind.REDUCE}
                    assert not pushed & chunks_of(s for s in steps if s.kind in own or s.peer == schedule.rank)
                    pushed |= chunks_of(s for s in steps if s.kind is StepKind.RECEIVE and s.push)
            pulled = [
                replace(each, rounds=tuple(tuple(replace(step, push=False) for step in steps) for steps in each.rounds))
                for each in found
            ]
            verify(pulled)
            for aliased in (True, False):
                assert bool(races(pulled, aliased)) == bool(races(found, aliased))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("algorithm", [each for each in WITH_SCHEDULE if each.collective == "allreduce"], ids=name)
def test_all_ranks_get_the_same_bits(algorithm: Algorithm, size: int) -> None:
    for hosts in ((tuple(range(size)),), (tuple(range(1, size)), (0,))):
        found, random = schedules(algorithm, hosts), np.random.default_rng(size)
        chunks = range(found[0].chunks)
        data = [{chunk: random.standard_normal(40).astype(np.float32) for chunk in chunks} for _ in range(size)]
        results = replay(found, data)
        for chunk in chunks:
            exact = sum(mine[chunk].astype(float) for mine in data)
            np.testing.assert_allclose(results[0][chunk], exact, rtol=1e-5, atol=1e-5)
            assert len({result[chunk].tobytes() for result in results}) == 1


@pytest.mark.parametrize("algorithm", [each for each in WITH_SCHEDULE if "reduce" in each.collective], ids=name)
def test_what_keeps_the_order_combines_by_the_fixed_tree(algorithm: Algorithm) -> None:
    """On expressions in place of numbers, of which a op b and b op a are the same."""
    lines = [tuple((rank,) for rank in range(size)) for size in (2, 3, 5, 8)]
    for hosts in [
        *HOSTS,
        *lines,
        ((0, 2), (1, 3)),
        ((0, 1), (2, 3), (4, 5)),
        tuple((2 * h, 2 * h + 1) for h in range(4)),
    ]:
        found = schedules(algorithm, hosts)
        chunks, size = range(found[0].chunks), len(found)
        leaves = [np.array(f"{rank}", object) for rank in range(size)]

        def combine(a: Any, b: Any) -> Any:
            return np.array("(" + "+".join(sorted((str(a), str(b)))) + ")", object)

        expected = str(tree(leaves, combine))
        results = replay(found, [dict.fromkeys(chunks, leaf) for leaf in leaves], combine)
        kept = {
            str(results[rank][chunk]) == expected
            for rank in range(size)
            for chunk in (chunks if algorithm.collective == "allreduce" else [rank])
        }
        assert (kept == {True}) or not algorithm.keeps_order(hosts), hosts


@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_properties_are_those_of_the_schedules(algorithm: Algorithm) -> None:
    found = schedules(algorithm, ((0, 1, 2), (3, 4, 5)))
    assert algorithm.one_chunk == (found[0].chunks == 1)
    assert algorithm.versioned == any(races(found, aliased) for aliased in (True, False))
    kinds = [{step.kind for step in steps if step.push} for steps in found[0].rounds]
    reduces_then_pushes = kinds == [set(), {StepKind.SEND, StepKind.RECEIVE}] and algorithm.collective == "allreduce"
    # "reproducible" does so on some hosts only.
    assert algorithm.owner_pushes == reduces_then_pushes or algorithm.spans_hosts


def test_a_name_is_offered_to_users_as_soon_as_it_is_registered() -> None:
    assert ("auto", *registry.NAMES) == ALGORITHMS
    assert {algorithm.name for algorithm in REGISTERED} == set(registry.NAMES)


def test_what_autotuning_tries_is_an_all_reduce_of_the_host() -> None:
    for one_host in (True, False):
        assert set(registry.tuned(one_host)) < set(registry.on_host("allreduce"))
    assert "hierarchical" in registry.tuned(False) and "hierarchical" not in registry.tuned(True)


def test_nccl_has_collectives_that_mpi_is_not_asked_for() -> None:
    assert registry.NATIVE in registry.on_host("allreduce") and registry.NATIVE not in registry.on_host("broadcast")
    assert registry.NATIVE in registry.on_gpu("broadcast") and registry.NATIVE not in registry.on_gpu("alltoall")
