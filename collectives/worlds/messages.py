"""Point-to-point messages of one world, on tensors of every kind.

A rank that refuses its arguments tells no peer: the other side waits for the message, as for any that was not sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from collectives.base import dtypes
from collectives.base.errors import CollectivesError, InvalidArgumentError, InvalidTypeError
from collectives.base.options import (
    IreceiveOptions,
    MessageOptions,
    NewTensorOptions,
    ReceiveOptions,
    refuse_unknown,
)
from collectives.engine import arguments
from collectives.engine.handles import Handle
from collectives.engine.messages.matching import ANY_SOURCE, ANY_TAG, Posted
from collectives.engine.messages.transfers import MessageHandle, Status, Transfers
from collectives.tensors import arrays
from collectives.tensors.arrays import View
from collectives.transport.point_to_point import Outgoing

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_TAG = (1 << 31) - 1
"""The largest tag."""

Tensor = TypeVar("Tensor")
_Finish = Callable[[], Any]


class Messages:
    """Point-to-point messages of a world; ranks are numbered within the world, except in a `Status`."""

    def __init__(self, rank: int, ranks: Sequence[int], transfers: Transfers) -> None:
        self._rank, self._ranks, self._size = rank, ranks, len(ranks)
        self._transfers, self._delivery = transfers, transfers.delivery

    # ---- sending

    def send(self, tensor: Any, dst: int, tag: int = 0, **options: Unpack[MessageOptions]) -> None:
        """Send a tensor to a rank. Returns when the tensor may be changed: at once if it is small, and otherwise when
        the receiver has it, or has called `recv`.

        Args:
            tensor: any that `collectives.allreduce` takes, of any shape; on a GPU it is copied to host memory first.
            dst: a rank of the whole world, also with a process set. A message to this rank itself is copied at once.
            tag: from 0 to 2**31 - 1; the receiver asks for it.
            process_set: messages of one process set are never received in another one.
            stream: of a GPU tensor, as for `collectives.allreduce`.

        Raises:
            NotInitializedError, InvalidTypeError, InvalidArgumentError: an argument is refused; the receiver is not
                told.
            MismatchError: the receiver has called `recv` and refused the message because of its length or dtype. If
                the message is small, or travels through MPI, only the receiver raises.
            RankFailedError: a rank has failed or died, or the receiver has shut down.
            CollectiveTimeoutError: the receiver has not called `recv` within COLLECTIVES_TIMEOUT; the world has failed.

        Example:
            >>> peer = 1 - hvd.rank()
            >>> handle = hvd.irecv(None, peer)
            >>> hvd.send(np.arange(3), peer)
            >>> handle.wait()
            array([0, 1, 2])
        """
        plain = not options and self._is_plain(tensor, dst, tag)
        message = self._delivery.send_at_once(tensor, dst, tag) if plain else False
        if message is True:
            return
        if message is False:
            refuse_unknown(options, MessageOptions)
            message, _ = self._outgoing(tensor, dst, tag, options.get("stream"))
        try:
            self._transfers.complete(message)
        except BaseException as error:  # an interrupt as the call begins
            self._delivery.abandon(message, error)
            raise
        self._delivery.check_refused(message)

    def isend(self, tensor: Any, dst: int, tag: int = 0, **options: Unpack[MessageOptions]) -> Handle[None]:
        """Begin to `send` and return at once.

        Returns a handle, with `wait` and `poll`. The tensor must not change until it is done: at once, where this rank
        sends to itself. Meanwhile it may be read, and sent by other calls.

        Example:
            >>> peer = 1 - hvd.rank()
            >>> handle = hvd.isend(np.arange(3), peer, tag=7)
            >>> hvd.recv(None, peer, tag=7)
            array([0, 1, 2])
            >>> handle.wait()
        """
        refuse_unknown(options, MessageOptions)
        message, view = self._outgoing(tensor, dst, tag, options.get("stream"))
        delivery, reads = self._delivery, view if isinstance(view, View) and not view.copied else None
        return self._transfers.start(message, lambda handle: delivery.check_refused(message), reads=reads)

    def _outgoing(self, tensor: Any, dst: Any, tag: Any, stream: Any) -> tuple[Outgoing, Any]:
        """A message that has not been sent, and the view of its tensor."""
        try:
            peer = arguments.integer("dst", dst, "a rank", self._size - 1)
            tag = arguments.integer("tag", tag, "an integer", MOST_TAG)
            view = arrays.view(tensor, stream=stream)
            array = view.array if isinstance(view, View) else view.on_host()
        except CollectivesError as error:
            raise self._named(error) from None
        return Outgoing(peer, tag, array, view.shape), view

    # ---- receiving

    @overload
    def recv(
        self,
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
        self, tensor: None, src: int, tag: int = 0, *, status: Status | None = None, **options: Unpack[NewTensorOptions]
    ) -> npt.NDArray[Any]: ...

    @overload
    def recv(
        self, tensor: Tensor, src: int, tag: int = 0, *, status: Status | None = None, **options: Unpack[MessageOptions]
    ) -> Tensor: ...

    def recv(
        self, tensor: Tensor | None, src: int, tag: int = 0, **options: Unpack[ReceiveOptions]
    ) -> Tensor | npt.NDArray[Any]:
        """Receive a message from a rank.

        Args:
            tensor: writable, of the message's dtype, with at least as many elements as the message. The message
                replaces the first elements, in C order; the others stay. Shapes may differ. None: make a new tensor.
            src: a rank of the whole world, also with a process set, or ANY_SOURCE.
            tag: the tag of the message, or ANY_TAG.
            like: for a new tensor: a tensor of the wanted type (NumPy, torch, JAX, ...) on the wanted device; its shape
                and dtype do not matter. None: a NumPy array.
            shape, dtype: for a new tensor: those that the message must have; by default, any.
            status: is filled with what was received: its source, tag, shape, dtype and number of elements.
            process_set, stream: as for `send`.

        Returns:
            The tensor itself, or the new one.

        Raises:
            NotInitializedError, InvalidTypeError, InvalidArgumentError: an argument is refused; the sender is not told.
            MismatchError: the message has more elements than the tensor, or not the expected dtype or shape; names the
                sender, the tag, and the expected and found values. The message is lost, and the tensor unchanged.
            RankFailedError: a rank has failed or died, or the sender has shut down.
            CollectiveTimeoutError: no message has come within COLLECTIVES_TIMEOUT; the world has failed.

        Example:
            >>> peer = 1 - hvd.rank()
            >>> handle = hvd.isend(np.arange(3), peer)
            >>> hvd.recv(None, peer)
            array([0, 1, 2])
        """
        array: Any = tensor
        if not options and self._is_plain(array, src, tag) and self._delivery.receive_at_once(array, src, tag):
            return array  # type: ignore[no-any-return]
        posted, finish, _ = self._posted(array, src, tag, options)
        self._transfers.complete(posted)
        self._fill_status(posted, options)
        received: Tensor | npt.NDArray[Any] = finish()
        return received

    @overload
    def irecv(
        self, tensor: None, src: int, tag: int = 0, *, like: Tensor, **options: Unpack[NewTensorOptions]
    ) -> MessageHandle[Tensor]: ...

    @overload
    def irecv(
        self, tensor: None, src: int, tag: int = 0, **options: Unpack[NewTensorOptions]
    ) -> MessageHandle[npt.NDArray[Any]]: ...

    @overload
    def irecv(
        self, tensor: Tensor, src: int, tag: int = 0, **options: Unpack[MessageOptions]
    ) -> MessageHandle[Tensor]: ...

    def irecv(
        self, tensor: Tensor | None, src: int, tag: int = 0, **options: Unpack[IreceiveOptions]
    ) -> MessageHandle[Tensor] | MessageHandle[npt.NDArray[Any]]:
        """Begin to `recv` and return at once.

        Returns a handle like that of `isend`. Its result is that of `recv`, and its ``status`` describes what was
        received. Do not use the tensor until the receive is done. Receives that match the same message are served in
        the order of the calls.

        Example:
            >>> peer = 1 - hvd.rank()
            >>> handle = hvd.irecv(None, peer)
            >>> hvd.send(np.arange(3), peer)
            >>> handle.wait()
            array([0, 1, 2])
        """
        posted, finish, writes = self._posted(tensor, src, tag, options, IreceiveOptions)
        fence = finish if isinstance(finish, _ToDevice) else None
        return self._transfers.start(posted, lambda handle: finish() if fence is None else None, fence, writes=writes)

    @overload
    def sendrecv(
        self,
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
        self,
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
        self,
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

    def sendrecv(
        self,
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
            into, src, recv_tag: of the message that is received; ``recv_tag`` is ``tag`` by default. ``into`` None: a
                new tensor is made, of the type of ``tensor`` by default.
            like, shape, dtype, status, process_set, stream: as for `recv`.

        Returns:
            What `recv` returns.

        Example:
            >>> peer = 1 - hvd.rank()
            >>> hvd.sendrecv(np.arange(3), peer, None, peer)
            array([0, 1, 2])
        """
        array: Any = into
        transfers, delivery, expected = self._transfers, self._delivery, tag if recv_tag is None else recv_tag
        plain = not options and self._is_plain(tensor, dst, tag) and self._is_plain(array, src, expected)
        message, received = (
            delivery.sendrecv_at_once(tensor, dst, tag, array, src, expected) if plain else (False, False)
        )
        if message is True:
            return array if received else self.recv(array, src, expected)  # type: ignore[no-any-return]
        posted: Posted | None = None
        if message is False:
            if array is None and options.get("like") is None:
                options["like"] = tensor
            message, _ = self._outgoing(tensor, dst, tag, options.get("stream"))
            posted, finish, _ = self._posted(array, src, expected, options)
        try:
            transfers.begin(message)
            if posted is None and not received:
                posted, finish, _ = self._posted(array, src, expected, options)
            if posted is not None:
                transfers.begin(posted)
            transfers.complete(message)
            if posted is not None:
                transfers.complete(posted)
        except BaseException as error:
            delivery.abandon(message, error)
            if posted is not None:
                delivery.abandon(posted, error)
            raise
        delivery.check_refused(message)
        if posted is None:
            return array  # type: ignore[no-any-return]
        self._fill_status(posted, options)
        result: Tensor = finish()
        return result

    def _fill_status(self, posted: Posted, options: ReceiveOptions) -> None:
        """Fill the status of a receive that is done, if the caller has given one."""
        status = options.get("status")
        if status is not None:
            self._transfers.status_of(posted, status)

    def _posted(
        self, tensor: Any, src: Any, tag: Any, options: IreceiveOptions, accepted: type[Any] = ReceiveOptions
    ) -> tuple[Posted, _Finish, Any]:
        """A receive that has not begun; what makes its result; and the view of the memory that it writes."""
        refuse_unknown(options, accepted)
        try:
            source = ANY_SOURCE if src == ANY_SOURCE else arguments.integer("src", src, "a rank", self._size - 1)
            tag = ANY_TAG if tag == ANY_TAG else arguments.integer("tag", tag, "an integer", MOST_TAG)
            if tensor is None:
                return self._posted_new(source, tag, options)
            for name in ("like", "shape", "dtype"):
                if options.get(name) is not None:
                    raise InvalidArgumentError(
                        f"{name}: expected None, because a tensor is given; got {options.get(name)!r} [A43]"
                    )
            view = arrays.view(tensor, writable=True, stream=options.get("stream"))
        except CollectivesError as error:
            raise self._named(error) from None
        name = dtypes.name(view.dtype)
        if isinstance(view, View):
            buffer = view

            def finish() -> Any:
                if buffer.copied:
                    buffer.store()
                return tensor

            return Posted(source, tag, view.array, name, None), finish, view
        posted = Posted(source, tag, np.empty(view.array.size, view.dtype), name, None)
        return posted, _ToDevice(posted, view, tensor), view

    def _posted_new(self, source: int, tag: int, options: IreceiveOptions) -> tuple[Posted, _Finish, Any]:
        """`_posted`, of a new tensor."""
        like, dtype = options.get("like"), options.get("dtype")
        view = None if like is None else arrays.view(like, argument="like", stream=options.get("stream"))
        posted = Posted(source, tag, None, None if dtype is None else _dtype(dtype), _shape(options.get("shape")))
        if view is not None and not isinstance(view, View):
            return posted, _ToDevice(posted, view), None

        def finish() -> Any:
            assert posted.into is not None and posted.message is not None
            array = posted.into.reshape(posted.message.shape)
            return array if view is None else view.wrap(array)

        return posted, finish, None

    # ---- both

    def _is_plain(self, tensor: Any, peer: Any, tag: Any) -> bool:
        """Whether a tensor is an array that messages can use as it is, and the numbers are what they should be."""
        return (
            type(tensor) is np.ndarray
            and type(peer) is int
            and type(tag) is int
            and 0 <= peer < self._size
            and 0 <= tag <= MOST_TAG
            and tensor.dtype in dtypes.SUPPORTED
            and tensor.flags.carray
        )

    def _named(self, error: CollectivesError) -> CollectivesError:
        """An error of an argument, with the rank."""
        if not str(error).startswith("rank "):
            error.args = (f"rank {self._ranks[self._rank]}: {error}",)
        return error


