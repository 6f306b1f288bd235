"""NCCL behind one small interface: what the engine asks of a communicator, and CuPy's binding as the one that answers.

Nothing but this module knows whose binding it is, so that NVIDIA's own can take CuPy's place. Three things are settled
here once:

- what NCCL calls an element. It moves every dtype of `collectives.base.dtypes` (those it does not know as bytes or as
pairs) and reduces
  those that it reduces as this package does: see `reduces`;
- what an error means and what to do about it. The binding names NCCL's older statuses only, and stumbles over the
others;
- how long anything takes. NCCL waits for its peers without a bound, and a thread that is inside NCCL cannot be
interrupted: what may
  wait runs in a thread of its own, which is left behind when the time is up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import CollectiveTimeoutError, InvalidTypeError, MissingDependencyError, TransportError
from collectives.base.reduce_op import Op

if TYPE_CHECKING:
    from collectives.device.protocol import Device

Dtype = np.dtype[Any]
_Result = TypeVar("_Result")

SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own setting; with 1, several ranks may use one GPU."""

_SHARES_SINCE = (2, 30, 0)
_BLOCKS_VARIABLE = "NCCL_MAX_CTAS"
_BLOCKS_VARIABLES = (_BLOCKS_VARIABLE, "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
"""NCCL's own settings of how many thread blocks a kernel of its has; who has set one of them has decided."""
_MOST_BLOCKS = 8
_ABORT_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_GRACE_SECONDS = 1.0
"""How long an abort lets a call finish that another thread is making; one that hangs does not, and is what the abort
must end."""


class Communicator(Protocol):
    """Some ranks that NCCL connects, as one of them sees them.

    Addresses are device memory of this rank, streams the driver's. Every operation is given to the stream and returns;
    all ranks issue the same collectives in the same order, and between two ranks sends and receives pair up in order.
    One thread issues operations at a time. ``check`` and ``abort`` may be called by another one meanwhile. Errors are
    TransportErrors.
    """

    rank: int
    size: int

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``count`` elements of every rank into every rank's ``target``, which may be ``source``. An average
        stays a sum.

        Raises:
            InvalidTypeError: `reduces` says no.
        """

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``size`` blocks of ``count`` elements; this rank's block goes to ``target``, which may be that block;
        as `all_reduce`."""

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: int) -> None:
        """Put every rank's ``count`` elements behind one another into ``target``; ``source`` may be its own block in
        there."""

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        """Copy the root's ``source`` to every rank's ``target``; the other ranks' ``source`` is not looked at."""

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Send ``count`` elements to ``peer``, which receives as many."""

    def receive(self, target: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Receive ``count`` elements from ``peer``."""

    def begin_group(self) -> None:
        """Operations until `end_group` are one operation of the stream: none of them waits for another."""

    def end_group(self) -> None:
        """To be called by the thread that began the group, also when an operation in between has raised: see
        `Group`."""

    def check(self) -> None:
        """Raise what has gone wrong since, outside of any call; also after `abort` and `close`."""

    def abort(self) -> None:
        """End everything that this rank has under way, in bounded time, and let go of it all; never raises, and twice
        is once."""

    def close(self) -> None:
        """Let go, in bounded time, when all work is done: the ranks of a host wait for each other. After a failure
        `abort`.

        Both wait until no CUDA graph refers to the communicator: destroy those first; with `abort`, meanwhile.
        """


