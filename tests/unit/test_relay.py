"""The relay between a launcher's pipes and an agent elsewhere, and what tells the launcher of Spark's slots: only
holders of the job's key are heard, and only to such is anything said."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives.base.errors import TransportError
from collectives.launch import held_slots, relay
from collectives.launch.hosts import Host
from collectives.launch.relayed import Relayed, start_agent
from collectives.transport.tcp.authentication import Connection, make_key
from collectives.transport.tcp.listener import dialled, listening

WITHIN = 20.0
KEY = make_key()


def test_connections_of_others_do_not_end_it() -> None:
    server = listening("127.0.0.1")
    port = server.getsockname()[1]
    accepted: list[dict[str, Connection] | None] = []
    waiting = threading.Thread(target=lambda: accepted.append(relay.accept(server, port, KEY, WITHIN)), daemon=True)
    waiting.start()
    with contextlib.ExitStack() as stack:
        rude, wrong, _ = (stack.enter_context(socket.create_connection(("127.0.0.1", port), WITHIN)) for _ in range(3))
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.close()
        wrong.sendall(b"wrong orders\n")
        with pytest.raises(TransportError, match="its key is different"):
            dialled("127.0.0.1", port, make_key(), relay.hello(port, "orders"))
        own = {
            stream: stack.enter_context(dialled("127.0.0.1", port, KEY, relay.hello(port, stream)))
            for stream in ("words", "orders")
        }
        waiting.join(WITHIN)
        (connections,) = accepted
        assert connections is not None and connections.keys() == own.keys()
        for stream, connection in own.items():
            connection.sendall(stream.encode())
            assert connections[stream].recv(16) == stream.encode()
            connections[stream].close()


def test_it_waits_no_longer_than_it_is_told() -> None:
    assert relay.accept(listening("127.0.0.1"), 1, KEY, 0.05) is None


def test_the_relay_has_the_port_before_its_process_starts_and_no_secret_on_its_command_line(tmp_path: Path) -> None:
    remote = Relayed(timeout=WITHIN, folder=str(tmp_path), key=KEY.hex())
    port, command = remote.make_relay("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    assert KEY.hex() not in " ".join(command)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    passed = remote.passed(command)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=passed
    )
    for descriptor in passed:
        os.close(descriptor)
    agent = start_agent("127.0.0.1", port, KEY.hex())
    with process, agent:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().startswith(b"\x10ready ")
        process.stdin.close()
        assert process.wait(WITHIN) == agent.wait(WITHIN) == 0
    assert not list(tmp_path.iterdir())


def test_an_agent_is_not_started_for_who_does_not_prove_the_key() -> None:
    """Who listens at the relay's port in its place gets nothing, and is not obeyed."""
    heard = []

    def steal(thief: socket.socket) -> None:
        connection, _ = thief.accept()
        connection.sendall(b"collectives 1\n" + bytes(32))
        connection.settimeout(WITHIN)
        data = b""
        while len(data) < 32 + 2 + len(relay.hello(0, "orders")) + 32:
            data += connection.recv(4096)
        heard.append(data)
        connection.sendall(bytes(32) + b'{"command": []}\n')

    with socket.create_server(("127.0.0.1", 0)) as thief:
        thread = threading.Thread(target=steal, args=(thief,), daemon=True)
        thread.start()
        with pytest.raises(TransportError, match="does not have this job's key"):
            start_agent("127.0.0.1", thief.getsockname()[1], KEY.hex())
        thread.join(WITHIN)
    assert heard and KEY not in heard[0] and KEY.hex().encode() not in heard[0]


@pytest.fixture
def slots() -> Iterator[tuple[held_slots.Holders, int]]:
    server = listening("127.0.0.1")
    holders = held_slots.Holders(server, KEY)
    yield holders, server.getsockname()[1]
    holders.close()


def test_silent_connections_do_not_hold_up_sparks_slots(slots: tuple[held_slots.Holders, int]) -> None:
    holders, port = slots
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        task = stack.enter_context(dialled("127.0.0.1", port, KEY, b"17"))
        before, end = holders(), time.monotonic() + WITHIN
        while not before and time.monotonic() < end:
            before = holders()
            time.sleep(0.01)  # until the service's thread has handed it over
        assert before == (Host("127.0.0.1/17", 1),)
        holders.ask("127.0.0.1/17", "4711\n")
        assert task.recv(16) == b"4711\n"
        task.close()
        while holders() and time.monotonic() < end:
            time.sleep(0.01)
        assert holders() == ()


def test_a_folder_that_somebody_else_may_write_is_refused(tmp_path: Path) -> None:
    from collectives.base.user_folder import user_folder

    for mode in (0o777, 0o750):
        folder = tmp_path / f"made-{mode}"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="is not a folder of this user alone"):
            user_folder(folder)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(PermissionError):
        user_folder(tmp_path / "link")
    made = user_folder(tmp_path / "new" / "inner")
    assert made.stat().st_mode & 0o777 == 0o700 and user_folder(made) == made
