"""Plain sockets between hosts: the least that an all-reduce over TCP costs, and what `benchmarks.hosts` compares with.

Every rank sends each other rank its share of the tensor, adds what it receives to its own share, and sends the sum to
all: two rounds, and two exchanges of halves where there are two ranks. Small tensors are exchanged whole, in one round.
Nothing is checked or agreed on: no names, shapes, dtypes, failures, or operations beside this one.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import common
from collectives.tools.bench.collective import IN_PLACE, Case, Result, Unavailable
from collectives.tools.bench.ranks import Ranks

WHOLE_UNTIL = 16 << 10
"""Bytes of a tensor that are exchanged in one round."""

_PATIENCE = 30.0
"""Seconds after which a peer that has not come is taken for lost."""
_UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Sockets:
    """The peer of this name; see the module. The addresses are exchanged through the benchmark's ranks."""

    name, calls = "sockets", "by_itself"

    def join(self, ranks: Ranks) -> None:
        """Connect every two ranks; unavailable for a single one."""
        if ranks.size == 1:
            raise Unavailable("sockets: a single rank has nobody to send to")
        self._rank, self._size = ranks.rank, ranks.size
        with socket.create_server((common.address(ranks), 0), backlog=ranks.size) as listener:
            listener.settimeout(_PATIENCE)
            addresses = ranks.gather(listener.getsockname())
            self._links = {peer: socket.create_connection(addresses[peer], _PATIENCE) for peer in range(ranks.rank)}
            for link in self._links.values():
                link.sendall(bytes([ranks.rank]))
            while len(self._links) < ranks.size - 1:
                link, _ = listener.accept()
                link.settimeout(_PATIENCE)
                self._links[link.recv(1)[0]] = link
        for link in self._links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)

    def allreduce(self, case: Case, mode: str) -> Result:
        """A call that reduces in place. Unavailable for rows out of place, and averages."""
        if mode != IN_PLACE or case.op not in _UFUNCS:
            raise Unavailable("sockets: in place only, and no average")
        work, combine = case.work, _UFUNCS[case.op]
        whole = work.nbytes <= WHOLE_UNTIL
        first = [case.count * rank // self._size for rank in range(self._size + 1)]
        shares = [work if whole else work[begin:end] for begin, end in pairwise(first)]
        own_share = shares[self._rank]
        inbox = {peer: np.empty_like(own_share) for peer in self._links}
        arriving = {peer: _bytes(array) for peer, array in inbox.items()}
        leaving = {peer: _bytes(shares[peer]) for peer in self._links}
        summed = dict.fromkeys(self._links, _bytes(own_share))

        def call() -> Any:
            self._exchange(leaving, arriving)
            for part in inbox.values():
                combine(own_share, part, own_share)
            if not whole:
                self._exchange(summed, leaving)
            return work

        return call

    def _exchange(self, sends: Mapping[int, memoryview], receives: Mapping[int, memoryview]) -> None:
        """Send and receive one block for each peer, all at once; raises if one has gone, or nothing moves for long."""
        outgoing = {self._links[peer]: block for peer, block in sends.items()}
        incoming = {self._links[peer]: block for peer, block in receives.items()}
        while outgoing or incoming:
            moved = _advance(outgoing, socket.socket.send) + _advance(incoming, socket.socket.recv_into)
            if not moved and (outgoing or incoming) and not any(select.select(incoming, outgoing, (), _PATIENCE)):
                raise TimeoutError(f"sockets: nothing has moved for {_PATIENCE:g} s")

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()


def _advance(blocks: dict[socket.socket, memoryview], move: Any) -> int:
    """Move of each block what can be moved now, and keep the rest; the number of bytes."""
    total = 0
    for link, block in list(blocks.items()):
        try:
            moved = move(link, block)
        except BlockingIOError:
            continue
        if not moved:
            raise ConnectionError("sockets: a peer has closed its connection")
        total += moved
        if moved == len(block):
            del blocks[link]
        else:
            blocks[link] = block[moved:]
    return total


def _bytes(array: np.ndarray) -> memoryview:
    return array.data.cast("B")
