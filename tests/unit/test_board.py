"""What a board makes of a death where ranks on other hosts must hear of it, too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from collectives.base.errors import RankFailedError
from collectives.transport.host.board import FAILED, Board, board_bytes


def boards(here: int) -> list[Board]:
    """Of the first ranks of three: those of this host."""
    pages = [memoryview(bytearray(board_bytes(3))) for _ in range(here)]
    processes = [os.getpid()] * 3
    return [
        Board([*pages, *[None] * (3 - here)], rank, timeout=20, spins=1, processes=processes) for rank in range(here)
    ]


def run_in(rank: Board, process: int) -> None:
    """Have all boards say that a rank is another process."""
    rank._processes[rank.rank] = process  # type: ignore[index]  # a list, of all boards


def die(rank: Board) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        run_in(rank, process.pid)


def died(zero: Board, one: Board) -> Callable[[], object]:
    die(one)
    return zero.check


def inaccessible(zero: Board, one: Board) -> Callable[[], object]:
    return lambda: zero.explain(1, gone=True)


def failed_because_of_another(zero: Board, one: Board) -> Callable[[], object]:
    one.mark(FAILED, "RankFailedError: rank 2 has died")
    return zero.check


@pytest.mark.parametrize("end", [died, inaccessible, failed_because_of_another])
def test_what_the_network_knows_of_a_death_is_raised_though_the_board_shows_it_first(
    end: Callable[[Board, Board], Any],
) -> None:
    zero, one = boards(2)
    looks = 0

    def look_for_failures() -> None:
        nonlocal looks
        looks += 1
        if looks == 20:
            raise RankFailedError("rank 0: rank 1 on host1 has died")

    check = end(zero, one)
    zero.also_check = look_for_failures
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 1 on host1 has died$"):
        check()
    zero.also_check = None
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 1 has failed"):
        check()


@pytest.mark.parametrize("said", ["", "ValueError: no good"])
def test_a_rank_that_failed_because_of_another_is_not_named(said: str) -> None:
    """Also where its failure is seen first: whether processes live is looked at now and then."""
    zero, one, two = boards(3)
    one.mark(FAILED, "RankFailedError: rank 2 has failed")
    two.mark(FAILED, said) if said else die(two)
    with pytest.raises(
        RankFailedError, match=r"^rank 0: rank 2 has failed \[R5\]" + (f":\n{said}" if said else r" \(it died")
    ):
        zero.check(processes=False)


def test_a_process_that_its_parent_does_not_wait_for_has_died() -> None:
    zero, one = boards(2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run_in(one, process.pid)
        zero.check()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays in the table
        with pytest.raises(RankFailedError, match="rank 0: rank 1 has failed"):
            zero.check()
