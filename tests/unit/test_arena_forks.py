"""Forks: a child's writes are its own, it never sees memory reused, and nothing is lost in the parent."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or not hasattr(os, "memfd_create"), reason="needs fork and memfd_create"
)

COMMON = """
import os, threading
import numpy as np
from collectives.tensors import arena as module
from collectives.tensors.arena import arena
MIB = 1 << 20

def word(array):
    return arena.locate(array.ctypes.data, array.nbytes)

def resident():
    return sum(os.fstat(arena.piece(number).descriptor).st_blocks * 512 for number in arena.numbers())

ask, answer = os.pipe(), os.pipe()

def step(pipe):  # let the other process go on
    os.write(pipe[1], b"1")

def await_step(pipe):
    assert os.read(pipe[0], 1) == b"1"

def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    return child

def end(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def program(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", COMMON + textwrap.dedent(text)],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_childs_writes_are_its_own_and_its_arena_is_empty() -> None:
    program(
        """
        array = arena.empty(3 * MIB, np.uint8)
        array[:] = 1

        def child():
            assert (array == 1).all() and not word(array) and not arena.numbers()
            array[:] = 2
            other = arena.empty(MIB, np.uint8)
            other[:] = 3
            assert word(other) and arena.numbers() == {2} and (array == 2).all()

        end(in_child(child))
        assert (array == 1).all() and word(array)
        """
    )


def test_a_child_keeps_what_its_parent_drops() -> None:
    program(
        """
        arrays = [arena.empty(size, np.uint8) for size in (1000, 3 * MIB, 100 * MIB)]
        for array in arrays:
            array[:] = 1

        def child():
            await_step(ask)
            assert all((array == 1).all() for array in arrays)

        child = in_child(child)
        arrays.clear()
        del array
        again = [arena.empty(size, np.uint8) for size in (1000, 3 * MIB, 100 * MIB) for _ in range(3)]
        for array in again:
            array[:] = 2
        arena.release()
        step(ask)
        end(child)
        """
    )


def test_an_array_dropped_after_a_fork_in_the_middle_of_another_threads_allocation() -> None:
    """The thread that allocates has looked for forks already, and not yet at what has come back."""
    program(
        """
        import collections

        def child():
            await_step(ask)
            assert (array == 1).all()

        class Returned(collections.deque):
            def popleft(self):
                global array, forked
                if forked is None:
                    forked = in_child(child)
                    del array
                return super().popleft()

        forked, arena._returned = None, Returned()
        arena._note = arena._returned.append
        other, array = arena.empty(MIB, np.uint8), arena.empty(MIB, np.uint8)
        array[:] = 1
        del other
        again = [arena.empty(MIB, np.uint8) for _ in range(3)]
        for fresh in again:
            fresh[:] = 2
        step(ask)
        end(forked)
        """
    )


def test_pieces_of_before_the_fork_end_with_their_last_array() -> None:
    program(
        """
        kept, dropped = arena.empty(1000, np.uint8), arena.empty(100 * MIB, np.uint8)
        before = arena.numbers()
        end(in_child(lambda: None))
        assert word(kept) and arena.numbers() == before
        fresh = arena.empty(1000, np.uint8)
        assert before < arena.numbers() and word(fresh)
        files = len(os.listdir("/proc/self/fd"))
        del kept, dropped
        arena.empty(1000, np.uint8)
        assert not before & arena.numbers() and len(os.listdir("/proc/self/fd")) < files and word(fresh)
        """
    )


def test_many_forks_leave_nothing_behind() -> None:
    program(
        """
        def maps():
            with open("/proc/self/maps") as file:
                return len(file.readlines()), len(os.listdir("/proc/self/fd"))

        for turn in range(30):
            arrays = [arena.empty(size, np.uint8) for size in (1000, 3 * MIB, 70 * MIB)]
            end(in_child(lambda: arrays[0].fill(3)))
            if turn == 3:
                first = maps()
        assert maps() == first
        """
    )


def test_a_child_of_a_child() -> None:
    program(
        """
        array = arena.empty(1000, np.uint8)
        array[:] = 1

        def child():
            own = arena.empty(1000, np.uint8)
            own[:] = 2

            def grandchild():
                assert (own == 2).all() and (array == 1).all() and not word(own)
                own[:], array[:] = 5, 6

            end(in_child(grandchild))
            assert (own == 2).all() and (array == 1).all() and word(own)
            array[:] = 7

        end(in_child(child))
        assert (array == 1).all()
        """
    )


def test_a_fork_while_another_thread_is_within_an_allocation() -> None:
    program(
        """
        array = arena.empty(1000, np.uint8)
        array[:] = 1
        held, done = threading.Event(), threading.Event()

        def hold():
            with arena._lock:
                held.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)

        def child():
            array[:] = 2
            assert word(arena.empty(1000, np.uint8))

        end(in_child(child))
        done.set()
        thread.join()
        assert (array == 1).all() and word(arena.empty(1000, np.uint8))
        """
    )


def test_a_child_that_has_no_memory_for_a_private_copy_may_read() -> None:
    program(
        """
        import signal
        from collectives.tensors import arena_piece
        array = arena.empty(1000, np.uint8)
        array[:] = 1
        arena_piece._mmap = lambda *_: -1

        def child():
            assert (array == 1).all()
            array[:] = 2  # ends the child

        child = in_child(child)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
        assert (array == 1).all()
        """
    )
