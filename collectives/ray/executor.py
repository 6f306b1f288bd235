"""`RayExecutor`: actors that are ranks, for one call after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.queue import Queue

from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    NotInitializedError,
    RankFailedError,
    UnsupportedError,
)
from collectives.launch import hosted_ranks
from collectives.launch.hosted_ranks import Outcome, Site
from collectives.launch.records import Record
from collectives.ray.elastic import ElasticRayExecutor
from collectives.ray.nodes import LOOK
from collectives.ray.placement import Group, Shape
from collectives.ray.worker import Worker, interrupt, tell

_AFTER_FAILURE = 0.5
"""Seconds for which the other ranks of one that has failed may still say how they fared."""
_RETURN_WITHIN = 10.0
"""Seconds within which the function of an interrupted rank has to return."""


@dataclass(frozen=True)
class Settings:
    """How long to wait, and by which interfaces the ranks speak; see `RayExecutor.create_settings`."""

    timeout_s: float = 300.0
    placement_group_timeout_s: float = 100.0
    nics: frozenset[str] = frozenset()


class RayExecutor:
    """Actors of a Ray cluster that are ranks until `shutdown`.

    Their processes stay: what a function imports or stores is still there in the next call. The ranks of a host have
    consecutive numbers. A rank sees the GPUs of all ranks of its host; ``local_rank()`` is the number of its own. Works
    in Ray's client mode too.

    Args:
        settings: from `create_settings`; its defaults if not given.
        num_workers: the number of ranks, packed onto few hosts.
        num_hosts, num_workers_per_host: in place of ``num_workers``: the numbers of hosts, and of ranks on each host.
        cpus_per_worker: CPUs of each rank.
        use_gpu, gpus_per_worker: whether ranks have GPUs, and how many each; 1 by default.
        use_current_placement_group: whether to place the workers in this program's placement group, if it has one.
        min_workers: makes the job elastic, as `collectives.ray.ElasticRayExecutor` does: its smallest number of
            workers. Only `run` and `execute` work then.
        max_workers, reset_limit, cooldown_range, elastic_timeout: of elastic jobs, as for
            `ElasticRayExecutor.create_settings`.
        override_discovery: has no effect; it is part of Horovod's interface.

    Raises:
        InvalidArgumentError: the arguments contradict each other.

    Example:
        executor = RayExecutor(num_workers=2)
        executor.start()
        executor.run(train, args=["/data"])      # a list with the result of each rank
        executor.shutdown()
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600.0,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_worker and not use_gpu:
            raise InvalidArgumentError(
                f"RayExecutor: gpus_per_worker={gpus_per_worker} needs use_gpu=True; pass both [L96]"
            )
        if gpus_per_worker is not None and gpus_per_worker < 0:
            raise InvalidArgumentError(f"RayExecutor: gpus_per_worker={gpus_per_worker}: expected at least 1 [L97]")
        if max_workers is not None and min_workers is None:
            raise InvalidArgumentError(f"RayExecutor: max_workers={max_workers} needs min_workers; pass both [L98]")
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._settings = settings or Settings()
        self._elastic: ElasticRayExecutor | None = None
        self._makes_executable: Callable[[], Any] = lambda: None
        self._group: Group | None = None
        self._workers: list[Any] = []
        self._sites: list[Site] = []
        self._processes: list[tuple[str, int]] = []
        """The node and process of each rank."""
        self._lost = ""
        """Why the workers cannot be called any more."""
        if min_workers is not None:
            if num_workers is not None or num_hosts is not None:
                raise InvalidArgumentError(
                    "RayExecutor: expected either min_workers (an elastic job), or num_workers or num_hosts; got both "
                    "[L99]"
                )
            elastic_settings = ElasticRayExecutor.create_settings(
                min_workers,
                max_workers,
                reset_limit,
                elastic_timeout,
                self._settings.timeout_s,
                nics=",".join(sorted(self._settings.nics)),
                cooldown_range=cooldown_range,
            )
            self._elastic = ElasticRayExecutor(elastic_settings, use_gpu, cpus_per_worker, gpus or None)
            return
        self._shape = Shape(
            num_workers, num_hosts, num_workers_per_host or 1, cpus_per_worker, gpus, use_current_placement_group
        )
        self._shape.check()

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: Sequence[str] | set[str] | None = None,
    ) -> Settings:
        """Settings for an executor.

        Args:
            timeout_s: seconds within which the actors must have started.
            ssh_identity_file, ssh_str: have no effect: nothing is started by ssh. They are part of Horovod's interface.
            placement_group_timeout_s: seconds within which Ray must find room for the workers.
            nics: names of network interfaces; each host uses one of them.
        """
        return Settings(timeout_s, placement_group_timeout_s, frozenset(nics or ()))

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers.

        Args:
            executable_cls: is called on each of them; `execute` passes its result to the function.
            executable_args, executable_kwargs: its arguments.
            extra_env_vars: variables that are set before.

        Raises:
            CollectiveTimeoutError: Ray found no room for them, or the processes did not start in time.
            RankFailedError: ``executable_cls`` raised.
        """
        if self._workers:
            raise InvalidArgumentError(
                "RayExecutor.start: the workers are already started; call shutdown() first [L100]"
            )
        extra = {name: str(text) for name, text in (extra_env_vars or {}).items()}
        if self._settings.nics:
            extra.setdefault("COLLECTIVES_NETWORK_INTERFACE", ",".join(sorted(self._settings.nics)))
        if self._elastic is not None:
            self._elastic.variables |= extra
            if executable_cls is not None:
                self._makes_executable = partial(executable_cls, *(executable_args or ()), **(executable_kwargs or {}))
            return self._elastic.start()
        self._group = Group(self._shape, self._settings.placement_group_timeout_s)
        try:
            self._start(extra)
            if executable_cls is not None:
                made = [
                    worker.keep.remote(executable_cls, list(executable_args or ()), dict(executable_kwargs or {}))
                    for worker in self._workers
                ]
                self._results(made, "start")
        except BaseException:
            self.shutdown()
            raise

    def _start(self, extra: Mapping[str, str]) -> None:
        assert self._group is not None
        actor, shape = ray.remote(Worker), self._shape
        workers = [
            actor.options(num_cpus=shape.cpus, num_gpus=shape.gpus, scheduling_strategy=place).remote()
            for place in self._group.places()
        ]
        self._workers = workers
        self._within([worker.be.remote(extra) for worker in workers])
        nodes, processes, gpus, sites = zip(*self._within([worker.here.remote() for worker in workers]), strict=True)
        places: list[dict[str, str]] = hosted_ranks.arrange(sites)
        for number, variables in enumerate(places):
            visible = [gpu for node, own in zip(nodes, gpus, strict=True) if node == nodes[number] for gpu in own]
            if visible:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
        self._within([worker.be.remote(variables) for worker, variables in zip(workers, places, strict=True)])
        order = sorted(range(len(workers)), key=lambda number: int(places[number]["COLLECTIVES_RANK"]))
        self._workers = [workers[number] for number in order]
        self._sites = [sites[number] for number in order]
        self._processes = [(nodes[number], processes[number]) for number in order]

    def _within(self, references: Sequence[Any]) -> list[Any]:
        """What the workers answer while they start."""
        try:
            answers: list[Any] = ray.get(list(references), timeout=self._settings.timeout_s)
            return answers
        except GetTimeoutError:
            raise CollectiveTimeoutError(
                f"RayExecutor.start: the {len(references)} workers did not start within {self._settings.timeout_s:g} "
                "s; look at Ray's logs, or raise timeout_s of create_settings [L101]"
            ) from None

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call ``fn(executable)`` on all ranks; otherwise as `run`."""
        if self._elastic is not None:
            return self._elastic.run(partial(_with_executable, self._makes_executable, fn), callbacks)
        return self._collect(
            lambda worker, places, queue: worker.execute.remote(places, fn, queue), callbacks, "execute"
        )

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone, and return its result."""
        return self._results([self._all()[0].execute.remote([], fn)], "execute_single")[0]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all ranks, and return the results by rank.

        The function calls `collectives.init` itself.

        Args:
            fn: anything that cloudpickle can pickle.
            args, kwargs: its arguments, the same on every rank.
            callbacks: functions that are called here with each value that rank 0 passes to `collectives.ray.log`.

        Raises:
            RankFailedError: a rank raised, or its process ended; has the traceback of the first failure. The other
                ranks' calls end with RankFailedError. The executor can be used again unless a process has ended.
            BaseException: what a callback raised, or Ctrl-C; the calls end in the same way. If a function does not
                return within 10 s, because it is in C code for instance, the workers are ended: call `shutdown` and
                `start`.
            NotInitializedError: the workers are not started.
        """
        given, named = list(args or ()), dict(kwargs or {})
        if self._elastic is not None:
            return self._elastic.run(partial(fn, *given, **named), callbacks)
        return self._collect(
            lambda worker, places, queue: worker.call.remote(places, fn, given, named, queue), callbacks, "run"
        )

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all ranks, and return references to the results at once, for ``ray.get``."""
        given, named = list(args or ()), dict(kwargs or {})
        places = self._places()
        return [worker.result.remote(places, fn, given, named) for worker in self._all()]

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers, self._lost = [], ""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _all(self) -> list[Any]:
        if self._elastic is not None:
            raise UnsupportedError("RayExecutor: elastic jobs (min_workers) support only run() and execute() [L102]")
        if not self._workers:
            raise NotInitializedError("RayExecutor: the workers are not started; call start() first [L103]")
        if self._lost:
            raise RankFailedError(f"RayExecutor: {self._lost}")
        return self._workers

    def _places(self) -> Any:
        """A reference to the ranks' places. Rank 0 chooses ports shortly before they are bound."""
        return self._all()[0].places.remote(self._sites)

    def _collect(
        self, begin: Callable[[Any, Any, Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None, what: str
    ) -> list[Any]:
        queue = Queue(actor_options={"num_cpus": 0}) if callbacks else None
        try:
            places = self._places()
            references = [begin(worker, places, queue) for worker in self._all()]
            return self._results(references, what, queue, callbacks or ())
        finally:
            if queue is not None:
                queue.shutdown()

    def _results(
        self,
        references: Sequence[Any],
        what: str,
        queue: Any = None,
        callbacks: Sequence[Callable[[Any], Any]] = (),
    ) -> list[Any]:
        outcomes: dict[Any, Outcome] = {}
        try:
            self._wait(references, outcomes, queue, callbacks)
        finally:
            if len(outcomes) < len(references) or any(outcome.failure for outcome in outcomes.values()):
                self._interrupt([rank for rank, each in enumerate(references) if each not in outcomes], len(references))
        return hosted_ranks.results([outcomes[each] for each in references if each in outcomes], f"RayExecutor.{what}")

    def _wait(
        self,
        references: Sequence[Any],
        outcomes: dict[Any, Outcome],
        queue: Any,
        callbacks: Sequence[Callable[[Any], Any]],
    ) -> None:
        """Note what the calls have come to; after a failure not of all."""
        end = float("inf")
        while len(outcomes) < len(references) and time.monotonic() < end:
            pending = [reference for reference in references if reference not in outcomes]
            looks = queue is not None or end < float("inf")
            ready, _ = ray.wait(pending, num_returns=1, timeout=LOOK if looks else None)
            for reference in ready:
                outcomes[reference] = self._outcome(reference, references.index(reference))
            tell(queue, callbacks)
            if end == float("inf") and any(outcome.failure for outcome in outcomes.values()):
                end = time.monotonic() + _AFTER_FAILURE

    def _interrupt(self, ranks: Sequence[int], called: int) -> None:
        """End the calls of these ranks, and have all leave each other; end the workers if they cannot be used again.

        Only the first ``called`` ranks, which have had the call, are waited for: others may still be busy with an
        earlier one, after which they leave.
        """
        processes = self._processes[:called]
        free = {node: self._workers[rank] for rank, (node, _) in enumerate(processes) if rank not in ranks}
        busy: Sequence[Any] = self._workers
        try:
            if not self._lost:
                sent = [
                    # A task starts a process, which takes a second.
                    free[node].interrupt.remote(process) if node in free else interrupt(node, process)
                    for node, process in (processes[rank] for rank in ranks)
                ]
                if sent:
                    ray.wait(sent, num_returns=len(sent), timeout=_RETURN_WITHIN)
                leaving = [worker.leave.remote() for worker in self._workers][:called]
                _, busy = ray.wait(leaving, num_returns=len(leaving), timeout=_RETURN_WITHIN)
        finally:
            if busy:
                self._lost = self._lost or (
                    "a rank's function did not return when it was interrupted, so the workers were ended; call "
                    "shutdown() and start() again [L129]"
                )
                for worker in self._workers:
                    ray.kill(worker)

    def _outcome(self, reference: Any, rank: int) -> Outcome:
        try:
            outcome: Outcome = ray.get(reference)
            return outcome
        except RayActorError:
            self._lost = self._lost or (  # without rank 0 the others have no places, which Ray says in the same way
                f"the process of rank {rank} on {self._sites[rank].name} has ended; look at Ray's logs, and for an "
                "out-of-memory kill in the kernel's log; then call shutdown() and start() again [L16]"
            )
            text = f"RankFailedError: {self._lost}"
        except RayError as error:
            text = f"{type(error).__name__}: {error}"
        return Outcome(None, Record(rank, 1, text, time.time(), self._sites[rank].name))


def _with_executable(make: Callable[[], Any], function: Callable[[Any], Any]) -> Any:
    """On a rank of an elastic job."""
    return function(make())
