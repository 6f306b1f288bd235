"""Words of all ranks through MPI: an allgather of records of three words, and a second one for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collectives.transport.base import Array
from collectives.transport.mpi.channel import Channel

if TYPE_CHECKING:
    from mpi4py import MPI

_RECORD = 3
"""Words of a record: the token, and as many of the words that travel with it as fit."""


class MpiWords:
    """`network_control.Words` through MPI's allgather."""

    carries = False

    def __init__(self, channel: Channel) -> None:
        self.same = False
        self._channel = channel
        self._record = np.zeros(_RECORD, np.int64)
        self._records = np.zeros((channel.size, _RECORD), np.int64)
        channel.kept += [self._record, self._records]
        channel.users.append(self)
        self._all_words: Array = self._records[:, 1:]
        self._posted: Sequence[int] | memoryview = ()
        self._request: MPI.Request | None = None
        self.busy = False
        """Whether this rank has entered a round that has not ended."""

    def post(self, token: int, words: Sequence[int] | memoryview) -> None:
        self._posted = words
        self._record[0] = token
        short = words[: _RECORD - 1]
        self._record[1 : 1 + len(short)] = short
        self.busy = True  # an interrupt may come before there is a request
        self._request = self._channel.comm.Iallgather(self._record, self._records)

    def test(self, spin: bool) -> bool:
        if self._request is not None:
            if not self._request.Test():
                return False
            self._request = None
            self._read_records()
        return True

    def wait(self) -> None:
        if self._request is not None:
            self._channel.waiter.wait(self._request, "every rank to enter the call")
            self._request = None
            self._read_records()

    def of(self, peer: int) -> Sequence[int]:
        words: list[int] = self._all_words[peer].tolist()
        return words

    def _read_records(self) -> None:
        """Compare the records of all ranks, and gather the words that do not fit into them."""
        self.busy = False
        records, words = self._records, self._posted
        self.same = bool((records[:, 0] == self._record[0]).all())
        if not self.same:
            return
        self._all_words = records[:, 1 : 1 + min(len(words), _RECORD - 1)]
        if len(words) > _RECORD - 1:
            own_words = np.array(words, np.int64)
            all_words = np.empty((self._channel.size, len(own_words)), np.int64)
            self._channel.gather(
                (own_words, all_words),
                lambda: self._channel.comm.Iallgather(own_words, all_words),
                "every rank's sizes",
            )
            self._all_words = all_words
