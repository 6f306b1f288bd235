"""Tensors of torch, CuPy, jax and TensorFlow on GPUs. Without a GPU they are stand-ins over the host's memory, which
note on which stream they were asked to work; the device is the emulated one."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.device import selection
from collectives.tensors import arrays, dlpack
from collectives.tensors.cuda_tensors import DeviceView, view
from collectives.tensors.detection import is_on_device
from tests.support.emulated.cuda import EmulatedArray, EmulatedDevice, EmulatedProvider
from tests.support.emulated.gate import Gate


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    provider = EmulatedProvider(delays=5)
    before = selection.use(provider)
    made = provider.device(0)
    made.activate()
    yield made
    selection.use(before)
    violations = made.violations
    provider.close()
    assert violations == []


def at(
    address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None
) -> np.ndarray[Any, Any]:
    """Host memory by its address."""
    reach = (
        sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if strides
        else int(np.prod(shape)) * np.dtype(dtype).itemsize
    )
    memory = (ctypes.c_uint8 * (reach + np.dtype(dtype).itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory, 0, strides)


# ---- torch


class Torch:
    """torch with a GPU, as far as it is used.

    Attributes:
        tensor: makes a tensor that says it is on a GPU.
        current: the stack of current streams.
        log: what was asked for, and on which stream.
    """

    def __init__(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.current, self.log = torch, [0], []
        log, current = self.log, self.current

        class CudaTensor(torch.Tensor):  # type: ignore[misc]
            is_cuda = True
            device = torch.device("cuda", 0)

            def contiguous(self) -> Any:
                log.append(("contiguous", current[-1]))
                return super().contiguous()

            def resolve_conj(self) -> Any:
                log.append(("resolve", current[-1]))
                return super().resolve_conj()

            def copy_(self, other: Any) -> Any:
                log.append(("copy_", current[-1]))
                return super().copy_(other)

            def record_stream(self, stream: Any) -> None:
                log.append(("record_stream", stream.cuda_stream))

        self.kind = CudaTensor
        make = torch.empty

        def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
            assert device == torch.device("cuda", 0)
            log.append(("empty", current[-1]))
            return make(shape, dtype=dtype).as_subclass(CudaTensor)

        @contextlib.contextmanager
        def on(stream: Any) -> Iterator[None]:
            current.append(stream.cuda_stream)
            yield
            current.pop()

        def external(number: int, device: Any = None) -> Any:
            assert number and device == 0, "an ExternalStream of 0 is a new stream"
            return types.SimpleNamespace(cuda_stream=number)

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=current[-1]))
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "ExternalStream", external)
        monkeypatch.setattr(torch.cuda, "stream", on)

    def tensor(self, plain: Any) -> Any:
        return plain.as_subclass(self.kind)

    def asked(self) -> list[Any]:
        asked, self.log[:] = list(self.log), []
        return asked


@pytest.fixture
def torch(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(pytest.importorskip("torch"), monkeypatch)


TORCH_DTYPES = [name for name in dtypes.NAMES if name not in ("int16", "int32", "uint32")]


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)])
def test_a_torch_tensor_is_its_own_view_and_comes_back(torch: Torch, name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.tensor(torch.module.zeros(shape, dtype=getattr(torch.module, name)))
    torch.current.append(77)
    found = arrays.view(tensor, writable=True)
    assert isinstance(found, DeviceView) and is_on_device(tensor)
    assert (dtypes.name(found.dtype), found.shape, found.stream, found.copied, found.writable) == (
        name,
        shape,
        77,
        False,
        True,
    )
    assert (found.array.address, found.array.size) == (tensor.data_ptr(), tensor.numel())
    found.store()
    result, memory = found.empty((3, *shape))
    assert type(result) is torch.kind and result.dtype is tensor.dtype and tuple(result.shape) == (3, *shape)
    assert (memory.address, memory.size, memory.dtype) == (result.data_ptr(), result.numel(), found.dtype)
    assert found.wrap(result) is result
    assert torch.asked() == [("empty", 77)]


def test_torch_results_of_another_dtype(torch: Torch) -> None:
    found = view(torch.tensor(torch.module.zeros(3)))
    result, memory = found.empty((2,), np.dtype(np.int64))
    assert result.dtype is torch.module.int64 and memory.dtype == np.int64 and memory.nbytes == 16


def test_a_strided_torch_tensor_is_copied_and_stored_back_on_the_stream_of_that_moment(torch: Torch) -> None:
    plain = torch.module.arange(6.0).reshape(2, 3)
    turned = torch.tensor(plain.t())
    torch.current.append(5)
    found = view(turned, writable=True)
    assert found.copied and found.stream == 5 and found.array.address != plain.data_ptr()
    memory = at(found.array.address, (6,), np.float32)
    assert memory.tolist() == [0, 3, 1, 4, 2, 5]
    memory += 10
    assert plain[0, 1] == 1
    torch.current.append(6)
    found.store()
    assert plain.tolist() == [[10, 11, 12], [13, 14, 15]]
    # The copy was made on 5, and may be given away there before 6 has read it, unless torch is told.
    assert torch.asked() == [("contiguous", 5), ("copy_", 6), ("record_stream", 6)]


@pytest.mark.parametrize(("current", "named"), [(5, 9), (5, 0), (0, 9)])
def test_a_named_stream_is_where_torch_works(torch: Torch, current: int, named: int) -> None:
    torch.current.append(current)
    found = view(torch.tensor(torch.module.zeros((2, 3)).t()), writable=True, stream=named)
    result, _ = found.empty((2,))
    found.store()
    found.wrap(result)
    assert found.stream == found.current_stream() == named and torch.current[-1] == current
    assert torch.asked() == [("contiguous", named), ("empty", named), ("copy_", named)]


def test_a_torch_result_used_on_another_stream_is_not_given_away_too_early(torch: Torch) -> None:
    found = view(torch.tensor(torch.module.zeros(3)))
    result, _ = found.empty((3,))
    for stream in (8, 0):
        torch.current.append(stream)
        assert found.wrap(result) is result
    assert torch.asked() == [("empty", 0), ("record_stream", 8)]


def test_torch_parameters_are_written_in_place_and_strided_ones_too(torch: Torch) -> None:
    plain = torch.module.arange(6.0).reshape(2, 3)
    parameter = torch.tensor(plain).requires_grad_()
    found = view(parameter, writable=True)
    assert found.array.address == plain.data_ptr() and not found.copied
    found = view(parameter.t(), writable=True)
    at(found.array.address, (6,), np.float32)[:] = 4
    found.store()
    assert bool((plain == 4).all())


def test_lazily_conjugated_torch_tensors_are_resolved_and_not_written(torch: Torch) -> None:
    lazy = torch.tensor(torch.module.tensor([1 + 2j, 3 - 1j])).conj()
    found = view(lazy, stream=7)
    assert at(found.array.address, (2,), np.complex64).tolist() == [1 - 2j, 3 + 1j]
    assert torch.asked() == [("resolve", 7)] and not found.writable
    with pytest.raises(InvalidArgumentError, match="negates or conjugates"):
        view(lazy, writable=True)


def test_overlapping_torch_tensors_are_read_and_not_written(torch: Torch) -> None:
    wide = torch.tensor(torch.module.arange(2.0).reshape(2, 1).expand(2, 3))
    found = view(wide)
    assert at(found.array.address, (6,), np.float32).tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(
        InvalidArgumentError, match=r"share memory, got a .*CudaTensor of shape \(2, 3\) and strides \(4, 0\)"
    ):
        view(wide, writable=True)


def test_torch_tensors_that_cannot_be_used_are_refused(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.module
    with pytest.raises(
        InvalidTypeError, match=r"loss: dtype torch\.float8_e4m3fn is not supported on a GPU; expected one of bool"
    ):
        view(torch.tensor(module.zeros(3, dtype=module.float8_e4m3fn)), argument="loss")
    about = {"is_cuda": True, "is_nested": False, "device": module.device("cuda", 0), "layout": module.sparse_coo}
    sparse = types.SimpleNamespace(**about)
    monkeypatch.setattr("collectives.tensors.detection.framework", lambda kind: "torch")
    with pytest.raises(
        InvalidTypeError, match=r"loss: expected a dense tensor, got layout torch.sparse_coo; pass loss.to_dense\(\)"
    ):
        view(sparse, argument="loss")
    with pytest.raises(InvalidTypeError, match=r"expected a tensor with elements, .* on meta"):
        view(types.SimpleNamespace(device=module.device("meta")))
    for place in ("mps", "xpu"):
        with pytest.raises(
            InvalidTypeError,
            match=f"expected memory of the CPU or of an NVIDIA GPU, .* on {place}: copy it to the host",
        ):
            view(types.SimpleNamespace(device=module.device(place)))
    monkeypatch.setattr(module.version, "hip", "6.2")
    with pytest.raises(InvalidTypeError, match=r"on cuda:0 \(ROCm\)"):
        view(torch.tensor(module.zeros(3)))


def test_a_torch_tensor_without_memory_is_refused(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: Any) -> int:
        raise RuntimeError("cannot access data pointer")

    monkeypatch.setattr(torch.kind, "data_ptr", no_memory)
    with pytest.raises(InvalidTypeError, match="has no memory of its own: cannot access data pointer"):
        view(torch.tensor(torch.module.zeros(3)))


# ---- CuPy


class Ndarray:
    """A CuPy array over the host's memory: what is done with it is done in the order of the device's current stream."""

    gpu: EmulatedDevice

    def __init__(self, shape: Any, dtype: Any, memptr: Any = None, strides: Any = None) -> None:
        self.dtype = np.dtype(dtype)
        assert self.dtype.kind != "V" or memptr is None, "CuPy may not know this dtype"
        self.host = (
            np.zeros(shape, self.dtype) if memptr is None else at(memptr.address, tuple(shape), self.dtype, strides)
        )
        self.owner = memptr

    @classmethod
    def over(cls, host: np.ndarray[Any, Any]) -> Ndarray:
        array = cls((), host.dtype)
        array.host = host
        return array

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: self.host.flags)
    device = property(lambda self: types.SimpleNamespace(id=0))
    data = property(lambda self: types.SimpleNamespace(ptr=self.host.ctypes.data))
    __cuda_array_interface__ = property(lambda self: {"data": (self.host.ctypes.data, False)})

    def __setitem__(self, key: Any, other: Ndarray) -> None:
        self.gpu.enqueue(self.gpu.current_stream(), lambda: self.host.__setitem__(key, other.host))


def ascontiguousarray(array: Ndarray) -> Ndarray:
    copy = Ndarray(array.shape, array.dtype)
    copy[...] = array
    return copy


@pytest.fixture
def cupy(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("cupy")
    kind = type("ndarray", (Ndarray,), {"gpu": device})
    monkeypatch.setattr(Ndarray, "gpu", device, raising=False)
    cuda = types.SimpleNamespace(
        UnownedMemory=lambda address, nbytes, owner, index: (address, owner),
        MemoryPointer=lambda memory, offset: types.SimpleNamespace(address=memory[0] + offset, owner=memory[1]),
        get_current_stream=lambda index: types.SimpleNamespace(ptr=device.current_stream()),
    )
    vars(module).update(ndarray=kind, ascontiguousarray=ascontiguousarray, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", module)

    def empty(shape: Any, dtype: Any, stream: int) -> Any:
        array = kind(shape, dtype)
        array.stream = stream
        return array

    monkeypatch.setattr(device, "empty", empty)
    return module


def test_a_cupy_array_is_its_own_view_and_comes_back(device: EmulatedDevice, cupy: Any) -> None:
    tensor, stream = cupy.ndarray.over(np.arange(6.0).reshape(2, 3)), device.create_stream()
    with device.use_stream(stream):
        found = arrays.view(tensor, writable=True)
    assert isinstance(found, DeviceView) and (found.stream, found.current_stream(), found.copied) == (stream, 0, False)
    assert (found.array.address, found.array.size, found.shape) == (tensor.data.ptr, 6, (2, 3))
    result, memory = found.empty((4,))
    assert type(result) is cupy.ndarray and result.stream == stream and memory.address == result.data.ptr
    assert found.wrap(result) is result


@pytest.mark.parametrize("name", ["uint8", "float16", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("named", [False, True])
def test_a_strided_cupy_array_is_copied_and_stored_back_in_the_order_of_streams(
    device: EmulatedDevice, cupy: Any, name: str, named: bool
) -> None:
    base = np.zeros((2, 3), dtypes.resolve(name))
    tensor, stream, later = cupy.ndarray.over(base.T), device.create_stream(), device.create_stream()
    # The tensor is only made when the stream comes to it: a copy that does not wait reads zeros.
    gate = Gate(device, stream)
    device.enqueue(stream, lambda: base.__setitem__(..., np.arange(6).reshape(2, 3)))
    with contextlib.nullcontext() if named else device.use_stream(stream):
        found = view(tensor, writable=True, stream=stream if named else None)
    assert found.copied and found.dtype == base.dtype
    assert gate.holds(0 if named else stream)  # where CuPy copies
    gate.open()
    device.drain(found.stream)
    memory = at(found.array.address, (6,), found.dtype)
    assert memory.real.astype(int).tolist() == [0, 3, 1, 4, 2, 5]
    with device.use_stream(later):
        device.enqueue(found.current_stream(), lambda: memory.__setitem__(..., np.arange(6)))
        found.store()
        device.drain(found.current_stream())
    assert base.real.astype(int).tolist() == [[0, 2, 4], [1, 3, 5]] and device.held()["events"] == 0


def test_with_cupy_any_strided_tensor_is_copied(device: EmulatedDevice, cupy: Any) -> None:
    array = EmulatedArray.of(device, np.arange(6.0).reshape(2, 3))
    found = view(array.T, writable=True)
    device.drain(0)
    memory = at(found.array.address, (6,), np.float64)
    assert found.copied and memory.tolist() == [0, 3, 1, 4, 2, 5]
    memory *= 2
    found.store()
    assert array.get(0).tolist() == [[0, 2, 4], [6, 8, 10]]


# ---- jax and TensorFlow


class Place:
    platform = "gpu"


class Immutable:
    """An array of an immutable framework, in memory of the device."""

    def __init__(self, array: Any, places: int = 1) -> None:
        self.array, self.places = array, places
        self.device = "/job:localhost/replica:0/task:0/device:GPU:0"

    def devices(self) -> set[Any]:
        return {Place() for _ in range(self.places)}

    def numpy(self) -> Any:
        raise AssertionError("a GPU's tensor must not be brought to the host")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Array(Immutable):
        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    class Tracer(Array):
        pass

    module = types.ModuleType("jax")
    made = types.SimpleNamespace(stream=None)

    def from_dlpack(tensor: Any) -> Any:
        capsule = tensor.__dlpack__(stream=made.stream)
        return Array(dlpack.read(capsule))

    vars(module).update(
        Array=Array,
        core=types.SimpleNamespace(Tracer=Tracer),
        dlpack=types.SimpleNamespace(from_dlpack=from_dlpack),
        made=made,
    )
    monkeypatch.setitem(sys.modules, "jax", module)
    return module


def test_jax_arrays_are_read_and_made_anew_and_never_written(device: EmulatedDevice, jax: Any) -> None:
    array = EmulatedArray.of(device, np.arange(6, dtype=np.float32).reshape(2, 3))
    tensor = jax.Array(array)
    found = arrays.view(tensor)
    assert isinstance(found, DeviceView) and is_on_device(tensor)
    assert found.array.address == array.address and not found.writable and found.shape == (2, 3)
    with pytest.raises(InvalidArgumentError, match=r"read-only .*Array"):
        arrays.view(tensor, writable=True)
    with pytest.raises(InvalidTypeError, match="on one device, got one spread over 4 devices"):
        arrays.view(jax.Array(array, 4))
    with pytest.raises(InvalidTypeError, match="got a tracer"):
        arrays.view(jax.core.Tracer(array))


def test_a_jax_result_waits_for_what_fills_it(device: EmulatedDevice, jax: Any) -> None:
    found = view(jax.Array(EmulatedArray.of(device, np.zeros(4, np.float32))))
    jax.made.stream, now = device.create_stream(), device.create_stream()
    result, memory = found.empty((4,), dtypes.resolve("bfloat16"))
    with device.use_stream(now):
        result.set(np.arange(4), now)  # as if the stream had been made to wait for the operation
        made = found.wrap(result, memory.dtype)
    assert type(made) is jax.Array and made.array.address == memory.address and made.array.dtype == memory.dtype
    device.drain(jax.made.stream)
    assert result.host.astype(int).tolist() == [0, 1, 2, 3]


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Tensor(Immutable):
        def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
            raise RuntimeError("tf.Tensor does not support DLPack export with a non-None stream")

    class Variable(Immutable):
        __dlpack_device__ = None  # type: ignore[assignment]

    def to_dlpack(tensor: Any) -> Any:
        assert type(tensor) is Tensor
        return tensor.array.__dlpack__()

    module: Any = types.ModuleType("tensorflow")
    functions = types.SimpleNamespace(to_dlpack=to_dlpack, from_dlpack=lambda capsule: Tensor(dlpack.read(capsule)))
    vars(module).update(Tensor=Tensor, Variable=Variable, experimental=types.SimpleNamespace(dlpack=functions))
    module.convert_to_tensor = lambda value: value if type(value) is Tensor else Tensor(value.array)
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return module


@pytest.mark.parametrize("kind", ["Tensor", "Variable"])
def test_tensorflow_tensors_are_read_and_made_anew_when_they_are_ready(
    device: EmulatedDevice, tensorflow: Any, kind: str
) -> None:
    array = EmulatedArray.of(device, np.arange(6, dtype=np.float32).reshape(2, 3))
    tensor = getattr(tensorflow, kind)(array)
    found = arrays.view(tensor)
    assert isinstance(found, DeviceView) and is_on_device(tensor)
    assert found.array.address == array.address and not found.writable and found.shape == (2, 3)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        arrays.view(tensor, writable=True)
    now = device.create_stream()
    result, memory = found.empty((3,))
    with device.use_stream(now):
        result.set(np.arange(3), now)
        made = found.wrap(result)
    assert type(made) is tensorflow.Tensor and made.array.address == memory.address
    assert result.host.tolist() == [0, 1, 2]
