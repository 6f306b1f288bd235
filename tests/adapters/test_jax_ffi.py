"""The two ways in which a compiled program calls: XLA's call frames, read by ctypes; and JAX's own callback where those
cannot be had."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives.jax import compat, ffi, primitive

pytestmark = pytest.mark.timeout(120)

FLOAT32, TOKEN, INT4 = 11, 17, 21


class Frame:
    """A call frame as XLA makes it, of float32 operands and results, and what `ffi.handler` makes of it."""

    def __init__(self, operands: list[Any], results: list[Any], text: bytes = b"call", spread: bool = False) -> None:
        self.messages: list[bytes] = []
        self._kept: list[Any] = [operands, results, text]

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ffi._Error))
        def create_error(error: Any) -> int:
            self.messages.append(error.contents.message)
            return 4711

        api = self._keep(ffi._Api(ctypes.sizeof(ffi._Api), None))
        api.create_error = ctypes.cast(create_error, ctypes.c_void_p).value
        span = self._keep(ffi._Span(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value, len(text)))
        self.frame = ffi._Frame(ctypes.sizeof(ffi._Frame), None, ctypes.pointer(api), None, 3)
        self.frame.operands = self._buffers(operands, spread)
        self.frame.results = self._buffers(results, spread)
        kinds, items = self._keep((ctypes.c_int32 * 1)(4)), self._keep((ctypes.c_void_p * 1)(ctypes.addressof(span)))
        self.frame.attributes = ffi._Attributes(ctypes.sizeof(ffi._Attributes), None, 1, kinds, None, items)
        self._keep(create_error)

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _buffers(self, arrays: list[Any], spread: bool) -> Any:
        """One behind the other in memory, or anywhere; and the token."""
        count = len(arrays) + 1
        places = self._keep((ffi._Buffer * (count * count))())
        order = [number * (number + 1) // 2 if spread else number for number in range(count)]
        chosen = [places[number] for number in order]
        for buffer, array in zip(chosen, [*arrays, np.empty(())], strict=True):
            dims = self._keep((ctypes.c_int64 * max(array.ndim, 1))(*array.shape))
            kind = FLOAT32 if array.ndim else TOKEN
            ffi._Buffer.__init__(buffer, ctypes.sizeof(ffi._Buffer), None, kind, array.ctypes.data, array.ndim, dims)
        items = self._keep((ctypes.c_void_p * count)(*[ctypes.addressof(buffer) for buffer in chosen]))
        self.chosen = chosen
        return ffi._Buffers(ctypes.sizeof(ffi._Buffers), None, count, None, ctypes.addressof(items))

    def call(self, handler: Any) -> int | None:
        found: int | None = handler(ctypes.addressof(self.frame))
        return found


def doubled(operands: list[Any], results: list[Any]) -> None:
    for operand, result in zip(operands, results, strict=True):
        result[...] = 2 * operand


@pytest.mark.parametrize("spread", (False, True))
def test_buffers_are_read_and_written(spread: bool) -> None:
    handler = ffi.handler(lambda text: doubled, (0, 1))
    for start in range(12):  # more sets of addresses than views are kept for
        operands = [np.arange(start, start + length, dtype=np.float32).reshape(-1, 1) for length in (1, 5, 0, 70)]
        results = [np.zeros_like(operand) for operand in operands]
        frame = Frame(operands, results, spread=spread)
        for _ in range(2):
            assert frame.call(handler) is None
        for operand, result in zip(operands, results, strict=True):
            np.testing.assert_array_equal(result, 2 * operand)


def test_in_place_is_one_list() -> None:
    seen = []
    handler = ffi.handler(lambda text: lambda operands, results: seen.append(operands is results), (0, 1))
    arrays = [np.ones((3, 1), np.float32), np.ones((2, 1), np.float32)]
    Frame(arrays, arrays).call(handler)
    Frame(arrays, [array.copy() for array in arrays]).call(handler)
    Frame([arrays[0]], [arrays[0][:0]]).call(handler)  # no elements, at the operand's address
    assert seen == [True, False, False]


def test_what_cannot_be_read_is_an_error() -> None:
    called = []
    array = np.ones((3, 1), np.float32)
    short, strange, tokenless = Frame([array], [array]), Frame([array], [array]), Frame([array], [array])
    short.frame.operands.struct_size = 8
    strange.chosen[0].dtype = INT4
    tokenless.chosen[-1].dtype = FLOAT32
    for frame, text in ((short, b"8 bytes"), (strange, b"21"), (tokenless, b"token")):
        assert frame.call(ffi.handler(lambda text: lambda *buffers: called.append(buffers), (0, 1))) == 4711
        assert text in frame.messages[0]
    assert not called


@pytest.mark.parametrize("kind", (ValueError, KeyboardInterrupt))
def test_an_exception_becomes_xlas_error(kind: type[BaseException]) -> None:
    def fail(operands: Any, results: Any) -> None:
        raise kind("no such thing")

    frame = Frame([np.ones((3, 1), np.float32)], [np.ones((3, 1), np.float32)])
    assert frame.call(ffi.handler(lambda text: fail, (0, 1))) == 4711
    assert frame.messages == [f"{kind.__name__}: no such thing".encode()]


def test_the_version_of_the_interface() -> None:
    assert ffi.version_in("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 3\n") == (0, 3)
    assert ffi.version_in("nothing of the kind") is None


# ---- the other way


@pytest.fixture
def by_callback() -> Iterator[None]:
    """Programs compiled in here call by JAX's callback."""
    compat.register_lowering(primitive.collective_p, primitive._lower, platform="cpu")
    try:
        yield
    finally:
        compat.register_lowering(primitive.collective_p, primitive._lower_without_copies, platform="cpu")


@pytest.mark.skipif(compat.ffi is None, reason="it is the only way here")
@pytest.mark.usefixtures("by_callback")
@pytest.mark.parametrize("ordered", (True, False))
def test_by_a_callback_of_jax(hvd: Any, ordered: bool) -> None:
    rank, size = hvd.rank(), hvd.size()

    @jax.jit
    def program(x: Any) -> Any:
        total = hvd.allreduce({"a": x, "b": [x[0], x * 2]}, op=hvd.Sum, name="total", ordered=ordered)
        rows = hvd.allgather(x, name="rows", ordered=ordered)
        looped = jax.lax.fori_loop(0, 3, lambda _, c: hvd.allreduce(c, name="loop", ordered=ordered), x)
        gradient = jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum, name="loss", ordered=ordered) ** 2).sum())(x)
        return total, rows, looped, gradient

    assert "callback" in program.lower(jnp.arange(3.0)).as_text()
    total, rows, looped, gradient = program(jnp.arange(3.0) + rank)
    summed = np.arange(3.0) * size + sum(range(size))
    np.testing.assert_allclose(total["b"][1], 2 * summed)
    np.testing.assert_allclose(total["b"][0], summed[0])
    np.testing.assert_allclose(rows, np.concatenate([np.arange(3.0) + other for other in range(size)]))
    np.testing.assert_allclose(looped, summed / size, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * size * summed, rtol=1e-6)


@pytest.mark.skipif(compat.ffi is None, reason="there is only the other way here")
def test_nothing_is_copied(hvd: Any) -> None:
    assert "collectives.jax" in jax.jit(hvd.allreduce).lower(jnp.ones(3)).as_text()
