"""Heartbeats in MPI worlds of several hosts: MPI does not report the loss of a host."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from collectives.base.config import Config
from collectives.base.errors import CollectivesError, InvalidArgumentError, TransportError
from collectives.base.logging import logger
from collectives.transport import backoff
from collectives.transport.mpi.channel import Channel
from collectives.transport.tcp.heart import Heart
from collectives.transport.tcp.mesh import Mesh
from collectives.transport.tcp.notices import AFTER_EVERY_CALL, OUTERMOST

_CONNECT_WITHIN = 15.0


class _ProblemElsewhereError(CollectivesError):
    """Another rank reports that it cannot take part."""


class MpiHeart:
    """The heart of a world, the mesh below it, and the notices of all its ranks; made by `watch`."""

    def __init__(self, mesh: Mesh, heart: Heart, channel: Channel, timeout: float) -> None:
        self._timeout = timeout
        self.mesh = mesh
        self.heart = heart
        self.notices = heart.notices(OUTERMOST, channel.names)
        _watching.append(self)

    def end_if_lost(self) -> None:
        """End this process if one of the ranks has died, once the others have left, which may still have to save
        something: a launcher ends them all when it sees one end in this way."""
        if self.notices.died:
            self.notices.leave(AFTER_EVERY_CALL)  # unless its world has told that
            backoff.poll(self.notices.all_left, self._timeout)
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(0)

    def close(self) -> None:
        """Close the connections, unless a rank has died, of which `end_if_lost` must know; and those of earlier
        attempts, whose ranks have come again. Does not wait for the other ranks."""
        for one in [one for one in _watching if one is self or one.mesh.size <= self.mesh.size]:
            if one is not self or not one.notices.died:
                _watching.remove(one)
                one.heart.close()
                one.mesh.close()


_watching: list[MpiHeart] = []
"""Those that are not closed, also of worlds and attempts that have failed, in the order in which they were made."""


def end_if_lost() -> None:
    """End this process if a rank has died: finalising MPI waits for all ranks, without a bound. For the exit of a
    program that has handled the failure: one that ends by an exception or by `sys.exit` has ended the job before. The
    exit code is 0, because no exit handler can know that of a bare ``raise SystemExit(3)``."""
    for place, one in enumerate(list(_watching)):
        # A rank that seemed dead in an attempt may have come again in a later one.
        if not any(later.mesh.size >= one.mesh.size for later in _watching[place + 1 :]):
            one.end_if_lost()


def watch(channel: Channel, config: Config, *, needed: bool = False) -> MpiHeart | None:
    """Connect the ranks of a world, whose addresses MPI tells; collective.

    Returns:
        None on all ranks, after a warning, if some of them cannot be connected, which are not ``needed``. Deaths of
        hosts then end a wait when its timeout is over, as without heartbeats.

    Raises:
        InvalidArgumentError: this host has no interface of the name that is set.
        RankFailedError: a rank has failed meanwhile.
        TransportError: connections are needed, but cannot be made.
    """
    mesh: Mesh | None = None
    heart: Heart | None = None

    def exchange(value: Any, problem: str = "") -> list[Any]:
        answers = channel.exchange((problem, value))
        first = next((text for text, _ in answers if text), "")
        if first:
            raise _ProblemElsewhereError(first)
        return [value for _, value in answers]

    try:
        try:
            mesh = Mesh(exchange, channel.rank, None, interface=config.network_interface)
            heart = Heart(mesh, config.peer_timeout, _CONNECT_WITHIN, channel.look_for_failures)
        except (InvalidArgumentError, _ProblemElsewhereError):
            raise
        except (CollectivesError, OSError) as error:
            if not channel.in_step:  # a rank has failed, or not come
                raise
            # The other ranks are in the next exchange, or come to it.
            exchange(None, str(error) or type(error).__name__)
        exchange(None)
        assert mesh is not None and heart is not None
        heart.start()
        return MpiHeart(mesh, heart, channel, config.timeout)
    except BaseException as error:
        if heart is not None:
            heart.abandon(OUTERMOST, channel.names, error)
        if mesh is not None:
            mesh.close()
        if not isinstance(error, _ProblemElsewhereError):
            raise
        if needed:
            raise TransportError(str(error)) from None
        if channel.rank == 0:
            logger.warning(
                "the ranks cannot monitor each other, so the loss of a host is noticed only after "
                "COLLECTIVES_TIMEOUT: %s [N16]",
                error,
            )
        return None
