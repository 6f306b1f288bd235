"""What a board makes of a death where ranks on other hosts must hear of it, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from collectives.base.errors import RankFailedError
from collectives.transport.board import FAILED, Board, board_bytes

_PID = 2


def boards() -> tuple[Board, Board]:
    """Of ranks 0 and 1 of this host; rank 2 is on another one."""
    pages = [memoryview(bytearray(board_bytes(3))) for _ in range(2)]
    zero, one = (Board([*pages, None], rank, timeout=20, spins=1) for rank in range(2))
    return zero, one


def died(zero: Board, one: Board) -> Callable[[], object]:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        one._mine[_PID] = process.pid
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
    zero, one = boards()
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
