"""The benchmarks on several ranks: every value right, the peers in the same run, one table."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

import collectives
from benchmarks import cli
from benchmarks.allgather import ALLGATHER
from benchmarks.allreduce import ALLREDUCE
from benchmarks.alltoall import ALLTOALL
from benchmarks.broadcast import BROADCAST
from benchmarks.collective import Collective
from benchmarks.ranks import Ranks
from benchmarks.reducescatter import REDUCESCATTER
from benchmarks.run import main, run

pytestmark = pytest.mark.mpi

RANKS = {"openmpi": (2,), "mpich": (3,)}
RANK = MPI.COMM_WORLD.rank


def flags(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


@pytest.mark.parametrize(
    "collective", [ALLREDUCE, ALLGATHER, BROADCAST, REDUCESCATTER, ALLTOALL], ids=lambda found: found.name
)
def test_every_value_is_right(collective: Collective, capsys: pytest.CaptureFixture[str]) -> None:
    main(collective, flags("-b 4 -e 1M -f 512 -n 2 -w 1 -d float,half,bfloat16,uint8 --peers mpi"))
    shown = capsys.readouterr().out
    if RANK == 0:
        assert "# Out of bounds values : 0 OK" in shown
        assert shown.count("# Avg bus bandwidth") == 1
    else:
        assert shown == ""


@pytest.mark.parametrize(
    "collective", [ALLREDUCE, ALLGATHER, BROADCAST, REDUCESCATTER, ALLTOALL], ids=lambda found: found.name
)
def test_persistent_operations_in_both_memories(collective: Collective, capsys: pytest.CaptureFixture[str]) -> None:
    main(collective, flags("-b 4 -e 1M -f 512 -n 2 -w 1 -d float,uint8 --persistent --memory mapped,private"))
    shown = capsys.readouterr().out
    if RANK == 0:
        assert "# Out of bounds values : 0 OK" in shown
        assert "n/a" not in shown or collective is BROADCAST, "in place only"
        rows = [line for line in shown.splitlines() if " persistent, private " in line]
        assert len(rows) >= 6


def test_all_operations(capsys: pytest.CaptureFixture[str]) -> None:
    main(ALLREDUCE, flags("-b 4K -e 4K -n 1 -w 0 -d double,int32 -o all"))
    main(REDUCESCATTER, flags("-b 4K -e 4K -n 1 -w 0 -d double,int32 -o all"))
    if RANK == 0:
        assert capsys.readouterr().out.count("# Out of bounds values : 0 OK") == 2


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


def test_files_and_forced_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ALLREDUCE,
        ["-b", "64K", "-e", "64K", "-n", "2", "--algorithm", "ring,direct", "--json", str(tmp_path / "results.json")],
    )
    if RANK == 0:
        assert (tmp_path / "results.json").stat().st_size > 0
        shown = capsys.readouterr().out
        assert " ring " in shown
        assert " direct " in shown


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


def test_a_root_that_is_no_rank_is_refused_once(capsys: pytest.CaptureFixture[str]) -> None:
    settings = cli.settings(cli.parser("broadcast", False, True), ["-r", "99"])
    collectives.init()
    try:
        assert run(BROADCAST, settings, Ranks()) == 2
    finally:
        collectives.shutdown()
    assert capsys.readouterr().err.count("99 is not a rank") == (1 if RANK == 0 else 0)
