"""A name for this host, or container, that no other one has."""

from __future__ import annotations

import hashlib
import os
import socket

NAMESPACE_PATH = "/proc/self/ns"


def _hash(string: str) -> str:
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def _namespaces() -> str:
    """The kernel's namespaces that this process is in (Linux): containers on one machine differ in them."""
    if not os.path.isdir(NAMESPACE_PATH):
        return ""
    return " ".join(os.readlink(entry) for entry in sorted(os.scandir(NAMESPACE_PATH), key=lambda entry: entry.name))


def host_hash(salt: object = None) -> str:
    """The short host name and a hash, which is the same for all processes that share the host's memory.

    Args:
        salt: distinguishes further.
    """
    name = socket.gethostname()
    return f"{name.partition('.')[0]}-{_hash('-'.join([name, _namespaces(), *([str(salt)] if salt else [])]))}"
