"""Keys, and signatures made with them."""

from __future__ import annotations

import hashlib
import hmac
import os

SECRET_LENGTH = 32
DIGEST_LENGTH = 32
"""Lengths in bytes."""
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """Return a new random key."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Return the signature of a message: its HMAC with SHA-256."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether a digest is the signature of a message; compared in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
