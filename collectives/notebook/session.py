"""`Session`: a job whose ranks carry out cells, seen from the notebook."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError, RankFailedError
from collectives.base.wake_up import WakeUp
from collectives.launch import cli, ssh
from collectives.launch.agent import die_with_parent
from collectives.launch.api import search_path
from collectives.launch.hosts import Host
from collectives.launch.status import listed
from collectives.notebook.rank import END, INTERRUPT, MARK, VARIABLE
from collectives.transport.tcp.authentication import make_key
from collectives.transport.tcp.listener import Listener
from collectives.transport.tcp.service import Service

_LOOK = 0.05
"""Seconds between two looks at the ranks' output."""
_START_WITHIN = 120.0
_GRACE = 1.0
"""Seconds after a rank's error in which the others may end the cell by themselves; then they are told."""
_OUTPUT_WITHIN = 2.0
_MARKED_LINE = re.compile(rf"(\[\d+\] ?)?{MARK}\n")
"""The mark alone on a line, which may have a rank's tag."""
_AFTER_INTERRUPT = 10.0
_AFTER_TERMINATE = 5.0
_SAID_AFTER = 2.0
"""Seconds after which a cell that runs is said to run."""


def size_and_hosts(options: Sequence[str]) -> tuple[int, Sequence[Host]]:
    """The number of ranks, and their hosts, that options of ``collectivesrun`` ask for.

    Raises:
        InvalidArgumentError: the options cannot be understood.
        SystemExit: they asked for the help or the version, which is printed.
    """
    elastic, size, hosts = cli.check_arguments([*options, sys.executable])
    if elastic:
        raise InvalidArgumentError(
            "%%collectives: elastic jobs cannot run in a notebook; leave out these options, or start a program with "
            "collectivesrun [L126]"
        )
    return size, hosts


