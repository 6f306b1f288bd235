"""Programs written for Horovod, unchanged, and functions called on several ranks: real jobs, with Open MPI and
MPICH."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from collectives.horovod import FOLDER
from tests.support.launching.mpirun import (
    IMPLEMENTATIONS,
    ROOT,
    UNUSED_BY_TENSORFLOW,
    Result,
    python_for,
    run_command,
    run_ranks,
)

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
BOTH = pytest.mark.parametrize("mpi", IMPLEMENTATIONS)

# A rank prints one text at a time: what is printed in pieces may end up between those of another.
COMMON = """
import os
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError
import numpy as np, collectives

hvd = HorovodBasics(__file__, "mpi_lib")
hvd.init(comm=None, process_sets="dynamic")
names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
told = [os.environ.get(f"HOROVOD_{name.upper()}") for name in names]
own = [str(getattr(hvd, name)()) for name in names]
assert hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported() and not hvd.gloo_enabled()
try:
    collectives.allreduce(np.ones(hvd.rank() + 1), name="x")
except collectives.MismatchError as error:
    assert not isinstance(error, HorovodInternalError)
    print(f"rank {hvd.rank()} caught {type(error).__name__}, told {told == own or told}")
"""
TRAINING = """
import horovod
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async_, synchronize, Sum

def train(steps):
    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=2.0,
    )
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.randn(16, 4)
        torch.nn.functional.mse_loss(model(data), data.sum(1, keepdim=True)).backward()
        optimizer.step()
    moved = any(not torch.equal(*pair) for pair in zip(start, model.parameters()))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    seen = hvd.allgather(weights[None], name="weights")
    total = synchronize(allreduce_async_(torch.ones(2), name="ones", op=Sum))
    embedding = torch.ones(1, requires_grad=True)
    hvd.allgather(embedding).sum().backward()
    assert embedding.grad.item() == 1.0
    mean = hvd.allreduce(torch.tensor(float(hvd.rank())), name="mean").item()
    return moved, bool((seen == seen[0]).all()), mean, total.tolist()
"""
RESUMING = """
import os
import keras
import numpy as np
import horovod.keras as hvd

def train(checkpoint_format, epochs):
    resume_from_epoch = 0
    for try_epoch in range(epochs, 0, -1):
        if hvd.rank() == 0 and os.path.exists(checkpoint_format.format(epoch=try_epoch)):
            resume_from_epoch = try_epoch
            break
    resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name='resume_from_epoch'))
    initial_lr = 0.01 * hvd.size()
    if resume_from_epoch > 0 and hvd.rank() == 0:
        model = hvd.load_model(checkpoint_format.format(epoch=resume_from_epoch), compression=hvd.Compression.fp16)
    else:
        model = keras.Sequential([keras.layers.Dense(16, activation='relu'), keras.layers.Dense(1)])
        opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=0.9)
        opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
        model.compile(loss='mse', optimizer=opt, metrics=['mae'])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=2, verbose=hvd.rank() == 0),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=2),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))
    x = np.random.default_rng(hvd.rank()).standard_normal((32, 4)).astype('float32')
    y = x.sum(axis=1, keepdims=True)
    model.fit(x, y, batch_size=8, callbacks=callbacks, initial_epoch=resume_from_epoch, epochs=epochs, verbose=0)
    hvd.check_consistency([value.numpy() for value in [*model.variables, *model.optimizer.variables]])
    rate, steps = float(model.optimizer.learning_rate), int(model.optimizer.iterations)
    return resume_from_epoch, steps, round(rate, 6), bool(hvd.allreduce(model.evaluate(x, y, verbose=0))[0] > 0)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def as_horovod(mpi: str, program: str, n: int = 2) -> Result:
    python = str(python_for(mpi))
    command = [python, "-m", "collectives.launch", "--as-horovod", "-np", str(n), python, program]
    return run_command(command, timeout=120, env=UNUSED_BY_TENSORFLOW)


def test_a_program_is_given_collectives(tmp_path: Path) -> None:
    output = as_horovod("mpich", script(tmp_path, COMMON), n=3).output
    assert all(f"rank {rank} caught MismatchError, told True" in output for rank in range(3)), output


