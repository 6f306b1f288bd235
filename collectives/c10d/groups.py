"""The process groups that torch gets, and how their ranks are connected.

torch has two ways in. Where ``torch.distributed.Backend`` can be derived from in Python, the group is a backend, beside
those of other devices. Elsewhere it is a ``ProcessGroup`` by itself, for all devices. The default group connects its
ranks, and further groups are made over its connection, by their members alone. A group whose members are not connected,
because the default group is another backend's, makes a connection of its own.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from collectives.base.config import Config, Timeout
from collectives.base.errors import InvalidArgumentError
from collectives.c10d import nan_checks
from collectives.c10d.membership import Membership
from collectives.c10d.operations import Operations
from collectives.worlds.connections import Connection

_ProcessGroup: Any = dist.ProcessGroup
_Backend: Any = torch._C._distributed_c10d.Backend
NAME = "collectives"
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Group(Operations, Membership):
    """What both kinds of groups have besides their operations: what torch asks of a group, and its end."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_reconfigure = True
    options: Any = None
    _name = _description = ""
    _sequence = 0

    def __init__(
        self,
        store: Any = None,
        rank: int = 0,
        size: int = 1,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        name: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        """Connect the ranks, or stay without them where there is no store.

        Args:
            store: the group's own, at which its ranks meet if they are not connected yet.
            rank, size: of this process in the group.
            timeout: how long its operations wait for a rank.
            name: of the group.
            ranks: the members, as ranks of the default group; empty: this is the default group.
        """
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's class, which comes after these
        self._rank, self._size, self._name, self._timeout, self._store = rank, size, name, timeout, store
        if store is None:
            return
        if ranks and _Connected.all_ranks is not None:
            config = self._config()
            self.world = _Connected.all_ranks.part(_Connected.unique(name, ranks), ranks, config)
            return
        self._connect(store, rank, size, f"the store of process group {name}", ranks or None)
        if not ranks:
            _Connected.all_ranks = self._connection

    def _config(self) -> Config:
        timeout = Timeout(self._timeout.total_seconds(), "timeout= of init_process_group or new_group")
        return replace(Config.from_environment(), timeout=timeout)

    def shutdown(self) -> None:
        """Leave the group; operations in flight fail. Idempotent."""
        if self._connection is not None and self._connection is _Connected.all_ranks:
            _Connected.all_ranks = None
        self._disconnect()

    def abort(self) -> None:
        """End the group at once: operations in flight fail, here and on the other ranks. It may be reconfigured."""
        if self.world is not None:
            self.world.fail("its process group was aborted")
        self.shutdown()

    # ---- what torch asks

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Of operations to come: how long `Work.wait` waits."""
        self._timeout, self._limit = timeout, timeout.total_seconds()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, dtype: Any = None, device: Any = None) -> Any:
        """An uninitialised tensor in memory that the ranks of a host map; for FSDP, if the program asks for it
        by ``model.set_allocate_memory_from_process_group_for_comm(True)``."""
        from collectives.torch import memory  # with the adapter, which few programs over this backend need

        return memory.empty(size, dtype=dtype, device=device)

    def get_group_store(self) -> Any:
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _wait_for_pending_works(self) -> None:
        """Operations complete by themselves."""

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier; its error names the ranks that are missing, as every error here does."""
        self.barrier(opts).wait()


class ProcessGroup(Group, _ProcessGroup):  # type: ignore[misc]  # torch's class
    """A process group by itself, for all devices.

        group = ProcessGroup(timeout=timedelta(seconds=30))    # torchft: Manager(pg=group, ...)

    Args: as of `Group`. Without a store the group has no members until it is configured (`Membership`).
    """

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description


class _Connected:
    """The connection of the default group's ranks, over which other groups are made."""

    all_ranks: Connection | None = None
    _made: ClassVar[defaultdict[str, Iterator[int]]] = defaultdict(itertools.count)
    """How often the same members have made a group of the same name: equal on them, whatever other ranks have made."""

    @classmethod
    def unique(cls, name: str, ranks: Sequence[int]) -> str:
        """A name for the network, the same on all members, that was not used before: torch uses its names again, also
        for other members."""
        key = f"c10d/{name}/{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
        return f"{key}/{next(cls._made[key])}"


class Backend(Group, _Backend):  # type: ignore[misc]  # torch's class
    """A backend of one of torch's groups, beside those of other devices. Takes what `ProcessGroup` takes.

    Where this version of torch has no constructor for it, making one raises TypeError. Of a `Work`, torch's group
    passes on ``wait`` and ``get_future`` alone.
    """


def create(options: Any, pg_options: Any = None) -> Any:
    """Make a process group; what torch calls for ``init_process_group("collectives")`` and ``new_group``.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        pg_options: the caller's.

    Raises:
        InvalidArgumentError: options of another backend; or other backends are wanted for other devices, and this torch
            does not let a Python class be one of several.
    """
    if pg_options is not None:
        raise InvalidArgumentError(
            f"pg_options: expected None for the backend {NAME}, got {pg_options!r}; leave pg_options out [F96]"
        )
    deferred = getattr(options, "enable_reconfigure", False)
    arguments = (
        None if deferred else options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
    )
    wanted = _wanted_backends()
    if not wanted - {NAME}:
        checks = os.environ.get("TORCH_DIST_NAN_CHECK") == "1"
        return (nan_checks.checked(ProcessGroup) if checks else ProcessGroup)(*arguments)
    try:
        return Backend(*arguments)
    except TypeError as error:
        if "constructor" not in str(error):
            raise
        raise InvalidArgumentError(
            f"backend: expected {NAME!r} alone, for all devices, got it together with {', '.join(wanted - {NAME})}: "
            f"in torch {torch.__version__} a backend written in Python replaces the whole process group; pass "
            f"{NAME!r} alone, or use torch 2.14 or newer [F97]"
        ) from None


def _wanted_backends() -> set[str]:
    """The backends of the group that is being made. torch does not tell this to the maker of one of them, but the
    function of torch's that calls it has the text in a variable."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    text = str(frame.f_locals.get("backend", NAME)) if frame is not None else NAME
    return {part.rpartition(":")[2] for part in text.split(",")}
