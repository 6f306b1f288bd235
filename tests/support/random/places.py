"""Where the tensors of a random program lie, as each rank chooses for itself: in private memory, in the arena, between
other tensors, in the memory of an earlier tensor or result.

The memory around a tensor is filled with a pattern, and results may be kept until the program ends: whoever writes past
a tensor's end, or into memory that has been given out a second time, is found.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from collectives.tensors.arena import arena

Array = np.ndarray[Any, Any]

MEMORIES = ("private", "mapped", "mixed")
"""Where all ranks take an operation's tensors from; mixed: each rank, and each tensor, from either."""

_WHOLE, _BETWEEN, _SLAB, _AGAIN, _STRIDED, _BACKWARDS, _FORTRAN = range(7)
_WEIGHTS = (4, 4, 3, 4, 1, 0.5, 0.5)
_GAPS = (0, 1, 8, 15, 16, 64, 1000, 4096)
"""Elements that a tensor lies behind the start of its memory, and before the end."""
_SLAB_BYTES = 1 << 20
_MOST_SPARE = 4
_MOST_SPARE_BYTES = 64 << 20
_MOST_KEPT = 6
_CHILD_ENDS_WITHIN = 20.0


@dataclass(eq=False)
class Laid:
    """A tensor where it was laid.

    Attributes:
        tensor: to be passed.
        guards: the memory around it, uint8, all of the value ``pattern``.
        mapped: whether it was to lie in the arena.
    """

    tensor: Array
    mapped: bool
    guards: tuple[Array, ...] = ()
    pattern: int = 0

    def check(self, what: str) -> None:
        """The memory around it must be as it was."""
        for guard in self.guards:
            if not (guard == self.pattern).all():
                at = int(np.flatnonzero(guard.reshape(-1) != self.pattern)[0])
                raise AssertionError(f"{what}: byte {at} of {guard.size} beside the tensor was overwritten")


@dataclass(eq=False)
class _Kept:
    result: Array
    digest: bytes


@dataclass(eq=False)
class _Slab:
    """Memory from which several tensors are cut, one behind the other."""

    memory: Array
    pattern: int
    used: int = 0