class Group:
    """``with Group(communicator)``: a group that is ended whatever happens; the first error is the one that is
    raised."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        self._communicator.begin_group()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._communicator.end_group()
        except TransportError:
            if error is None:
                raise


class Library(Protocol):
    """Where communicators come from."""

    def why_not(self) -> str | None:
        """What is missing and what to do about it; None if NCCL can be used. The methods below are for after that."""

    def version(self) -> tuple[int, int, int]: ...

    def shares_gpus(self) -> bool:
        """Whether several ranks may use one GPU."""

    def make_id(self) -> bytes:
        """128 bytes that name a new communicator; one rank makes them, and every rank of it connects with them."""

    def connect(
        self, rank: int, size: int, unique_id: bytes, timeout: float, device: Device, *, sharers: int = 1
    ) -> Communicator:
        """Meet the other ranks; called by all of them, each with its device, which ``sharers`` of them use.

        Raises:
            CollectiveTimeoutError: one did not come within ``timeout`` seconds.
            TransportError: NCCL refused.
        """


# ---- elements
# ------------------------------------------------------------------------------------------------------------------

# The numbers are NCCL's binary interface, the same in every version.
_INT8, _UINT8, _INT32, _UINT32, _INT64, _UINT64, _FLOAT16, _FLOAT32, _FLOAT64, _BFLOAT16 = range(10)
_REDUCTIONS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3}


class Word(NamedTuple):
    """What an element consists of in NCCL's terms."""

    code: int
    """ncclDataType_t."""
    per_element: int


_WORDS = {
    "bool": Word(_UINT8, 1),
    "int8": Word(_INT8, 1),
    "int16": Word(_UINT8, 2),
    "int32": Word(_INT32, 1),
    "int64": Word(_INT64, 1),
    "uint8": Word(_UINT8, 1),
    "uint16": Word(_UINT8, 2),
    "uint32": Word(_UINT32, 1),
    "uint64": Word(_UINT64, 1),
    "float16": Word(_FLOAT16, 1),
    "bfloat16": Word(_BFLOAT16, 1),
    "float32": Word(_FLOAT32, 1),
    "float64": Word(_FLOAT64, 1),
    "complex64": Word(_FLOAT32, 2),
    "complex128": Word(_FLOAT64, 2),
}


@functools.cache
def word(dtype: Dtype) -> Word:
    """How elements of a supported dtype are moved."""
    return _WORDS[dtypes.name(dtype)]


@functools.cache
def reduction(op: Op, dtype: Dtype) -> int | None:
    """The ncclRedOp_t that does on the words of ``dtype`` what ``op`` does on its elements; None if there is none.

    NCCL's Min and Max of floating-point numbers lose a NaN (they are fmin and fmax), where this package passes it on.
    It has no 16-bit integers. Complex numbers add up as pairs, and multiply otherwise. A bool is a byte of 0 or 1: "or"
    is its maximum, "and" its minimum.
    """
    if not op.elementwise or dtypes.name(dtype) in ("int16", "uint16"):
        return None
    combining = op.combining(dtype)
    if (dtypes.is_floating(dtype) or dtypes.is_complex(dtype)) and combining is not Op.SUM:
        return _REDUCTIONS[Op.PRODUCT] if combining is Op.PRODUCT and dtypes.is_floating(dtype) else None
    return _REDUCTIONS.get(combining)


def reduces(op: Op, dtype: Dtype) -> bool:
    """Whether NCCL reduces this dtype as this package does, up to the order of additions; an average as the sum it
    begins with."""
    return reduction(op, dtype) is not None


def _reduction(op: Op, dtype: Dtype) -> int:
    number = reduction(op, dtype)
    if number is None:
        raise InvalidTypeError(
            f"NCCL does not reduce op={op!r} of dtype {dtypes.name(dtype)} as this package does: move the blocks, "
            f"and reduce with kernels"
        )
    return number


# ---- errors
# --------------------------------------------------------------------------------------------------------------------

