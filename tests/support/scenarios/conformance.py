"""What every transport must do, whatever it is made of: checks on one group's rank, run by all of its ranks at once.

`memory_checks` hold for any `MemoryTransport`, `message_checks` for any `MessageTransport`, `control_checks` for any
`Control`. A new transport is done when it passes them on threads, under mpirun, or wherever its ranks live.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from collectives.base.errors import RankFailedError
from collectives.tensors.arena import MAPPED, arena
from collectives.transport.base import WINDOW_BYTES
from collectives.transport.group import Group
from collectives.transport.host.board import max_words

_BYTE = np.dtype(np.uint8)
_MORE_THAN_A_PIECE = 65 << 20
SIZES = (1, 7, 64, 4096, 100_003, 1_000_000)


def pattern(nbytes: int, rank: int, peer: int) -> np.ndarray:
    return np.random.default_rng([nbytes, rank, peer]).integers(0, 256, nbytes, np.uint8)


# ---- control


def all_enter_with_the_same_token(group: Group) -> None:
    for call in range(200):
        assert group.control.agree(call * 7919 + 1)


def everyone_sees_a_disagreement(group: Group) -> None:
    if group.size == 1:
        return
    for odd in range(group.size):
        assert group.control.agree(5)
        assert not group.control.agree(6 if group.rank == odd else 5)
        assert group.control.agree(5)


def words_travel(group: Group) -> None:
    for call in range(10):
        for count in (1, 2, 3, max_words(group.size)):
            words = [group.rank * 1000 + call * 100 + k - 50 for k in range(count)]
            assert group.control.agree(count, words)
            for peer in range(group.size):
                if peer != group.rank:
                    assert list(group.control.words_of(peer)) == [
                        peer * 1000 + call * 100 + k - 50 for k in range(count)
                    ]


def values_are_exchanged(group: Group) -> None:
    assert group.control.exchange({"rank": group.rank}) == [{"rank": rank} for rank in range(group.size)]


def a_call_waits_for_everyone(group: Group) -> None:
    """What any rank did before it entered a call is done when the call has been entered."""
    log: list[int] = []
    for call in range(20):
        log.append(call)
        seen = group.control.exchange(len(log))
        assert min(seen) == call + 1
        assert group.control.agree(1)


control_checks: list[Callable[[Group], None]] = [
    all_enter_with_the_same_token,
    everyone_sees_a_disagreement,
    words_travel,
    values_are_exchanged,
    a_call_waits_for_everyone,
]

# ---- memory


def windows_show_what_was_written_before_the_progress(group: Group) -> None:
    memory = group.memory
    assert memory is not None
    board = memory.board
    base = 1 + max(group.control.exchange(max(board.seen)))
    window = memory.windows[group.rank]
    assert window is not None and window.nbytes == WINDOW_BYTES
    for step, nbytes in enumerate(SIZES):
        window[-nbytes:] = pattern(nbytes, group.rank, step)
        board.advance(base + 2 * step)
        for peer in board.peers:
            board.wait(peer, base + 2 * step)
            theirs = memory.windows[peer]
            assert theirs is not None
            np.testing.assert_array_equal(theirs[-nbytes:], pattern(nbytes, peer, step))
        board.advance(base + 2 * step + 1)
        for peer in board.peers:
            board.wait(peer, base + 2 * step + 1)  # nobody reads any more: the window may be written again


def private_memory_is_read_and_written(group: Group) -> None:
    memory = group.memory
    assert memory is not None
    if not memory.reads_private:
        return
    for nbytes in SIZES:
        for shift in (0, 1):
            mine = np.zeros(nbytes + shift, np.uint8)[shift:]
            mine[:] = pattern(nbytes, group.rank, 0)
            inbox = [np.zeros(nbytes, np.uint8) for _ in range(group.size)]
            addresses = group.control.exchange((mine.ctypes.data, [box.ctypes.data for box in inbox]))
            for peer in memory.board.peers:
                copy = np.zeros(nbytes, np.uint8)
                memory.fetch(peer, addresses[peer][0], copy.ctypes.data, nbytes)
                np.testing.assert_array_equal(copy, pattern(nbytes, peer, 0))
                gift = pattern(nbytes, group.rank, peer + 1)
                memory.store(peer, addresses[peer][1][group.rank], gift.ctypes.data, nbytes)
            group.control.exchange(None)
            for peer in memory.board.peers:
                np.testing.assert_array_equal(inbox[peer], pattern(nbytes, peer, group.rank + 1))


def ranks_elsewhere_have_no_window(group: Group) -> None:
    memory = group.memory
    assert memory is not None
    assert [rank for rank, window in enumerate(memory.windows) if window is not None] == sorted(group.local)
    assert sorted((*memory.board.peers, group.rank)) == sorted(group.local)


def tensors_in_arenas_are_read_and_written(group: Group) -> None:
    """Where they lie, at any offset: a peer sees the owner's bytes, the owner those that peers have written."""
    memory = group.memory
    assert memory is not None
    mapped = memory.mapped
    if mapped is None:
        return
    for nbytes in (1, 4097, 100_003):
        for shift in (0, 1):
            mine = arena.empty(nbytes + shift, np.uint8)[shift:]
            mine[:] = pattern(nbytes, group.rank, 0)
            inbox = arena.empty((group.size, nbytes), np.uint8)
            inbox.fill(0)
            boxes = [mapped.word_of(box.ctypes.data, nbytes) for box in inbox]
            told = group.control.exchange((mapped.word_of(mine.ctypes.data, nbytes), mine.ctypes.data, boxes))
            for peer in memory.board.peers:
                word, address, their_boxes = told[peer]
                assert word & MAPPED and mapped.address_of(peer, word) == address
                theirs = mapped.view_of(peer, word, _BYTE)
                assert theirs is not None
                np.testing.assert_array_equal(theirs[:nbytes], pattern(nbytes, peer, 0))
                box = mapped.view_of(peer, their_boxes[group.rank], _BYTE)
                assert box is not None
                box[:nbytes] = pattern(nbytes, group.rank, peer + 1)
            group.control.exchange(None)
            for peer in range(group.size):
                gift = (
                    pattern(nbytes, peer, group.rank + 1) if peer in memory.board.peers else np.zeros(nbytes, np.uint8)
                )
                np.testing.assert_array_equal(inbox[peer], gift)


