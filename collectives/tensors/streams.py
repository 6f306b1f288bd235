"""Callers' CUDA streams: their numbers, ordering between them, and which cannot be used.

A stream is represented by the driver's number. The legacy default stream has two, 0 and 1; here it is always 0. The
per-thread default stream is a different stream in every thread under one number: the threads that execute operations
cannot refer to the caller's.
"""

from __future__ import annotations

from typing import Any

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.device.protocol import Device
from collectives.tensors.detection import describe

LEGACY, PER_THREAD = 0, 2


def handle(stream: Any, *, argument: str = "stream") -> int:
    """The number of a stream.

    Args:
        stream: the number itself, a ``cupy.cuda.Stream``, a ``torch.cuda.Stream``, or anything with
            ``__cuda_stream__``.
        argument: its name in messages.

    Raises:
        InvalidTypeError: none of these.
        InvalidArgumentError: a negative number.
    """
    number = stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        number = (protocol() if callable(protocol) else protocol)[1]
    elif hasattr(stream, "cuda_stream"):
        number = stream.cuda_stream
    elif hasattr(stream, "ptr"):
        number = stream.ptr
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise InvalidTypeError(
            f"{argument}: expected a CUDA stream (the driver's number, a cupy.cuda.Stream, a torch.cuda.Stream or an "
            f"object with __cuda_stream__), got {describe(stream)} [T56]"
        )
    number = int(number)
    if number < 0:
        raise InvalidArgumentError(f"{argument}: expected the number of a CUDA stream, 0 or more, got {number} [T57]")
    return LEGACY if number == 1 else number


def usable(stream: int, argument: str = "stream") -> int:
    """Return the stream if other threads can use it.

    Raises:
        InvalidArgumentError: it is the per-thread default stream.
    """
    if stream == PER_THREAD:
        raise InvalidArgumentError(
            f"{argument}: expected a stream that is the same in every thread, got the per-thread default stream "
            "(number 2, with CuPy from CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1), for which other threads cannot wait; "
            "make another stream current, such as cupy.cuda.Stream(non_blocking=True), or pass it as stream= [T58]"
        )
    return stream


def free_of_capture(
    device: Device, stream: int, whose: str, advice: str = "call collectives outside of the capture"
) -> None:
    """Reject a stream under capture, before a wait in it would invalidate the capture. The device must be active.

    Raises:
        InvalidArgumentError: the stream is under capture; the message is ``whose``, the reason and ``advice``.
    """
    if device.capturing(stream):
        raise InvalidArgumentError(
            f"{whose}: its stream is being captured into a CUDA graph, which cannot hold work that waits for other "
            f"ranks; {advice} [T59]"
        )


def order(device: Device, first: int, then: int) -> None:
    """Order later work of stream ``then`` after earlier work of stream ``first``. The device must be active."""
    if first == then:
        return
    event = device.create_event()
    try:
        device.record(event, first)
        device.wait(then, event)
    finally:
        device.destroy_event(event)