_STATUSES = {
    1: (
        "ncclUnhandledCudaError",
        "a CUDA call failed: is the GPU in order, its memory not used up, the driver new enough?",
    ),
    2: (
        "ncclSystemError",
        "a system call failed: often /dev/shm is too small, or NCCL_SOCKET_IFNAME names no usable network interface",
    ),
    3: ("ncclInternalError", "NCCL failed in itself, or a peer left in the middle"),
    4: ("ncclInvalidArgument", "an argument was refused"),
    5: (
        "ncclInvalidUsage",
        "the ranks' calls do not fit together, their NCCL versions differ, or two ranks use the same GPU: then set "
        f"{SHARE_VARIABLE}=1 with NCCL 2.30 or later, or COLLECTIVES_DEVICE_TRANSPORT=cuda-ipc",
    ),
    6: ("ncclRemoteError", "a peer's process has died, or the network has failed"),
    7: ("ncclInProgress", "calls must block: unset NCCL_COMM_BLOCKING"),
    8: ("ncclTimeout", "a peer did not come in NCCL's own time"),
}
"""The result codes of NCCL 2.32's nccl.h: their names, and what is behind them."""


def failure(call: str, rank: int, error: Exception) -> TransportError:
    """What an exception of the binding's, raised by ``call``, says to a user.

    CuPy raises NcclError with a ``status``; but KeyError with the status as its argument where its own table of names
    ends (14.2: from 7 on, 13: from 6 on).
    """
    found: Any = error.args[0] if isinstance(error, KeyError) and error.args else getattr(error, "status", None)
    if not isinstance(found, int):
        return TransportError(f"rank {rank}: NCCL's {call} failed: {type(error).__name__}: {error}")
    name, meaning = _STATUSES.get(found, ("a status that this version does not know", "look it up in nccl.h"))
    return TransportError(
        f"rank {rank}: NCCL's {call} failed: {name} ({found}): {meaning}. NCCL_DEBUG=INFO in the environment says more"
    )


_BINDING_ERRORS = (RuntimeError, KeyError)
"""NcclError is a RuntimeError."""


# ---- bounded time
# --------------------------------------------------------------------------------------------------------------


class _TimeIsUpError(Exception):
    pass