class Session:
    """Ranks that stay until `close`.

    Args:
        options: of ``collectivesrun``.

    Attributes:
        options: as given.
        ranks: for each rank its process's number and its host.
        alive: whether all of them run.

    Raises:
        InvalidArgumentError: the options cannot be understood.
        RankFailedError: the job has ended before all ranks were there.
        CollectiveTimeoutError: they were not there in time.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self.options = list(options)
        size, hosts = size_and_hosts(options)
        elsewhere = [host.name for host in hosts if not ssh.is_here(host.name)]
        self._output: deque[tuple[bool, bytes]] = deque()
        self._rests = {True: b"", False: b""}
        """The incomplete last line of each stream."""
        self._awaited = {True: 0, False: 0}
        """The marks that have yet to come, on each stream: also those of orders that were given up."""
        self._said: dict[int, tuple[int, tuple[Any, ...]]] = {}
        """For each rank the number of the order that it has answered last, and the answer."""
        self._is_broken = False
        """Whether a rank has ended."""
        self._heard = WakeUp()
        """Set after either has changed."""
        self._orders = 0
        self._cells = 0
        self._is_stale = False
        self.alive = False
        key, service, arrived = make_key(), Service(), queue.SimpleQueue[socket.socket]()
        with contextlib.closing(service):
            address = ssh.address_for(elsewhere, "", ssh.Ssh())
            listener = Listener(service, address, 0, key, lambda hello, peer: arrived.put(peer))
            host, port = listener.address
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(search_path()),
                "PYTHONUNBUFFERED": "1",
                VARIABLE: f"{host} {port} {key.hex()}",
            }
            command = [sys.executable, "-m", "collectives.launch", *options, sys.executable]
            self._process = subprocess.Popen(
                [*command, "-m", "collectives.notebook"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the notebook's, which interrupts the ranks alone
                preexec_fn=die_with_parent(),
            )
            assert self._process.stdout and self._process.stderr
            for pipe, is_error in ((self._process.stdout, False), (self._process.stderr, True)):
                threading.Thread(target=self._read, args=(pipe, is_error), daemon=True).start()
            try:
                self._connections = self._accept(arrived, size)
            except BaseException:
                self.close()
                raise
            finally:
                listener.close()
        self.alive = True

    def _accept(self, arrived: queue.SimpleQueue[socket.socket], size: int) -> list[Connection]:
        """The ranks' connections, in the order of ranks."""
        came: dict[int, tuple[Connection, tuple[int, str]]] = {}
        end = time.monotonic() + _START_WITHIN
        while len(came) < size:
            if self._process.poll() is not None:
                self.show_output()
                raise RankFailedError(
                    f"%%collectives: the job ended with exit code {self._process.returncode} before all ranks had "
                    "started; its output is above [L10]"
                )
            if time.monotonic() > end:
                raise CollectiveTimeoutError(
                    f"%%collectives: only {len(came)} of {size} ranks started within {_START_WITHIN:g} s; their "
                    "output is above [L127]"
                )
            with contextlib.suppress(queue.Empty):
                peer = arrived.get(timeout=_LOOK)
                threading.Thread(target=self._hear, args=(peer, came), daemon=True).start()
            self.show_output()
        self.ranks = [came[rank][1] for rank in range(size)]
        return [came[rank][0] for rank in range(size)]

    def _hear(self, peer: socket.socket, came: dict[int, tuple[Connection, tuple[int, str]]]) -> None:
        """Receive what a rank says. In a thread, because an interrupt in the middle of a message would lose it."""
        peer.setblocking(True)
        connection = Connection(peer.detach())
        try:
            rank, process, host = connection.recv()
            came[rank] = connection, (process, host)
            while True:
                self._said[rank] = connection.recv()
                self._heard.set()
        except (EOFError, OSError):
            pass
        finally:
            self._is_broken = True
            self._heard.set()

    def _read(self, pipe: IO[bytes], is_error: bool) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            self._output.append((is_error, data))

    def show_output(self) -> None:
        """Show what the ranks have printed, in whole lines, or parts that end with a carriage return."""
        while self._output:
            is_error, data = self._output.popleft()
            data = self._rests[is_error] + data
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._rests[is_error] = data[end:]
            text = data[:end].decode(errors="replace")  # a character may come in two pieces, a line's end does not
            self._awaited[is_error] -= text.count(MARK)
            shown = _MARKED_LINE.sub("", text).replace(MARK, "")
            if shown:
                print(shown, end="", file=sys.stderr if is_error else sys.stdout, flush=True)

    def _show_rest(self) -> None:
        """Show what the ranks have printed until their answers."""
        end = time.monotonic() + _OUTPUT_WITHIN
        while max(self._awaited.values()) > 0 and time.monotonic() < end:
            self.show_output()
            time.sleep(0.001)  # a deque does not notify: two threads fill it
        self.show_output()
        self._awaited = {True: 0, False: 0}  # without those of an order that did not reach all ranks

    def status(self) -> str:
        """One line a rank."""
        return "\n".join(f"rank {rank}: process {process} on {host}" for rank, (process, host) in enumerate(self.ranks))

    def run(self, source: str) -> None:
        """Carry out a cell on all ranks.

        Raises:
            RankFailedError: a rank has raised, or has ended; the first error's traceback is shown.
            KeyboardInterrupt: the cell was interrupted, on all ranks.
        """
        if self._is_stale:
            self._ask("renew")
            self._is_stale = False
        self._cells += 1
        answers = self._ask("cell", source, self._cells)
        errors = {rank: answer for rank, answer in answers.items() if answer[0] == "error"}
        self._is_stale = self._is_stale or any(answer[0] == "done" and answer[1] for answer in answers.values())
        if not errors:
            return
        self._is_stale = self._is_stale or any(answer[3] for answer in errors.values())
        first = min(errors, key=lambda rank: (errors[rank][3], rank))
        _, reason, text, _ = errors[first]
        others = sorted(set(errors) - {first})
        also = f" (and {listed(others)})" if others else ""
        print(text, file=sys.stderr, flush=True)
        raise RankFailedError(f"%%collectives: rank {first}{also}: {reason} [L11]")

    def pull(self, name: str) -> list[Any]:
        """See `collectives.notebook.pull`."""
        answers = self._ask("pull", name)
        for rank, answer in sorted(answers.items()):
            if answer[0] == "error":
                raise RankFailedError(f"collectives.notebook.pull: rank {rank}: {answer[1]} [L12]")
        loads: Callable[[bytes], Any] = importlib.import_module("cloudpickle").loads
        return [loads(answers[rank][1]) for rank in range(len(answers))]

    def _ask(self, *order: Any) -> dict[int, tuple[Any, ...]]:
        """Give all ranks an order, and wait for their answers, however long a cell takes."""
        answers: dict[int, tuple[Any, ...]] = {}
        self._orders += 1
        self._awaited = {is_error: number + len(self._connections) for is_error, number in self._awaited.items()}
        progress = _Progress(len(self._connections))
        with self._told((self._orders, *order)):
            interrupted = failed_at = 0.0
            while len(answers) < len(self._connections):
                try:
                    self._heard.wait(_LOOK)
                    for rank, (number, answer) in list(self._said.items()):
                        if number == self._orders:  # else its order was given up
                            answers[rank] = answer
                    if self._is_broken or self._process.poll() is not None:
                        raise EOFError
                    self.show_output()
                    progress.show(answers)
                    if not failed_at and any(answer[0] == "error" for answer in answers.values()):
                        failed_at = time.monotonic()
                    if failed_at and time.monotonic() > failed_at + _GRACE and not self._is_stale:
                        self._fail(answers)
                    is_late = bool(interrupted) and time.monotonic() > interrupted + _AFTER_INTERRUPT
                    if is_late and max(self._awaited.values()) > 0:  # else the answers are on their way, and large
                        raise EOFError
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = time.monotonic()
                    for connection in self._connections:
                        connection.send(INTERRUPT)
            self._said.clear()  # answers may be large
            self._show_rest()
            progress.close()
            if interrupted:
                raise KeyboardInterrupt
        return answers

    def _fail(self, answers: Mapping[int, tuple[Any, ...]]) -> None:
        """End the collectives in which ranks wait for one that has raised."""
        self._is_stale = True
        for rank, answer in answers.items():
            if answer[0] == "error":
                self._connections[rank].send((0, "fail", answer[2] or answer[1]))

    @contextlib.contextmanager
    def _told(self, order: tuple[Any, ...]) -> Any:
        """In the body the ranks obey; if one of them ends meanwhile, so does the session. After an interrupt they may
        still be at the order, or some may not have got it: the next cell has them join each other anew."""
        try:
            for connection in self._connections:
                connection.send(order)
            yield
        except KeyboardInterrupt:
            self._is_stale = True
            raise
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_AFTER_TERMINATE)
            self.close()
            raise RankFailedError(
                "%%collectives: the ranks have ended; the output of the first one to end is above. The next cell "
                "starts new ranks, without the variables of the old ones [L13]"
            ) from None

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self.alive = False
        for connection in getattr(self, "_connections", ()):
            with contextlib.suppress(OSError):
                connection.send(END)
        try:
            self._process.wait(_AFTER_TERMINATE)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_AFTER_TERMINATE)
            self._process.kill()
            self._process.wait()
        self.show_output()


class _Progress:
    """A line in the notebook that says how long a cell has run, and on which ranks it still does."""

    def __init__(self, size: int) -> None:
        self._size, self._start, self._said = size, time.monotonic(), 0
        self._handle: Any = None

    def show(self, answers: Mapping[int, object]) -> None:
        seconds = int(time.monotonic() - self._start)
        if seconds < _SAID_AFTER or seconds == self._said or not _in_notebook():
            return
        self._said = seconds
        running = [str(rank) for rank in range(self._size) if rank not in answers]
        self._update(f"collectives: {seconds} s, running on ranks {', '.join(running)}")

    def close(self) -> None:
        if self._handle is not None:
            self._update(f"collectives: {time.monotonic() - self._start:.1f} s on {self._size} ranks")

    def _update(self, text: str) -> None:
        display = importlib.import_module("IPython.display")
        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")
