"""The default world: joining and leaving the other ranks, and the process sets among them.

Only this module and `collectives.api` know a default world; all else takes its state from a `World`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from collectives.base import interrupts, launchers, logging
from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    NotInitializedError,
)
from collectives.base.options import ProcessSetLike
from collectives.base.tracebacks import FULL_TRACEBACKS
from collectives.engine.messages.matching import ANY_SOURCE
from collectives.transport.stores.rendezvous import Asked
from collectives.transport.stores.rendezvous import asked as check_asked
from collectives.transport.threads import thread_groups
from collectives.worlds import connect, elastic_environment, elastic_jobs, status, succession, summary
from collectives.worlds.default_world import default as default
from collectives.worlds.default_world import global_process_set as global_process_set
from collectives.worlds.exit_hooks import RECORDS, Hooks, tell_joined
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Iterable[int] | MPI.Comm] | str | None = None,
    *,
    rendezvous: str | None = None,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
) -> None:
    """Join the other ranks; every rank calls it before any other function. Reads the environment (see `Config`).

    Until `shutdown`, further calls do nothing. After an exception, an interrupt included, every rank that raised may
    call it again; a rank that ends instead ends the job. Without a launcher there is one rank, and MPI is neither
    needed nor started.

    Where the ranks meet is decided by, in this order: the arguments; ``COLLECTIVES_RENDEZVOUS``; MPI, if its launcher
    has started the ranks; the variables of torchrun, Slurm, ``TF_CONFIG`` or JAX. (With
    ``COLLECTIVES_ALLOW_SINGLE=1`` these variables do not count.)

    Args:
        comm: an mpi4py intracommunicator, which is duplicated, or the ranks of COMM_WORLD that take part; all of
            COMM_WORLD by default.
        process_sets: are added as by `add_process_set`. Pass the same sets on every rank, or communicators, of which
            each rank has its own. Horovod's ``"dynamic"`` adds none. A second call accepts only known sets.
        rendezvous: where the ranks meet, such as ``"tcp://node1:29400"``: an address of rank 0's host, and a port that
            is free there. MPI is neither needed nor started.
        store: where the ranks meet, in place of ``rendezvous``: anything with ``set(key, value)``, ``get(key)`` and
            ``wait(keys, timeout)``, such as torch's stores. Anyone who can read it can join, unless
            ``COLLECTIVES_KEY`` is set.
        rank, size: of this process, with ``rendezvous`` or ``store``; by default ``COLLECTIVES_RANK`` and
            ``COLLECTIVES_SIZE``, or the launcher's variables.

    Raises:
        MissingDependencyError: an MPI launcher has started several ranks, but no MPI library can be loaded, and nothing
            says where they meet.
        TransportError: a launcher has started several processes, but this one finds no other: nothing says where they
            meet, or the launcher belongs to another MPI. (With ``COLLECTIVES_ALLOW_SINGLE=1`` it becomes a world of
            one rank instead.) Or the store where the ranks meet is not this job's.
        InvalidArgumentError: a setting in the environment or ``comm`` is invalid; the arguments contradict each other;
            this process already is another rank, perhaps in another thread; or two process sets have the same ranks,
            or one has all ranks: then the world and the other sets exist.
        CollectiveTimeoutError: not every rank has called `init` in time.
        RankFailedError: a rank raised during its `init`.
        ForkedProcessError: a rank has started this process, which is not a rank itself.

    Example:
        >>> hvd.init()
    """
    asked = check_asked(comm, rendezvous, store, rank, size)
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidArgumentError(f'process_sets: expected process sets or "dynamic", got {process_sets!r} [S19]')
        process_sets = ()
    sets = [members if isinstance(members, ProcessSet) else ProcessSet(members) for members in process_sets or ()]
    with interrupts.deferred(), default.as_one_rank(asked), default.held():
        if default.world is not None:
            default.known.recognize(sets, default.world, default.comm)
            return
        if default.joining:
            raise InvalidArgumentError(
                "init() was called by a signal handler while init() was running; set a flag in the handler, and call "
                "init() later [W26]"
            )
        connect.check_place(asked)
        if comm is None and not asked.explicit:
            default.job = default.job or elastic_environment.job()
        several = default.job is not None or launchers.mpi_may_join(os.environ) or launchers.several(os.environ)
        if "mpi4py.MPI" in sys.modules or several or asked.explicit:
            _watch_exit()  # the others must not wait for a rank that fails for an invalid setting
        path = os.environ.get(status.VARIABLE, "" if several or asked.explicit else "0")
        if path != "0" and (default.status is None or not default.status.is_alive()):
            default.status = status.start(path, _present, asked)
        config = Config.from_environment()
        logging.configure(config.log_level)
        default.joining = True
        try:
            world = _join(comm, config, asked)
        finally:
            default.joining = False
        logging.place(world.rank)
        summary.log(world)
    if world.config.timeline and (default.job is None or default.job.generation == 1):
        world.start_timeline(world.config.timeline, world.config.timeline_mark_cycles)
    if sets:
        with interrupts.deferred():
            if _is_newcomer():
                default.known.foresee(sets, world)
            elif default.job is not None and default.job.others_renewed:
                default.known.recognize(sets, world, comm)  # the others have made them again
            else:
                default.known.add_first(sets, world, default.comm)


def _join(comm: MPI.Intracomm | Sequence[int] | None, config: Config, asked: Asked) -> World:
    """Make the default world. After an exception it can be tried again, and no other rank waits for this one."""
    group = None
    try:
        if default.job is not None:
            world = _world_of_job(default.job, config)
        else:
            group = connect.connect(comm, config, _watch_exit, asked)
            world = World(group, group.config or config)
        if world.size > 1 or default.job is not None:
            connect.take_place(asked)
            tell_joined(os.environ.get(RECORDS))
        elif default.hooks is not None:
            default.hooks.remove()
            default.hooks = None
        global_process_set.mpi_comm = None if isinstance(comm, Sequence) else comm
        default.comm = comm
        default.adopt(world)
    except BaseException as error:
        default.interrupted = not isinstance(error, CollectivesError) or isinstance(error, CollectiveTimeoutError)
        if group is not None:
            group.control.fail(f"{type(error).__name__}: {error}")
        raise
    default.interrupted = False
    return world


def _present() -> tuple[World | None, int | None]:
    """The default world and the generation of an elastic job, for the thread that says where this rank is; while
    `init` makes a world, a generation before the first, so that the thread does not take this for the end."""
    if default.joining and default.job is None:
        return default.world, -1
    return default.world, None if default.job is None else default.job.generation


def _is_newcomer() -> bool:
    """Whether this process waits to be admitted to an elastic job, and is alone until then."""
    return default.job is not None and not default.job.generation


def _world_of_job(job: elastic_jobs.Job, config: Config) -> World:
    """The world that this member of an elastic job begins with: of the first generation, or a later one, if ranks have
    died meanwhile; or of itself, while others have one; or, after a `shutdown`, of the next."""
    began = time.monotonic()
    if job.generation:
        why = "init() was called again"
        world: World | None = job.next(why, config)
    else:
        why = "this process has joined"
        world = job.join(config)
    if world is None:
        return World(thread_groups.connect(1)[0], config)
    return world if job.generation == 1 else succession.begin_by_init(default, world, job, began, why)


def shutdown() -> None:
    """Leave the other ranks. Does nothing before `init`. Does not finalise MPI, which the program may still use.

    First it waits until other threads' calls have ended. An interrupt during that wait changes nothing: call it again.
    A later interrupt is raised once this rank has left.
    """
    with default.held():
        # Without a world the hooks stay: `init` may have been interrupted, and the others wait in it for this rank.
        if default.world is not None:
            try:
                default.world.shutdown()
            except Exception:
                default.forget()
                raise
            default.forget()
            if default.hooks is not None:
                default.hooks.remove()
                default.hooks = None


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not been called since."""
    return default.world is not None