def _within(
    seconds: float, name: str, work: Callable[[], _Result], late: Callable[[_Result], object] | None = None
) -> _Result:
    """What ``work`` returns or raises, done in a thread of its own, which is left behind after ``seconds``.

    ``late`` is called there with what ``work`` returns when nobody waits for it any more.

    Raises:
        _TimeIsUpError
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def too_late(future: concurrent.futures.Future[_Result]) -> None:
        if late is not None and future.exception() is None:
            late(future.result())

    threading.Thread(target=run, name=f"collectives-nccl-{name}", daemon=True).start()
    try:
        concurrent.futures.wait((future,), seconds)
        if not future.done():
            raise _TimeIsUpError
    except BaseException:  # an interrupt too
        future.add_done_callback(too_late)
        raise
    return future.result()


# ---- CuPy's binding
# ------------------------------------------------------------------------------------------------------------


class CupyCommunicator:
    """A `Communicator` over ``cupy.cuda.nccl.NcclCommunicator``.

    A lock is held during every call, and from the beginning to the end of a group: an abort frees what the calls use,
    so it waits until there is none. It gives a call that hangs a moment only, because ending that is what it is for.

    Args:
        module: ``cupy.cuda.nccl``.
        communicator: its communicator, connected.
        device: of this rank.
    """

    def __init__(self, module: Any, communicator: Any, rank: int, size: int, device: Device) -> None:
        self.rank = rank
        self.size = size
        self._module = module
        self._communicator = communicator
        self._device = device
        self._calls = threading.RLock()
        self._end = threading.Lock()

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        number, (code, n) = _reduction(op, dtype), word(dtype)
        self._issue("allReduce", source, target, count * n, code, number, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        number, (code, n) = _reduction(op, dtype), word(dtype)
        self._issue("reduceScatter", source, target, count * n, code, number, stream)

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: int) -> None:
        code, n = word(dtype)
        self._issue("allGather", source, target, count * n, code, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        code, n = word(dtype)
        self._issue("broadcast", source, target, count * n, code, root, stream)

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        code, n = word(dtype)
        self._issue("send", source, count * n, code, peer, stream)

    def receive(self, target: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        code, n = word(dtype)
        self._issue("recv", target, count * n, code, peer, stream)

    def begin_group(self) -> None:
        self._calls.acquire()
        try:
            self._present("groupStart")
            self._told("groupStart", self._module.groupStart)
        except BaseException:
            self._calls.release()
            raise

    def end_group(self) -> None:
        # Also after an abort: the group is the thread's, and what the thread called next would be put off for ever.
        try:
            self._told("groupEnd", self._module.groupEnd)
        finally:
            self._calls.release()

    def check(self) -> None:
        if not self._calls.acquire(blocking=False):
            return  # a call is being made, and will tell by itself
        try:
            self._issue("check_async_error")
        finally:
            self._calls.release()

    def abort(self) -> None:
        communicator = self._take()
        if communicator is None:
            return
        idle = self._calls.acquire(timeout=_GRACE_SECONDS)
        try:
            # Where it fails there is nothing left that could be done.
            with contextlib.suppress(_TimeIsUpError, *_BINDING_ERRORS):
                _within(_ABORT_SECONDS, "abort", self._on_device(communicator.abort))
        finally:
            if idle:
                self._calls.release()

    def close(self) -> None:
        communicator = self._take()
        if communicator is not None:
            # Where a rank of this host does not close, NCCL's thread stays behind.
            with contextlib.suppress(_TimeIsUpError):
                _within(_CLOSE_SECONDS, "close", self._on_device(communicator.destroy))

    def _on_device(self, work: Callable[[], object]) -> Callable[[], None]:
        """In a thread of its own: no capture of the program's may restrict what NCCL frees."""

        def run() -> None:
            self._device.activate()
            work()

        return run

    def _issue(self, call: str, *arguments: int) -> None:
        with self._calls:
            self._told(call, getattr(self._present(call), call), *arguments)

    def _told(self, call: str, function: Callable[..., object], *arguments: int) -> None:
        try:
            function(*arguments)
        except _BINDING_ERRORS as error:
            raise failure(call, self.rank, error) from error

    def _present(self, call: str) -> Any:
        communicator = self._communicator
        if communicator is None:
            raise TransportError(
                f"rank {self.rank}: NCCL's {call} cannot be called: the communicator has been aborted or closed"
            )
        return communicator

    def _take(self) -> Any:
        """The binding's communicator for who calls first; None, and errors in all other methods, from then on."""
        with self._end:
            communicator, self._communicator = self._communicator, None
        return communicator


