"""The arena: memory that is leased, never to two arrays at once, given back, refused, and flat."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import linecache
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base import interrupts
from collectives.base.errors import InvalidArgumentError
from collectives.tensors import arena as module
from collectives.tensors import arena_piece
from collectives.tensors.arena import MAPPED, OFFSET_BITS, OFFSET_MASK, Arena, private

MIB = 1 << 20
Bytes = npt.NDArray[np.uint8]

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


def address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def word(arena: Arena, array: npt.NDArray[Any]) -> int:
    return arena.locate(address(array), array.nbytes)


def resident(arena: Arena) -> int:
    """Bytes of physical memory that the arena's files have."""
    return sum(os.fstat(arena.piece(number).descriptor).st_blocks * 512 for number in arena.numbers())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of 4 MiB, so that a test has many of them."""
    for name, value in {"_PIECE_BYTES": 4, "_LARGE_BYTES": 8, "_IDLE_BYTES": 4, "_MOST_QUICK_BYTES": 1}.items():
        monkeypatch.setattr(module, name, value * MIB)
    yield


@pytest.mark.parametrize("shape", [5, (), (3, 4), (MIB,), (1, 0, 2), 0])
@pytest.mark.parametrize("dtype", ["bool", "float32", "complex128"])
def test_arrays_are_plain_and_aligned(shape: int | tuple[int, ...], dtype: str) -> None:
    for array in (Arena().empty(shape, dtype), private(shape, dtype)):
        assert type(array) is np.ndarray and array.flags.carray and array.dtype == dtype
        assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
        assert not array.nbytes or address(array) % 64 == 0
        array[...] = 1
        assert (array == 1).all()


def test_sizes_may_be_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    arena = Arena()
    for shape in (np.int64(3000), (np.int32(3), np.int64(5)), np.int64(70 * MIB)):
        for _ in range(2):
            assert type(word(arena, arena.empty(shape, np.uint8))) is int
    arena.release()
    assert not ignored and not arena.numbers()


def test_a_word_says_where_an_array_lies() -> None:
    arena = Arena()
    for array in (arena.empty(100, np.float32), arena.empty((3, MIB), np.uint8)):
        for view in (array, array[1:], array[-1:]):
            found = word(arena, view)
            piece = arena.piece((found - MAPPED) >> OFFSET_BITS)
            assert found & MAPPED and piece.address + (found & OFFSET_MASK) == address(view)
            with mmap.mmap(piece.descriptor, piece.nbytes) as peers:
                view[...] = 7
                offset = found & OFFSET_MASK
                assert peers[offset : offset + view.nbytes] == view.tobytes()


def test_private_memory_has_no_word() -> None:
    arena = Arena()
    array = arena.empty(100, np.uint8)
    end = arena.piece(1).address + arena.piece(1).nbytes
    assert not word(arena, np.zeros(100)) and not word(arena, private(100, np.uint8))
    assert not arena.locate(end - 10, 11) and arena.locate(end - 10, 10) and not arena.locate(address(array) - 1, 5)


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 23), st.integers(0, 1 << 30)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_arrays_never_share_memory_whatever_comes_and_goes(steps: list[tuple[int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_PIECE_BYTES": 4, "_LARGE_BYTES": 4, "_IDLE_BYTES": 4, "_MOST_QUICK_BYTES": 1}.items():
            patch.setattr(module, name, value * MIB)
        arena, live = Arena(), list[tuple[int, Bytes]]()
        for number, (action, bits, chosen) in enumerate(steps):
            if action <= 1:
                array = arena.empty((1 << bits) - chosen % (1 << bits - 1), np.uint8)
                array[:: 1 << 10] = number
                array[-1] = number
                live.append((number, array))
            elif action == 2 and live:
                number, array = live.pop(chosen % len(live))
                assert (array[:: 1 << 10] == number).all() and array[-1] == number
            elif action == 3:
                arena.release()
        spans = sorted((address(array), address(array) + array.nbytes) for _, array in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for number, array in live:
            assert (array[:: 1 << 10] == number).all() and array[-1] == number and word(arena, array)
        array = np.empty(0, np.uint8)
        live.clear()
        arena.release()
        assert not arena.numbers() and not arena._lent and not resident(arena)


# ---- huge pages


def huge(arena: Arena) -> int:
    """Bytes of the arena's first piece that this process has mapped as huge pages."""
    with open("/proc/self/smaps") as file:
        _, found, rest = file.read().partition(f"\n{arena.piece(1).address:x}-")
    return int(rest.partition("ShmemPmdMapped:")[2].split()[0]) * 1024 if found else -1


