"""Proof that both ends of a connection hold the job's key, before either interprets a byte of the other.

    the side that is dialled    "collectives 1\\n", nonce
    the side that dials         nonce, length of the hello, the hello, HMAC(key, "dials", both nonces, hello)
    the side that is dialled    HMAC(key, "is dialled", both nonces, hello)

HMAC is that of RFC 2104 with SHA-256; challenge and response as in ISO/IEC 9798-4. A recorded exchange is worth nothing
later, because both nonces are new, and nothing can be reflected, because the proofs name the side. The *hello* says
what the connection is for.

From key, nonces and hello both sides derive a key for each direction of this connection, with which they *seal* the
frames of what controls the job: the words of a round, exchanges, notices, and what a store says. A seal is a MAC over
the frame and its number, so that no frame is changed, inserted, repeated, left out or moved. It is BLAKE2b's keyed mode
(RFC 7693), which takes a third of an HMAC's time for so few bytes. Tensors and messages are not sealed, nor is a round
that carries a tensor; nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
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


SEAL_BYTES = 16
_packed = struct.Struct("<Q").pack


class Seal:
    """Seals the frames of one direction of a connection, or verifies them; ``number`` is the next frame's."""

    __slots__ = ("_begin", "number")

    def __init__(self, key: bytes) -> None:
        self.number = 0
        self._begin = hashlib.blake2b(key=key, digest_size=SEAL_BYTES).copy

    def of(self, frame: bytes | memoryview, behind: int = 0) -> bytes:
        """The seal of a frame as the next one, or so many before it."""
        seal = self._begin()
        seal.update(_packed(self.number - behind))
        seal.update(frame)
        return seal.digest()

    def next(self, frame: bytes | memoryview) -> bytes:
        """The seal of the next frame, which is counted."""
        seal = self.of(frame)
        self.number += 1
        return seal


class Connection(socket.socket):
    """A socket whose other side has proved the key, and the seals of the two directions."""

    sent: Seal
    received: Seal


def make_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


async def prove(sock: Connection, key: bytes, hello: bytes) -> None:
    """Prove the key to the side that was dialled, and have it prove the same; the socket, which is connected and
    non-blocking, gets its seals. The hello has at most `MOST_HELLO` bytes.

    Raises:
        TransportError: the other side is no process of this job.
        OSError, EOFError: the connection has ended, perhaps because there are too many: worth another attempt.
    """
    loop = asyncio.get_running_loop()
    greeting = await receive(sock, len(_GREETING))
    if greeting != _GREETING:
        raise TransportError("the process that listens there is not collectives, or is another version of it [S43]")
    peer_nonce, own_nonce = await receive(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    message = _LENGTH.pack(len(hello)) + hello
    await loop.sock_sendall(sock, own_nonce + message + _proof(key, b"dials", peer_nonce, own_nonce, hello))
    try:
        proof = await receive(sock, _PROOF_BYTES)
    except EOFError:
        raise TransportError(
            "the process there has refused this connection: its key is different, or it has ended [S44]"
        ) from None
    if not hmac.compare_digest(proof, _proof(key, b"is dialled", peer_nonce, own_nonce, hello)):
        raise TransportError("the process there does not have this job's key [S45]")
    sock.sent, sock.received = _seals(key, peer_nonce, own_nonce, hello)


class Verification:
    """The side that is dialled: the bytes that it sends, and the check of those that it receives. Holds no socket.

    Attributes:
        greeting: is sent first.
        missing: bytes that are to be received next; 0: the other side holds the key, and gets `proof`. What comes after
            them belongs to the code that takes the connection over.
        received, sent: the seals of the two directions.
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
        heard, header_bytes = self._heard, _NONCE_BYTES + _LENGTH.size
        heard += data
        self.missing -= len(data)
        if self.missing:
            return
        peer_nonce, (length,) = bytes(heard[:_NONCE_BYTES]), _LENGTH.unpack_from(heard, _NONCE_BYTES)
        if len(heard) == header_bytes:
            if length > MOST_HELLO:
                raise TransportError("the process that connected is not collectives [S46]")
            self.missing = length + _PROOF_BYTES
            return
        hello = bytes(heard[header_bytes : header_bytes + length])
        if not hmac.compare_digest(
            heard[header_bytes + length :], _proof(self._key, b"dials", self._nonce, peer_nonce, hello)
        ):
            raise TransportError("the process that connected does not have this job's key [S47]")
        self.hello, self.proof = hello, _proof(self._key, b"is dialled", self._nonce, peer_nonce, hello)
        self.received, self.sent = _seals(self._key, self._nonce, peer_nonce, hello)


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


def _seals(key: bytes, first: bytes, second: bytes, hello: bytes) -> tuple[Seal, Seal]:
    """Of what the side that dials says, and of what the side that is dialled says."""
    dialling = _proof(key, b"seals, dials", first, second, hello)
    return Seal(dialling), Seal(_proof(key, b"seals, is dialled", first, second, hello))
