"""A rank that carries out the cells of a notebook, one after the other.

Its main thread waits for orders; another thread receives them, so that an interrupt arrives while a cell runs.
"""

from __future__ import annotations

import ast
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import collectives
from collectives.base.errors import is_consequence
from collectives.transport.tcp.listener import dialled
from collectives.worlds import runtime

VARIABLE = "COLLECTIVES_NOTEBOOK"
"""Where the notebook listens, as ``host port key``."""
MARK = "\x1e"
"""Ends what an order has had this rank print, on both streams: output takes longer than the answer."""

INTERRUPT, END = (0, "interrupt"), (0, "end")
"""Orders, which are tuples: a number that returns with the answer (0: there is none), what to do, and details."""


class Rank:
    """Attributes: ``names``: the variables of the cells."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._is_busy = False
        self.names: dict[str, Any] = {"__name__": "__main__", "collectives": collectives}

    def serve(self) -> None:
        """Obey until the notebook is gone."""
        collectives.init()
        self._connection.send((collectives.rank(), os.getpid(), os.uname().nodename))
        threading.Thread(target=self._receive, name="collectives-notebook", daemon=True).start()
        number = 0
        while True:
            try:
                number, what, *details = self._orders.get()
                if what == "end":
                    return
                self._is_busy = True
                answer = getattr(self, f"_{what}")(*details)
                self._is_busy = False
            except KeyboardInterrupt:
                answer = ("error", "KeyboardInterrupt", "KeyboardInterrupt", True)
            self._is_busy = False
            if not number:
                continue  # nobody waits for an answer
            for stream in (sys.stdout, sys.stderr):
                print(MARK, file=stream, flush=True)
            self._connection.send((number, answer))

    def _receive(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                order = END
            if order == INTERRUPT:
                if self._is_busy:
                    signal.pthread_kill(main, signal.SIGINT)
                continue
            self._orders.put(order)
            if order == END:
                return

    def _cell(self, source: str, number: int) -> tuple[Any, ...]:
        """Carry out a cell; show the value of an expression at its end."""
        name = f"<cell {number}>"
        try:
            tree = ast.parse(source, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), self.names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
                if value is not None:
                    print(repr(value))
            return ("done", self._has_failed())
        except BaseException as error:
            of_cell = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, of_cell))
            consequence = is_consequence(error) or isinstance(error, KeyboardInterrupt)
            return ("error", traceback.format_exception_only(error)[-1].strip(), text, consequence)

    def _fail(self, text: str) -> tuple[Any, ...]:
        """End the collectives in which others wait for this rank."""
        if runtime.is_initialized():
            runtime.world().fail(text)
        return ("done", True)

    def _renew(self) -> tuple[Any, ...]:
        """Join the others anew."""
        collectives.shutdown()
        collectives.init()
        return ("done", False)

    def _pull(self, name: str) -> tuple[Any, ...]:
        if name not in self.names:
            return ("error", f"NameError: there is no variable {name!r}", "", False)
        try:
            return ("done", importlib.import_module("cloudpickle").dumps(self.names[name]))
        except Exception as error:
            return ("error", f"{type(error).__name__}: {error}", "", False)

    def _has_failed(self) -> bool:
        return runtime.is_initialized() and runtime.world().failure is not None


def main() -> None:
    """Connect with the notebook, and serve it."""
    host, port, key = os.environ.pop(VARIABLE).split()
    Rank(Connection(dialled(host, int(port), bytes.fromhex(key), b"").detach())).serve()
