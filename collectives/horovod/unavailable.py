"""Horovod's modules without a counterpart: importing one raises a ModuleNotFoundError that names the alternative."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_LAUNCHING = "start the ranks with collectivesrun, or from a program with collectives.launch.run"
_OWN_PARTS = f"there are none of horovodrun's own parts and services: {_LAUNCHING}"
_PARTS = """
    driver gloo_run http js_run mpi_run run_task task task_fn util common.service common.util.codec
    common.util.config_parser common.util.host_hash common.util.hosts common.util.network common.util.safe_shell_exec
    common.util.secret common.util.settings common.util.timeout common.util.tiny_shell_exec
"""
INSTEAD = {
    "horovod.runner.elastic": _OWN_PARTS,
    "horovod.data": "there are no data loaders; use the framework's, with the rank and the size for its sampler",
    "horovod.tensorflow.data": "there is no service for other jobs; shard the Dataset by rank and size, or see "
    "docs/horovod.md",
    "horovod.tensorflow.gradient_aggregation": "there is no such helper; use DistributedOptimizer with "
    "backward_passes_per_step",
    "horovod.tensorflow.gradient_aggregation_eager": "there is no such helper; use DistributedOptimizer with "
    "backward_passes_per_step",
    "horovod._keras.callbacks": "there are no such bases; derive from the callbacks of horovod.keras or "
    "horovod.tensorflow.keras",
    "horovod.mxnet": "there is no adapter for MXNet; collectives.allreduce and the others take its tensors by DLPack",
    "horovod.spark.lightning": "there is no estimator for Lightning; have horovod.spark.run call a function that "
    "trains with Lightning's own Trainer, or give the estimator of horovod.spark.torch the plain module",
    "horovod.spark.tensorflow": "there is no service for other jobs; shard the Dataset by rank and size",
    **{f"horovod.runner.{name}": _OWN_PARTS for name in _PARTS.split()},
}
"""The alternative to each module; submodules are unavailable as well."""


class Finder:
    """Finds these modules, after all others and only in our package ``horovod``; loading one raises.

    They are found so that the error can name the alternative.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an unavailable module; see `importlib.abc.MetaPathFinder`."""
        if name not in INSTEAD or self._folder not in getattr(sys.modules.get("horovod"), "__path__", ()):
            return None
        return ModuleSpec(name, _Loader())


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        raise ModuleNotFoundError(
            f"{name} is not part of collectives, which is installed in Horovod's place: {INSTEAD[name]} [F115]",
            name=name,
        )
