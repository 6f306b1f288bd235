"""`ElasticRayExecutor`: an elastic job whose hosts are the nodes of a Ray cluster that grows and shrinks."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError, NotInitializedError, RankFailedError
from collectives.launch import job
from collectives.launch import rank as before_rank
from collectives.launch.api import EVENTS, of_elastic_job, pickled, search_path
from collectives.launch.elastic_terms import Rules
from collectives.launch.output import Output
from collectives.launch.relayed import RelayedAgents
from collectives.ray.nodes import LOG, LOOK, Hosts, Remote, Slot, signal_on
from collectives.ray.worker import tell
from collectives.transport.tcp.authentication import make_key

_WIDTH = 4
_END_WITHIN = 20.0
"""Seconds for which an interrupted job may end in order: its ranks get signals, folders are removed."""
_OURS = ("COLLECTIVES_", "HOROVOD_")


@dataclass(frozen=True)
class ElasticSettings:
    """See `ElasticRayExecutor.create_settings`."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    timeout_s: float = 30.0
    cooldown_range: tuple[float, float] | None = None
    nics: str = ""


class ElasticRayExecutor:
    """Runs training functions that survive the loss of ranks and nodes, and take in new ones; see docs/elastic.md.

    Each node gets as many ranks as its free CPUs and GPUs have room for when the job begins to use it; these stay
    reserved for the job. Nodes that come later join. The launcher's driver decides, as for ``collectivesrun
    --host-discovery-script``.

    Args:
        settings: from `create_settings`; its defaults if not given.
        use_gpu: whether ranks have GPUs.
        cpus_per_slot, gpus_per_slot: CPUs and GPUs of each rank.
        env_vars: environment variables of the ranks.
        override_discovery: False: ``discovery`` finds the hosts. It is part of Horovod's interface.
        discovery: a function that returns the present hosts, as `collectives.ray.nodes.Hosts` does.

    Attributes:
        variables: environment variables of the ranks.

    Raises:
        InvalidArgumentError: the arguments contradict each other.

    Example:
        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2), cpus_per_slot=2)
        executor.start()
        results = executor.run(train)     # a function that has its inner part under @collectives.elastic.run
    """

    def __init__(
        self,
        settings: ElasticSettings | None = None,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
        discovery: Callable[[], Any] | None = None,
    ) -> None:
        if gpus_per_slot and not use_gpu:
            raise InvalidArgumentError(
                f"ElasticRayExecutor: gpus_per_slot={gpus_per_slot} needs use_gpu=True; pass both [L91]"
            )
        if override_discovery == (discovery is not None):
            raise InvalidArgumentError(
                "ElasticRayExecutor: expected discovery together with override_discovery=False; pass both or neither "
                "[L92]"
            )
        self.settings = settings or ElasticSettings()
        self._slot = Slot(cpus_per_slot, (gpus_per_slot or 1) if use_gpu else 0)
        self._discovery = discovery or Hosts(self._slot)
        self.variables = {name: str(text) for name, text in (env_vars or {}).items()}

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600.0,
        timeout_s: float = 30.0,
        ssh_identity_file: str | None = None,
        nics: str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        **ignored: Any,
    ) -> ElasticSettings:
        """Settings for an executor.

        Args:
            min_num_proc, max_num_proc: the smallest and the largest number of ranks; None: as many as the cluster has
                room for. ``min_np`` and ``max_np`` are Horovod's earlier names.
            reset_limit: how often the ranks may change; None: any number of times.
            elastic_timeout: seconds that the job waits for missing ranks.
            timeout_s: seconds within which Ray has to start the job's process on a node.
            cooldown_range: the least and the most seconds for which a failed node is not used.
            nics: a network interface, or several separated by commas; each host uses one of them.
            ssh_identity_file, ignored: have no effect: nothing is started by ssh. They are part of Horovod's interface.
        """
        smallest = min_num_proc if min_np is None else min_np
        largest = max_num_proc if max_np is None else max_np
        if smallest < 1 or (largest is not None and largest < smallest):
            raise InvalidArgumentError(
                f"ElasticRayExecutor: expected 1 <= min_num_proc <= max_num_proc, got {smallest} and {largest} [L93]"
            )
        cooldown = (cooldown_range[0], cooldown_range[1]) if cooldown_range else None
        return ElasticSettings(smallest, largest, reset_limit, elastic_timeout, timeout_s, cooldown, nics or "")

    def start(self) -> None:
        """Check that there is a cluster; NotInitializedError if not."""
        if not ray.is_initialized():
            raise NotInitializedError("ElasticRayExecutor: Ray is not connected; call ray.init() first [L94]")

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call a function on all ranks; nodes and ranks may come and go during the call.

        Args:
            worker_fn: anything that cloudpickle can pickle. It calls `collectives.init`, and a training function under
                `collectives.elastic.run`.
            callbacks: functions that are called here with each value that rank 0 passes to `collectives.ray.log`.

        Returns:
            The results of the ranks of the last generation, by rank, with None for a rank that was lost after others
            had finished; then the results of members that finished before that generation.

        Raises:
            RankFailedError: the job could not go on; has the traceback of the failure.
            BaseException: what a callback raised, or Ctrl-C; the job has been ended.
        """
        self.start()
        settings = self.settings
        environment = {name: text for name, text in os.environ.items() if name.startswith(_OURS)}
        environment |= {"PYTHONPATH": os.pathsep.join(search_path()), "PYTHONUNBUFFERED": "1", **self.variables}
        if settings.nics:
            environment["COLLECTIVES_NETWORK_INTERFACE"] = settings.nics
        rules = Rules(
            smallest=settings.min_num_proc,
            largest=settings.max_num_proc,
            elastic_timeout=settings.elastic_timeout,
            reset_limit=settings.reset_limit,
            cooldown=settings.cooldown_range,
        )
        call = pickled(worker_fn, (), {})
        # As long as the program runs, its node does: Ray would also choose one whose death it has not noticed yet.
        own_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        launcher = ray.remote(_Launcher).options(num_cpus=0, scheduling_strategy=own_node).remote()
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": own_node}) if callbacks else None
        hear = [partial(_unpickled, callback) for callback in callbacks or ()]
        running = None
        try:
            node, process = ray.get(launcher.here.remote())
            running = launcher.run.remote(
                rules, self._discovery, self._slot, call, environment, settings.timeout_s, queue
            )
            while not ray.wait([running], timeout=None if queue is None else LOOK)[0]:
                tell(queue, hear)
            tell(queue, hear)
            results: bytes = ray.get(running)
            return list(importlib.import_module("cloudpickle").loads(results))
        except RayActorError as error:
            raise RankFailedError(
                f"ElasticRayExecutor.run: the process that launches the job has ended: {error} [L14]"
            ) from error
        except BaseException:
            if running is not None and not ray.wait([running], timeout=0)[0]:
                # Not by a method of the launcher: the one that runs has its main thread.
                signal_on(node, process, signal.SIGTERM)
                ray.wait([running], timeout=_END_WITHIN)
            raise
        finally:
            ray.kill(launcher)
            if queue is not None:
                queue.shutdown()


def _unpickled(callback: Callable[[Any], Any], data: bytes) -> None:
    callback(pickle.loads(data))


class _Launcher:
    """The actor in which the job's driver runs: nodes reach it, wherever the program is."""

    def here(self) -> tuple[str, int]:
        """Node and process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(
        self,
        rules: Rules,
        discovery: Callable[[], Any],
        slot: Slot,
        call: bytes,
        environment: Mapping[str, str],
        timeout: float,
        queue: Any,
    ) -> bytes:
        with tempfile.TemporaryDirectory(prefix="collectives-ray-") as folder:
            os.chdir(folder)  # the folder in which ranks start, on all nodes
            config = Config.from_environment(environment)
            remote = Remote(
                timeout=timeout,
                folder=folder,
                key=make_key().hex(),
                call=call,
                slot=slot,
                most=rules.largest,
                queue=queue,
            )
            if queue is not None:
                environment = {**environment, LOG: folder}
            program = [sys.executable, "-m", "collectives.launch.run_function", folder]
            members = RelayedAgents(
                rules,
                partial(remote.look, discovery),
                before_rank.pack(["", str(_WIDTH), "", "", *program]),
                environment,
                config,
                remote,
                event_files=[str(Path(folder, EVENTS))],
            )
            try:
                code = job.run(members, Output(max(rules.largest or 2, 2), verbose=True))
                remote.collect()
                returned = of_elastic_job(Path(folder), code, "ElasticRayExecutor.run")
                data: bytes = importlib.import_module("cloudpickle").dumps(returned)
                return data
            finally:
                os.chdir("/")
                remote.close()
