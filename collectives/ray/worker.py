"""The actor that is a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from collectives.launch import hosted_ranks
from collectives.launch.hosted_ranks import Outcome, Site
from collectives.worlds import runtime

_queue: Any = None
"""Where `log` puts what rank 0 says, while a call with callbacks runs."""


def log(value: Any) -> None:
    """Have the executor's callbacks called with a value, where this process is rank 0; does nothing elsewhere."""
    if _queue is not None and os.environ.get("COLLECTIVES_RANK") == "0":
        _queue.put(value)


class Worker:
    """A process of the cluster that is one rank from `be` on. Its executable is what the program has it keep."""

    def __init__(self) -> None:
        self.executable: Any = None

    def here(self) -> tuple[str, list[Any], Site]:
        """Node, numbers of the GPUs that are this actor's, and where it is."""
        context = ray.get_runtime_context()
        site = hosted_ranks.here(ray.util.get_node_ip_address())
        return context.get_node_id(), list(ray.get_gpu_ids()), site

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
        return [] if runtime.is_initialized() else hosted_ranks.arrange([self.here()[2], *sites[1:]])

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
        return hosted_ranks.call(function, args, kwargs)

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

    def leave(self) -> None:
        """Leave the other ranks, some of which have failed."""
        runtime.shutdown()
