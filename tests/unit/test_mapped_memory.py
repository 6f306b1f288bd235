"""Pieces that are announced, mapped by peers, and not mapped: found by their numbers, and only if they are what they
are said to be."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from collectives.tensors.arena import MAPPED, Arena
from collectives.transport.host import mapped_memory
from collectives.transport.host.board import PIECES
from collectives.transport.host.mapped_memory import MappedMemory
from collectives.transport.threads import thread_groups

BYTE = np.dtype(np.uint8)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    arena = Arena()
    monkeypatch.setattr(mapped_memory, "arena", arena)
    yield arena


def ranks() -> tuple[MappedMemory, MappedMemory]:
    first, second = (group.memory.mapped for group in thread_groups.connect(2) if group.memory is not None)
    assert first is not None and second is not None
    return first, second


def word_of(mapped: MappedMemory, array: np.ndarray) -> int:  # type: ignore[type-arg]
    return mapped.word_of(array.ctypes.data, array.nbytes)


def test_a_peer_sees_what_the_owner_writes(arena: Arena) -> None:
    owner, peer = ranks()
    array = arena.empty(1000, BYTE)
    array[:] = np.arange(1000) % 251
    word = word_of(owner, array)
    view = peer.view_of(0, word, BYTE)
    assert view is not None and (view[:1000] == array).all()
    assert peer.view_of(0, word, BYTE) is view and peer.address_of(0, word) == array.ctypes.data


def test_a_piece_whose_place_is_taken_is_reached_by_its_address(arena: Arena) -> None:
    owner, peer = ranks()
    first = arena.empty(100 << 20, BYTE)
    assert word_of(owner, first) & MAPPED
    arena._numbers = PIECES
    second = arena.empty(100 << 20, BYTE)
    assert arena.numbers() == {1, 1 + PIECES}
    assert word_of(owner, second) == second.ctypes.data
    del first
    arena.release()
    word = word_of(owner, second)
    assert word & MAPPED and peer.view_of(0, word, BYTE) is not None, "the place has come free"


@pytest.mark.parametrize("another", [False, True])
def test_a_piece_that_has_ended_is_not_mapped(another: bool, arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    owner, peer = ranks()
    word = word_of(owner, arena.empty(100 << 20, BYTE))
    arena.release()
    if another:
        arena._numbers = PIECES  # in the same place of the table
    array = arena.empty(200 << 20, BYTE)
    assert word_of(owner, array) & MAPPED
    assert peer.view_of(0, word, BYTE) is None and "given back" in caplog.text


def test_what_the_system_refuses_is_told_once(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    owner, peer = ranks()
    arrays = [arena.empty(100 << 20, BYTE) for _ in range(2)]
    monkeypatch.setattr(mapped_memory, "map_shared", refuse)
    assert [peer.view_of(0, word_of(owner, array), BYTE) for array in arrays] == [None, None]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_descriptor_that_is_another_files_by_now_is_not_mapped(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    owner, peer = ranks()
    array = arena.empty(1000, BYTE)
    word = word_of(owner, array)
    with tempfile.TemporaryFile() as file:  # shorter: to read it beyond its end would end the process
        os.dup2(file.fileno(), arena.piece(1).descriptor)
        assert peer.view_of(0, word, BYTE) is None and "another file" in caplog.text
    assert peer.address_of(0, word) == array.ctypes.data
