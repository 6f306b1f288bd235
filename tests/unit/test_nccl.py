"""NCCL's adapter: what elements are called, what errors say, how long things take; and the watch."""

from __future__ import annotations

import gc
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidTypeError,
    MissingDependencyError,
    RankFailedError,
    TransportError,
)
from collectives.base.reduce_op import Op
from collectives.cuda.launches import Message, Stage
from collectives.cuda.messages import NcclMessages
from collectives.device import nccl_binding
from collectives.transport.cuda import nccl, nccl_elements, nccl_library
from collectives.transport.cuda.watchdog import Watch, _WorkInFlight
from tests.support.emulated.cuda import EmulatedDevice
from tests.support.emulated.fake_cupy import checked, signatures
from tests.support.emulated.nccl import EmulatedCommunicator, EmulatedNccl

pytestmark = pytest.mark.timeout(60)

SECONDS = 20.0
"""A wait that takes this long has failed."""


def dtype(name: str) -> Any:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return dtypes.resolve(name)


# ---- elements

SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""Bytes of NCCL's data types."""


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_dtype_moves_with_all_its_bytes(name: str) -> None:
    code, per_element = nccl_elements.word(dtype(name))
    assert SIZES[code] * per_element == dtype(name).itemsize


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_what_is_reduced_is_reduced_as_words_of_the_same_kind(name: str) -> None:
    reduced = {op.value for op in Op if nccl_elements.reduces(op, dtype(name))}
    if name in ("int16", "uint16"):
        assert reduced == set()
    elif name.startswith("complex"):
        assert reduced == {"sum", "average"}
    elif "float" in name:
        assert reduced == {"sum", "average", "product"}  # fmin and fmax lose a NaN
    else:
        of_bools = {"band", "bor"} if name == "bool" else set()
        assert reduced == {"sum", "average", "product", "min", "max", *of_bools}


def test_bool_is_reduced_as_the_package_reduces_it() -> None:
    from collectives.tensors.reduction import kernel

    byte = {2: np.maximum, 3: np.minimum}
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    for op in (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT):
        ours = np.empty_like(a)
        kernel(op, a.dtype)(a, b, ours)
        number = nccl_elements.reduction(op, a.dtype)
        assert number is not None
        np.testing.assert_array_equal(byte[number](a.view(np.uint8), b.view(np.uint8)), ours.view(np.uint8))


def test_cupy_calls_them_by_the_same_numbers() -> None:
    cupy_nccl = pytest.importorskip("cupy.cuda.nccl")
    if not cupy_nccl.available:
        pytest.skip("NCCL is not installed")
    of = {"UINT8": "uint8", "BFLOAT16": "bfloat16"} | {f"INT{bits}": f"int{bits}" for bits in (8, 32, 64)}
    of |= {f"UINT{bits}": f"uint{bits}" for bits in (32, 64)} | {
        f"FLOAT{bits}": f"float{bits}" for bits in (16, 32, 64)
    }
    for constant, name in of.items():
        assert nccl_elements.word(dtype(name)) == (getattr(cupy_nccl, f"NCCL_{constant}"), 1)
    int32 = dtype("int32")
    ops = {Op.SUM: "SUM", Op.PRODUCT: "PROD", Op.MIN: "MIN", Op.MAX: "MAX"}
    assert {op: nccl_elements.reduction(op, int32) for op in ops} == {
        op: getattr(cupy_nccl, f"NCCL_{name}") for op, name in ops.items()
    }


