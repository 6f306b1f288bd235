"""Compressors, and the conversions below them against NumPy's and ml_dtypes' bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.tensors import halves
from collectives.tensors.compression import BUILT_IN, Compression, Compressor, check
from collectives.tensors.halves import cast

ml_dtypes = pytest.importorskip("ml_dtypes")
FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
FLOATS = [FLOAT16, BFLOAT16, FLOAT32, FLOAT64]
HALVES = [FLOAT16, BFLOAT16]
LENGTHS = [0, 1, 3, 1000, 65535, 65536, 65537, 150_000]

# Conversions overflow by design; none may warn.
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=["numkong", "numpy"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The conversions with numkong, and as if it were not installed."""
    if request.param == "numpy":
        monkeypatch.setattr(halves, "numkong", lambda half: None)
    elif importlib.util.find_spec("numkong") is None:
        pytest.skip("numkong is not installed")
    halves._conversion.cache_clear()
    yield request.param
    halves._conversion.cache_clear()


def anything(dtype: np.dtype[Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Half of them any bit patterns, with infinities, NaN and subnormals among them; half of them numbers that halves
    can hold."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    with np.errstate(all="ignore"):
        numbers = (rng.standard_normal(count) * 2.0 ** rng.integers(-26, 18, count)).astype(dtype)
        return np.where(rng.random(count) < 0.5, patterns, numbers)


def quietly(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def converted(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    out = np.full(array.size, 7, dtype)
    cast(array, out)
    return out


def assert_same_bits(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """The same bits, but for NaN, which may be any NaN."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        number = ~np.isnan(wanted)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    np.testing.assert_array_equal(found[number].view(bits), wanted[number].view(bits))


# ---- conversion


@pytest.mark.parametrize("wanted", FLOATS, ids=dtypes.name)
@pytest.mark.parametrize("given", FLOATS, ids=dtypes.name)
def test_every_conversion_equals_numpys_at_every_length(
    given: np.dtype[Any], wanted: np.dtype[Any], backend: str
) -> None:
    for count in LENGTHS:
        source = anything(given, count, seed=count)
        before = source.tobytes()
        through = FLOAT32 if given == FLOAT64 and dtypes.is_half(wanted) else given
        assert_same_bits(converted(source, wanted), quietly(quietly(source, through), wanted))
        assert source.tobytes() == before


@pytest.mark.parametrize("half", HALVES, ids=dtypes.name)
def test_all_halves_come_back_from_float32_and_float64(half: np.dtype[Any], backend: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    for wide in (FLOAT32, FLOAT64):
        widened = converted(every, wide)
        assert_same_bits(widened, quietly(every, wide))
        assert_same_bits(converted(widened, half), every)


@pytest.mark.parametrize("half", HALVES, ids=dtypes.name)
def test_ties_go_to_the_even_half_and_their_neighbours_to_the_nearer(half: np.dtype[Any], backend: str) -> None:
    bits = np.arange(0x0000, 0x7000, dtype=np.uint16)
    lower, upper = bits.view(half), (bits + np.uint16(1)).view(half)
    middle = (lower.astype(FLOAT32) + upper.astype(FLOAT32)) / np.float32(2)
    assert_same_bits(converted(middle, half), np.where(bits % 2 == 0, lower, upper))
    assert_same_bits(converted(np.nextafter(middle, np.float32(0)), half), lower)
    assert_same_bits(converted(np.nextafter(middle, np.float32(np.inf)), half), upper)


@pytest.mark.parametrize("half", HALVES, ids=dtypes.name)
def test_a_nan_whose_bits_a_half_drops_stays_nan(half: np.dtype[Any], backend: str) -> None:
    for bits in (0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF):  # the third is CUDA's
        source = np.linspace(-2, 2, 999, dtype=np.float32)
        source[500] = np.array(bits, np.uint32).view(np.float32)
        assert_same_bits(converted(source, half), quietly(source, half))


def numkong_of_numpy(change: Callable[[Any, Any], object]) -> Any:
    """A numkong whose conversions are NumPy's, and whose narrow results are changed."""
    arithmetic = pytest.importorskip("numkong").blend

    def astype(source: Any, name: str, out: Any) -> None:
        source, out = (each.owner if isinstance(each, SimpleNamespace) else each for each in (source, out))
        out[...] = source.astype(out.dtype)
        if dtypes.is_half(out.dtype):
            change(source, out)

    return SimpleNamespace(blend=arithmetic, astype=astype, from_pointer=lambda *_, owner: SimpleNamespace(owner=owner))


def truncate(source: Any, out: Any) -> None:
    large = np.abs(out.astype(np.float64)) > np.abs(source.astype(np.float64))
    out.view(np.uint16)[large] -= 1


def flush_subnormals(source: Any, out: Any) -> None:
    normal = {FLOAT16: 2.0**-14, BFLOAT16: 2.0**-126}[out.dtype]
    out[np.abs(out.astype(np.float64)) < normal] = 0


def lose_infinities(source: Any, out: Any) -> None:
    out[np.isinf(out)] = 1


def refuse(source: Any, out: Any) -> None:
    raise TypeError("no such dtype")


@pytest.mark.parametrize("half", HALVES, ids=dtypes.name)
def test_a_numkong_that_differs_or_fails_is_not_used(half: np.dtype[Any]) -> None:
    numkong = pytest.importorskip("numkong")

    def wrong_sums(a: Any, b: Any, *rest: Any, out: Any, **options: Any) -> None:
        numkong.blend(a, b, *rest, out=out, **options)
        out[0] = 1

    wrong = SimpleNamespace(astype=numkong.astype, from_pointer=numkong.from_pointer, blend=wrong_sums)
    with np.errstate(all="ignore"):
        assert halves._agrees(numkong, half) and halves._agrees(numkong_of_numpy(lambda source, out: None), half)
        for change in (truncate, flush_subnormals, lose_infinities, refuse):
            assert not halves._agrees(numkong_of_numpy(change), half)
        for other in (wrong, SimpleNamespace()):
            assert not halves._agrees(other, half)


# ---- compressors


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_only_float32_and_float64_travel_as_halves(name: str) -> None:
    dtype = dtypes.resolve(name)
    wide = name in ("float32", "float64")
    assert Compression.none.wire(dtype) is None
    assert Compression.fp16.wire(dtype) == (FLOAT16 if wide else None)
    assert Compression.bf16.wire(dtype) == (BFLOAT16 if wide else None)


def layouts(dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    grid = np.random.default_rng(1).standard_normal((6, 4)).astype(dtype)
    frozen = grid.copy()
    frozen.flags.writeable = False
    swapped = grid.astype(dtype.newbyteorder(">"))
    return [
        grid,
        grid[::2, 1:],
        np.asfortranarray(grid),
        frozen,
        swapped,
        grid[:0],
        np.array(grid[0, 0]),
        grid.reshape(2, 3, 4),
    ]


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=dtypes.name)
@pytest.mark.parametrize(
    ("compressor", "half"), [(Compression.fp16, FLOAT16), (Compression.bf16, BFLOAT16)], ids=["fp16", "bf16"]
)
def test_arrays_of_any_layout_travel_as_halves_and_come_back(
    compressor: Any, half: np.dtype[Any], dtype: np.dtype[Any]
) -> None:
    for array in layouts(dtype):
        sent, context = compressor.compress(array)
        assert sent.dtype == half and sent.shape == array.shape
        back = compressor.decompress(sent, context)
        assert back.dtype == dtype and back.shape == array.shape
        np.testing.assert_array_equal(back, array.astype(np.float32).astype(half).astype(dtype))


@pytest.mark.parametrize("compressor", BUILT_IN)
def test_what_is_not_compressed_passes_through_untouched(compressor: Any) -> None:
    for tensor in (
        np.arange(3),
        np.ones(2, np.float16),
        np.ones(2, BFLOAT16),
        np.ones(2, np.complex64),
        np.array([True]),
        3,
    ):
        sent, context = compressor.compress(tensor)
        assert sent is tensor
        assert compressor.decompress(sent, context) is tensor


class Owned:
    """A tensor of a framework that is not NumPy: it has a dtype and a device, and only its framework can convert it."""

    def __init__(self, dtype: Any, device: str = "device 1") -> None:
        self.dtype, self.device = dtype, device

    def astype(self, dtype: Any) -> Any:
        return type(self)(dtype, self.device)


DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32, "float64": FLOAT64}


def framework_of(name: str, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A framework as far as compression knows it, in place of the real one; its tensor type."""
    kind: type[Any] = type("Tensor", (Owned,), {})
    if name == "jax":
        monkeypatch.setitem(sys.modules, "jax.numpy", SimpleNamespace(**DTYPES))  # type: ignore[arg-type]
        module = SimpleNamespace(Array=kind)
    elif name == "cupy":
        module = SimpleNamespace(ndarray=kind, float32=np.float32, float64=np.float64)
    else:
        module = SimpleNamespace(Tensor=kind, cast=lambda tensor, dtype: kind(dtype, tensor.device), **DTYPES)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return kind


@pytest.mark.parametrize(
    ("compressor", "half"), [(Compression.fp16, FLOAT16), (Compression.bf16, BFLOAT16)], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("framework", ["jax", "cupy", "tensorflow"])
def test_a_frameworks_tensor_is_converted_by_its_framework(
    framework: str, compressor: Any, half: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = framework_of(framework, monkeypatch)
    for dtype in (FLOAT32, FLOAT64):
        sent, context = compressor.compress(kind(dtype))
        assert type(sent) is kind and sent.dtype == half and sent.device == "device 1"
        back = compressor.decompress(sent, context)
        assert type(back) is kind and back.dtype == dtype and back.device == "device 1"
    for dtype in (np.dtype(np.int32), FLOAT16, BFLOAT16):
        tensor = kind(dtype)
        sent, context = compressor.compress(tensor)
        assert sent is tensor and compressor.decompress(sent, context) is tensor


@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
def test_a_torch_tensor_stays_one(compressor: Any) -> None:
    torch = pytest.importorskip("torch")
    half = torch.float16 if compressor is Compression.fp16 else torch.bfloat16
    for dtype in (torch.float32, torch.float64):
        whole = torch.tensor([[1.0, -2.5e-7, 1.1], [70000.0, float("inf"), float("nan")]], dtype=dtype)
        for tensor in (whole, whole.T, whole[:, 1:], whole[0, 0], whole[:0], whole.clone().requires_grad_()):
            sent, context = compressor.compress(tensor)
            assert type(sent) is torch.Tensor and sent.dtype is half and sent.shape == tensor.shape
            back = compressor.decompress(sent, context)
            assert back.dtype is dtype and torch.equal(
                back.nan_to_num(7, 8), tensor.to(half).to(dtype).nan_to_num(7, 8)
            )
    for tensor in (
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.float16),
        torch.ones(2, dtype=torch.bfloat16),
    ):
        sent, context = compressor.compress(tensor)
        assert sent is tensor and compressor.decompress(sent, context) is tensor
    empty = torch.empty(3, device="meta")  # on a device that only torch can reach
    sent, context = compressor.compress(empty)
    assert sent.device.type == "meta" and compressor.decompress(sent, context).dtype is torch.float32


class Signs(Compressor):
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return np.sign(tensor).astype(np.int8), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor.astype(context)


class Scaled:
    """Not a Compressor, and its methods need an instance."""

    def compress(self, tensor: Any, name: str | None = None) -> tuple[Any, Any]:
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        return tensor


def test_compressors_of_every_kind_are_accepted() -> None:
    accepted = [*BUILT_IN, Compression.fp16(), Compressor, Signs, Signs(), Scaled()]
    for each in [
        *accepted,
        SimpleNamespace(compress=lambda tensor: (tensor, None), decompress=lambda tensor, context: tensor),
    ]:
        check(each)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "got NoneType None, which has no method 'compress'"),
        ("fp16", "got str 'fp16', which has no method 'compress'"),
        (np.ones(2), "got ndarray array([1., 1.]), which has no method 'decompress'"),
        (Compression, "got Compression, which has no method 'compress'"),
        (SimpleNamespace(compress=print), "which has no method 'decompress'"),
        (SimpleNamespace(compress=print, decompress=3), "which has no method 'decompress'"),
        (
            Scaled,
            "got Scaled, whose compress cannot be called with (tensor); pass an instance, or make it a @staticmethod",
        ),
        (
            SimpleNamespace(compress=print, decompress=lambda tensor: tensor),
            "whose decompress cannot be called with (tensor, context)",
        ),
    ],
)
def test_what_is_no_compressor_is_refused_by_name(wrong: Any, said: str) -> None:
    with pytest.raises(InvalidTypeError) as error:
        check(wrong)
    assert said in str(error.value)
    assert str(error.value).startswith(
        "compression: expected Compression.none, Compression.fp16, Compression.bf16, or a class or instance"
    )
