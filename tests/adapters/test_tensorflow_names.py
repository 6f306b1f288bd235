"""docs/horovod.md and the adapters agree: what it lists for TensorFlow and Keras is there, with these arguments in this
order."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "horovod.md"
SECTIONS = {
    "collectives.tensorflow": "`horovod.tensorflow`\n",
    "collectives.tensorflow.keras": "`horovod.tensorflow.keras` and",
}


def rows(title: str) -> Iterator[tuple[str, list[str], str]]:
    """Each name of a section's tables, the arguments that are listed for it, and what is said of it."""
    section = DOCS.read_text().partition(f"\n## {title}")[2].partition("\n## ")[0]
    for names, arguments, here in re.findall(
        r"^\| (`[^|]*) \| ([^|]*)\| (same|better|differs|not there) \|", section, re.MULTILINE
    ):
        for name in re.findall(r"`([\w.]+)`", names) if " (in " not in names else ():
            yield name, re.findall(r"`([^`]+)`", arguments), here


def parameters(function: Any) -> list[str]:
    """As the tables have them, without those of our own, which are given by keyword."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        found.append(
            (
                str(parameter).partition(":")[0] if parameter.kind is parameter.VAR_KEYWORD else parameter.name,
                parameter.default,
            )
        )
    return [name if default is inspect.Parameter.empty else f"{name}={default!r}" for name, default in found]


@pytest.mark.parametrize("module", SECTIONS)
def test_what_is_listed_is_there(module: str, hvd: Any) -> None:
    adapter = importlib.import_module(module)
    wrong = {}
    count = 0
    for name, arguments, here in rows(SECTIONS[module]):
        count += 1
        if here == "not there":
            assert not hasattr(adapter, name), name
            continue
        found = attrgetter(name)(adapter)
        listed = [
            f"{argument}={eval(default, vars(adapter))!r}" if default else argument
            for argument, _, default in (each.partition("=") for each in arguments)
        ]
        if listed and here != "differs" and parameters(found)[: len(listed)] != listed:
            wrong[name] = (listed, parameters(found))
    assert not wrong and count > 30


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow.keras", "keras"])
def test_horovods_modules_have_the_same(name: str, hvd: Any) -> None:
    importlib.import_module("collectives.horovod")
    ours, theirs = importlib.import_module(f"collectives.{name}"), importlib.import_module(f"horovod.{name}")
    own = {"callbacks", "elastic", "add_process_set"}  # this one refuses duplicates, as Horovod's does
    assert {each for each in ours.__all__ if getattr(theirs, each) is not getattr(ours, each)} <= own
    if name == "tensorflow":
        others = ["mpi_ops", "functions", "sync_batch_norm", "compression", "util", "elastic"]
    else:
        others = ["callbacks", "elastic"]
        assert theirs.callbacks.MetricAverageCallback is ours.callbacks.MetricAverageCallback
    modules = [importlib.import_module(f"horovod.{name}.{other}") for other in others]
    wanted = {
        "mpi_ops": "allreduce alltoall size_op rank_op process_set_included_op HorovodInternalError Average init "
        "_basics _allreduce",
        "functions": "broadcast_variables broadcast_object broadcast_object_fn allgather_object",
        "sync_batch_norm": "SyncBatchNormalization",
        "util": "_executing_eagerly _make_subgraph _cache vars_to_refs refs_to_vars",
        "compression": "Compression Compressor NoneCompressor FP16Compressor",
        "callbacks": "BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback "
        "BestModelCheckpoint",
        "elastic": "run TensorFlowState TensorFlowKerasState"
        if name == "tensorflow"
        else "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback",
    }
    if name == "tensorflow":
        helpers = ["check_extension", "split_list", "handle_average_backwards_compatibility", *wanted["util"].split()]
        assert [each for each in helpers if not hasattr(theirs, each)] == []
    missing = [
        each
        for other, module in zip(others, modules, strict=True)
        for each in wanted[other].split()
        if not hasattr(module, each)
    ]
    assert not missing


def test_what_horovods_operations_are_made_of(hvd: Any) -> None:
    importlib.import_module("collectives.horovod")
    tf, ops, util = (
        importlib.import_module(name)
        for name in ("tensorflow", "horovod.tensorflow.mpi_ops", "horovod.tensorflow.util")
    )
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) / 2
    ones = tf.ones(2 * size) * (rank + 1)
    assert ops._allreduce(ones, name="one").numpy().tolist() == [total] * 2 * size
    assert [each.numpy().tolist() for each in ops._grouped_allreduce([ones, ones])] == [[total] * 2 * size] * 2
    assert ops._reducescatter(ones).numpy().tolist() == [total] * 2
    assert [each.numpy().tolist() for each in ops._grouped_reducescatter([ones])] == [[total] * 2]
    assert (
        ops._basics._get_process_set_ids_and_ranks()[0] == list(range(size))
        and ops._basics._process_set_rank(0) == rank
    )
    if size > 1:
        communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
        assert ops._basics._comm_process_set_id(communicator) == 0
    variable = tf.Variable(1.0)
    back = util.refs_to_vars(util.vars_to_refs([variable, [variable]]))
    assert back[0] is variable and back[1][0] is variable
    made = util._cache(lambda number: [number])
    assert made(1) is made(1) and made(1) is not made(2) and util._executing_eagerly()


def test_what_horovods_keras_interfaces_are_made_of(hvd: Any, tmp_path: Path) -> None:
    importlib.import_module("collectives.horovod")
    parts, keras = importlib.import_module("horovod._keras"), importlib.import_module("keras")
    none = hvd.Compression.none
    ours = importlib.import_module("collectives.keras")

    def wrap(kind: type) -> Any:
        return lambda **config: parts.create_distributed_optimizer(
            keras, kind(**config), None, "", "", none, False, 1.0, hvd.Average
        )

    optimizer = wrap(keras.optimizers.SGD)(learning_rate=0.5)
    assert isinstance(optimizer, keras.optimizers.SGD) and optimizer.learning_rate.numpy() == 0.5
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        ours.DistributedOptimizer(optimizer)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.save(tmp_path / "model.keras")
    again = parts.load_model(keras, wrap, tmp_path / "model.keras", [keras.optimizers.SGD], None)
    assert isinstance(again.optimizer, keras.optimizers.SGD) and again.optimizer.learning_rate.numpy() == 0.5
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        ours.DistributedOptimizer(again.optimizer)
    total = hvd.size() * (hvd.size() + 1) / 2
    assert float(parts.allreduce(None, float(hvd.rank() + 1), "number", None, 1.0, 1.0, hvd.Sum, none)) == total
    assert [float(each) for each in parts.broadcast(None, [1.0 + hvd.rank()], 0, "first")] == [1.0]
    assert len(parts.allgather(None, [1.0], "all")) == hvd.size()


@pytest.mark.parametrize("name", ["tensorflow.data"])
def test_what_is_not_here_says_so(name: str, hvd: Any) -> None:
    importlib.import_module("collectives.horovod")
    with pytest.raises(ModuleNotFoundError, match=rf"horovod\.{name} is not part of collectives, .* there (are|is) no"):
        importlib.import_module(f"horovod.{name}")
