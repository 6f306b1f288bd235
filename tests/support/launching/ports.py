"""Ports for tests that must name one before anybody listens at it."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port of this machine at which nobody listens.

    It lies below those that systems give to connections by themselves (32768 and up), of which other tests open many:
    one of them would take the port before it is used.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port between 20000 and 32000 is free")