def test_cupy_raises_what_is_expected_of_it() -> None:
    cupy_nccl = pytest.importorskip("cupy.cuda.nccl")
    if not cupy_nccl.available:
        pytest.skip("NCCL is not installed")
    told = {}
    for status in range(1, 10):
        with pytest.raises((RuntimeError, KeyError)) as raised:
            cupy_nccl.check_status(status)
        told[status] = str(nccl_library.failure("allReduce", 3, raised.value))
    assert all(f"({status})" in text and "rank 3" in text and "allReduce" in text for status, text in told.items())
    assert "ncclInvalidUsage" in told[5] and "ncclRemoteError" in told[6] and "ncclInProgress" in told[7]
    methods = (
        "allReduce",
        "reduceScatter",
        "allGather",
        "broadcast",
        "send",
        "recv",
        "check_async_error",
        "abort",
        "destroy",
    )
    assert all(hasattr(cupy_nccl.NcclCommunicator, name) for name in methods)
    library = nccl_library.NcclLibrary()
    assert library.why_not() is None
    assert library.version() >= (2, 20, 0)
    first, second = library.make_id(), library.make_id()
    assert len(first) == len(second) == 128 and first != second
    unconnected = nccl_library.NcclCommunicator(
        cupy_nccl, cupy_nccl.NcclCommunicator.__new__(cupy_nccl.NcclCommunicator), 0, 2, FakeDevice()
    )
    for call in (
        lambda: unconnected.all_reduce(0, 0, 1, dtype("int32"), Op.SUM, 0),
        lambda: unconnected.send(0, 1, dtype("int16"), 1, 0),
    ):
        with pytest.raises(TransportError, match="ncclInvalidArgument"):
            call()
    with pytest.raises(TransportError, match="ncclInvalidArgument"):
        unconnected.check()


def test_nccl4py_raises_what_is_expected_of_it() -> None:
    bindings = pytest.importorskip("nccl.bindings.nccl")
    for status in range(1, 9):
        told = str(nccl_library.failure("allReduce", 3, bindings.NCCLError(status)))
        assert f"({status})" in told and "nccl" in told and "does not know" not in told
    binding = nccl_binding.Nccl4py(bindings)
    library = nccl_library.NcclLibrary(binding)
    assert library.version() >= (2, 20, 0)
    first, second = library.make_id(), library.make_id()
    assert len(first) == len(second) == 128 and first != second
    handle = nccl_binding.Nccl4pyCommunicator.__new__(nccl_binding.Nccl4pyCommunicator)
    handle._bindings, handle._handle = bindings, bindings.Comm()
    unconnected = nccl_library.NcclCommunicator(binding, handle, 0, 2, FakeDevice())
    for call in (
        lambda: unconnected.all_reduce(0, 0, 1, dtype("int32"), Op.SUM, 0),
        lambda: unconnected.send(0, 1, dtype("int16"), 1, 0),
        unconnected.check,
    ):
        with pytest.raises(TransportError, match="ncclInvalidArgument"):
            call()


# ---- a binding that raises as CuPy's does


class FakeNcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        if status > 6:
            raise KeyError(status)
        super().__init__(f"status {status}")
        self.status = status