def a_view_has_the_peers_dtype(group: Group) -> None:
    assert group.memory is not None
    mapped = group.memory.mapped
    if mapped is None:
        return
    for dtype in (np.bool_, np.float16, np.int64, np.complex128):
        mine = arena.empty(40, dtype)
        mine[:] = pattern(40, group.rank, 0).astype(dtype)
        words = group.control.exchange(mapped.word_of(mine[7:].ctypes.data, mine[7:].nbytes))
        for peer in group.memory.board.peers:
            theirs = mapped.view_of(peer, words[peer], mine.dtype)
            assert theirs is not None and theirs.dtype == mine.dtype
            np.testing.assert_array_equal(theirs[:33], pattern(40, peer, 0).astype(dtype)[7:])
        group.control.exchange(None)


def private_memory_has_no_view(group: Group) -> None:
    """Its word is its address."""
    assert group.memory is not None
    mapped = group.memory.mapped
    if mapped is None:
        return
    mine = np.zeros(1000, np.uint8)
    word = mapped.word_of(mine.ctypes.data, mine.nbytes)
    assert word == mine.ctypes.data
    for peer, theirs in enumerate(group.control.exchange(word)):
        if peer in group.memory.board.peers:
            assert mapped.view_of(peer, theirs, _BYTE) is None
            assert mapped.address_of(peer, theirs) == theirs


def words_of_many_tensors_are_those_of_each(group: Group) -> None:
    assert group.memory is not None
    mapped = group.memory.mapped
    if mapped is None:
        return
    tensors = [(arena.empty if k % 3 else np.empty)(k * 100, np.float32) for k in range(1, 20)]
    addresses, nbytes = (
        np.array(values, np.int64) for values in zip(*((t.ctypes.data, t.nbytes) for t in tensors), strict=True)
    )
    words = mapped.words_of(addresses, nbytes).tolist()
    assert words == [mapped.word_of(t.ctypes.data, t.nbytes) for t in tensors]
    assert [bool(word & MAPPED) for word in words] == [k % 3 != 0 for k in range(1, 20)]


_allocating = threading.Lock()
"""Ranks that are threads share one arena, which gives private memory to who would wait for a second."""


