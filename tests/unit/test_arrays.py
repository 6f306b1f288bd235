"""Views of host tensors: every kind of tensor in, the same kind out."""

from __future__ import annotations

import array as array_module
import ctypes
import mmap
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError
from collectives.device import diagnosis, selection
from collectives.tensors.arrays import View, view

NUMPY_NAMES = [name for name in dtypes.NAMES if name != "bfloat16"]


def shares(found: View, tensor: np.ndarray[Any, Any]) -> bool:
    return np.shares_memory(found.array, tensor)


def check(found: View) -> None:
    """What the floors below rely on."""
    assert type(found.array) is np.ndarray and found.array.ndim == 1
    assert found.array.flags.c_contiguous and found.array.flags.aligned
    assert found.array.dtype == found.dtype and found.dtype in dtypes.SUPPORTED
    assert found.nbytes == found.array.nbytes
    assert found.array.size == np.prod(found.shape, dtype=int)


# ---- NumPy


@pytest.mark.parametrize("name", NUMPY_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 3, 4)])
def test_a_contiguous_array_is_its_own_view(name: str, shape: tuple[int, ...]) -> None:
    tensor = np.zeros(shape, name)
    found = view(tensor, writable=True)
    check(found)
    assert not found.copied and found.writable and found.shape == shape and dtypes.name(found.dtype) == name
    found.array[:] = 1
    found.store()
    assert (tensor == 1).all()
    result = np.ones(shape, name)
    assert found.wrap(result) is result


def test_bfloat16_arrays_are_taken_as_they_are() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = np.ones((2, 3), ml_dtypes.bfloat16)
    found = view(tensor, writable=True)
    check(found)
    assert not found.copied and shares(found, tensor)


def test_an_unaligned_array_is_copied_and_stored_back() -> None:
    tensor = np.zeros(97, np.uint8)[1:].view(np.int64)
    found = view(tensor, writable=True)
    check(found)
    found.array[:] = np.arange(12)
    found.store()
    assert found.copied and tensor.tolist() == list(range(12))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_slicing_and_transposing_reads_and_stores_like_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    dtype = np.dtype(data.draw(st.sampled_from(["<f4", ">f4", "<i8", ">i2", "u1", ">c16"])))
    base = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    index = tuple(
        slice(data.draw(st.none() | st.integers(-4, 4)), None, data.draw(st.sampled_from([None, 1, 2, -1, -2])))
        for _ in shape
    )
    order = data.draw(st.permutations(range(len(shape))))
    tensor = base[index].transpose(order)
    wanted = tensor.copy()
    found = view(tensor, writable=True)
    check(found)
    np.testing.assert_array_equal(found.array.reshape(found.shape), wanted)
    assert not tensor.size or found.copied == (not shares(found, tensor))
    assert found.wrap(result := np.ones(3, found.dtype)) is result
    found.array += 1
    found.store()
    np.testing.assert_array_equal(tensor, wanted + 1)


def test_read_only_arrays_can_be_read_and_not_written() -> None:
    for tensor in (np.arange(6.0), np.arange(6.0).reshape(2, 3).T):
        tensor.flags.writeable = False
        found = view(tensor)
        check(found)
        assert not found.writable
        np.testing.assert_array_equal(found.array.reshape(found.shape), tensor)
        with pytest.raises(InvalidArgumentError, match=r"gradient: .*read-only numpy.ndarray .*float64"):
            view(tensor, argument="gradient", writable=True)


@pytest.mark.parametrize(
    "tensor",
    [
        np.lib.stride_tricks.as_strided(np.zeros(3), (3, 4), (8, 0)),
        np.lib.stride_tricks.as_strided(np.zeros(10), (4, 3), (8, 8)),
        np.lib.stride_tricks.as_strided(np.zeros(10, np.int32), (4, 2), (4, 6)),
    ],
    ids=["broadcast", "sliding", "partly"],
)
def test_overlapping_elements_can_be_read_and_not_written(tensor: np.ndarray[Any, Any]) -> None:
    check(view(tensor))
    with pytest.raises(InvalidArgumentError, match="share memory"):
        view(tensor, writable=True)


def test_a_stride_of_zero_over_one_element_is_no_overlap() -> None:
    tensor = np.lib.stride_tricks.as_strided(np.zeros(6), (1, 3), (0, 16))
    assert view(tensor, writable=True).copied


