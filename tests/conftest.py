"""Set-up shared by all tests, on one process or on every rank of an mpirun."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from collectives.base import launchers
from tests.support.emulated import host_kernels

# Hundreds of interpreters start, and may keep what they compile for the next ones, whatever the user's own do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Ranks must draw the same examples, or they would call different collectives; and examples on a slow machine have no
# deadline.
settings.register_profile("one-process", deadline=None)
settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
_UNDER_MPI = any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
settings.load_profile("ranks" if _UNDER_MPI else "one-process")
if not _UNDER_MPI:
    # A job of Slurm's, say, in which the tests run: worlds of one rank are meant here.
    for _variable in launchers.VARIABLES:
        os.environ.pop(_variable, None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # In the background of a script; jobs that the tests interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_module() -> None:
    """Collecting garbage, which many tests do, looks at what the module's own tests have made: all else takes several
    times as long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def gradients_of_this_module() -> Iterator[None]:
    """Importing `horovod` chooses its gradients for this process and those that it starts: not for the tests of other
    modules."""
    before = os.environ.get("COLLECTIVES_GRADIENTS")
    yield
    if before is None:
        os.environ.pop("COLLECTIVES_GRADIENTS", None)


@pytest.fixture(scope="session")
def kernels() -> None:
    """The device's kernels are there for the CPU: compiled all at once, which is several times quicker than each when
    it is needed."""
    if host_kernels.COMPILER is None:
        pytest.skip(host_kernels.MISSING)
    host_kernels.prepare()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests for ranks to ``test_mpi_driver.py``, which starts them under mpirun.

    Tests that are neither pure nor run their ranks as threads are slow.
    """
    if config.getoption("--with-mpi"):
        return
    for item in items:
        if item.path.parent.name not in ("unit", "threads"):
            item.add_marker(pytest.mark.slow)
    for_ranks = [item for item in items if item.get_closest_marker("mpi")]
    if for_ranks and len(for_ranks) < len(items):
        config.hook.pytest_deselected(items=for_ranks)
        items[:] = [item for item in items if item not in for_ranks]
