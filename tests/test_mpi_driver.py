"""Runs every file of tests/mpi that is marked ``mpi`` under mpirun: 1 to 4 ranks, Open MPI and MPICH.

A file may narrow the number of ranks with a line of its own: ``RANKS = (2, 3)``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mpirun import IMPLEMENTATIONS, ROOT, run_ranks

DEFAULT_RANKS = (1, 2, 3, 4)


def _ranks(file: Path) -> tuple[int, ...]:
    """Return the numbers of ranks that a file wants, without importing it; none if it is not marked ``mpi``."""
    tree = ast.parse(file.read_text())
    assigned = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)}
    if "pytest.mark.mpi" not in assigned.get("pytestmark", ""):
        return ()
    return tuple(ast.literal_eval(assigned.get("RANKS", repr(DEFAULT_RANKS))))


CASES = [
    pytest.param(file, n, mpi, id=f"{file.stem.removeprefix('test_')}-{n}-{mpi}")
    for file in sorted((ROOT / "tests" / "mpi").glob("test_*.py"))
    for n in _ranks(file)
    for mpi in IMPLEMENTATIONS
]


@pytest.mark.parametrize(("file", "n", "mpi"), CASES)
def test_under_mpirun(file: Path, n: int, mpi: str) -> None:
    result = run_ranks(n, file, mpi=mpi, timeout=120)
    assert all(" passed" in output or " skipped" in output for output in result.ranks), str(result)
