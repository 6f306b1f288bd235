"""Proof that both ends of a connection hold the job's key, before either interprets a byte of the other.

    the side that is dialled    "collectives 1\\n", nonce
    the side that dials         nonce, length of the hello, the hello, HMAC(key, "dials", both nonces, hello)
    the side that is dialled    HMAC(key, "is dialled", both nonces, hello)

HMAC is that of RFC 2104 with SHA-256; challenge and response as in ISO/IEC 9798-4. A recorded exchange is worth nothing
later, because both nonces are new, and nothing can be reflected, because the proofs name the side. The *hello* says
what the connection is for. What follows is neither encrypted nor signed: the network between the hosts is trusted to
carry bytes unchanged, as MPI's is.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct

from collectives.base.errors import TransportError

KEY_BYTES = 32
MOST_HELLO = 1024
"""Bytes of a hello."""
_GREETING = b"collectives 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct("<H")


def make_key() -> bytes:
    """A new key for a job."""
    return secrets.token_bytes(KEY_BYTES)


async def prove(sock: socket.socket, key: bytes, hello: bytes) -> None:
    """Prove the key to the side that was dialled, and have it prove the same.

    Args:
        sock: connected, non-blocking.
        hello: at most `MOST_HELLO` bytes.

    Raises:
        TransportError: the other side is no process of this job.
        OSError, EOFError: the connection has ended, perhaps because there are too many: worth another attempt.
    """
    loop = asyncio.get_running_loop()
    greeting = await receive(sock, len(_GREETING))
    if greeting != _GREETING:
        raise TransportError("what listens there is no process of collectives, or of another version")
    theirs, mine = await receive(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    said = _LENGTH.pack(len(hello)) + hello
    await loop.sock_sendall(sock, mine + said + _proof(key, b"dials", theirs, mine, hello))
    try:
        proof = await receive(sock, _PROOF_BYTES)
    except EOFError:
        raise TransportError("the process there has refused this one: its key is another, or it has ended") from None
    if not hmac.compare_digest(proof, _proof(key, b"is dialled", theirs, mine, hello)):
        raise TransportError("the process there does not hold this job's key")


class Verification:
    """The part of the side that is dialled: what it says, and what it makes of what it hears. Holds no socket.

    Attributes:
        greeting: is sent first.
        missing: bytes that are to be received next; 0: the other side holds the key, and gets `proof`. What comes after
            them belongs to whoever takes the connection over.
        hello: the other side's.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._heard = bytearray()
        self.greeting = _GREETING + self._nonce
        self.missing = _NONCE_BYTES + _LENGTH.size
        self.hello = self.proof = b""

    def take(self, data: bytes) -> None:
        """Take at most `missing` bytes.

        Raises:
            TransportError: the other side does not hold the key.
        """
        heard, said = self._heard, _NONCE_BYTES + _LENGTH.size
        heard += data
        self.missing -= len(data)
        if self.missing:
            return
        theirs, (length,) = bytes(heard[:_NONCE_BYTES]), _LENGTH.unpack_from(heard, _NONCE_BYTES)
        if len(heard) == said:
            if length > MOST_HELLO:
                raise TransportError("what dialled is no process of collectives")
            self.missing = length + _PROOF_BYTES
            return
        hello = bytes(heard[said : said + length])
        if not hmac.compare_digest(heard[said + length :], _proof(self._key, b"dials", self._nonce, theirs, hello)):
            raise TransportError("what dialled does not hold this job's key")
        self.hello, self.proof = hello, _proof(self._key, b"is dialled", self._nonce, theirs, hello)


async def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Receive exactly ``nbytes`` from a non-blocking socket.

    Raises:
        EOFError: the other side has closed the connection.
    """
    loop = asyncio.get_running_loop()
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        count = await loop.sock_recv_into(sock, view[got:])
        if not count:
            raise EOFError("the connection was closed")
        got += count
    return bytes(data)


def _proof(key: bytes, side: bytes, first: bytes, second: bytes, hello: bytes) -> bytes:
    # All parts but the last are of fixed length, or end with a zero byte, so that no two exchanges sign the same text.
    return hmac.digest(key, side + b"\0" + first + second + hello, "sha256")