def world() -> World:
    """The default world.

    Raises:
        NotInitializedError: before `init` or after `shutdown`.
    """
    current = default.world
    if current is None:
        again = "was shut down; call collectives.init() again"
        when = again if default.was_shut_down else "has not been initialized; call collectives.init()"
        raise NotInitializedError(f"collectives {when} on every rank before any other function [W4]")
    return current


def _place() -> World | elastic_jobs.Place:
    """Where this process is among the ranks. A newcomer of an elastic job, which is alone until it is admitted, has the
    place that it will have, because programs share out data, log and write checkpoints by it."""
    current, job = world(), default.job
    return current if job is None or job.expected is None else job.expected


def rank() -> int:
    """This rank, from 0 to `size` - 1."""
    return _place().rank


def size() -> int:
    """The number of ranks."""
    return _place().size


def local_rank() -> int:
    """This rank among the ranks of its host."""
    return _place().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _place().local_size


def local_device() -> int:
    """The number of this rank's GPU in this process: ``COLLECTIVES_DEVICE``, or chosen by `local_rank`.

    Programs select it: ``torch.cuda.set_device(collectives.local_device())``. Collectives run on the GPU of their
    tensors, which may be another one. If a host has more ranks than GPUs, ranks share GPUs.

    Raises:
        MissingDependencyError: GPUs cannot be used here; names what is missing.
        InvalidArgumentError: there is no GPU of that number.
    """
    from collectives.device import selection  # not imported by programs without GPUs

    current = world()
    return selection.choose(current.local_rank, current.config.device if current.config.device >= 0 else None)


