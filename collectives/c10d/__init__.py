"""The backend "collectives" of ``torch.distributed``.

    torch.distributed.init_process_group("collectives")    # in place of "gloo"

torch finds it by the entry point ``torch.backends``, which calls `register`. DDP, FSDP, DTensor and what stands on
these run over the engine then. Nothing of the engine is imported before the first process group is made.

``ProcessGroup`` is the class of its groups. One that is made without arguments has no members until it is configured,
as torchft's ``Manager(pg=ProcessGroup(timeout=...))`` does, or reconfigured.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.c10d.groups import ProcessGroup

__all__ = ["ProcessGroup", "get_reconfigure_handle", "monitored_barrier", "reconfigure", "register"]

_DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Tell torch about the backend; does nothing where torch is built without ``torch.distributed``, or knows it."""
    import torch.distributed as dist

    if dist.is_available() and "collectives" not in dist.Backend.backend_list:
        dist.Backend.register_backend("collectives", _create, extended_api=True, devices=_DEVICES)


def get_reconfigure_handle(group: Any = None) -> str:
    """Where this process can be met: a text that names it in `reconfigure`.

    Args:
        group: of this backend; the default group by default.
    """
    handle: str = _ours(group).get_reconfigure_handle()
    return handle


def reconfigure(uuid: int, handles: Iterable[str], timeout: timedelta | None = None, group: Any = None) -> None:
    """Give a group other members: shrink it, grow it, merge, divide or reorder groups; after an ``abort()``, too. Every
    process that is to be a member calls it. c10d's ``_reconfigure``, for every version of torch.

    Args:
        uuid: a number that is used once.
        handles: of all new members: in a list in the order of their ranks, in a set in any.
        timeout: of the group from now on; None: as it was.
        group: as of `get_reconfigure_handle`.

    Raises:
        InvalidArgumentError: this process is not among the members. OperationError: the number was used before. The
            group stays as it is.
        CollectiveTimeoutError, RankFailedError: not every member came; the group has no members then, and may be
            reconfigured again.
    """
    handles = handles if isinstance(handles, (set, frozenset)) else list(handles)
    _ours(group).reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout))


def monitored_barrier(group: Any = None) -> None:
    """A barrier whose error names the ranks that are missing. (``torch.distributed.monitored_barrier`` accepts no other
    backend than gloo.)

    Args:
        group: as of `get_reconfigure_handle`.
    """
    _ours(group).monitored_barrier()


def _ours(group: Any) -> Any:
    """This backend's part of a group."""
    import torch
    import torch.distributed as dist

    from collectives.base.errors import InvalidTypeError
    from collectives.c10d.groups import Group

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, Group) and group is not None:
        group = group._get_backend(torch.device("cpu"))
    if not isinstance(group, Group):
        raise InvalidTypeError(f"group: expected a process group of the backend collectives, got {group!r} [F95]")
    return group


def _create(options: Any, pg_options: Any) -> Any:
    from collectives.c10d import groups  # with the engine, which not all programs need

    return groups.create(options, pg_options)


def __getattr__(name: str) -> Any:
    if name == "ProcessGroup":
        from collectives.c10d.groups import ProcessGroup

        return ProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
