"""Point-to-point messages, as users call them: from one rank to another, matched by source and tag.

Messages from one rank to another with the same tag are received in the order in which they were sent. They are no
operations of all ranks: they may be mixed freely with collectives, also with those in flight, and come from several
threads. Tensors on GPUs pass through host memory.

`send` and `recv` document the arguments and the errors that all functions share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy.typing as npt

from collectives.base.options import IreceiveOptions, MessageOptions, NewTensorOptions, ReceiveOptions, spelled_out
from collectives.engine.handles import Handle
from collectives.engine.messages.transfers import MessageHandle, Status
from collectives.worlds.runtime import default, peer_in, world, world_of
from collectives.worlds.world import World

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = TypeVar("Tensor")


def _with_peer(rank: int, argument: str, options: MessageOptions) -> tuple[World, int]:
    """The world of a call, and a rank of all ranks as a rank of that world. Takes ``process_set`` out of the keywords.

    Args:
        rank: the other side of the message.
        argument: its name in messages.
    """
    process_set = options.pop("process_set", None) if options else None
    if process_set is None:
        return default.world or world(), rank
    return world_of(process_set), peer_in(process_set, rank, argument)


@spelled_out(MessageOptions)
def send(tensor: Any, dst: int, tag: int = 0, **options: Unpack[MessageOptions]) -> None:
    """Send a tensor to a rank. Returns when the tensor may be changed: at once if it is small, and otherwise when the
    receiver has it, or has called `recv`.

    Args:
        tensor: any that `collectives.allreduce` takes, of any shape; on a GPU it is copied to host memory first.
        dst: a rank of all ranks, also where a process set is given. To this rank itself a copy is sent at once.
        tag: from 0 to 2**31 - 1; the receiver asks for it.
        process_set: messages of one process set are never received in another one.
        stream: of a GPU tensor, as for `collectives.allreduce`.

    Raises:
        NotInitializedError, InvalidTypeError, InvalidArgumentError: an argument is refused; the receiver is not told.
        MismatchError: the receiver has called `recv`, and refused the message, for its length or dtype. Where the
            message is small, or travels through MPI, only the receiver raises.
        RankFailedError: a rank has failed or died, or the receiver has shut down.
        CollectiveTimeoutError: the receiver has not called `recv` within COLLECTIVES_TIMEOUT; the world has failed.
    """
    world, peer = _with_peer(dst, "dst", options)
    world.send(tensor, peer, tag, **options)


@spelled_out(MessageOptions)
def isend(tensor: Any, dst: int, tag: int = 0, **options: Unpack[MessageOptions]) -> Handle[None]:
    """Begin to `send` and return at once.

    Returns a handle, with `wait` and `poll`. The tensor must not change until it is done: at once, where this rank
    sends to itself. Meanwhile it may be read, and sent by other calls.
    """
    world, peer = _with_peer(dst, "dst", options)
    return world.isend(tensor, peer, tag, **options)


@overload
def recv(
    tensor: None,
    src: int,
    tag: int = 0,
    *,
    like: Tensor,
    status: Status | None = None,
    **options: Unpack[NewTensorOptions],
) -> Tensor: ...


@overload
def recv(
    tensor: None, src: int, tag: int = 0, *, status: Status | None = None, **options: Unpack[NewTensorOptions]
) -> npt.NDArray[Any]: ...


@overload
def recv(
    tensor: Tensor, src: int, tag: int = 0, *, status: Status | None = None, **options: Unpack[MessageOptions]
) -> Tensor: ...


@spelled_out(ReceiveOptions, like=None, shape=None, dtype=None, status=None)
def recv(tensor: Tensor | None, src: int, tag: int = 0, **options: Unpack[ReceiveOptions]) -> Tensor | npt.NDArray[Any]:
    """Receive a message from a rank.

    Args:
        tensor: writable, of the dtype of the message, and of as many elements at least; the message's elements replace
            the first ones, in C order, and the others stay. Shapes may differ. None: a new tensor is made.
        src: a rank of all ranks, also where a process set is given, or ANY_SOURCE.
        tag: the tag of the message, or ANY_TAG.
        like: of a new tensor: one of the type (NumPy, torch, JAX, ...) that it is to have, and on its device; its shape
            and dtype do not matter. None: a NumPy array.
        shape, dtype: of a new tensor: what the message must have; by default, whatever it has.
        status: is filled with what was received: its source, tag, shape, dtype and number of elements.
        process_set, stream: as for `send`.

    Returns:
        The tensor itself, or the new one.

    Raises:
        NotInitializedError, InvalidTypeError, InvalidArgumentError: an argument is refused; the sender is not told.
        MismatchError: the message has more elements than the tensor, or another dtype or shape than is expected; names
            sender, tag, what was expected and what was found. The message is gone, and the tensor unchanged.
        RankFailedError: a rank has failed or died, or the sender has shut down.
        CollectiveTimeoutError: no message has come within COLLECTIVES_TIMEOUT; the world has failed.
    """
    world, peer = _with_peer(src, "src", options)
    received: Tensor | npt.NDArray[Any] = world.recv(tensor, peer, tag, **options)
    return received


@overload
def irecv(
    tensor: None, src: int, tag: int = 0, *, like: Tensor, **options: Unpack[NewTensorOptions]
) -> MessageHandle[Tensor]: ...


@overload
def irecv(
    tensor: None, src: int, tag: int = 0, **options: Unpack[NewTensorOptions]
) -> MessageHandle[npt.NDArray[Any]]: ...


@overload
def irecv(tensor: Tensor, src: int, tag: int = 0, **options: Unpack[MessageOptions]) -> MessageHandle[Tensor]: ...


@spelled_out(IreceiveOptions, like=None, shape=None, dtype=None)
def irecv(
    tensor: Tensor | None, src: int, tag: int = 0, **options: Unpack[IreceiveOptions]
) -> MessageHandle[Tensor] | MessageHandle[npt.NDArray[Any]]:
    """Begin to `recv` and return at once.

    Returns a handle as `isend` does, whose result is that of `recv`, and whose ``status`` tells what was received. The
    tensor may not be used until it is done. Receives that fit the same message get theirs in the order of the calls.
    """
    world, peer = _with_peer(src, "src", options)
    return world.irecv(tensor, peer, tag, **options)


@overload
def sendrecv(
    tensor: Any,
    dst: int,
    into: None,
    src: int,
    tag: int = 0,
    recv_tag: int | None = None,
    *,
    like: Tensor,
    status: Status | None = None,
    **options: Unpack[NewTensorOptions],
) -> Tensor: ...


@overload
def sendrecv(
    tensor: Tensor,
    dst: int,
    into: None,
    src: int,
    tag: int = 0,
    recv_tag: int | None = None,
    *,
    status: Status | None = None,
    **options: Unpack[NewTensorOptions],
) -> Tensor: ...


@overload
def sendrecv(
    tensor: Any,
    dst: int,
    into: Tensor,
    src: int,
    tag: int = 0,
    recv_tag: int | None = None,
    *,
    status: Status | None = None,
    **options: Unpack[MessageOptions],
) -> Tensor: ...


@spelled_out(ReceiveOptions, like=None, shape=None, dtype=None, status=None)
def sendrecv(
    tensor: Any,
    dst: int,
    into: Tensor | None,
    src: int,
    tag: int = 0,
    recv_tag: int | None = None,
    **options: Unpack[ReceiveOptions],
) -> Tensor:
    """`send` one tensor and `recv` another at the same time, so that ranks in a ring do not wait for each other.

    Args:
        tensor, dst, tag: of the message that is sent.
        into, src, recv_tag: of the message that is received; ``recv_tag`` is ``tag`` by default. ``into`` None: a new
            tensor is made, of the type of ``tensor`` by default.
        like, shape, dtype, status, process_set, stream: as for `recv`.

    Returns:
        What `recv` returns.
    """
    process_set = options.get("process_set") if options else None
    world, following = _with_peer(dst, "dst", options)
    before = src if process_set is None else peer_in(process_set, src, "src")
    received: Tensor = world.sendrecv(tensor, following, into, before, tag, recv_tag, **options)
    return received