@pytest.mark.parametrize("dtype", [object, "U4", "S4", "M8[s]", "m8[s]", "V3", [("a", "f4")]])
def test_unsupported_dtypes_are_refused_by_name(dtype: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"loss \(numpy.ndarray\): dtype .* is not supported; expected one of bool"
    ):
        view(np.zeros(3, dtype), argument="loss")


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"tensor: masked arrays .*filled"):
        view(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


def test_subclasses_come_back_as_themselves() -> None:
    class Units(np.ndarray):
        unit = "none"

        def __array_finalize__(self, parent: Any) -> None:
            self.unit = getattr(parent, "unit", "none")

    metres = np.arange(4.0).view(Units)
    metres.unit = "m"
    found = view(metres, writable=True)
    check(found)
    result = found.wrap(np.zeros(8))
    assert type(result) is Units and result.unit == "m"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.asmatrix(np.eye(2))
    found = view(matrix, writable=True)
    check(found)
    assert shares(found, np.asarray(matrix)) and type(found.wrap(np.zeros((2, 2)))) is np.matrix


def test_a_memory_map_is_written_in_place_and_its_results_are_plain(tmp_path: Any) -> None:
    tensor = np.memmap(tmp_path / "weights", np.float32, "w+", shape=(3, 2))
    found = view(tensor, writable=True)
    check(found)
    found.array[:] = 4
    assert (tensor == 4).all() and type(found.wrap(np.zeros(3, np.float32))) is np.ndarray


# ---- scalars


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_numpy_scalars_come_back_with_their_dtype(name: str) -> None:
    scalar = np.dtype(name).type(1)
    found = view(scalar)
    check(found)
    assert found.shape == () and found.array[0] == 1
    result = found.wrap(np.array(1, name))
    assert type(result) is type(scalar) and result == 1
    gathered = np.ones(3, name)
    assert found.wrap(gathered) is gathered


@pytest.mark.parametrize(("scalar", "name"), [(True, "bool"), (-7, "int64"), (2.5, "float64"), (1 + 2j, "complex128")])
def test_python_scalars_come_back_as_python_scalars(scalar: Any, name: str) -> None:
    found = view(scalar)
    check(found)
    assert dtypes.name(found.dtype) == name and found.shape == () and found.array[0] == scalar
    result = found.wrap(np.array(scalar))
    assert type(result) is type(scalar) and result == scalar
    with pytest.raises(InvalidArgumentError, match="read-only"):
        view(scalar, writable=True)


def test_an_int_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"count: .*int64.*9223372036854775808"):
        view(1 << 63, argument="count")


# ---- buffers


def test_buffers_come_back_as_their_own_type() -> None:
    cases: list[tuple[Any, str, bool]] = [
        (b"\1\2\3", "uint8", False),
        (bytearray(b"\1\2\3"), "uint8", True),
        (array_module.array("f", [1, 2, 3]), "float32", True),
        (array_module.array("q", [1, 2, 3]), "int64", True),
        (memoryview(bytearray(b"\1\2\3")), "uint8", True),
        ((ctypes.c_double * 3)(1, 2, 3), "float64", True),
    ]
    for tensor, name, writable in cases:
        found = view(tensor)
        check(found)
        assert dtypes.name(found.dtype) == name and found.writable == writable and not found.copied
        assert found.array.tolist() == [1, 2, 3]
        result = found.wrap(np.array([4, 5, 6], found.dtype))
        assert type(result) is type(tensor)
        assert np.asarray(memoryview(result)).tolist() == [4, 5, 6]
        if writable:
            view(tensor, writable=True).array[0] = 9
            assert np.asarray(memoryview(tensor))[0] == 9
        else:
            with pytest.raises(InvalidArgumentError, match="read-only"):
                view(tensor, writable=True)


def test_a_buffer_of_several_dimensions_keeps_its_shape() -> None:
    tensor = memoryview(np.arange(6, dtype=np.int16).reshape(2, 3))
    found = view(tensor)
    assert found.shape == (2, 3)
    result = found.wrap(np.zeros((4, 3), np.int16))
    assert isinstance(result, memoryview) and result.shape == (4, 3)


def test_results_that_a_buffers_type_cannot_hold_stay_arrays() -> None:
    found = view((ctypes.c_double * 3)(1, 2, 3))
    assert type(found.wrap(np.zeros(6))) is np.ndarray
    with mmap.mmap(-1, 4096) as memory:
        found = view(memory, writable=True)
        found.array[5] = 3
        assert memory[5] == 3 and type(found.wrap(np.zeros(6, np.uint8))) is np.ndarray
        del found


def test_a_buffer_of_no_numbers_is_refused() -> None:
    for tensor in ((ctypes.c_wchar * 3)(*"abc"), (ctypes.c_void_p * 3)(), memoryview(b"abc").cast("c")):
        with pytest.raises(InvalidTypeError, match="tensor"):
            view(tensor)


# ---- protocols, by small stand-ins


