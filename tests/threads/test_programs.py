"""Random programs with ranks as threads: one host, hosts of several shapes, no direct reads, and blocking calls
alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.random.programs import Menu, Program, draw, run

SEVERAL_HOSTS = (((0,), (1,)), ((0, 2), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)))


def carry_out(program: Program, hosts: Sequence[Sequence[int]] | None = None, reads_private: bool = True) -> None:
    thread_groups.run(
        program.size,
        lambda world: run(world, program),
        hosts=hosts,
        reads_private=reads_private,
        timeout=30,
        make_world=World,
    )


@pytest.mark.parametrize("seed", range(32))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_host(size: int, seed: int) -> None:
    carry_out(draw(seed, size))


@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("hosts", SEVERAL_HOSTS, ids=str)
def test_several_hosts(hosts: Sequence[Sequence[int]], seed: int) -> None:
    carry_out(draw(seed, sum(map(len, hosts))), hosts=hosts)


@pytest.mark.parametrize("seed", range(200, 220))
def test_without_direct_reads(seed: int) -> None:
    carry_out(draw(seed, 3), reads_private=False)


@pytest.mark.parametrize("seed", range(300, 320))
def test_blocking_calls_alone(seed: int) -> None:
    carry_out(draw(seed, 2 + seed % 3, Menu(asynchronous=0.0)))