@dataclass(eq=False)
class Places:
    """One rank's memory for one program. ``random`` chooses, alike in every run of a seed."""

    random: Random
    _spare: list[Laid] = field(default_factory=list)
    """Tensors, and results, that no operation uses any more; the next tensor of that size may lie there."""
    _kept: list[_Kept] = field(default_factory=list)
    _slabs: dict[bool, _Slab] = field(default_factory=dict)
    _in_use: list[Laid] = field(default_factory=list)

    def lay(self, array: Array, memory: str, *, strided: bool = False, contiguous: bool = False) -> Laid:
        """Copy ``array`` to a place of this rank's choice; ``strided``: not contiguous."""
        mapped = memory == "mapped" or (memory == "mixed" and self.random.random() < 0.5)
        ways = range(_STRIDED if contiguous else _FORTRAN + 1)
        way = _STRIDED if strided else self.random.choices(ways, _WEIGHTS[: len(ways)])[0]
        laid = self._lay(array, mapped, way)
        np.copyto(laid.tensor, array)
        self._in_use.append(laid)
        return laid

    def done(self, laid: Laid, what: str) -> None:
        """No operation uses the tensor any more: check what lies around it, and perhaps use its memory again."""
        laid.check(what)
        self._in_use.remove(laid)
        tensor = laid.tensor
        if tensor.flags.c_contiguous and tensor.flags.writeable and self.random.random() < 0.6:
            self._put_by(laid)

    def results(self, results: Sequence[Array]) -> None:
        """Keep new results until the end, put their memory by, or drop them."""
        for result in results:
            drawn = self.random.random()
            if not isinstance(result, np.ndarray) or not result.size:
                continue
            if drawn < 0.2:
                self._kept.append(_Kept(result, _digest(result)))
            elif drawn < 0.5 and result.flags.writeable:
                self._put_by(Laid(result, arena.locate(result.ctypes.data, result.nbytes) != 0))
        if len(self._kept) > _MOST_KEPT:
            self._compare(self._kept.pop(self.random.randrange(len(self._kept))))

    def check(self) -> None:
        """At the program's end: nobody has written to results that were kept, or beside a tensor."""
        for kept in self._kept:
            self._compare(kept)
        for laid in (*self._spare, *self._in_use):
            laid.check("at the end")

    def fork(self) -> None:
        """Have a child read and write all tensors that it inherits, and end: this process must not see any of it."""
        own = arena.empty(1000, np.float64)
        own.fill(1.5)
        before = [_digest(laid.tensor) for laid in self._spare]
        child = os.fork()
        if child == 0:
            try:
                os._exit(self._in_child(own, before))
            finally:
                os._exit(3)
        _await(child)
        assert (own == 1.5).all(), "a child's writes are seen"
        for laid, digest in zip(self._spare, before, strict=True):
            assert _digest(laid.tensor) == digest, "a child's writes to a tensor that nobody uses are seen"

    def _in_child(self, own: Array, before: Sequence[bytes]) -> int:
        try:
            right = all(_digest(kept.result) == kept.digest for kept in self._kept) and (own == 1.5).all()
            right &= all(_digest(laid.tensor) == digest for laid, digest in zip(self._spare, before, strict=True))
            for array in (own, *self._writable()):
                array[...] = np.ones((), array.dtype)
            fresh = arena.empty(50_000, np.uint8)
            fresh.fill(0xEE)
            return 0 if right and (own == 1).all() and (fresh == 0xEE).all() else 1
        except BaseException:
            return 2

    def _writable(self) -> Iterator[Array]:
        for laid in (*self._spare, *self._in_use):
            if laid.tensor.flags.writeable:
                yield laid.tensor
            yield from laid.guards
        for kept in self._kept:
            if kept.result.flags.writeable:
                yield kept.result

    # ---- ways to lay a tensor

    def _lay(self, array: Array, mapped: bool, way: int) -> Laid:
        shape, dtype = array.shape, array.dtype
        if way == _AGAIN and (laid := self._again(array, mapped)) is not None:
            return laid
        if way == _SLAB and array.nbytes <= _SLAB_BYTES // 4:
            return self._from_slab(array, mapped)
        if way == _BETWEEN and array.ndim:
            return self._between(array, mapped)
        if way == _STRIDED and array.ndim:
            return self._strided(array, mapped)
        if way == _BACKWARDS and array.ndim:
            return Laid(_memory(mapped, shape, dtype)[::-1], mapped)
        if way == _FORTRAN and array.ndim > 1:
            return Laid(_memory(mapped, shape[::-1], dtype).T, mapped)
        return Laid(_memory(mapped, shape, dtype), mapped)

    def _again(self, array: Array, mapped: bool) -> Laid | None:
        for index, laid in enumerate(self._spare):
            tensor = laid.tensor
            if laid.mapped == mapped and tensor.dtype == array.dtype and tensor.size >= array.size and array.size:
                del self._spare[index]
                if tensor.shape == array.shape:
                    return laid
                rest = tensor.reshape(-1)[array.size :].view(np.uint8)
                rest.fill(laid.pattern)
                return Laid(
                    tensor.reshape(-1)[: array.size].reshape(array.shape), mapped, (*laid.guards, rest), laid.pattern
                )
        return None

    def _from_slab(self, array: Array, mapped: bool) -> Laid:
        """Behind the last tensor from the same memory, with a small gap or none."""
        slab = self._slabs.get(mapped)
        gap, after = (self.random.choice((0, 0, 1, 4)) * array.itemsize for _ in range(2))
        start = 0 if slab is None else -(-slab.used // array.itemsize) * array.itemsize + gap
        if slab is None or start + array.nbytes + after > slab.memory.nbytes:
            slab = self._slabs[mapped] = _Slab(_memory(mapped, _SLAB_BYTES, np.uint8), self.random.randrange(1, 256))
            slab.memory.fill(slab.pattern)
            start = gap
        end = start + array.nbytes
        guards = slab.memory[slab.used : start], slab.memory[end : end + after]
        slab.used = end + after
        return Laid(slab.memory[start:end].view(array.dtype).reshape(array.shape), mapped, guards, slab.pattern)

    def _between(self, array: Array, mapped: bool) -> Laid:
        before, after = (self.random.choice(_GAPS) * array.itemsize for _ in range(2))
        memory = _memory(mapped, before + array.nbytes + after, np.uint8)
        end = before + array.nbytes
        guards, pattern = (memory[:before], memory[end:]), self.random.randrange(1, 256)
        for guard in guards:
            guard.fill(pattern)
        return Laid(memory[before:end].view(array.dtype).reshape(array.shape), mapped, guards, pattern)

    def _strided(self, array: Array, mapped: bool) -> Laid:
        """Every second or third element of the last axis."""
        step = self.random.choice((2, 3))
        count = array.shape[-1]
        wide = _memory(mapped, (*array.shape[:-1], step * count, array.itemsize), np.uint8)
        pattern = self.random.randrange(1, 256)
        wide.fill(pattern)
        guards = tuple(wide[..., first::step, :] for first in range(1, step))
        return Laid(wide.view(array.dtype)[..., ::step, 0], mapped, guards, pattern)

    def _put_by(self, laid: Laid) -> None:
        self._spare.append(laid)
        while len(self._spare) > _MOST_SPARE or sum(one.tensor.nbytes for one in self._spare) > _MOST_SPARE_BYTES:
            self._spare.pop(0).check("while it was not used")

    def _compare(self, kept: _Kept) -> None:
        assert _digest(kept.result) == kept.digest, (
            f"a result of {kept.result.dtype}{kept.result.shape} was overwritten after it had been returned"
        )


def _memory(mapped: bool, shape: int | tuple[int, ...], dtype: Any) -> Array:
    return arena.empty(shape, dtype) if mapped else np.empty(shape, dtype)


def _digest(array: Array) -> bytes:
    return hashlib.blake2b(array.tobytes(), digest_size=8).digest()


def _await(child: int) -> None:
    deadline = time.monotonic() + _CHILD_ENDS_WITHIN
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"a child did not end within {_CHILD_ENDS_WITHIN:g} s")
        time.sleep(0.001)
    assert status == 0, f"a child found other values than its parent had (exit status {status})"