def test_pieces_begin_at_a_huge_page() -> None:
    arena = Arena()
    arrays = [arena.empty(size, np.uint8) for size in (10, 70 * MIB, 100 * MIB)]
    assert all(word(arena, array) for array in arrays)
    assert all(arena.piece(number).address % arena_piece.HUGE_PAGE == 0 for number in arena.numbers())


@pytest.mark.skipif(not arena_piece.huge_pages_must_be_asked_for(), reason="the system makes huge pages by itself")
def test_huge_pages_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, ...]]()

    def advise(*arguments: int) -> int:
        asked.append(arguments)
        return int(madvise(*arguments))

    madvise = arena_piece.madvise
    monkeypatch.setattr(arena_piece, "madvise", advise)
    arena = Arena()
    first = arena.empty(3 * MIB, np.uint8)
    if ctypes.get_errno() == errno.EINVAL:
        pytest.skip("needs MADV_COLLAPSE, Linux 6.1")
    assert huge(arena) == resident(arena) == 4 * MIB and not first.any()
    small = arena.empty(MIB, np.uint8)
    assert len(asked) <= 2 and huge(arena) == 4 * MIB and word(arena, small)
    second = arena.empty(5 * MIB, np.uint8)
    assert huge(arena) == resident(arena) == 10 * MIB and word(arena, second)