class FakeCommunicator:
    """Notes down what it is asked; ``status`` is what every call ends with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.entered = threading.Event()
        self.hold: threading.Event | None = None
        self.gone: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("allReduce", "reduceScatter", "allGather", "broadcast", "send", "recv", "check_async_error"):
            raise AttributeError(name)

        def call(*arguments: int) -> None:
            checked(signatures("cupy.cuda.nccl")[f"NcclCommunicator.{name}"], arguments)
            self.calls.append((name, *arguments))
            self.entered.set()
            if self.hold is not None and not self.hold.wait(SECONDS):
                self.gone.append("hung")
            if self.status:
                raise FakeNcclError(self.status)

        return call

    def abort(self) -> None:
        self.gone.append("abort")
        if self.hold is not None:
            self.hold.set()

    def destroy(self) -> None:
        self.gone.append("destroy")


class FakeModule:
    """``cupy.cuda.nccl``; ``meet`` stands for ncclCommInitRank."""

    available = True
    NcclConfig = object

    def __init__(self, meet: Callable[[int, bytes, int], Any] | None = None, version: int = 23203) -> None:
        self.NcclCommunicator = meet
        self.get_version = lambda: version
        self.get_unique_id = lambda: bytes(128)
        self.groups: list[str] = []
        self.group_status = 0

    def groupStart(self) -> None:
        self.groups.append("start")

    def groupEnd(self) -> None:
        self.groups.append("end")
        if self.group_status:
            raise FakeNcclError(self.group_status)


class FakeNccl4pyError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class FakeNccl4py:
    """``nccl.bindings.nccl``, whose one communicator notes down as CuPy's what it is asked."""

    NCCLError = FakeNccl4pyError
    UniqueId = SimpleNamespace(from_buffer=lambda buffer: ("id", bytes(buffer)))
    CUPYS = MappingProxyType(
        {
            "all_reduce": "allReduce",
            "reduce_scatter": "reduceScatter",
            "all_gather": "allGather",
            "broadcast": "broadcast",
            "send": "send",
            "recv": "recv",
        }
    )

    def __init__(self, communicator: FakeCommunicator, module: FakeModule) -> None:
        self._communicator, self._handle, self._module = communicator, object(), module
        self.met: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        text = signatures("nccl.bindings.nccl")[name]

        def call(*arguments: Any) -> Any:
            checked(text, arguments)
            if text.startswith(f"{name}(comm)") or name in self.CUPYS:
                assert arguments[0 if "(comm)" in text else -2] is self._handle
            try:
                return self._do(name, arguments)
            except (FakeNcclError, KeyError) as error:
                raise FakeNccl4pyError(error.args[0] if isinstance(error, KeyError) else error.status) from None

        return call

    def _do(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name in self.CUPYS:
            getattr(self._communicator, self.CUPYS[name])(*arguments[:-2], arguments[-1])
        elif name.startswith("group"):
            {"group_start": self._module.groupStart, "group_end": self._module.groupEnd}[name]()
        elif name == "comm_init_rank":
            self.met.append(arguments)
            return self._handle
        elif name == "comm_get_async_error":
            return self._communicator.status
        elif name == "get_unique_id":
            return bytearray(range(128))
        elif name == "get_version":
            return self._module.get_version()
        else:
            getattr(self._communicator, name.removeprefix("comm_"))()
        return None


BINDINGS = ("cupy", "nccl4py")


def adapter(
    rank: int = 1, size: int = 4, binding: str = "cupy"
) -> tuple[nccl_library.NcclCommunicator, FakeCommunicator, FakeModule]:
    module, fake = FakeModule(), FakeCommunicator()
    if binding == "cupy":
        return nccl_library.NcclCommunicator(module, fake, rank, size, FakeDevice()), fake, module
    nccl4py = nccl_binding.Nccl4py(FakeNccl4py(fake, module))
    communicator = nccl4py.NcclCommunicator(size, bytes(128), rank)
    return nccl_library.NcclCommunicator(nccl4py, communicator, rank, size, FakeDevice()), fake, module


@pytest.mark.parametrize("binding", BINDINGS)
def test_operations_arrive_with_counts_in_words(binding: str) -> None:
    communicator, fake, module = adapter(binding=binding)
    communicator.begin_group()
    communicator.all_reduce(10, 20, 5, dtype("complex64"), Op.AVERAGE, 7)
    communicator.reduce_scatter(10, 20, 5, dtype("bool"), Op.SUM, 7)
    communicator.all_gather(10, 20, 5, dtype("int16"), 7)
    communicator.broadcast(10, 20, 5, dtype("uint64"), 3, 7)
    communicator.send(10, 5, dtype("complex128"), 2, 7)
    communicator.receive(20, 5, dtype("float16"), 0, 7)
    communicator.end_group()
    assert fake.calls == [
        ("allReduce", 10, 20, 10, 7, 0, 7),
        ("reduceScatter", 10, 20, 5, 1, 2, 7),
        ("allGather", 10, 20, 10, 1, 7),
        ("broadcast", 10, 20, 5, 5, 3, 7),
        ("send", 10, 10, 8, 2, 7),
        ("recv", 20, 5, 6, 0, 7),
    ]
    assert module.groups == ["start", "end"]


def test_what_nccl_reduces_otherwise_is_refused_before_it_is_asked() -> None:
    communicator, fake, _ = adapter()
    for op, name in ((Op.MAX, "float32"), (Op.SUM, "uint16"), (Op.PRODUCT, "complex64"), (Op.ADASUM, "float32")):
        with pytest.raises(InvalidTypeError, match=name):
            communicator.all_reduce(0, 0, 1, dtype(name), op, 0)
        with pytest.raises(InvalidTypeError, match=name):
            communicator.reduce_scatter(0, 0, 1, dtype(name), op, 0)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (1, "ncclUnhandledCudaError"),
        (2, "ncclSystemError.*/dev/shm"),
        (5, "ncclInvalidUsage.*NCCL_MULTI_RANK_GPU_ENABLE=1.*cuda-ipc"),
        (6, "ncclRemoteError.*died"),
        (7, "ncclInProgress.*NCCL_COMM_BLOCKING"),
        (8, "ncclTimeout"),
        (42, r"does not know \(42\)"),
    ],
)
@pytest.mark.parametrize("binding", BINDINGS)
def test_errors_name_rank_call_status_and_remedy(status: int, expected: str, binding: str) -> None:
    communicator, fake, module = adapter(2, binding=binding)
    fake.status = status
    with pytest.raises(TransportError, match=rf"rank 2: NCCL's send failed: .*{expected}.*NCCL_DEBUG=INFO"):
        communicator.send(0, 1, dtype("int8"), 1, 0)
    with pytest.raises(TransportError, match=f"check_async_error failed: .*{expected}"):
        communicator.check()
    module.group_status = status
    communicator.begin_group()
    with pytest.raises(TransportError, match=expected):
        communicator.end_group()


