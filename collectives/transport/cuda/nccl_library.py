"""NCCL by the binding that is installed, CuPy's or nccl4py: communicators with bounded waits and explained errors.

NCCL waits for its peers without a bound, and a thread inside NCCL cannot be interrupted: calls that may wait run in a
separate thread (`collectives.base.bounded_call`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.bounded_call import TimeIsUpError, within
from collectives.base.errors import CollectiveTimeoutError, MissingDependencyError, TransportError
from collectives.base.exclusion import Lock, attempted, exclusive, exclusively, give_back
from collectives.base.reduce_op import Op
from collectives.device import nccl_binding
from collectives.device.protocol import Device
from collectives.transport.cuda.nccl_elements import Dtype, required_reduction, word

SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own setting; 1 allows several ranks on one GPU."""

_SHARES_SINCE = (2, 30, 0)
_BLOCKS_VARIABLE = "NCCL_MAX_CTAS"
_BLOCKS_VARIABLES = (_BLOCKS_VARIABLE, "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
"""NCCL's own settings of the number of thread blocks per kernel; left alone if the user has set one of them."""
_MOST_BLOCKS = 8
_ABORT_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_GRACE_SECONDS = 1.0
"""How long an abort waits for another thread's call to finish. A call that hangs does not; the abort ends it."""

_STATUSES = {
    1: (
        "ncclUnhandledCudaError",
        "a CUDA call failed; check the GPU, its free memory and the version of its driver",
    ),
    2: (
        "ncclSystemError",
        "a system call failed: often /dev/shm is too small, or NCCL_SOCKET_IFNAME names no usable network interface",
    ),
    3: ("ncclInternalError", "NCCL itself failed, or a peer left during the call"),
    4: ("ncclInvalidArgument", "an argument was refused"),
    5: (
        "ncclInvalidUsage",
        "the ranks' calls do not match, their NCCL versions differ, or two ranks use the same GPU: then set "
        f"{SHARE_VARIABLE}=1 with NCCL 2.30 or later, or COLLECTIVES_DEVICE_TRANSPORT=cuda-ipc",
    ),
    6: ("ncclRemoteError", "a peer's process has died, or the network has failed"),
    7: ("ncclInProgress", "calls must block: unset NCCL_COMM_BLOCKING"),
    8: ("ncclTimeout", "a peer did not connect within NCCL's own timeout"),
}
"""The result codes of NCCL 2.32's nccl.h: their names and likely causes."""


def failure(call: str, rank: int, error: Exception) -> TransportError:
    """The error of ``call`` for the user, from an exception of the binding.

    CuPy raises NcclError with a ``status``, or KeyError with the status as its argument if its table of names lacks it
    (14.2: from 7 on, 13: from 6 on); nccl4py NCCLError with a ``status``, or ValueError.
    """
    status: Any = error.args[0] if isinstance(error, KeyError) and error.args else getattr(error, "status", None)
    if not isinstance(status, int):
        return TransportError(f"rank {rank}: NCCL's {call} failed: {type(error).__name__}: {error} [G25]")
    name, meaning = _STATUSES.get(status, ("a status that this version does not know", "look it up in nccl.h"))
    return TransportError(
        f"rank {rank}: NCCL's {call} failed: {name} ({status}): {meaning}. Set NCCL_DEBUG=INFO for details [G26]"
    )


class NcclCommunicator:
    """An NCCL communicator as one of its ranks sees it.

    Addresses are device memory of this rank, streams the driver's handles. Every operation is enqueued on the stream
    and returns; all ranks issue the same collectives in the same order, and between two ranks sends and receives match
    in order. One thread issues operations at a time; another may call ``check`` and ``abort`` meanwhile. Errors are
    TransportErrors.

    A lock is held during every call, and from the beginning to the end of a group: an abort frees resources that calls
    use, so it waits for them to finish. The wait is short, because the purpose of an abort is to end a call that hangs.

    Args:
        binding: of `nccl_binding.load`.
        communicator: its communicator, connected.
    """

    def __init__(self, binding: Any, communicator: Any, rank: int, size: int, device: Device) -> None:
        self.rank = rank
        self.size = size
        self._binding = binding
        self._communicator = communicator
        self._device = device
        self._calls: Lock = threading.RLock()
        self._lock = threading.RLock()

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``count`` elements of every rank into every rank's ``target``, which may be ``source``. An average is
        left as a sum, unless it is of halves. Raises InvalidTypeError where `nccl_elements.reduces` is False."""
        number, (code, n) = required_reduction(op, dtype), word(dtype)
        self._issue("allReduce", source, target, count * n, code, number, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``size`` blocks of ``count`` elements, this rank's block into ``target``, which may be its block of
        ``source``; as `all_reduce`."""
        number, (code, n) = required_reduction(op, dtype), word(dtype)
        self._issue("reduceScatter", source, target, count * n, code, number, stream)

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: int) -> None:
        """Concatenate every rank's ``count`` elements into ``target``; ``source`` may be its own block there."""
        code, n = word(dtype)
        self._issue("allGather", source, target, count * n, code, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        """Copy the root's ``source`` to every rank's ``target``; other ranks' ``source`` is ignored."""
        code, n = word(dtype)
        self._issue("broadcast", source, target, count * n, code, root, stream)

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        code, n = word(dtype)
        self._issue("send", source, count * n, code, peer, stream)

    def receive(self, target: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        code, n = word(dtype)
        self._issue("recv", target, count * n, code, peer, stream)

    def begin_group(self) -> None:
        """Begin an NCCL group: operations until `end_group` form one stream operation, without waits among them."""
        try:
            self._calls.acquire()
            self._present("groupStart")
            self._told("groupStart", self._binding.groupStart)
        except BaseException:
            give_back(self._calls)
            raise

    def end_group(self) -> None:
        """End the group, in the thread that began it, even after an error or an abort: the group belongs to the thread,
        and would defer all its later calls. `nccl.group` does so."""
        try:
            self._told("groupEnd", self._binding.groupEnd)
        finally:
            give_back(self._calls)

    def check(self) -> None:
        """Raise an asynchronous error that has occurred outside of any call; raises after `abort` and `close`, too."""
        attempted(self._calls, 0.0, self._check)  # a call in progress reports its own errors

    def _check(self) -> None:
        self._issue("check_async_error")

    def abort(self) -> None:
        """End all of this rank's work in bounded time and release all resources; never raises, and is idempotent."""
        communicator = self._take()
        if communicator is None:
            return
        try:
            self._calls.acquire(timeout=_GRACE_SECONDS)
            # Nothing remains to be done if it fails.
            with contextlib.suppress(Exception):
                within(_ABORT_SECONDS, "collectives-nccl-abort", self._on_device(communicator.abort))
        finally:
            give_back(self._calls)

    def close(self) -> None:
        """Release all resources, in bounded time, when all work is done; the ranks of a host wait for each other. After
        a failure use `abort`. Both wait until no CUDA graph refers to the communicator."""
        communicator = self._take()
        if communicator is not None:
            # If a rank of this host does not close, NCCL's thread remains.
            with contextlib.suppress(TimeIsUpError):
                within(_CLOSE_SECONDS, "collectives-nccl-close", self._on_device(communicator.destroy))

    def _on_device(self, work: Callable[[], object]) -> Callable[[], None]:
        """Wrap a call for a separate thread, where no capture of the program restricts which memory NCCL may free."""

        def run() -> None:
            self._device.activate()
            work()

        return run

    def _issue(self, call: str, *arguments: int) -> None:
        exclusively(self._calls, self._call, call, arguments)

    def _call(self, call: str, arguments: Sequence[int]) -> None:
        self._told(call, getattr(self._present(call), call), *arguments)

    def _told(self, call: str, function: Callable[..., object], *arguments: int) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise failure(call, self.rank, error) from error

    def _present(self, call: str) -> Any:
        communicator = self._communicator
        if communicator is None:
            raise TransportError(
                f"rank {self.rank}: NCCL's {call} cannot be called, because the communicator was aborted or closed; "
                "look for the first error of this job [G27]"
            )
        return communicator

    @exclusive
    def _take(self) -> Any:
        """Take the binding's communicator; None from the second call on, when all other methods raise."""
        communicator, self._communicator = self._communicator, None
        return communicator


class NcclLibrary:
    """A source of communicators. `why_not` says whether NCCL can be used, which the other methods require.

    Args:
        binding: replaces that of `nccl_binding.load`.
    """

    def __init__(self, binding: Any = None) -> None:
        self._replacement = binding

    def why_not(self) -> str | None:
        """What is missing and how to install it; None if NCCL can be used."""
        try:
            self._binding()
        except MissingDependencyError as error:
            return str(error)
        return None

    def version(self) -> tuple[int, int, int]:
        code: int = self._binding().get_version()
        return code // 10000, code // 100 % 100, code % 100

    def shares_gpus(self) -> bool:
        """Whether several ranks may use one GPU."""
        try:
            allowed = int(os.environ.get(SHARE_VARIABLE, "0"), 0) != 0
        except ValueError:
            allowed = False
        return allowed and self.why_not() is None and self.version() >= _SHARES_SINCE

    def make_id(self) -> bytes:
        """128 bytes that identify a new communicator; one rank makes them, and all its ranks connect with them."""
        binding = self._binding()
        try:
            return bytes(binding.get_unique_id())
        except Exception as error:
            raise failure("get_unique_id", 0, error) from error

    def connect(
        self, rank: int, size: int, unique_id: bytes, timeout: float, device: Device, *, sharers: int = 1
    ) -> NcclCommunicator:
        """Connect with the other ranks; called by all of them, each with its device, which ``sharers`` ranks use.

        Raises:
            CollectiveTimeoutError: a rank did not connect within ``timeout`` seconds.
            TransportError: NCCL failed.
        """
        binding = self._binding()
        # Otherwise NCCL connects the ranks at the first call of each of its algorithms, without a bound, within a
        # collective.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        if sharers > 1 and not any(name in os.environ for name in _BLOCKS_VARIABLES):
            # The ranks' kernels wait for each other, so all of their blocks must be resident at once, together with
            # those of other kernels.
            os.environ[_BLOCKS_VARIABLE] = str(max(1, min(_MOST_BLOCKS, device.multiprocessors // (2 * sharers))))

        # The separate thread also contains two side effects of NCCL: it binds the caller to the processors next to the
        # GPU while it connects, and it leaves a group open in the thread when it destroys a communicator that failed
        # to connect.
        def meet() -> Any:
            device.activate()
            try:
                return binding.NcclCommunicator(size, unique_id, rank)
            except Exception as error:
                raise failure("NcclCommunicator", rank, error) from error

        try:
            communicator = within(
                timeout, "collectives-nccl-connect", meet, late=lambda communicator: communicator.abort()
            )
        except TimeIsUpError:
            raise CollectiveTimeoutError(
                f"rank {rank}: the {size} ranks did not all connect with NCCL within {timeout:g} s; check for a "
                "firewall between the hosts or a wrong network (NCCL_SOCKET_IFNAME), and set NCCL_DEBUG=INFO to see "
                "which ranks connect [G28]"
            ) from None
        return NcclCommunicator(binding, communicator, rank, size, device)

    def _binding(self) -> Any:
        return nccl_binding.load() if self._replacement is None else self._replacement
