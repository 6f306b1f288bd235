"""The launcher's side of `collectives status`, and its page: who asks is told what the ranks do.

    a socket in the user's folder    for `collectives status`; connecting is asking, and the answer is one text of JSON
    a port of the loopback device    for browsers (``--status-port``); the address holds a token

The folder is the user's alone. The page takes requests to the loopback device's own names only, so that no site can
have a browser ask under another name; and it answers nothing to who does not know the token.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.base.logging import logger
from collectives.base.user_folder import user_folder
from collectives.launch.status import by_others

_PATIENCE = 5.0
"""Seconds within which a client must have asked, and again within which it must have read the answer."""
_MOST = 16
"""Connections at a time."""
_MOST_ASKED = 8 << 10
"""Bytes of a request."""
_PAUSE = 0.1
_PAGE = Path(__file__).with_name("status_page.html")
Snapshot = Callable[[], dict[str, Any]]


@contextlib.contextmanager
def serve(snapshot: Snapshot, port: int | None = None) -> Iterator[str]:
    """Serve what ``snapshot`` returns during the body, which gets the page's address.

    Args:
        port: of the page, 0: any; None: there is no page, and the address is empty.

    Raises:
        InvalidArgumentError: the port cannot be had.
    """
    address = ""
    with contextlib.ExitStack() as stack:
        try:
            path = user_folder() / str(os.getpid())
            path.unlink(missing_ok=True)
            local = _LocalServer(str(path), snapshot)
            stack.callback(path.unlink, missing_ok=True)
            stack.enter_context(_running(local))
        except OSError as error:
            logger.info("`collectives status` cannot find this job: %s", error)
        if port is not None:
            try:
                page = _PageServer(port, snapshot)
            except OSError as error:
                raise InvalidArgumentError(
                    f"--status-port {port}: {error.strerror}; choose another port, or 0 for any free one [L128]"
                ) from None
            stack.enter_context(_running(page))
            address = f"http://127.0.0.1:{page.server_port}/{page.token}/"
        yield address


def ask(pid: int) -> dict[str, Any]:
    """Return what the launcher with this number shows. OSError: there is none."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ValueError, TypeError, RecursionError):
        connection.settimeout(_PATIENCE)
        connection.connect(str(user_folder() / str(pid)))
        with connection.makefile("rb") as answer:
            return dict(json.loads(answer.read()))
    raise ConnectionResetError("the job is ending")


def jobs() -> dict[int, dict[str, Any]]:
    """Return snapshots of this user's jobs on this host, by the number of the launcher, or of a rank where that is not
    ``collectivesrun``; forgets launchers that were killed."""
    answers = by_others()
    for path in user_folder().iterdir():
        try:
            answers[int(path.name)] = ask(int(path.name))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue
    return answers


@contextlib.contextmanager
def _running(server: socketserver.BaseServer) -> Iterator[None]:
    """Have a thread serve during the body."""
    ends = threading.Event()

    def loop() -> None:
        while not ends.is_set():
            server.handle_request()

    thread = threading.Thread(target=loop, name="collectives status page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]  # wakes the thread
        thread.join(_PATIENCE)
        server.server_close()


class _Bounded(socketserver.ThreadingMixIn):
    """Holds few connections, each for a bounded time: who has no token may connect, too, and must not take the
    descriptors with which the launcher runs the job. A further connection takes the place of one of them, at random."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(_MOST)
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def get_request(self) -> Any:
        """Accept a connection."""
        try:
            return super().get_request()  # type: ignore[misc]
        except OSError:  # out of descriptors
            time.sleep(_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Have a thread handle a connection."""
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(OSError, IndexError):  # it ends just now
                random.choice(list(self._open)).shutdown(socket.SHUT_RDWR)
            self._room.acquire()
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        super().shutdown_request(request)  # type: ignore[misc]
        if request in self._open:
            self._open.discard(request)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


class _LocalServer(_Bounded, socketserver.UnixStreamServer):
    def __init__(self, path: str, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        super().__init__(path, _LocalHandler)


class _LocalHandler(socketserver.BaseRequestHandler):
    server: _LocalServer

    def handle(self) -> None:
        self.request.settimeout(_PATIENCE)
        with contextlib.suppress(OSError):
            self.request.sendall(json.dumps(self.server.snapshot()).encode())


class _PageServer(_Bounded, HTTPServer):
    allow_reuse_address = True

    def __init__(self, port: int, snapshot: Snapshot) -> None:
        self.snapshot, self.token = snapshot, secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), _PageHandler)

    def server_bind(self) -> None:
        """Bind without asking the network for this host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class _PageHandler(BaseHTTPRequestHandler):
    server: _PageServer
    timeout = _PATIENCE

    def setup(self) -> None:
        """Read the request, and no more: `timeout` begins anew with every byte."""
        super().setup()
        end, asked = time.monotonic() + _PATIENCE, b""
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in asked and len(asked) < _MOST_ASKED and (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not (data := self.connection.recv(_MOST_ASKED)):
                    break
                asked += data
        self.connection.settimeout(_PATIENCE)
        self.rfile = io.BytesIO(asked if b"\r\n\r\n" in asked else b"")

    def do_GET(self) -> None:
        """Answer a browser."""
        port = self.server.server_port
        _, token, *rest = f"{self.path.partition('?')[0]}/".split("/", 2)
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", b"ask for 127.0.0.1\n")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(404, "text/plain", b"wrong address: use the one that collectivesrun printed\n")
        elif rest == ["status.json/"]:
            self._answer(200, "application/json", json.dumps(self.server.snapshot()).encode())
        elif rest == ["/"] and self.path.endswith("/"):
            self._answer(200, "text/html; charset=utf-8", _PAGE.read_bytes())
        else:
            self._answer(404, "text/plain", b"not found: only the page and status.json exist\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing into the ranks' output."""
