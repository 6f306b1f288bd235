"""Keys, and what is signed with them."""

from __future__ import annotations

import hashlib
import hmac
import os

SECRET_LENGTH = 32
DIGEST_LENGTH = 32
"""In bytes, as is the length of a key."""
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A new random key."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The signature of a message: its HMAC with SHA-256."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether it is the signature of the message; compared in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
