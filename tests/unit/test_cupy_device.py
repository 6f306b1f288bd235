"""The real device without a GPU: every call that it makes is held to CuPy's own signatures, and every error is told in
our words."""

from __future__ import annotations

import gc
import importlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives.device
from collectives.base.errors import InvalidArgumentError, MissingDependencyError, OutOfMemoryError, TransportError
from collectives.device import diagnosis, libcuda, selection
from collectives.device.protocol import Allocation, active
from tests.support.emulated.fake_cupy import CudaError, FakeCupy

SOURCE = 'extern "C" __global__ void scale(float* x, float y, float z) { x[threadIdx.x] = x[threadIdx.x] * y + z; }'
OURS = ("compiler", "cupy_device")


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A driver for CUDA 13 with two GPUs; the environment changes it."""
    monkeypatch.setattr(libcuda, "LIBRARY", str(library))
    for name, value in {"FAKE_CUDA": "13000", "FAKE_GPUS": "2", "FAKE_INIT": "0", "FAKE_IN_USE": "0"}.items():
        monkeypatch.setenv(name, value)
    libcuda.load.cache_clear()
    yield monkeypatch
    libcuda.load.cache_clear()


def _forget() -> None:
    for name in OURS:
        sys.modules.pop(f"collectives.device.{name}", None)
        if hasattr(collectives.device, name):
            delattr(collectives.device, name)


@pytest.fixture
def cupy(driver: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCupy]:
    fake = FakeCupy()
    for name, module in fake.modules.items():
        driver.setitem(sys.modules, name, module)
    driver.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    _forget()
    yield fake
    _forget()


@pytest.fixture
def device(cupy: FakeCupy) -> Any:
    return importlib.import_module("collectives.device.cupy_device").CupyDevice(1)


# ---- the device


def test_what_a_device_is(device: Any, cupy: FakeCupy) -> None:
    assert (device.index, device.name, device.multiprocessors) == (1, "NVIDIA H200", 132)
    assert device.identity == "00000000-0000-0000-0000-000000000029"
    # No context on the GPU before a thread activates it.
    assert {call.name for call in cupy.calls} == {"deviceGetAttribute"}


CALLS: list[tuple[Callable[[Any], object], str, tuple[Any, ...]]] = [
    (lambda device: device.free(0x700), "free", (0x700,)),
    (lambda device: device.copy(1, 2, 3, 4), "memcpyAsync", (1, 2, 3, 4, 4)),
    (lambda device: device.clear(1, 2, 3), "memsetAsync", (1, 0, 2, 3)),
    (lambda device: device.create_stream(), "streamCreateWithPriority", (1, -100)),
    (lambda device: device.destroy_stream(5), "streamDestroy", (5,)),
    (lambda device: device.drain(5), "streamSynchronize", (5,)),
    (lambda device: device.create_event(), "eventCreateWithFlags", (2,)),
    (lambda device: device.create_event(shared=True), "eventCreateWithFlags", (6,)),
    (lambda device: device.destroy_event(6), "eventDestroy", (6,)),
    (lambda device: device.record(6, 5), "eventRecord", (6, 5)),
    (lambda device: device.wait(5, 6), "streamWaitEvent", (5, 6)),
    (lambda device: device.export_memory(7), "ipcGetMemHandle", (7,)),
    (lambda device: device.import_memory(bytes(64)), "ipcOpenMemHandle", (bytes(64), 1)),
    (lambda device: device.forget_memory(7), "ipcCloseMemHandle", (7,)),
    (lambda device: device.export_event(6), "ipcGetEventHandle", (6,)),
    (lambda device: device.import_event(bytes(64)), "ipcOpenEventHandle", (bytes(64),)),
    (lambda device: device.launch(8, (3, 2), 256, 9, 5), "launchKernel", (8, 3, 2, 1, 256, 1, 1, 0, 5, 9, 0)),
    (lambda device: device.capturing(5), "streamIsCapturing", (5,)),
    (lambda device: device.begin_capture(5), "streamBeginCapture", (5, 1)),
    (lambda device: device.launch_graph(4, 5), "graphLaunch", (4, 5)),
    (lambda device: device.destroy_graph(4), "graphExecDestroy", (4,)),
]


@pytest.mark.parametrize(
    ("do", "name", "arguments"), CALLS, ids=[f"{name}-{index}" for index, (_, name, _) in enumerate(CALLS)]
)
def test_a_method_is_one_call_whose_error_is_ours(
    do: Callable[[Any], object], name: str, arguments: tuple[Any, ...], device: Any, cupy: FakeCupy
) -> None:
    cupy.calls.clear()
    result = do(device)
    assert cupy.calls == [(name, arguments)]
    tells = ("streamCreate", "streamIsCapturing", "eventCreate", "ipcGet", "ipcOpen")
    assert result is not None if name.startswith(tells) else result is None
    cupy.failures[name] = CudaError("cudaErrorIllegalAddress: an illegal memory access was encountered")
    with pytest.raises(
        TransportError, match=r"^GPU 1 \(NVIDIA H200\): cannot .+: cudaErrorIllegalAddress: .*restart this process"
    ) as caught:
        do(device)
    assert isinstance(caught.value.__cause__, CudaError)


def test_the_current_device_is_the_programs_own_again(device: Any, cupy: FakeCupy, driver: pytest.MonkeyPatch) -> None:
    cupy.results["getDevice"] = 1
    device.activate()
    # Also if it is current already: the thread may have no context.
    assert cupy.called("setDevice") == [(1,)]
    cupy.results["getDevice"] = 0
    previous = device.activate()
    device.deactivate(previous)
    assert cupy.called("setDevice") == [(1,), (1,), (0,)]
    cupy.results["getDevice"] = 1
    device.deactivate(device.activate())  # it is current: nothing to do
    assert len(cupy.called("setDevice")) == 3
    # Nobody has used GPU 0: to make it current would create a context on it.
    driver.setenv("FAKE_IN_USE", "1")
    device.deactivate(previous)
    assert len(cupy.called("setDevice")) == 3
    cupy.results["getDevice"] = 0
    cupy.failures["setDevice"] = CudaError("cudaErrorInvalidDevice: invalid device ordinal")
    with pytest.raises(TransportError, match="cannot make it the current device: cudaErrorInvalidDevice"):
        device.activate()
    driver.delenv("FAKE_IN_USE")
    with pytest.raises(TransportError, match="cannot make GPU 0 the current device again: cudaErrorInvalidDevice"):
        device.deactivate(previous)


def test_captures_of_the_program_do_not_restrict_the_thread_while_the_device_is_active(
    device: Any, cupy: FakeCupy
) -> None:
    """And do again afterwards, as the program had it, whatever fails."""
    read = lambda: libcuda.capture_mode(libcuda.RELAXED)  # noqa: E731
    libcuda.capture_mode(1)
    with active(device):
        assert read() == libcuda.RELAXED
        with active(device):
            pass
        assert read() == libcuda.RELAXED
    assert libcuda.capture_mode(0) == 1
    cupy.failures["getDevice"] = CudaError("cudaErrorUnknown: unknown error")
    with pytest.raises(TransportError):
        device.activate()
    assert libcuda.capture_mode(0) == 0


def test_the_default_stream_counts_as_captured_while_a_stream_is_that_waits_for_it(device: Any, cupy: FakeCupy) -> None:
    cupy.failures["streamIsCapturing"] = CudaError(
        "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on it"
    )
    assert device.capturing(0) is True


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)])
def test_what_is_shared_fills_whole_blocks(nbytes: int, taken: int, device: Any, cupy: FakeCupy) -> None:
    assert device.allocate(nbytes, shared=True) % 256 == 0
    assert device.allocate(nbytes) % 256 == 0
    assert cupy.called("malloc") == [(taken,), (nbytes,)]


def test_memory_that_is_full(device: Any, cupy: FakeCupy) -> None:
    cupy.failures["malloc"] = CudaError("cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(
        OutOfMemoryError, match=r"cannot allocate 4096 bytes: .*out of memory.*torch.*collectives.empty_cache"
    ):
        device.allocate(4096)
    cupy.failures["empty"] = MemoryError("Out of memory allocating 16 bytes")
    with pytest.raises(OutOfMemoryError, match=r"cannot make an array of \(4,\) float32: Out of memory.*nvidia-smi"):
        device.empty((4,), np.dtype(np.float32), 0)


@pytest.mark.parametrize("error", ["InvalidValue", "InvalidDevice", "NotSupported", "MapBufferObjectFailed"])
@pytest.mark.parametrize("do", [do for do, name, _ in CALLS if name.startswith(("ipcGet", "ipcOpen"))])
def test_sharing_that_is_refused(do: Callable[[Any], object], error: str, device: Any, cupy: FakeCupy) -> None:
    for name in ("ipcGetMemHandle", "ipcOpenMemHandle", "ipcGetEventHandle", "ipcOpenEventHandle"):
        cupy.failures[name] = CudaError(f"cudaError{error}: as CUDA says it")
    with pytest.raises(TransportError, match=rf"cudaError{error}: .*expandable segments.*--ipc=host"):
        do(device)


def test_kernels_are_let_into_another_gpus_memory(device: Any, cupy: FakeCupy) -> None:
    device.reach(0)
    assert (cupy.called("deviceCanAccessPeer"), cupy.called("deviceEnablePeerAccess")) == ([(1, 0)], [(0,)])
    cupy.failures["deviceEnablePeerAccess"] = CudaError(
        "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled"
    )
    device.reach(0)
    cupy.failures["deviceEnablePeerAccess"] = CudaError("cudaErrorInvalidDevice: invalid device ordinal")
    with pytest.raises(TransportError, match=r"GPU 1 .*: cannot reach the memory of GPU 0: cudaErrorInvalidDevice"):
        device.reach(0)
    cupy.results["deviceCanAccessPeer"] = 0
    with pytest.raises(
        TransportError, match=r"GPU 1 .*: its kernels cannot reach the memory of GPU 0; nvidia-smi topo"
    ):
        device.reach(0)


def test_pinned_memory_lives_as_long_as_a_view_of_it_and_is_used_again(device: Any, cupy: FakeCupy) -> None:
    memory = device.pinned(1024)
    assert (memory.dtype, memory.shape, memory.flags.writeable) == (np.uint8, (1024,), True)
    assert cupy.called("hostAlloc") == [(4096, 3)]
    address = memory.ctypes.data
    view = memory[512:].view(np.float32)
    view[:] = 7
    del memory
    gc.collect()
    other = device.pinned(1000)
    assert other.ctypes.data != address and view.sum() == 7 * 128
    del view
    gc.collect()
    for nbytes in (1024, 1, 4096):
        assert device.pinned(nbytes).ctypes.data == address
    assert cupy.called("hostAlloc") == [(4096, 3)] * 2
    device.pinned(5000)
    device.pinned((1 << 20) + 1)
    assert cupy.called("hostAlloc")[2:] == [(8192, 3), (2 << 20, 3)] and cupy.called("freeHost") == []


def test_idle_pinned_memory_is_bounded_and_given_back_before_there_is_none(
    device: Any, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [device.pinned(nbytes).ctypes.data for nbytes in (4096, 8192)]
    monkeypatch.setattr("collectives.device.pinned._MOST_IDLE", 8192)
    kept = device.pinned(16384)
    assert sorted(cupy.called("freeHost")) == sorted((address,) for address in addresses)
    del kept
    allocate = cupy.results["hostAlloc"]

    def limited(nbytes: int, flags: int) -> int:
        if not cupy.called("freeHost")[2:]:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        return int(allocate(nbytes, flags))

    cupy.results["hostAlloc"] = limited
    assert device.pinned(4096).nbytes == 4096
    cupy.failures["hostAlloc"] = CudaError("cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(TransportError, match=r"cannot page-lock 65536 bytes of host memory: .*out of memory"):
        device.pinned(65536)


def test_what_an_address_belongs_to(device: Any) -> None:
    assert device.allocation(0x7F00_0000_0010) == Allocation(0x7F00_0000_0000, 8 << 30, 0x1234_5678_9AB)
    with pytest.raises(
        TransportError,
        match=r"GPU 1 .*: 0x1000 is not inside one allocation of device memory .*cuMemGetAddressRange_v2: error 1",
    ):
        device.allocation(0x1000)


def test_an_array_is_made_on_its_stream(device: Any, cupy: FakeCupy) -> None:
    cupy.current = 3
    made = device.empty((2, 3), np.dtype(np.float16), 77)
    assert (made.shape, made.dtype, made.stream) == ((2, 3), np.float16, 77)
    assert device.current_stream() == 3


def test_whether_an_event_has_passed(device: Any, cupy: FakeCupy) -> None:
    assert device.passed(6) is True
    cupy.results["eventQuery"] = 600
    assert device.passed(6) is False
    cupy.results["eventQuery"] = 700
    with pytest.raises(TransportError, match="cannot ask for an event: cudaError700"):
        device.passed(6)
    assert cupy.called("eventQuery") == [(6,)] * 3


def test_a_graph(device: Any, cupy: FakeCupy) -> None:
    cupy.calls.clear()
    graph = device.end_capture(5)
    (captured,) = cupy.called("graphInstantiate")[0]
    assert [call.name for call in cupy.calls] == ["streamEndCapture", "graphInstantiate", "graphDestroy"]
    assert graph != captured and cupy.called("graphDestroy") == [(captured,)]
    cupy.failures["graphInstantiate"] = CudaError("cudaErrorInvalidValue: invalid argument")
    with pytest.raises(TransportError, match="cannot make a graph"):
        device.end_capture(5)
    assert len(cupy.called("graphDestroy")) == 2


# ---- kernels


def test_a_kernel_is_compiled_once(device: Any, cupy: FakeCupy) -> None:
    function = device.function(SOURCE, "scale")
    assert device.function(SOURCE, "scale") == function
    assert device.function(SOURCE, "other") != function
    assert cupy.called("createProgram") == [(SOURCE, "collectives.cu", (), ())]
    assert [options for _, options in cupy.called("compileProgram")] == [("--std=c++17", "--fmad=false", "-arch=sm_90")]
    assert cupy.called("moduleLoadData") == [(b"\x7fELF and so on\0",)]
    assert len(cupy.called("destroyProgram")) == 1


def on_four_threads(ask: Callable[[], Any]) -> list[Any]:
    begin = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        return [asked.result(10) for asked in [pool.submit(lambda: (begin.wait(10), ask())[1]) for _ in range(4)]]


def test_threads_compile_a_kernel_once(device: Any, cupy: FakeCupy) -> None:
    functions = on_four_threads(lambda: device.function(SOURCE, "scale"))
    assert len(functions) == 4 and len(set(functions)) == 1
    assert len(cupy.called("compileProgram")) == 1


def test_the_next_process_finds_the_kernel_on_disk(device: Any, cupy: FakeCupy, tmp_path: Path) -> None:
    module = importlib.import_module("collectives.device.cupy_device")
    device.function(SOURCE, "scale")
    (kept,) = (tmp_path / "kernels").iterdir()
    module.CupyDevice(0).function(SOURCE, "scale")
    assert len(cupy.called("compileProgram")) == 1
    assert cupy.called("moduleLoadData") == [(b"\x7fELF and so on\0",)] * 2
    kept.write_bytes(kept.read_bytes()[:-1])
    module.CupyDevice(0).function(SOURCE, "scale")
    assert len(cupy.called("compileProgram")) == 2
    cupy.results["getVersion"] = (13, 1)
    module.CupyDevice(0).function(SOURCE, "scale")
    assert len(cupy.called("compileProgram")) == 3


def test_nothing_needs_to_be_kept(device: Any, cupy: FakeCupy, tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    assert device.function(SOURCE, "scale")
    assert cupy.called("moduleLoadData") == [(b"\x7fELF and so on\0",)]


def test_a_newer_gpu_gets_portable_code(device: Any, cupy: FakeCupy) -> None:
    cupy.results["deviceGetAttribute"] = lambda attribute, index: {75: 15, 76: 1}[attribute]
    device.function(SOURCE, "scale")
    assert cupy.called("compileProgram")[0][1][-1] == "-arch=compute_100"
    assert cupy.called("moduleLoadData") == [(b"// PTX\0",)]


def test_an_older_gpu_needs_an_older_cupy(device: Any, cupy: FakeCupy) -> None:
    cupy.results["deviceGetAttribute"] = lambda attribute, index: {75: 6, 76: 1}[attribute]
    with pytest.raises(TransportError, match=r"capability 75 and newer, but this GPU has 61.*cupy-cuda12x"):
        device.function(SOURCE, "scale")


def test_a_kernel_with_a_mistake(device: Any, cupy: FakeCupy) -> None:
    nvrtc = cupy.modules["cupy.cuda"].nvrtc
    cupy.failures["compileProgram"] = nvrtc.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
    with pytest.raises(
        TransportError,
        match=r"does not compile \(NVRTC_ERROR_COMPILATION.*-arch=sm_90.*\) \[G3\]:\ncollectives.cu\(1\)",
    ):
        device.function(SOURCE, "scale")
    assert len(cupy.called("destroyProgram")) == 1


def test_without_nvrtc(device: Any, cupy: FakeCupy) -> None:
    cupy.failures["getVersion"] = RuntimeError("CuPy failed to load libnvrtc.so.13")
    with pytest.raises(MissingDependencyError, match=r'libnvrtc.*pip install "cupy-cuda13x\[ctk\]"'):
        device.function(SOURCE, "scale")


@pytest.fixture
def real_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    _forget()
    compiler = importlib.import_module("collectives.device.compiler")
    try:
        compiler.nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    yield compiler
    _forget()


def test_nvrtc_compiles_for_real(real_compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = real_compiler.compiled(SOURCE, 90)
    assert code.startswith(b"\x7fELF") and b"scale" in code
    (headers,), (number,) = struct.unpack_from("<Q", code, 32), struct.unpack_from("<H", code, 56)
    assert len(code) >= headers + 56 * number, "complete: the segments' headers are its last part"
    assert len(list((tmp_path / "kernels").iterdir())) == 1
    monkeypatch.setattr(real_compiler, "_compile", None)
    assert real_compiler.compiled(SOURCE, 90) == code


def test_real_code_keeps_every_bit(real_compiler: Any) -> None:
    text = real_compiler.compiled(SOURCE, 999).decode()
    assert "mul.f32" in text or "mul.rn.f32" in text
    assert "fma" not in text and "ftz" not in text


def test_real_errors_are_ours(real_compiler: Any) -> None:
    with pytest.raises(TransportError, match=r"does not compile.*\n.*mistake"):
        real_compiler.compiled('extern "C" __global__ void scale() { mistake(); }', 90)


# ---- where devices come from


@pytest.fixture
def nothing_in_use() -> Iterator[None]:
    before = selection.use(None)
    yield
    selection.use(before)


class Some:
    """A provider of so many devices, none of which is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def count(self) -> int:
        return self._count

    def device(self, index: int) -> Any:
        raise AssertionError

    def device_of(self, address: int) -> Any:
        raise AssertionError


