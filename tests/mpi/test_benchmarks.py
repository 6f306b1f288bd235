"""The benchmarks on several ranks: every value right, the peers in the same run, one table."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import collectives
from benchmarks.allgather import ALLGATHER
from benchmarks.allreduce import ALLREDUCE
from benchmarks.broadcast import BROADCAST
from benchmarks.run import main
from collectives.tools.bench.collective import Collective

pytestmark = pytest.mark.mpi

RANKS = {"openmpi": (2,), "mpich": (3,)}
RANK = MPI.COMM_WORLD.rank


def flags(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


@pytest.mark.parametrize("collective", [ALLREDUCE, ALLGATHER, BROADCAST], ids=lambda collective: collective.name)
def test_every_value_is_right(collective: Collective, capsys: pytest.CaptureFixture[str]) -> None:
    """One-shot and persistent, in both memories, beside MPI's own."""
    types = "-d float,half,bfloat16,uint8 --persistent --memory mapped,private --peers mpi"
    main(collective, flags(f"-b 4 -e 1M -f 512 -n 2 -w 1 {types}"))
    shown = capsys.readouterr().out
    if RANK > 0:
        assert shown == ""
        return
    assert "# Out of bounds values : 0 OK" in shown and shown.count("# Avg bus bandwidth") == 1
    persistent = [line for line in shown.splitlines() if " persistent" in line]
    assert collective is BROADCAST or not any("n/a" in line for line in persistent), "in place only"
    assert len([line for line in persistent if " persistent, private " in line]) >= 6


def test_every_operation_gives_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    main(ALLREDUCE, flags("-b 1K -e 1K -n 1 -w 0 -d float,half,int32,uint8 -o sum,avg,prod,min,max"))
    assert "# Out of bounds values : 0 OK" in capsys.readouterr().out or RANK > 0


def test_wrong_results_fail_on_every_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = collectives.allreduce_

    def spoiled(tensor, **options):  # type: ignore[no-untyped-def]
        original(tensor, **options)
        if collectives.rank() == collectives.size() - 1:
            tensor[0] += 1
        return tensor

    monkeypatch.setattr(collectives, "allreduce_", spoiled)
    with pytest.raises(SystemExit) as ended:
        main(ALLREDUCE, flags("-b 4K -e 4K -n 1 -w 0"))
    assert ended.value.code == 1
    assert "FAILED" in capsys.readouterr().out or RANK > 0


@pytest.mark.parametrize("memory", ["private", "mapped"])
def test_the_prototype_of_two_ranks(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file of its own, which grows from row to row, and in the rows' own memory."""
    main(ALLREDUCE, flags(f"-b 4 -e 4M -f 64 -n 2 -w 0 -d float,int32 --peers prototype --memory {memory}"))
    if RANK == 0:
        shown = capsys.readouterr().out
        assert "# Out of bounds values : 0 OK" in shown
        if MPI.COMM_WORLD.size == 2:
            assert shown.count(" prototype ") == 8
        else:
            assert "needs two ranks on one host" in shown
