"""A unique name for this host or container."""

from __future__ import annotations

import hashlib
import os
import socket

NAMESPACE_PATH = "/proc/self/ns"


def _hash(string: str) -> str:
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def _namespaces() -> str:
    """Return this process's kernel namespaces (Linux), which differ between containers on one machine."""
    if not os.path.isdir(NAMESPACE_PATH):
        return ""
    return " ".join(os.readlink(entry) for entry in sorted(os.scandir(NAMESPACE_PATH), key=lambda entry: entry.name))


def host_hash(salt: object = None) -> str:
    """Return the short host name and a hash, equal for all processes that share the host's memory.

    Args:
        salt: further text to hash.
    """
    name = socket.gethostname()
    return f"{name.partition('.')[0]}-{_hash('-'.join([name, _namespaces(), *([str(salt)] if salt else [])]))}"