def test_errors_without_a_status_are_told_as_they_are() -> None:
    assert "RuntimeError: odd" in str(nccl_library.failure("send", 0, RuntimeError("odd")))
    assert "KeyError" in str(nccl_library.failure("send", 0, KeyError("name")))


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("end", ["abort", "close"])
def test_after_the_end_everything_is_refused_and_the_end_comes_once(end: str, binding: str) -> None:
    communicator, fake, _ = adapter(binding=binding)
    getattr(communicator, end)()
    communicator.abort()
    communicator.close()
    assert fake.gone == [{"abort": "abort", "close": "destroy"}[end]]
    for call in (communicator.begin_group, communicator.check, lambda: communicator.send(0, 1, dtype("int8"), 0, 0)):
        with pytest.raises(TransportError, match="aborted or closed"):
            call()
    assert fake.calls == []


@pytest.mark.parametrize("group_status", [0, 3])
def test_a_group_is_ended_when_a_call_in_it_raises(group_status: int) -> None:
    """And what that call raises is told, not what NCCL says of the group."""
    communicator, fake, module = adapter()
    messages = NcclMessages(communicator)
    fake.status, module.group_status = 1, group_status
    stage = Stage(sends=[Message(2, (0, 0), 4)])
    with pytest.raises(TransportError, match="send failed: ncclUnhandledCudaError"):
        messages.exchange(stage, np.array([64], np.int64), dtype("int32"), 7)
    assert module.groups == ["start", "end"]
    assert not communicator._calls._is_owned()  # type: ignore[attr-defined]


def test_an_abort_waits_for_a_group_and_ends_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_GRACE_SECONDS", 0.05)
    communicator, fake, _ = adapter()
    fake.hold = threading.Event()
    call = threading.Thread(target=communicator.send, args=(0, 1, dtype("int8"), 1, 0), daemon=True)
    call.start()
    assert fake.entered.wait(SECONDS)
    communicator.check()  # does not wait for the call that hangs
    assert fake.calls == [("send", 0, 1, 0, 1, 0)]
    communicator.abort()
    call.join(SECONDS)
    assert not call.is_alive() and fake.gone == ["abort"]

    monkeypatch.setattr(nccl_library, "_GRACE_SECONDS", 10 * SECONDS)
    communicator, fake, module = adapter()
    communicator.begin_group()
    abort = threading.Thread(target=communicator.abort, daemon=True)
    abort.start()
    abort.join(0.05)
    assert fake.gone == []
    communicator.end_group()
    abort.join(SECONDS)
    assert not abort.is_alive() and fake.gone == ["abort"] and module.groups == ["start", "end"]