def cross_rank() -> int:
    """The number of this host among those that have a rank with this local rank."""
    return world().cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return world().is_homogeneous


def world_of(process_set: ProcessSetLike | int | None) -> World:
    """The world of a process set, of its number, or of all ranks.

    Raises:
        NotInitializedError: before `init`, or the set was not added.
        InvalidArgumentError: this rank is not in the set, or there is no set of that number.
    """
    if process_set is None:
        return default.world or world()
    if process_set is global_process_set:
        return world()
    if type(process_set) is ProcessSet:
        return process_set.world()
    if isinstance(process_set, int) and not isinstance(process_set, bool):
        return process_set_of(process_set).world()
    raise InvalidTypeError(f"process_set: expected a ProcessSet, got {process_set!r} [W53]")


def communicates(process_set: ProcessSet) -> bool:
    """Whether this process ever has others to communicate with in a process set: now or, in an elastic job, when its
    world is followed by another one. What adapters leave out where it has none is left out for good."""
    return process_set.included() and (process_set.size() > 1 or is_elastic())


def is_elastic() -> bool:
    """Whether the job is elastic, so that other worlds follow the present one."""
    return default.job is not None


def process_set_of(number: int) -> ProcessSet:
    """The process set of a number, whether this rank is in it or not.

    Raises:
        NotInitializedError: before `init`. InvalidArgumentError: there is no set of that number.
    """
    world()
    return default.known.of(number)


def root_in(process_set: ProcessSetLike | int | None, root_rank: Any, name: str | None = None) -> Any:
    """Convert the root of the operation ``name`` from a rank of all ranks to a rank of a process set; a refusal is told
    to the set's other ranks."""
    return rank_in(process_set, root_rank, "root_rank", name)


def rank_in(process_set: ProcessSetLike | int | None, rank: Any, argument: str, name: str | None = None) -> Any:
    """`root_in`; or, for the other ``argument`` s, the same of the other side of a message, of which no rank is told.

    Raises:
        InvalidArgumentError: the rank is not in the set.
    """
    is_root = argument == "root_rank"
    if process_set is None or process_set is global_process_set or (rank == ANY_SOURCE and not is_root):
        return rank
    members = world_of(process_set)
    resolved_set: Any = default.known.of(process_set) if isinstance(process_set, int) else process_set
    try:
        return resolved_set.number_of(rank, argument)
    except InvalidArgumentError as error:
        if is_root:
            raise members.refused(error, name) from None
        raise InvalidArgumentError(f"rank {members.ranks[members.rank]}: {error}") from None