class CupyNccl:
    """The `Library` of ``cupy.cuda.nccl``, which is imported at the first use.

    Args:
        module: in place of ``cupy.cuda.nccl``.
    """

    def __init__(self, module: Any = None) -> None:
        self._given = module

    def why_not(self) -> str | None:
        try:
            module = self._module
        except ImportError as error:
            return f"NCCL is reached through CuPy, which cannot be imported ({error}): pip install cupy-cuda13x, or cupy-cuda12x"
        if not module.available:
            # What CuPy was built for, which needs no GPU to be asked.
            major = importlib.import_module("cupy").cuda.runtime.runtimeGetVersion() // 1000
            return f"NCCL is not installed, or cannot be loaded: pip install nvidia-nccl-cu{major}"
        if not hasattr(module, "NcclConfig"):
            return "this CuPy is too old for its NCCL binding to be used: pip install --upgrade cupy-cuda13x, or cupy-cuda12x"
        return None

    def version(self) -> tuple[int, int, int]:
        code: int = self._usable().get_version()
        return code // 10000, code // 100 % 100, code % 100

    def shares_gpus(self) -> bool:
        try:
            allowed = int(os.environ.get(SHARE_VARIABLE, "0"), 0) != 0
        except ValueError:
            allowed = False
        return allowed and self.why_not() is None and self.version() >= _SHARES_SINCE

    def make_id(self) -> bytes:
        try:
            return bytes(self._usable().get_unique_id())
        except _BINDING_ERRORS as error:
            raise failure("get_unique_id", 0, error) from error

    def connect(
        self, rank: int, size: int, unique_id: bytes, timeout: float, device: Device, *, sharers: int = 1
    ) -> Communicator:
        module = self._usable()
        # NCCL would else connect the ranks at the first call of each of its algorithms, without a bound, in the middle
        # of a collective.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        if sharers > 1 and not any(name in os.environ for name in _BLOCKS_VARIABLES):
            # The ranks' kernels wait for each other, so all of their blocks must fit the GPU at once, beside those of
            # other kernels.
            os.environ[_BLOCKS_VARIABLE] = str(max(1, min(_MOST_BLOCKS, device.multiprocessors // (2 * sharers))))

        # The thread is also good for two things of NCCL's: binding the caller to the processors next to the GPU while
        # it connects, and the open group that it leaves in the thread when destroying a communicator that did not come
        # about.
        def meet() -> Any:
            device.activate()
            try:
                return module.NcclCommunicator(size, unique_id, rank)
            except _BINDING_ERRORS as error:
                raise failure("NcclCommunicator", rank, error) from error

        try:
            communicator = _within(timeout, "connect", meet, late=lambda communicator: communicator.abort())
        except _TimeIsUpError:
            raise CollectiveTimeoutError(
                f"rank {rank}: the {size} ranks did not all connect with NCCL within {timeout:g} s: does a firewall, "
                f"or the wrong network "
                f"(NCCL_SOCKET_IFNAME), keep them apart? NCCL_DEBUG=INFO shows who is there"
            ) from None
        return CupyCommunicator(module, communicator, rank, size, device)

    @property
    def _module(self) -> Any:
        return importlib.import_module("cupy.cuda.nccl") if self._given is None else self._given

    def _usable(self) -> Any:
        reason = self.why_not()
        if reason is not None:
            raise MissingDependencyError(reason)
        return self._module


_library: Library = CupyNccl()


def library() -> Library:
    """The library in use: CuPy's, unless `use` has said otherwise."""
    return _library


def use(library: Library) -> Library:
    """Take communicators from ``library`` from now on; returns the one used before. For tests, and for other
    bindings."""
    global _library
    before, _library = _library, library
    return before


# ---- warming up
# ----------------------------------------------------------------------------------------------------------------

_BYTE = np.dtype(np.uint8)


def warm_up(communicator: Communicator, device: Device, scratch: int, stream: int, timeout: float) -> None:
    """Exchange a byte with every peer, so that the first real send finds its connection; called by all ranks.

    NCCL connects two ranks when they first send, which takes hundreds of milliseconds. All pairs are one group, in
    which nobody waits for anybody in particular: no order of the ranks can deadlock it.

    Args:
        scratch: two bytes of device memory for each rank. Allocated before any rank's kernel can wait for this rank,
            because to allocate may wait for all kernels on the device.
        stream: on which it is done.

    Raises:
        CollectiveTimeoutError: it took longer than ``timeout`` seconds. The communicator has been aborted.
        TransportError: NCCL could not connect two ranks.
    """
    rank, size = communicator.rank, communicator.size

    def talk() -> None:
        device.activate()
        with Group(communicator):
            for distance in range(1, size):
                to, origin = (rank + distance) % size, (rank - distance) % size
                communicator.send(scratch + to, 1, _BYTE, to, stream)
                communicator.receive(scratch + size + origin, 1, _BYTE, origin, stream)
        device.drain(stream)

    if size == 1:
        return
    try:
        _within(timeout, "warm-up", talk)
    except _TimeIsUpError:
        communicator.abort()
        raise CollectiveTimeoutError(
            f"rank {rank}: NCCL could not connect with all of the {size - 1} other ranks within {timeout:g} s: does "
            f"a firewall, or the "
            f"wrong network (NCCL_SOCKET_IFNAME), keep them apart? NCCL_DEBUG=INFO shows who is there"
        ) from None
    communicator.check()