class Interfaced:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class Packed:
    """Speaks DLPack only, as a tensor on ``device``."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()


class Namespaced(Packed):
    """From a library of the array API standard."""

    def __array_namespace__(self, **options: Any) -> Any:
        return Library


class Library:
    @staticmethod
    def from_dlpack(tensor: Any) -> Namespaced:
        return Namespaced(np.from_dlpack(tensor))


def test_array_interface_shares_memory_and_gives_arrays_back() -> None:
    for array in (np.arange(6.0), np.arange(12.0).reshape(3, 4)[:, ::2]):
        found = view(Interfaced(array), writable=True)
        check(found)
        found.array += 1
        found.store()
        assert array.flat[1] in (2.0, 3.0)
        result = np.zeros(3)
        assert found.wrap(result) is result


def test_dlpack_shares_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = view(Packed(array))
    check(found)
    assert found.shape == (2, 3) and shares(found, array)
    assert type(found.wrap(np.zeros(3, np.float32))) is np.ndarray


def test_a_library_with_from_dlpack_gets_its_own_type_back() -> None:
    found = view(Namespaced(np.arange(6.0)))
    check(found)
    result = found.wrap(np.full((2, 2), 5.0))
    assert type(result) is Namespaced and (result.array == 5).all()


def test_a_module_with_from_dlpack_is_found_without_an_array_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("smallframework")
    module.from_dlpack = lambda tensor: Foreign(np.from_dlpack(tensor))  # type: ignore[attr-defined]

    class Foreign(Packed):
        pass

    Foreign.__module__ = "smallframework.tensors"
    monkeypatch.setitem(sys.modules, "smallframework", module)
    assert type(view(Foreign(np.arange(3.0))).wrap(np.zeros(2))) is Foreign


@pytest.mark.parametrize("device", [4, 10])
def test_tensors_on_other_devices_are_refused(device: int) -> None:
    with pytest.raises(
        InvalidTypeError,
        match=rf"grad: .*NVIDIA GPU, got a .*Packed on DLPack device kind {device}: copy it to the host",
    ):
        view(Packed(np.zeros(3), device), argument="grad")


@pytest.mark.parametrize(
    "tensor", [Packed(np.zeros(3), 2), Packed(np.zeros(3), 13), type("Cuda", (), {"__cuda_array_interface__": {}})()]
)
def test_gpu_tensors_are_refused_by_the_reason_where_gpus_cannot_be_used(
    tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "why_not", lambda: "no driver: install it")
    before = selection.use(None)
    try:
        with pytest.raises(MissingDependencyError, match=r"grad: got a .* on a GPU, but .*no driver: install it"):
            view(tensor, argument="grad")
    finally:
        selection.use(before)


@pytest.mark.parametrize(
    "tensor", [np.zeros(3), np.zeros((3, 3)).T, np.float32(1), 2.5, bytearray(3), Packed(np.zeros(3))]
)
@pytest.mark.parametrize("stream", [0, 7, object()])
def test_a_stream_is_refused_for_a_tensor_on_the_cpu(tensor: Any, stream: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"stream: expected None for a tensor on the CPU, got .* of grad \("):
        view(tensor, argument="grad", stream=stream)


def test_an_exporter_that_refuses_is_reported() -> None:
    class Sulky(Packed):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(InvalidTypeError, match="Sulky cannot be read through DLPack: not today"):
        view(Sulky(np.zeros(3)))


@pytest.mark.parametrize("tensor", [[1.0, 2.0], (1, 2)])
def test_lists_and_tuples_are_refused_with_the_remedy(tensor: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=rf"tensor: .*got a {type(tensor).__name__}: pass numpy.asarray\(tensor\)"
    ):
        view(tensor)


@pytest.mark.parametrize("tensor", [None, "text", {}, {1}, len, range(3)], ids=lambda tensor: type(tensor).__name__)
def test_other_objects_are_refused(tensor: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"tensor: expected a NumPy array .*; got "):
        view(tensor)


def test_an_object_that_only_converts_is_refused_with_the_remedy() -> None:
    class Convertible:
        def __array__(self, *args: Any, **options: Any) -> Any:
            return np.zeros(3)

    with pytest.raises(InvalidTypeError, match=r"Convertible: pass numpy.asarray\(tensor\)"):
        view(Convertible())


# ---- frameworks


TORCH_DTYPES = [name for name in dtypes.NAMES if name not in ("uint16", "uint32", "uint64")]


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)])
def test_torch_tensors_share_memory_and_come_back(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    tensor = torch.zeros(shape, dtype=getattr(torch, name))
    found = view(tensor, writable=True)
    check(found)
    assert dtypes.name(found.dtype) == name and found.shape == shape and not found.copied
    found.array[:] = 1
    found.store()
    assert bool((tensor == 1).all())
    result = found.wrap(np.ones((2, *shape), found.dtype))
    assert type(result) is torch.Tensor and result.dtype is tensor.dtype and tuple(result.shape) == (2, *shape)
    assert bool((result == 1).all())


UNSERVED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "nested": ("unbind", lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": (
        "unbind", lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ),
    "complex32": ("bool, int8.*complex128.*float8", lambda torch: torch.ones(2, dtype=torch.complex32)),
    "quantized": (
        "bool, int8.*float8.*int_repr", lambda torch: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    ),
    "bits": ("bool, int8.*float8", lambda torch: torch.zeros(2, dtype=torch.uint8).view(torch.bits8)),
    "int4": ("bool, int8.*float8", lambda torch: torch.empty(2, dtype=torch.int4)),
    "two in a byte": (
        "bool, int8.*float8", lambda torch: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ),
    "without memory": ("cannot be read: .*ZeroTensor", lambda torch: torch._efficientzerotensor(3)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # prototypes
@pytest.mark.parametrize(("message", "make"), UNSERVED.values(), ids=UNSERVED)
def test_what_torch_has_and_is_not_served_is_refused_with_what_is(message: str, make: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    try:
        tensor = make(torch)
    except AttributeError as error:
        pytest.skip(f"an older torch: {error}")
    with pytest.raises(InvalidTypeError, match=f"tensor: .*{message}") as refusal:
        view(tensor)
    assert "ScalarType" not in str(refusal.value) and "Internal error" not in str(refusal.value)


def test_a_result_in_bfloat16_is_wrapped_before_anything_else_has_met_that_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    seen = view(torch.zeros(2))
    monkeypatch.delitem(dtypes.SUPPORTED, np.dtype(ml_dtypes.bfloat16), raising=False)
    result = seen.wrap(np.ones(2, ml_dtypes.bfloat16))
    assert result.dtype is torch.bfloat16 and result.tolist() == [1, 1]


def test_torch_strided_parameters_and_lazy_tensors() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    found = view(parameter, writable=True)
    check(found)
    found.array += 1
    assert parameter[0, 0].item() == 1.0 and type(found.wrap(np.zeros(2, np.float32))) is torch.Tensor
    turned = torch.arange(6.0).reshape(2, 3).t()
    found = view(turned, writable=True)
    assert found.copied and found.array.tolist() == [0, 3, 1, 4, 2, 5]
    found.array += 1
    found.store()
    assert turned.tolist() == [[1, 4], [2, 5], [3, 6]]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert view(conjugate).array.tolist() == [1 - 2j]
    with pytest.raises(InvalidArgumentError, match="negates or conjugates"):
        view(conjugate, writable=True)


def test_torch_tensors_that_cannot_be_read_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidTypeError, match="to_dense"):
        view(torch.eye(3).to_sparse())
    with pytest.raises(InvalidTypeError, match=r"torch.Tensor on meta"):
        view(torch.empty(3, device="meta"))


@pytest.mark.parametrize("name", ["bool", "int32", "uint8", "float16", "bfloat16", "float32", "complex64"])
def test_jax_arrays_are_read_and_made_anew_and_never_written(name: str) -> None:
    jax = pytest.importorskip("jax")
    tensor = jax.numpy.ones((2, 3), name)
    found = view(tensor)
    check(found)
    assert dtypes.name(found.dtype) == name and not found.writable and not found.array.flags.writeable
    result = found.wrap(np.ones((4, 3), found.dtype))
    assert isinstance(result, jax.Array) and result.dtype == tensor.dtype and result.shape == (4, 3)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        view(tensor, writable=True)


def test_jax_tracers_are_refused() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(InvalidTypeError, match="tracer"):
        jax.jit(lambda tensor: view(tensor).array.sum())(jax.numpy.ones(3))


@pytest.mark.parametrize("name", ["bool", "int64", "float16", "bfloat16", "float32", "complex64"])
def test_tensorflow_tensors_are_read_and_made_anew(name: str) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    tensor = tensorflow.cast(tensorflow.ones((2, 3)), name)
    found = view(tensor)
    check(found)
    assert dtypes.name(found.dtype) == name and not found.writable
    result = found.wrap(np.ones((4, 3), found.dtype))
    assert isinstance(result, tensorflow.Tensor) and result.dtype == tensor.dtype and result.shape == (4, 3)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        view(tensor, writable=True)
    assert isinstance(view(tensorflow.Variable(tensor)).wrap(np.ones((2, 3), found.dtype)), tensorflow.Tensor)