def test_the_provider_is_made_once(cupy: FakeCupy, nothing_in_use: None) -> None:
    found = on_four_threads(lambda: (selection.provider(), selection.provider().device(1)))
    assert len(found) == 4 and len(set(map(id, sum(found, ())))) == 2
    provider = selection.provider()
    assert provider.count() == 2
    assert [provider.device(index).index for index in (0, 1)] == [0, 1]
    for index in (-1, 2):
        with pytest.raises(InvalidArgumentError, match=f"GPU {index}: expected 0 to 1"):
            provider.device(index)


def test_where_an_address_lies(cupy: FakeCupy, nothing_in_use: None) -> None:
    provider = selection.provider()
    assert provider.device_of(0x7F00_0000_0010) is provider.device(1)
    with pytest.raises(InvalidArgumentError, match=r"0x1000: .*page-locked host memory"):
        provider.device_of(0x1000)
    with pytest.raises(InvalidArgumentError, match=r"0x2000: .*device memory.*cuPointerGetAttribute: error 1"):
        provider.device_of(0x2000)


def test_a_provider_of_ones_own(nothing_in_use: None) -> None:
    mine = Some(3)
    assert selection.use(mine) is None
    assert selection.provider() is mine
    assert selection.use(None) is mine


def test_without_gpus_the_provider_says_why(nothing_in_use: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "why_not", lambda: "no driver: install it")
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match="GPUs cannot be used here: no driver: install it"):
            selection.provider()
    with pytest.raises(MissingDependencyError, match="no driver"):
        selection.choose(0)


def test_which_gpu_a_rank_uses(nothing_in_use: None) -> None:
    selection.use(Some(3))
    assert [selection.choose(rank) for rank in range(5)] == [0, 1, 2, 0, 1]
    assert selection.choose(0, 2) == 2
    assert selection.choose(2, 0) == 0
    for override in (-1, 3):
        with pytest.raises(InvalidArgumentError, match=f"GPU {override}: expected 0 to 2"):
            selection.choose(0, override)
    selection.use(Some(0))
    for override in (None, 0):
        with pytest.raises(InvalidArgumentError, match="sees no GPU"):
            selection.choose(0, override)


def test_the_drivers_library(driver: pytest.MonkeyPatch) -> None:
    assert libcuda.version() == (13, 0)
    assert libcuda.count() == 2
    driver.setenv("FAKE_INIT", "100")
    with pytest.raises(TransportError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        libcuda.count()


def test_no_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", os.devnull)
    libcuda.load.cache_clear()
    with pytest.raises(TransportError, match="no NVIDIA driver"):
        libcuda.version()
    libcuda.load.cache_clear()