def pieces_come_and_go(group: Group) -> None:
    """Each tensor is as large as a piece and outlives no turn: peers see the new one, and keep no mapping of old
    ones."""
    memory = group.memory
    assert memory is not None
    mapped = memory.mapped
    if mapped is None:
        return
    mappings = []
    for turn in range(8):
        with _allocating:
            mine = arena.empty(_MORE_THAN_A_PIECE, np.uint8)
        mine[-1000:] = pattern(1000, group.rank, turn)
        words = group.control.exchange(mapped.word_of(mine.ctypes.data, mine.nbytes))
        for peer in memory.board.peers:
            theirs = mapped.view_of(peer, words[peer], _BYTE)
            assert theirs is not None
            last = theirs[_MORE_THAN_A_PIECE - 1000 : _MORE_THAN_A_PIECE]
            np.testing.assert_array_equal(last, pattern(1000, peer, turn))
        group.control.exchange(None)  # nobody reads any more
        del mine
        mappings.append(max(group.control.exchange(_mappings_of_pieces())))
    # Threads share one arena, whose tensors lie in one piece more or less.
    assert mappings[-1] - mappings[0] <= group.size, mappings


def _mappings_of_pieces() -> int:
    with open("/proc/self/maps") as file:
        return file.read().count("memfd:collectives")


memory_checks: list[Callable[[Group], None]] = [
    windows_show_what_was_written_before_the_progress,
    private_memory_is_read_and_written,
    ranks_elsewhere_have_no_window,
    tensors_in_arenas_are_read_and_written,
    a_view_has_the_peers_dtype,
    private_memory_has_no_view,
    words_of_many_tensors_are_those_of_each,
    pieces_come_and_go,
]

# ---- messages


def blocks_arrive_whole(group: Group) -> None:
    messages = group.messages
    assert messages is not None
    peers = [peer for peer in range(group.size) if peer != group.rank]
    for nbytes in SIZES:
        boxes = {peer: np.zeros(nbytes, np.uint8) for peer in peers}
        blocks = {peer: pattern(nbytes, group.rank, peer) for peer in peers}
        for peer in peers:
            messages.post_receive(peer, boxes[peer])
        for peer in peers:
            messages.post_send(peer, blocks[peer])
        messages.drain()
        for peer in peers:
            np.testing.assert_array_equal(boxes[peer], pattern(nbytes, peer, group.rank))


def blocks_between_two_ranks_keep_their_order(group: Group) -> None:
    messages = group.messages
    assert messages is not None
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    boxes = [np.zeros(3, np.int64) for _ in range(50)]
    blocks = [np.full(3, group.rank * 100 + k) for k in range(50)]
    for box, block in zip(boxes, blocks, strict=True):
        if group.size > 1:
            messages.post_send(after, block)
            messages.post_receive(before, box)
    messages.drain()
    if group.size > 1:
        assert [int(box[0]) for box in boxes] == [before * 100 + k for k in range(50)]


def any_dtype_travels(group: Group) -> None:
    messages = group.messages
    assert messages is not None
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in (np.bool_, np.int8, np.float16, np.complex128):
        box, block = np.zeros(33, dtype), pattern(33, group.rank, 0).astype(dtype)
        if group.size > 1:
            messages.post_receive(before, box)
            messages.post_send(after, block)
            messages.drain()
            np.testing.assert_array_equal(box, pattern(33, before, 0).astype(dtype))


def draining_nothing_returns(group: Group) -> None:
    assert group.messages is not None
    group.messages.drain()


message_checks: list[Callable[[Group], None]] = [
    blocks_arrive_whole,
    blocks_between_two_ranks_keep_their_order,
    any_dtype_travels,
    draining_nothing_returns,
]

# ---- failure; the last check of a group, because it ends it


def a_failure_reaches_every_wait(group: Group) -> None:
    """The last rank fails; the others wait for it, see why, and acknowledge by failing as well. Only then do they
    leave."""
    if group.size == 1:
        return
    control = group.control
    if group.rank == group.size - 1:
        control.agree(1)  # a failure before every rank has connected would end their connecting
        control.fail("out of paper")
    else:
        with pytest.raises(RankFailedError, match=r"(?s)has failed.*(out of paper|because of it)"):
            until(lambda: control.agree(1) < 0)
        control.fail("because of it")
    until(control.acknowledged)
    if group.rank == 0:
        until(control.all_left)
        control.leave()
    else:
        assert not control.all_left()  # rank 0 has not
        control.leave()
        until(control.all_left)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