def test_an_abort_and_a_close_that_hang_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_ABORT_SECONDS", 0.02)
    monkeypatch.setattr(nccl_library, "_CLOSE_SECONDS", 0.02)
    never, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        never.wait(SECONDS)

    for end in ("abort", "close"):
        stuck = SimpleNamespace(abort=hang, destroy=hang)
        getattr(nccl_library.NcclCommunicator(FakeModule(), stuck, 0, 2, FakeDevice()), end)()
        assert begun.acquire(timeout=SECONDS)
    never.set()


# ---- connecting


class FakeDevice:
    """Notes down which threads have activated it."""

    def __init__(self) -> None:
        self.multiprocessors = 132
        self.active: set[int] = set()
        self.done: set[int] = set()

    def activate(self) -> None:
        self.active.add(threading.get_ident())

    def passed(self, event: int) -> bool:
        assert threading.get_ident() in self.active
        return event in self.done


def test_connecting_activates_the_device_in_the_thread_that_connects() -> None:
    device, asked = FakeDevice(), []

    def meet(size: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        asked.append((size, unique_id, rank, threading.get_ident() in device.active))
        return FakeCommunicator()

    communicator = nccl_library.NcclLibrary(FakeModule(meet)).connect(2, 3, b"i" * 128, SECONDS, device)
    assert (communicator.rank, communicator.size) == (2, 3)
    assert asked == [(3, b"i" * 128, 2, True)]


def test_connecting_tells_nccls_error() -> None:
    def meet(size: int, unique_id: bytes, rank: int) -> Any:
        raise FakeNcclError(5)

    with pytest.raises(TransportError, match=r"rank 1: .*ncclInvalidUsage.*two ranks use the same GPU"):
        nccl_library.NcclLibrary(FakeModule(meet)).connect(1, 2, bytes(128), SECONDS, FakeDevice())


def test_connecting_by_nccl4py() -> None:
    """With NCCL's own check of what the settings allow: calls of a communicator that does not block would return too
    early."""
    fake, module = FakeCommunicator(), FakeModule()
    bindings = FakeNccl4py(fake, module)
    library = nccl_library.NcclLibrary(nccl_binding.Nccl4py(bindings))
    assert library.make_id() == bytes(range(128)) and library.version() == (2, 32, 3)
    communicator = library.connect(2, 3, library.make_id(), SECONDS, FakeDevice())
    assert (communicator.rank, communicator.size) == (2, 3)
    assert bindings.met == [(3, ("id", bytes(range(128))), 2)]
    fake.status = 7
    with pytest.raises(TransportError, match=r"rank 1: .*ncclInProgress.*unset NCCL_COMM_BLOCKING"):
        library.connect(1, 2, bytes(128), SECONDS, FakeDevice())
    assert fake.gone == ["abort"]


def test_connecting_is_bounded_and_what_comes_too_late_is_aborted() -> None:
    proceed, aborted = threading.Event(), threading.Event()

    def meet(size: int, unique_id: bytes, rank: int) -> Any:
        assert proceed.wait(SECONDS)
        return SimpleNamespace(abort=aborted.set)

    with pytest.raises(CollectiveTimeoutError, match="rank 0: the 2 ranks did not all connect"):
        nccl_library.NcclLibrary(FakeModule(meet)).connect(0, 2, bytes(128), 0.02, FakeDevice())
    assert not aborted.is_set()
    proceed.set()
    assert aborted.wait(SECONDS)


@pytest.mark.parametrize(
    ("sharers", "multiprocessors", "given", "expected"),
    [
        (1, 132, {}, None),
        (2, 132, {}, "8"),
        (4, 132, {}, "8"),
        (16, 132, {}, "4"),
        (4, 16, {}, "2"),
        (4, 4, {}, "1"),
        (4, 132, {"NCCL_MAX_CTAS": "16"}, "16"),
        (4, 132, {"NCCL_MIN_CTAS": "16"}, None),
        (4, 132, {"NCCL_MIN_NCHANNELS": "16"}, None),
    ],
)
def test_ranks_that_share_a_gpu_leave_room_for_each_other(
    sharers: int, multiprocessors: int, given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the communicator is made, when NCCL reads it; unless the user has decided."""
    seen: list[str | None] = []

    def meet(size: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        seen.append(os.environ.get("NCCL_MAX_CTAS"))
        return FakeCommunicator()

    with monkeypatch.context() as patched:
        for name in ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"):
            patched.setenv(name, "")  # so that it is restored, whatever is set meanwhile
            patched.delenv(name)
        for name, value in given.items():
            patched.setenv(name, value)
        device = FakeDevice()
        device.multiprocessors = multiprocessors
        nccl_library.NcclLibrary(FakeModule(meet)).connect(0, 4, bytes(128), SECONDS, device, sharers=sharers)
    assert seen == [expected]


@pytest.mark.parametrize("end", ["abort", "close"])
def test_the_end_comes_in_a_thread_on_which_the_device_is_active(end: str) -> None:
    """No capture of the program's restricts what NCCL frees there."""
    communicator, fake, _ = adapter()
    threads: list[int] = []
    fake.abort = fake.destroy = lambda: threads.append(threading.get_ident())  # type: ignore[method-assign]
    getattr(communicator, end)()
    device: Any = communicator._device
    assert threads and set(threads) <= device.active


def test_gpus_are_shared_only_where_nccl_can_and_may(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, version, expected in (
        ("1", 23000, True),
        ("0x1", 23203, True),
        ("1", 22907, False),
        ("0", 23203, False),
        ("yes", 23203, False),
        (None, 23203, False),
    ):
        monkeypatch.delenv(nccl_library.SHARE_VARIABLE, raising=False)
        if setting is not None:
            monkeypatch.setenv(nccl_library.SHARE_VARIABLE, setting)
        assert nccl_library.NcclLibrary(FakeModule(version=version)).shares_gpus() is expected, (setting, version)


class Installed:
    """What can be imported; everything else that has to do with NCCL cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
        runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090)
        self._modules = {"cupy": SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))}
        self._modules |= {name.replace("_", "."): module for name, module in modules.items()}
        monkeypatch.setattr(nccl_binding.importlib, "import_module", self._find)

    def _find(self, name: str) -> Any:
        if name not in self._modules:
            raise ImportError(f"no module {name}")
        return self._modules[name]


def test_the_binding_is_cupys_or_else_nccl4pys(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeModule()
    nccl4py = FakeNccl4py(FakeCommunicator(), FakeModule(version=22905))
    Installed(monkeypatch, cupy_cuda_nccl=module, nccl_bindings_nccl=nccl4py)
    assert nccl_binding.load() is module
    for cupys in ({}, {"cupy_cuda_nccl": SimpleNamespace(available=False)}):
        Installed(monkeypatch, nccl_bindings_nccl=nccl4py, **cupys)
        assert nccl_library.NcclLibrary().why_not() is None
        assert nccl_library.NcclLibrary().version() == (2, 29, 5)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nccl_library.NcclLibrary()
    Installed(monkeypatch, cupy_cuda_nccl=SimpleNamespace(available=True))
    assert "too old" in str(library.why_not())

    def no_nccl() -> int:
        raise RuntimeError("libnccl.so.2: cannot open shared object file")

    without = SimpleNamespace(get_version=no_nccl)
    Installed(monkeypatch, cupy_cuda_nccl=SimpleNamespace(available=False), nccl_bindings_nccl=without)
    assert "pip install nvidia-nccl-cu12" in str(library.why_not())
    assert not library.shares_gpus()
    Installed(monkeypatch)
    assert "no module cupy.cuda.nccl" in str(library.why_not())
    with pytest.raises(MissingDependencyError, match="CuPy"):
        library.make_id()


# ---- the watch


class Aborted:
    """A communicator that is watched."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.others: threading.Barrier | None = None
        self.checks = threading.Semaphore(0)
        self.aborts = 0

    def check(self) -> None:
        self.checks.release()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        if self.others is not None:
            self.others.wait(SECONDS)
            threading.Event().wait(0.02)
        self.aborts += 1


class Watched:
    """A watch and all that it looks at."""

    def __init__(self, communicators: int = 2, interval: float = 0.001) -> None:
        self.device = FakeDevice()
        self.device.activate()
        self.communicators = [Aborted() for _ in range(communicators)]
        self.peers: Callable[[], None] = lambda: None
        self.looks = threading.Semaphore(0)
        self.failures: queue.Queue[tuple[Exception, list[int]]] = queue.Queue()
        self.watch = Watch(self.device, self.communicators, self._check_peers, self._fail, interval=interval)  # type: ignore[arg-type]

    def _check_peers(self) -> None:
        self.looks.release()
        self.peers()

    def _fail(self, error: Exception) -> None:
        self.failures.put((error, [communicator.aborts for communicator in self.communicators]))


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.close()


def look(watched: Watched, times: int = 3) -> None:
    """Let the watch look at the peers some more times."""
    for _ in range(times):
        assert watched.looks.acquire(timeout=SECONDS)


def test_the_watch_looks_while_work_is_under_way(watched: Watched) -> None:
    watched.watch.add(1)
    look(watched)
    assert not watched.watch.settled()
    watched.device.done.add(1)
    assert watched.watch.settled()
    watched.device.done.clear()
    watched.watch.add(2)
    watched.watch.add(2)
    look(watched)
    watched.device.done.add(2)
    assert watched.watch.settled() and watched.watch.failure is None and watched.failures.empty()


def test_the_watch_sleeps_while_nothing_is_under_way() -> None:
    device = FakeDevice()
    device.activate()
    flight = _WorkInFlight(device)  # type: ignore[arg-type]
    woken: queue.Queue[bool] = queue.Queue()

    def sleep() -> None:
        while flight.wait(0.0):
            woken.put(True)
            device.activate()
            flight.settled()
        woken.put(False)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    for event in (1, 2):
        device.done.add(event)
        with pytest.raises(queue.Empty):
            woken.get(timeout=0.05)
        flight.add(event)
        assert woken.get(timeout=SECONDS)
    flight.close()
    assert woken.get(timeout=SECONDS) is False
    thread.join(SECONDS)


def test_what_is_added_ends_no_pause_between_two_looks() -> None:
    flight = _WorkInFlight(FakeDevice())  # type: ignore[arg-type]
    flight.add(1)

    class Woken:
        calls = 0

        def wait(self, seconds: float) -> bool:
            self.calls += 1
            flight.closed = self.calls == 3  # the others are wake-ups of what has been seen already
            return True

    flight._changed = woken = Woken()  # type: ignore[assignment]
    assert not flight.wait(SECONDS) and woken.calls == 3


def test_a_peer_that_died_ends_the_work_once(watched: Watched) -> None:
    watched.watch.add(1)
    look(watched)

    def dead() -> None:
        raise RankFailedError("rank 1 died")

    watched.peers = dead
    error, aborts = watched.failures.get(timeout=SECONDS)
    assert isinstance(error, RankFailedError) and watched.watch.failure is error
    assert aborts == [1, 1]  # all are aborted before it is told
    watched.watch.add(2)
    watched.watch.close()
    assert [communicator.aborts for communicator in watched.communicators] == [1, 1] and watched.failures.empty()


def test_a_peer_that_left_a_moment_before_the_work_was_done_is_not_missed(watched: Watched) -> None:
    watched.watch.add(1)
    look(watched)

    def left() -> None:
        watched.device.done.add(1)
        raise RankFailedError("rank 1 has left")

    watched.peers = left
    while not watched.watch.settled():
        look(watched, 1)
    watched.peers = lambda: None
    watched.watch.add(2)
    while watched.looks.acquire(blocking=False):
        pass
    look(watched)
    assert watched.watch.failure is None and watched.failures.empty()


def test_communicators_are_aborted_at_once_and_then_it_is_told(watched: Watched) -> None:
    both = threading.Barrier(2)
    for communicator in watched.communicators:
        communicator.others = both  # neither ends before the other has begun
    watched.communicators[0].error = TransportError("remote")
    watched.watch.add(1)
    error, aborts = watched.failures.get(timeout=SECONDS)
    assert str(error) == "remote" and aborts == [1, 1] and not both.broken


def test_communicators_that_come_later_are_looked_after_too(watched: Watched) -> None:
    watched.watch.add(1)
    look(watched)
    late = Aborted()
    watched.communicators.append(late)
    assert late.checks.acquire(timeout=SECONDS)


def test_a_broken_device_ends_the_work(watched: Watched) -> None:
    def broken(event: int) -> bool:
        raise TransportError("the device is lost")

    watched.device.passed = broken  # type: ignore[method-assign]
    watched.watch.add(1)
    assert "lost" in str(watched.failures.get(timeout=SECONDS)[0])


def test_closing_ends_the_thread_even_while_work_is_under_way() -> None:
    watched = Watched(interval=3600.0)
    watched.watch.add(1)
    thread = watched.watch._thread
    assert thread is not None
    watched.watch.close()
    assert not thread.is_alive() and watched.failures.empty()


def test_the_failure_may_close_the_watch() -> None:
    watched = Watched()
    closed = threading.Event()

    def fail(error: Exception) -> None:
        watched.watch.close()
        closed.set()

    watched.watch._on_failure = fail
    watched.communicators[0].error = TransportError("remote")
    watched.watch.add(1)
    assert closed.wait(SECONDS)


@pytest.mark.parametrize("interval", [0.001, 3600.0])
def test_a_watch_that_is_dropped_ends_its_thread_without_the_collector(interval: float) -> None:
    watched = Watched(interval=interval)
    watched.watch.add(1)
    if interval < 1:
        look(watched)
    thread, alive = watched.watch._thread, weakref.ref(watched.watch)
    gc.disable()
    try:
        del watched.watch
        assert thread is not None
        thread.join(SECONDS)
        assert not thread.is_alive() and alive() is None
    finally:
        gc.enable()


# ---- on emulated GPUs


class Rank:
    """A rank of an emulated communicator, with a GPU, a stream and some memory of its own."""

    def __init__(self, rank: int, library: EmulatedNccl, unique_id: bytes) -> None:
        self.device = EmulatedDevice(rank)
        self.device.activate()
        self.stream, self.memory = self.device.create_stream(), self.device.allocate(64)
        self.communicator = library.connect(rank, library.size, unique_id, SECONDS, self.device)


@contextmanager
def ranks(size: int) -> Iterator[list[Rank]]:
    library = EmulatedNccl(size, timeout=SECONDS)
    with ThreadPoolExecutor(size) as pool:
        group = list(pool.map(Rank, range(size), [library] * size, [library.make_id()] * size))
    yield group
    for member in group:
        member.device.close()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_warming_up_reaches_every_peer(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, send = set(), EmulatedCommunicator.send

    def noted(self: EmulatedCommunicator, source: int, count: int, dtype: Any, peer: int, stream: int) -> None:
        pairs.add((self.rank, peer))
        send(self, source, count, dtype, peer, stream)

    def warm_up(member: Rank) -> None:
        nccl.warm_up(member.communicator, member.device, member.memory, member.stream, SECONDS)

    monkeypatch.setattr(EmulatedCommunicator, "send", noted)
    with ranks(size) as group, ThreadPoolExecutor(size) as pool:
        list(pool.map(warm_up, group))
        for member in group:
            member.communicator.check()
            assert member.communicator._carried_out == (size > 1)
    assert pairs == {(a, b) for a in range(size) for b in range(size) if a != b}


def test_warming_up_without_a_peer_is_bounded_and_aborts() -> None:
    with ranks(2) as (first, _):
        with pytest.raises(CollectiveTimeoutError, match=r"rank 0: .*1 other ranks within 0.05 s"):
            nccl.warm_up(first.communicator, first.device, first.memory, first.stream, 0.05)
        assert first.communicator.aborts == 1
