"""Connecting to the store at which the ranks of a job meet. Rank 0 serves it unless another process already does."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from collectives.base.errors import CollectivesError, CollectiveTimeoutError, TransportError
from collectives.base.places import Spot
from collectives.transport.backoff import Backoff
from collectives.transport.stores.store import Store, StoreServer
from collectives.transport.tcp import network
from collectives.transport.tcp.service import Service

T = TypeVar("T")

_ATTEMPT = 5.0
"""Seconds for a connection to a store."""
_SERVE_WITHIN = 5.0
"""Seconds for which rank 0 tries: a port may be free again soon."""
NAME_WITHIN = 60.0
"""Seconds for which rank 0 waits until the name of its host is known: Kubernetes publishes those of pods late."""
_FIRST_NAP, _LONGEST_NAP = 0.02, 0.5
_served: list[StoreServer] = []
"""Stores that this process serves until it ends: the ranks meet there again."""


class Meeting:
    """The connection of one rank to this package's own store at a spot.

    Args:
        timeout: seconds within which a process must serve the store.
        key_file: the user's file from which the key is derived; empty: it was given.

    Attributes:
        how: what said where, and where; for messages.
    """

    def __init__(self, spot: Spot, key: bytes, timeout: float, key_file: str = "") -> None:
        self._spot, self._key, self._timeout = spot, key, timeout
        self._who = f"rank {spot.rank}" if spot.rank >= 0 else "a newcomer"
        self._hint = "; where users or their home folders differ, set COLLECTIVES_KEY on all ranks" if key_file else ""
        self.how = spot.launcher if "://" in spot.launcher else f"{spot.launcher}, at {spot.host}"
        self.how += f", with the key of {key_file}" if key_file else ""
        self._service = Service()
        self._store: Store | None = None
        self._why: dict[int, str] = {}

    def connect(self) -> Store:
        first = self._spot.rank == 0
        if first:
            self._why = dict.fromkeys(self._spot.ports, f"the address of {self._spot.host} is not known yet")
            with suppress(OSError):
                await_name(self._spot.host, min(self._timeout, NAME_WITHIN))
        backoff, within = Backoff(_FIRST_NAP), min(self._timeout, _SERVE_WITHIN) if first else self._timeout
        try:
            while not any(self._try(port) or (first and self._serve(port)) for port in self._spot.ports):
                backoff.look()
                late = backoff.now > backoff.begun + within
                if late and first:
                    raise TransportError(
                        f"rank 0: cannot serve a store ({self.how}): {self.reasons()}; set "
                        f"COLLECTIVES_RENDEZVOUS=tcp://{self._spot.host}:port on all ranks, with a free port [S20]"
                    )
                if late:
                    raise CollectiveTimeoutError(
                        f"{self._who}: waited {self._timeout:g} s for rank 0 to serve a store ({self.how}): "
                        f"{self.reasons()}; rank 0 must call init() on that host [S21]"
                    )
                backoff.nap(_LONGEST_NAP, backoff.begun + within)
        except BaseException:
            self.close()
            raise
        assert self._store is not None
        return self._store

    @property
    def serves(self) -> bool:
        return self._store is not None and any(self._store.address[1] == server.address[1] for server in _served)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._service.close()

    def _try(self, port: int) -> bool:
        """Connect to a store at a port.

        Raises:
            TransportError: something else listens at the only port.
        """
        store = Store(self._spot.host, port, self._key, self._timeout, self._service)
        try:
            store.connect(min(_ATTEMPT, self._timeout))
        except CollectivesError as error:
            self._why[port] = f"{error}{self._hint}"
            if len(self._spot.ports) == 1:
                raise TransportError(
                    f"{self._who}: found no store of this job at {network.joined(self._spot.host, port)} "
                    f"({self.how}): {self._why[port]} [S22]"
                ) from None
        except ConnectionRefusedError:
            self._why[port] = "no process listens there"
        except TimeoutError as error:
            self._why[port] = (
                f"{str(error) or 'no answer'}: the host is unreachable, or the process that listens there is stopped"
            )
        except OSError as error:
            self._why[port] = str(error) or "no answer"
        else:
            self._store = store
        return self._store is not None

    def _serve(self, port: int) -> bool:
        """Serve a store at a port, unless the port is taken."""
        service = Service()
        try:
            server = listening_at(self._spot.host, port, lambda host, port: StoreServer(service, host, port, self._key))
        except OSError as error:
            service.close()
            self._why[port] = str(error)
            return False
        try:
            if self._try(port):
                _served.append(server)
                return True
        finally:
            if server not in _served:
                server.close()
                service.close()
        self._why[port] += (
            f" (this is {socket.gethostname()}, which does not reach itself there; rank 0 must run on that host)"
        )
        return False

    def reasons(self) -> str:
        reasons: dict[str, list[int]] = {}
        for port, why in list(self._why.items()):  # to which another thread may add
            reasons.setdefault(why, []).append(port)
        return "; ".join(f"port {', '.join(map(str, ports))}: {why}" for why, ports in reasons.items())


def await_name(host: str, seconds: float) -> None:
    """Wait until an address of a host is known. OSError: none is in time."""
    backoff = Backoff(_FIRST_NAP)
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            backoff.look()
            if backoff.now > backoff.begun + seconds:
                raise
            backoff.nap(_LONGEST_NAP, backoff.begun + seconds)


def listening_at(host: str, port: int, listen: Callable[[str, int], T]) -> T:
    """Have ``listen(address, port)`` listen where others reach this host by a name or address. OSError: it cannot."""
    address = listening_host(host, port)
    try:
        return listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # Not an address of this host: perhaps one that is translated, such as that of a Kubernetes service.
        return listen(_any_address(address), port)


def listening_host(host: str, port: int) -> str:
    """The address on which to listen so that others reach this host by a name.

    A host's own name is often one of its loopback addresses for itself (``127.0.1.1``), and another one for others.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return host
    if network.is_loopback(str(address)) and host not in (address, "localhost"):
        return _any_address(str(address))
    return str(address)


def _any_address(address: str) -> str:
    """All addresses of this host, in the notation of the version that this one has."""
    return "::" if ":" in address else "0.0.0.0"