class _ToDevice:
    """Brings what was received into host memory to a GPU: in a blocking call, or as the fence of a handle, in the
    thread that fetches the result. ``view`` is that of ``tensor``; or, where the result is new, of one that it is like.
    """

    def __init__(self, posted: Posted, view: Any, tensor: Any = None) -> None:
        self._posted, self._view, self._tensor = posted, view, tensor
        self._fetched: Any = None

    def __call__(self) -> Any:
        posted, view = self._posted, self._view
        if self._fetched is not None:
            return self._fetched
        assert posted.into is not None and posted.message is not None
        shape = posted.message.shape
        values = posted.into[: math.prod(shape)]
        if self._tensor is not None:
            view.fill_from_host(values)
            view.store()
            self._fetched = self._tensor
        else:
            result, elements = view.empty(shape, values.dtype)
            view.fill_from_host(values, elements)
            self._fetched = view.wrap(result, values.dtype)
        return self._fetched

    def pass_through(self, ordered: set[Any]) -> Any:
        """As `collectives.cuda.completion.Fence`."""
        return self()

    def passed(self) -> bool:
        """As `collectives.cuda.completion.Fence`."""
        return True


def _dtype(dtype: Any) -> str:
    """The name of a dtype of NumPy or of a framework."""
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return dtypes.name(dtypes.resolve(name if name in (*dtypes.NAMES, *dtypes.FLOAT8) else dtype))


def _shape(shape: Any) -> tuple[int, ...] | None:
    if shape is None:
        return None
    try:
        sizes = tuple(int(size.__index__()) for size in ((shape,) if hasattr(shape, "__index__") else shape))
    except (TypeError, AttributeError):
        raise InvalidTypeError(f"shape: expected non-negative integers, got {shape!r} [A44]") from None
    if any(size < 0 for size in sizes):
        raise InvalidArgumentError(f"shape: expected non-negative integers, got {shape!r} [A45]")
    return sizes
