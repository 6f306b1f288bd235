"""The actor that is a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.queue import Empty

from collectives.base.errors import RankFailedError
from collectives.launch import hosted_ranks
from collectives.launch.hosted_ranks import Outcome, Site
from collectives.ray import nodes
from collectives.worlds import runtime

_INTERRUPT = signal.SIGUSR1
"""SIGINT is blocked in Ray's processes."""
_queue: Any = None
"""Where `log` puts what rank 0 says, while a call with callbacks runs."""


def log(value: Any) -> None:
    """Have the executor's callbacks called with a value, where this process is rank 0; does nothing elsewhere.

    Example:
        collectives.ray.log({"epoch": epoch, "loss": loss})
    """
    rank = runtime.world().rank if runtime.is_initialized() else int(os.environ.get("COLLECTIVES_RANK", -1))
    if rank == 0 and _queue is not None:
        _queue.put(value)
    elif rank == 0 and nodes.LOG in os.environ:
        nodes.log(value)


class Worker:
    """A process of the cluster that is one rank from `be` on. Its executable is what the program has it keep.

    A signal ends its call: Ray runs no other method of an actor meanwhile.
    """

    def __init__(self) -> None:
        self.executable: Any = None
        self._is_called = self._is_given_up = False
        signal.signal(_INTERRUPT, self._give_up)

    def _give_up(self, *_: Any) -> None:
        """Have the call end that runs, or that is about to."""
        self._is_given_up = True
        if self._is_called:
            raise RankFailedError("another rank failed, or the program cancelled the call [L130]")

    def here(self) -> tuple[str, int, list[Any], Site]:
        """Node, process, numbers of the GPUs that are this actor's, and where it is."""
        context = ray.get_runtime_context()
        site = hosted_ranks.here(ray.util.get_node_ip_address())
        return context.get_node_id(), os.getpid(), list(ray.get_gpu_ids()), site

    def be(self, variables: Mapping[str, Any]) -> None:
        """Take a place among the ranks, and set further variables."""
        os.environ.update({name: str(text) for name, text in variables.items()})

    def keep(self, made_by: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
        """Make the executable."""
        outcome = hosted_ranks.call(made_by, args, kwargs)
        self.executable = outcome.returned
        return Outcome(None, outcome.failure)

    def places(self, sites: Sequence[Site]) -> list[dict[str, str]]:
        """On rank 0: the places of all ranks, which meet at ports that are free now; none: they have met.

        Args:
            sites: of the ranks when they were started.
        """
        return [] if runtime.is_initialized() else hosted_ranks.arrange([self.here()[-1], *sites[1:]])

    def call(
        self,
        places: Sequence[Mapping[str, str]],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: Any = None,
    ) -> Outcome:
        """Call a function, in this rank's place if there are places."""
        global _queue
        if places:
            self.be(places[int(os.environ["COLLECTIVES_RANK"])])
        _queue = queue
        try:
            self._is_called = True
            if self._is_given_up:
                self._give_up()
            return hosted_ranks.call(function, args, kwargs)
        finally:
            self._is_called = False

    def execute(
        self, places: Sequence[Mapping[str, str]], function: Callable[[Any], Any], queue: Any = None
    ) -> Outcome:
        """Call a function with the executable."""
        return self.call(places, function, [self.executable], {}, queue)

    def result(
        self,
        places: Sequence[Mapping[str, str]],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function, and return what it returns."""
        return hosted_ranks.results([self.call(places, function, args, kwargs)], "RayExecutor.run_remote")[0]

    def interrupt(self, process: int) -> None:
        """End the call of another worker on this node."""
        os.kill(process, _INTERRUPT)

    def leave(self) -> None:
        """Leave the other ranks, some of which have failed."""
        self._is_called = False  # where a signal came as the call ended
        runtime.shutdown()
        self._is_given_up = False


def interrupt(node: str, process: int) -> Any:
    """End the call of the worker that is a process on a node; returns a reference that is there when it knows."""
    return nodes.signal_on(node, process, _INTERRUPT)


def tell(queue: Any, callbacks: Sequence[Callable[[Any], Any]]) -> None:
    """Call the callbacks with what rank 0 has logged."""
    while queue is not None:
        try:
            value = queue.get_nowait()
        except Empty:
            return
        for callback in callbacks:
            callback(value)