@pytest.mark.parametrize(("error", "calls"), [(errno.EINVAL, 2), (errno.EAGAIN, 4)])
def test_huge_pages_may_be_refused(error: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not known to the system: it is not asked again. Not now: it is."""
    asked = list[tuple[int, ...]]()

    def advise(*arguments: int) -> int:
        asked.append(arguments)
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(module, "huge_pages_must_be_asked_for", lambda: True)
    monkeypatch.setattr(arena_piece, "madvise", advise)
    arena = Arena()
    arrays = [arena.empty(3 * MIB, np.uint8) for _ in range(2)]
    for array in arrays:
        array[:] = 1
        assert word(arena, array)
    assert len(asked) == calls


# ---- given back


def test_a_block_is_leased_again_when_its_last_view_is_gone() -> None:
    arena = Arena()
    array = arena.empty(1000, np.float32)
    where, view = address(array), array[5:].view(np.int8)
    del array
    others = [arena.empty(1000, np.float32) for _ in range(5)]
    assert where not in map(address, others)
    del view
    assert address(arena.empty(1000, np.float32)) == where


def test_other_libraries_views_count() -> None:
    arena = Arena()
    array = arena.empty(1000, np.uint8)
    where, kept = address(array), memoryview(array.base)
    del array
    assert address(arena.empty(1000, np.uint8)) != where
    del kept
    assert address(arena.empty(1000, np.uint8)) == where


def test_physical_memory_of_a_large_array_goes_back_at_once() -> None:
    arena = Arena()
    small, large = arena.empty(100, np.uint8), arena.empty(70 * MIB, np.uint8)
    small[:], large[:] = 1, 1
    assert resident(arena) >= 70 * MIB
    del large  # no further call
    assert resident(arena) <= 2 * MIB and (small == 1).all()
    again = arena.empty(70 * MIB, np.uint8)
    assert not again[:: 1 << 12].any()
    again[:] = 2
    assert (small == 1).all()


def test_idle_memory_is_bounded_and_a_loop_keeps_its_pages(small_pieces: None) -> None:
    arena = Arena()
    arrays = [arena.empty(3 * MIB, np.uint8) for _ in range(8)]
    for array in arrays:
        array[:] = 1
    del array, arrays
    first = arena.empty(3 * MIB, np.uint8)  # settles
    assert resident(arena) <= 8 * MIB
    where = address(first)
    for _ in range(10):
        del first
        first = arena.empty(3 * MIB, np.uint8)
        first[:] = 1
        assert address(first) == where
        before = resident(arena)
    assert resident(arena) == before


def test_pieces_without_blocks_end_but_for_one(small_pieces: None) -> None:
    arena = Arena()
    arrays = [arena.empty(3 * MIB, np.uint8) for _ in range(8)]
    descriptors = [arena.piece(number).descriptor for number in arena.numbers()]
    assert len(descriptors) > 3
    arrays.clear()
    arena.empty(1, np.uint8)
    assert len(arena.numbers()) == 1
    arena.release()
    assert not arena.numbers() and not arena.locate(0, 0)
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_a_piece_that_a_peer_has_mapped_holds_no_memory_after_its_end() -> None:
    arena = Arena()
    array = arena.empty(10 * MIB, np.uint8)
    array[:] = 1
    piece = arena.piece(1)
    descriptor = os.dup(piece.descriptor)
    with mmap.mmap(descriptor, piece.nbytes) as peers:
        assert peers[0] == 1 and os.fstat(descriptor).st_blocks * 512 >= 10 * MIB
        del array, piece
        arena.release()
        assert os.fstat(descriptor).st_blocks == 0 and peers[0] == 0
    os.close(descriptor)


def test_an_interrupt_is_not_lost_in_what_drops_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what is raised in a destructor, and handles a signal wherever its next line is: there must be
    none."""
    ignored = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    arena = Arena()

    def interrupt(*event: Any) -> Any:
        raise KeyboardInterrupt

    for size in (1000, 70 * MIB):
        array = arena.empty(size, np.uint8)
        where = address(array)
        sys.settrace(interrupt)
        del array
        sys.settrace(None)
        assert not ignored and address(arena.empty(size, np.uint8)) == where


def test_an_interrupt_anywhere_in_an_allocation_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised at every line in turn, as a signal's handler does, but not where handlers are deferred."""
    monkeypatch.setattr(module, "huge_pages_must_be_asked_for", lambda: False)  # they take time
    for stop in range(2000):
        arena, counted = Arena(), 0
        kept = [arena.empty(3 * MIB, np.uint8), arena.empty(100, np.uint8)]

        def interrupt(frame: Any, event: str, _: Any) -> Any:
            nonlocal counted
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if interrupts._deferral is not None or line == "try:":  # an instruction that does nothing
                return interrupt
            counted += 1
            if counted > stop:  # noqa: B023
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        arrays = list[Bytes]()
        kept.pop(0)
        try:
            sys.settrace(interrupt)
            for size in (100, 3 * MIB, 100 * MIB):
                arrays.append(arena.empty(size, np.uint8))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        arrays += [arena.empty(size, np.uint8) for size in (100, 3 * MIB, 100)] + kept
        spans = sorted((address(array), address(array) + array.nbytes) for array in arrays)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(word(arena, array) for array in arrays)
        if counted <= stop:
            break
    else:
        pytest.fail("an allocation has more lines than expected")
    assert stop > 50


# ---- threads, destructors and signals


def test_threads_may_share_an_arena() -> None:
    arena, wrong = Arena(), []

    def work(number: int) -> None:
        chosen = random.Random(number)
        for _ in range(300):
            array = arena.empty(chosen.randrange(1, 1 << 18), np.uint8)
            array[:] = number
            if not (array == number).all() or not word(arena, array):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    arena.release()
    assert not arena.numbers()


def test_a_call_from_within_an_allocation_gets_private_memory() -> None:
    arena = Arena()
    kept, found = arena.empty(10, np.uint8), list[Bytes]()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            found.append(arena.empty(10, np.uint8))

    def collect(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "_find":
            sys.settrace(None)
            Cycle()
            gc.collect()
        return collect

    sys.settrace(collect)
    array = arena.empty(1000, np.uint8)
    sys.settrace(None)
    assert len(found) == 1 and not word(arena, found[0]) and word(arena, array) and word(arena, kept)
    assert word(arena, arena.empty(10, np.uint8)), "afterwards all is as before"


def test_a_thread_waits_a_bounded_time_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT", 0.01)
    arena, found = Arena(), list[Bytes]()
    with arena._lock:
        thread = threading.Thread(target=lambda: found.append(arena.empty(10, np.uint8)))
        thread.start()
        thread.join(60)
    assert len(found) == 1 and not word(arena, found[0]) and word(arena, arena.empty(10, np.uint8))


# ---- refused


def refused(error: int) -> Any:
    def refuse(*_: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return refuse


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.EMFILE, errno.ENOMEM, errno.EFBIG])
def test_refused_memory_is_private_and_told_once(
    call: str, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena()
    open_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(arena_piece.os, call, refused(error))
    for _ in range(3):
        array = arena.empty(1000, np.float32)
        array[:] = 1
        assert not word(arena, array) and array.ctypes.data % 64 == 0
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert os.strerror(error) in record.getMessage() and "private memory" in record.getMessage()
    assert len(os.listdir("/proc/self/fd")) == open_files
    monkeypatch.undo()
    for _ in range(module._SKIPS):
        array = arena.empty(1000, np.float32)
    assert word(arena, arena.empty(1000, np.float32)), "after a while the system is asked again"


@pytest.mark.parametrize(
    ("limit", "value", "shapes"),
    [
        ("RLIMIT_NOFILE", "len(os.listdir('/proc/self/fd')) - 1", (1000, 1 << 20, 1000)),
        ("RLIMIT_FSIZE", "1 << 20", (1000, 1 << 20, 1000)),
        ("RLIMIT_AS", "mapped() + (1 << 20)", (1000, 2000)),
    ],
)
def test_the_systems_limits_mean_private_memory_and_one_line(limit: str, value: str, shapes: tuple[int, ...]) -> None:
    program = f"""
import os, resource
from collectives import is_mapped, zeros
def mapped():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.{limit}, ({value}, resource.getrlimit(resource.{limit})[1]))
arrays = [zeros(shape) for shape in {shapes}]
print({{is_mapped(array) for array in arrays}}, sum(array.sum() for array in arrays))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "{False} 0.0\n"
    assert done.stderr.count("\n") == 1 and "no more memory that other ranks can map" in done.stderr


def test_a_large_request_that_is_refused_keeps_no_small_one_out(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena()
    with pytest.raises((MemoryError, ValueError)):
        arena.empty(1 << 61, np.uint8)
    assert word(arena, arena.empty(1000, np.uint8)) and word(arena, arena.empty(100 * MIB, np.uint8))
    assert len(caplog.records) == 1


def test_a_smaller_piece_is_made_where_the_usual_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    truncate = os.ftruncate

    def small_only(descriptor: int, nbytes: int) -> None:
        if nbytes > 8 * MIB:
            raise OSError(errno.ENOMEM, "too large")
        truncate(descriptor, nbytes)

    monkeypatch.setattr(arena_piece.os, "ftruncate", small_only)
    arena = Arena()
    assert word(arena, arena.empty(7 * MIB, np.uint8)) and not word(arena, arena.empty(9 * MIB, np.uint8))
    assert word(arena, arena.empty(8 * MIB, np.uint8))


def test_the_limit_of_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("COLLECTIVES_ARENA", "0")
    arena = Arena()
    assert not word(arena, arena.empty(10, np.uint8)) and not caplog.records
    monkeypatch.setenv("COLLECTIVES_ARENA", "20M")
    arena = Arena()
    first, second = arena.empty(15 * MIB, np.uint8), arena.empty(15 * MIB, np.uint8)
    assert word(arena, first) and not word(arena, second) and word(arena, arena.empty(4 * MIB, np.uint8))
    assert len(caplog.records) == 1 and "COLLECTIVES_ARENA" in caplog.text
    monkeypatch.setenv("COLLECTIVES_ARENA", "1000M")
    assert not word(arena, arena.empty(30 * MIB, np.uint8)), "read once"
    monkeypatch.setenv("COLLECTIVES_ARENA", "plenty")
    with pytest.raises(InvalidArgumentError, match="COLLECTIVES_ARENA='plenty': expected a number of bytes"):
        Arena().empty(10, np.uint8)


def test_where_the_system_overcommits_nothing_memory_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "never_overcommits", lambda: True)
    arena = Arena()
    assert word(arena, arena.empty(3 * MIB, np.uint8)) and resident(arena) >= 3 * MIB
    monkeypatch.setattr(arena_piece.os, "posix_fallocate", refused(errno.ENOSPC))
    assert not word(arena, arena.empty(5 * MIB, np.uint8))
    monkeypatch.undo()
    assert word(arena, arena.empty(5 * MIB, np.uint8))


def test_there_is_a_bound_on_pieces(monkeypatch: pytest.MonkeyPatch, small_pieces: None) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 3)
    arena = Arena()
    arrays = [arena.empty(3 * MIB, np.uint8) for _ in range(5)]
    assert [bool(word(arena, array)) for array in arrays] == [True] * 3 + [False] * 2


def test_a_word_has_room_for_the_number_of_every_piece(small_pieces: None) -> None:
    arena = Arena()
    arena._numbers = (1 << 62 - OFFSET_BITS) - 2
    words = [word(arena, array) for array in [arena.empty(3 * MIB, np.uint8) for _ in range(2)]]
    assert words == [MAPPED | arena._numbers << OFFSET_BITS, 0] and words[0] < 1 << 63


def test_pieces_grow_so_that_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "huge_pages_must_be_asked_for", lambda: False)
    arena = Arena()
    arrays = [arena.empty(40 * MIB, np.uint8) for _ in range(1000)]  # 40 GB that nobody touches
    assert all(word(arena, array) for array in arrays) and len(arena.numbers()) < 40


# ---- flat


def test_100_000_allocations_leave_memory_mappings_and_descriptors_as_they_were() -> None:
    arena, chosen = Arena(), random.Random(7)
    live: list[Bytes | None] = [None] * 100

    def turn(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            place = chosen.randrange(100)
            live[place] = None
            live[place] = arena.empty(int(2 ** chosen.uniform(0, 20)), np.uint8)
        with open("/proc/self/maps") as maps:
            return resident(arena), len(maps.readlines()), len(os.listdir("/proc/self/fd"))

    for array in filter(None.__ne__, live):
        array[:] = 1
    first = turn(10_000)
    last = turn(90_000)
    assert last[0] <= first[0] + 64 * MIB and last[1] <= first[1] + 4 and last[2] <= first[2] + 4
    live.clear()
    arena.release()
    assert not arena.numbers() and not arena._lent and not arena._quick_bytes