def test_under_plain_mpirun_a_path_does_it() -> None:
    result = run_ranks(2, COMMON, env={"PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])})
    assert [
        f"rank {rank} caught MismatchError, told {[None] * 6}" in text for rank, text in enumerate(result.ranks)
    ] == [True, True]


@needs_torch
def test_a_training_program_runs_as_it_is(tmp_path: Path) -> None:
    program = script(tmp_path, f"{TRAINING}\nif __name__ == '__main__':\n    print(str(train(3)))")
    assert as_horovod("openmpi", program).output.count("(True, True, 0.5, [2.0, 2.0])") == 2


@pytest.mark.skipif(find_spec("keras") is None or find_spec("torch") is None, reason="needs Keras and PyTorch")
def test_a_keras_program_goes_on_from_the_checkpoint_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    path = str(tmp_path / "checkpoint-{epoch}.keras")
    program = script(tmp_path, f"{RESUMING}\nhvd.init()\nprint(str([train({path!r}, 2), train({path!r}, 4)]))")
    output = as_horovod("openmpi", program).output
    # Four steps an epoch. Two epochs warm up, the third has the full rate, and each after it a tenth of the one before.
    assert output.count("[(0, 8, 0.02, True), (2, 16, 0.002, True)]") == 2, output
    assert output.count("finished gradual learning rate warmup to 0.02") == 1


def test_a_program_may_start_its_ranks_itself(tmp_path: Path) -> None:
    program = """
import horovod

def train(number):
    from horovod.common.basics import HorovodBasics
    hvd = HorovodBasics(__file__, "mpi_lib")
    hvd.init()
    return hvd.rank(), hvd.allreduce(number, op=hvd.Sum)

if __name__ == "__main__":
    print("found", horovod.run(train, args=(3.0,), np=2, hosts="localhost:2", use_mpi=True, verbose=2))
"""
    path = os.pathsep.join([str(ROOT / "compat"), str(ROOT)])
    result = run_command([str(python_for("openmpi")), script(tmp_path, program)], timeout=60, env={"PYTHONPATH": path})
    assert "found [(0, 6.0), (1, 6.0)]" in result.output


def test_horovodrun_as_a_module(tmp_path: Path) -> None:
    python = str(python_for("mpich"))
    program = "import collectives as hvd\nhvd.init()\nprint(f'sum {hvd.allreduce(1.0, op=hvd.Sum)}')"
    words = ["-m", "horovod.runner.launch", "-np", "2", "-H", "localhost:2"]
    command = [python, *words, python, script(tmp_path, program)]
    result = run_command(command, timeout=60, env={"PYTHONPATH": os.pathsep.join([str(ROOT / "compat"), str(ROOT)])})
    assert result.output.count("sum 2.0") == 2


@BOTH
def test_mpi_may_be_left_to_init(mpi: str) -> None:
    program = """
import mpi4py
mpi4py.rc.initialize = False
import collectives.horovod as hvd
hvd.init()
assert hvd.mpi_threads_supported()
from mpi4py import MPI
print("sum", hvd.allreduce(1.0, op=hvd.Sum), MPI.COMM_WORLD.allreduce(1))
"""
    assert all("sum 2.0 2" in text for text in run_ranks(2, program, mpi=mpi).ranks)


def test_a_lone_rank_starts_mpi_when_it_is_asked_about_it() -> None:
    program = """
import collectives.horovod as hvd
hvd.init()
assert not hvd.mpi_enabled() and hvd.mpi_threads_supported()
from mpi4py import MPI
print("size", MPI.COMM_WORLD.Get_size(), hvd.size())
"""
    result = run_command([str(python_for("openmpi")), "-c", program], timeout=60)
    assert "size 1 1" in result.output


CALLER = """
import helper
from collectives.launch import run

def function(number, *, factor=1):
    import os, sys, time
    import collectives as hvd
    hvd.init()
    {body}
    return hvd.rank(), float(hvd.allreduce(float(number), op=hvd.Sum)) * factor, helper.value, lambda: number

if __name__ == "__main__":
    try:
        found = run(function, (3,), {{"factor": 2}}, np=2, {more})
        print("found", [(rank, total, value, again()) for rank, total, value, again in found])
    except Exception as error:
        print(f"raised {{type(error).__name__}}: {{error}}")
"""


def call(mpi: str, folder: Path, body: str = "pass", more: str = "") -> Result:
    (folder / "helper.py").write_text("value = 'of a module'")
    return run_command([str(python_for(mpi)), script(folder, CALLER.format(body=body, more=more))], timeout=60)


def test_a_function_returns_by_rank(tmp_path: Path) -> None:
    found = [(rank, 12.0, "of a module", 3) for rank in range(2)]
    assert f"found {found}" in call("mpich", tmp_path).output


@pytest.mark.parametrize(
    ("mpi", "body", "words"),
    [
        ("openmpi", "if hvd.rank() == 1: raise ValueError('no data')", ["rank 1 on", "in function", "ValueError: no"]),
        ("mpich", "if hvd.rank() == 1: sys.exit(3)", ["run: rank 1 on", "SystemExit: 3"]),
        ("mpich", "os._exit(0)", ["run: rank 0 ended without a result"]),
        ("mpich", "return __import__('threading').Lock()", ["run: rank", "TypeError", "pickle"]),
    ],
)
def test_a_rank_that_fails_is_raised(mpi: str, body: str, words: list[str], tmp_path: Path) -> None:
    raised = call(mpi, tmp_path, body).output.rpartition("raised RankFailedError: ")[2]
    assert raised and all(word in raised for word in words), raised


def test_a_killed_rank_is_raised(tmp_path: Path) -> None:
    output = call("openmpi", tmp_path, "if hvd.rank() == 1: os.kill(os.getpid(), 9)").output
    assert "raised RankFailedError: run: " in output and "rank 1 on" in output and "SIGKILL" in output


def test_a_function_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    output = call("openmpi", tmp_path, "time.sleep(300)", "timeout=4.0").output
    assert "raised CollectiveTimeoutError: run: the job did not finish within 4 s" in output
