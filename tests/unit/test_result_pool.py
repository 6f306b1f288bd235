"""Result memory: really reused, never while somebody looks at it, and bounded."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

from collectives.tensors.arena import MAPPED_FROM, arena
from collectives.tensors.result_pool import THRESHOLD, ResultPool
from collectives.worlds.memory import is_mapped

MIB = 1 << 20


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("shape", [(), (0,), 0, 5, (3, 0, 4), (2, 3), (MIB,), 3 * MIB + 1, (1 << 10, 1 << 9)])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "complex128"])
def test_results_are_plain_arrays_of_the_asked_shape(shape: int | tuple[int, ...], dtype: str) -> None:
    result = ResultPool(64 * MIB).empty(shape, dtype)
    assert type(result) is np.ndarray
    assert result.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert result.dtype == dtype and result.flags.carray
    result[...] = 1
    assert (result == 1).all()
    if result.nbytes >= THRESHOLD:
        assert address(result) % 64 == 0


def test_a_dropped_result_is_used_again_whatever_its_shape_and_dtype() -> None:
    pool = ResultPool(64 * MIB)
    first = pool.empty((4, MIB), np.float32)
    where = address(first)
    del first
    assert pool.free_bytes >= 16 * MIB
    again = pool.empty(2 * MIB, np.float64)
    assert address(again) == where and pool.free_bytes == 0


def test_any_view_keeps_the_memory() -> None:
    pool = ResultPool(64 * MIB)
    result = pool.empty((1024, 1024), np.float32)
    result[:] = 3
    keepers: list[Any] = [result[5:7].T, memoryview(result), result.view(np.int32).reshape(-1)[-1:]]
    del result
    while keepers:
        other = pool.empty((1024, 1024), np.float32)
        other[:] = 9
        assert pool.free_bytes == 0
        kept = np.asarray(keepers.pop())
        assert (kept.view(np.float32) if kept.dtype == np.int32 else kept).max() == 3
        del kept, other
        pool.clear()
    assert pool.free_bytes == 0


def test_the_best_fitting_block_is_taken_and_none_that_is_much_too_large() -> None:
    pool = ResultPool(256 * MIB)
    results = {size: pool.empty(size * MIB, np.uint8) for size in (8, 9, 10, 40)}
    where = {size: address(result) for size, result in results.items()}
    results.clear()
    found = [pool.empty(9 * MIB - 5000, np.uint8) for _ in range(3)]
    assert [address(result) for result in found[:2]] == [where[9], where[10]]
    assert address(found[2]) not in where.values()
    assert address(pool.empty(20 * MIB, np.uint8)) != where[40]


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    pool = ResultPool(10 * MIB)
    results = [pool.empty(4 * MIB, np.uint8) for _ in range(5)]
    last = address(results[-1])
    while results:
        del results[0]
        assert pool.free_bytes <= 10 * MIB
    assert pool.free_bytes == 8 * MIB
    assert address(pool.empty(4 * MIB, np.uint8)) == last


def test_blocks_beyond_the_limit_and_pools_without_one_keep_nothing() -> None:
    for pool in (ResultPool(0), ResultPool(3 * MIB)):
        result = pool.empty(4 * MIB, np.uint8)
        assert is_mapped(result)
        del result
        assert pool.free_bytes == 0


def test_small_results_are_numpys_own_and_others_below_the_threshold_the_arenas() -> None:
    pool = ResultPool(64 * MIB)
    assert pool.empty(MAPPED_FROM - 1, np.uint8).flags.owndata
    result = pool.empty(MAPPED_FROM, np.uint8)
    assert is_mapped(result) and is_mapped(pool.empty((THRESHOLD - 1,), np.uint8))
    where = address(result)
    del result
    assert address(pool.empty(MAPPED_FROM, np.uint8)) == where and pool.free_bytes == 0


@pytest.mark.parametrize("count", [0, 1, 1000, MAPPED_FROM, MIB, 100 * MIB])
def test_aligned_results(count: int) -> None:
    result = ResultPool(64 * MIB).aligned(count, np.uint8)
    assert result.shape == (count,) and is_mapped(result) == (count >= MAPPED_FROM)
    assert count == 0 or address(result) % 64 == 0


def test_where_the_arena_is_exhausted_results_are_private_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_lease", lambda nbytes: None)
    pool = ResultPool(64 * MIB)
    result = pool.empty(4 * MIB, np.uint8)
    result[:] = 1
    where = address(result)
    del result
    again = pool.empty(4 * MIB, np.uint8)
    assert address(again) == where and where % 64 == 0 and not is_mapped(again)


def test_clear_frees_and_leaves_results_in_use_alone() -> None:
    pool = ResultPool(64 * MIB)
    kept, dropped = pool.empty(4 * MIB, np.uint8), pool.empty(4 * MIB, np.uint8)
    kept[:] = 7
    block = weakref.ref(dropped)
    del dropped
    assert block() is None and pool.free_bytes == 4 * MIB
    pool.clear()
    assert pool.free_bytes == 0 and kept.min() == kept.max() == 7


def test_results_outlive_their_pool() -> None:
    pool = ResultPool(64 * MIB)
    result = pool.empty(4 * MIB, np.uint8)
    result[:] = 7
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None and result.min() == result.max() == 7


def test_a_block_that_comes_back_while_the_lock_is_held_is_not_lost() -> None:
    pool = ResultPool(64 * MIB)
    result = pool.empty(4 * MIB, np.uint8)
    with pool._lock:  # as if the garbage collector ran inside empty()
        del result
        assert pool.free_bytes == 0
        fresh = pool.empty(4 * MIB, np.uint8)
    fresh[:] = 1
    assert address(fresh) % 64 == 0 and pool.free_bytes == 4 * MIB


def test_an_interrupt_is_not_lost_in_what_drops_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what is raised in a destructor, and handles a signal wherever its next line is: there must be
    none."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    pool = ResultPool(64 * MIB)
    result = pool.empty(4 * MIB, np.uint8)

    def interrupt(*event: Any) -> Any:
        raise KeyboardInterrupt

    sys.settrace(interrupt)  # raises where a function of Python begins, as a signal does that came before
    del result
    sys.settrace(None)
    assert not ignored and pool.free_bytes == 4 * MIB


def test_results_that_are_kept_do_not_take_the_place_of_those_that_come_back() -> None:
    pool = ResultPool(10 * MIB)
    kept = [pool.empty(4 * MIB, np.uint8) for _ in range(4)]
    result = pool.empty(4 * MIB, np.uint8)
    where = address(result)
    del result
    assert address(pool.empty(4 * MIB, np.uint8)) == where
    del kept
    assert pool.free_bytes <= 10 * MIB


def test_threads_may_share_a_pool() -> None:
    pool, wrong = ResultPool(20 * MIB), []

    def work(number: int) -> None:
        for turn in range(60):
            result = pool.empty(MIB + (number + turn) % 5 * 1000, np.uint8)
            result[:: 1 << 12] = number
            result[-1] = number
            if not (result[:: 1 << 12] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert pool.free_bytes == sum(block.nbytes for block in pool._free) <= 20 * MIB
    assert not pool._returned


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Python 3.12 warns of a fork while other tests' threads are alive
def test_a_child_forked_in_the_middle_of_a_call_can_still_allocate() -> None:
    program = textwrap.dedent(
        """
        import os, numpy
        from collectives.tensors.result_pool import ResultPool
        pool = ResultPool(1 << 26)
        result = pool.empty(1 << 22, "u1")
        pool._lock.acquire()
        child = os.fork()
        if child == 0:
            other = pool.empty(1 << 22, "u1")
            other[:] = 1
            del result, other
            os._exit(0 if pool.empty(1 << 22, "u1").size == 1 << 22 else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_child_may_look_at_is_not_used_again() -> None:
    program = textwrap.dedent(
        """
        import os, numpy
        from collectives.worlds.memory import is_mapped
        from collectives.tensors.result_pool import ResultPool
        pool = ResultPool(1 << 26)
        results = [pool.empty(1 << 22, "u1") for _ in range(2)]
        for result in results:
            result[:] = 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            assert not pool.free_bytes
            os._exit(0 if all((result == 1).all() for result in results) else 1)
        del result, results
        assert not pool.free_bytes
        fresh = [pool.empty(1 << 22, "u1") for _ in range(3)]
        for result in fresh:
            result[:] = 2
            assert is_mapped(result)
        os.write(writer, b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del result, fresh
        assert pool.free_bytes == 3 << 22
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_result_dropped_after_a_fork_while_another_thread_settles_is_not_used_again() -> None:
    results: list[Any] = []

    class Returned(deque[Any]):
        def popleft(self) -> Any:
            if results:
                arena.forks += 1  # as a fork does
                results.clear()
            return super().popleft()

    pool = ResultPool(1 << 26)
    pool._returned = Returned()
    other, result = (pool.empty(1 << 22, "u1") for _ in range(2))
    results.append(result)
    at = address(result)
    del other, result
    assert not pool.free_bytes and at not in [address(pool.empty(1 << 22, "u1")) for _ in range(2)]


def test_results_alive_at_the_end_of_the_interpreter_make_no_noise() -> None:
    program = (
        "from collectives.tensors.result_pool import ResultPool\npool = ResultPool(1 << 26)\n"
        "kept = [pool.empty(1 << 22, 'u1') for _ in range(3)]\nkept.append(kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert done.stderr == ""