def add_process_set(process_set: ProcessSet | Iterable[int], *, unlike: bool = False) -> ProcessSet:
    """Make a process set; every rank calls it, in the same order as other collectives.

    Args:
        process_set: a `ProcessSet`, or the ranks of one.
        unlike: whether to refuse a set of all ranks, or of the same ranks as a known set, as Horovod does. If not, such
            a set is added, and its operations are independent.

    Returns:
        The process set.

    Raises:
        InvalidArgumentError: a rank does not exist, the set was already added, or a duplicate is refused.
        NotImplementedError: the set was made of a communicator, which only `init` accepts.
        MismatchError: the ranks' sets differ.

    Example:
        >>> alone = hvd.add_process_set([0])
        >>> alone.included() == (hvd.rank() == 0)
        True
        >>> hvd.remove_process_set(alone)
        True
    """
    root = world()
    try:
        members = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    except (InvalidTypeError, InvalidArgumentError) as error:
        raise root.refused(error, None) from None
    with interrupts.deferred():
        if _is_newcomer():
            default.known.foresee([members], root)
        else:
            default.known.add(members, root, unlike)
    return members


def remove_process_set(process_set: ProcessSet) -> bool:
    """Shut down a process set; every rank calls it. Operations in flight on it fail.

    Returns:
        True if the set was removed; False if it was not known, or is the set of all ranks.

    Raises:
        InvalidTypeError: the argument is not a `ProcessSet`.
        MismatchError: the ranks passed different sets; none is removed.

    Example:
        >>> hvd.remove_process_set(hvd.add_process_set([0]))
        True
    """
    passed: object = process_set
    if not isinstance(passed, ProcessSet):
        wrong = InvalidTypeError(f"remove_process_set: process_set: expected a ProcessSet, got {passed!r} [W66]")
        raise world().refused(wrong, None)
    if not process_set.process_set_id:
        return False
    root = world()
    with interrupts.deferred():
        return default.known.remove(process_set, root)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record the engine's work, as a trace that Perfetto and Chrome open; every rank calls it.

    Args:
        file_path: the file for all ranks, as rank 0 passes it; ``collectives report`` turns it into a report.
        mark_cycles: whether to mark every negotiation round.

    Example:
        >>> hvd.start_timeline("run.json")
        >>> hvd.stop_timeline()
    """
    world().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop recording, and finish the file."""
    world().stop_timeline()


def _watch_exit() -> None:
    """Watch how this process ends, from before it joins the others, which may already wait for it."""
    if default.hooks is None:
        connect.finalize_at_exit()  # exit handlers run in reverse order
        rank, records = launchers.rank(os.environ), os.environ.get(RECORDS)
        full = bool(os.environ.get(FULL_TRACEBACKS))
        default.hooks = Hooks(
            rank, connect.abort, _publish, records, all_left=_all_left, leave=_leave, full_tracebacks=full
        )


def _publish(text: str) -> None:
    default.interrupted = False  # this failure is published, and ends the job with its own exit code
    if default.job is not None:
        with suppress(CollectivesError):  # who hears it may have ended
            default.job.say("failed", text.strip().rpartition("\n")[2])
    if default.world is not None:
        default.world.fail(text)


def _all_left() -> bool:
    return default.world is None or default.world.all_left()


def _leave() -> None:
    if default.world is not None:
        default.world.leave()
    elif default.interrupted:
        print(
            "collectives: init() was interrupted before this rank joined the others; ending the job [W64]",
            file=sys.stderr,
        )
        connect.abort(1)
