"""The examples, as a user starts them: on two ranks, with less to do, judged by what they print and write; and by
Horovod's names.

Each ends with every rank's parameters compared bit by bit, which the example does by itself; those of TensorFlow,
Keras, JAX and clusters come to the same on one rank with the same batch. Starting a framework takes longer than most,
so that those of one framework share a job (`tests.support.launching.example_ranks`).
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching.adapter_runs import XLA_FLAGS
from tests.support.launching.mpirun import ROOT, python_for, run_command

pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
AGREED = "All ranks hold the same parameters"
"""The last words of an example."""


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
    jobs: Sequence[Sequence[str]], folder: Path, launcher: list[str], timeout: float, **settings: str
) -> list[str]:
    """Run commands on two ranks, each followed by another one alone, if there is one; returns what each printed."""
    listed = json.dumps([[command.split() for command in job] for job in jobs])
    python = str(python_for("openmpi"))
    command = [*launcher, python, "-m", "tests.support.launching.example_ranks", str(folder), listed]
    # What Keras and TensorFlow would import, and no example uses.
    hidden = " ".join({"jax", "matplotlib", "pandas"} - {settings.get("KERAS_BACKEND")})
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "COLLECTIVES_TEST_HIDDEN": hidden}
    result = run_command(command, timeout=timeout, env={**quiet, **settings})
    outputs = re.split(r"^### .*\n", result.output, flags=re.MULTILINE)[1:]
    assert len(outputs) == sum(map(len, jobs)), str(result)
    assert all(output.count(AGREED) == 1 for output in outputs), str(result)
    return [output.partition(AGREED)[0] for output in outputs]


def plainly() -> list[str]:
    """As on a cluster."""
    return [str(python_for("openmpi").parent / "mpirun"), "-n", "2"]


def by_our_launcher(*options: str) -> list[str]:
    return [str(python_for("openmpi")), "-m", "collectives.launch", "--no-tag", "-np", "2", *options]


# ---- PyTorch

BENCHMARK = "pytorch/pytorch_synthetic_benchmark.py"
BENCHMARKED = "--batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"
AS_THEY_ARE = {
    "mnist": ("pytorch/pytorch_mnist.py", "--epochs 10 --checkpoint-format {folder}/checkpoint-{{epoch}}.pth.tar"),
    "benchmark": (BENCHMARK, BENCHMARKED),
    "gan": ("pytorch/pytorch_gan.py", "--epochs 4 --log-interval 2"),
    "transformer": (
        "pytorch/pytorch_transformer.py",
        "--steps 40 --log-interval 20 --width 64 --batch-size 8",
    ),
    "adasum": ("adasum/adasum_small_model.py", "--steps 50"),
}
"""Examples and their flags, which may name the folder of the tests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """What each of `AS_THEY_ARE` printed, by name."""
    needs("torch")
    commands = [
        [f"{as_it_is(script)} --no-cuda {flags.format(folder=folder)}"] for script, flags in AS_THEY_ARE.values()
    ]
    return dict(zip(AS_THEY_ARE, together(commands, folder, by_our_launcher(), 200), strict=True))


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers that the pattern finds, in the order in which they were printed."""
    return [float(found) for found in re.findall(pattern, output)]


def test_mnist_learns(printed: dict[str, str], folder: Path) -> None:
    assert numbers(r"Accuracy: ([\d.]+)%", printed["mnist"])[-1] > 95
    assert "Resuming" not in printed["mnist"]
    assert {path.name for path in folder.glob("checkpoint-*")} == {
        f"checkpoint-{epoch}.pth.tar" for epoch in range(1, 11)
    }


def test_mnist_in_mixed_precision_on_ranks_that_it_starts_by_itself() -> None:
    needs("torch")
    flags = "--num-proc 2 --no-cuda --epochs 3 --use-mixed-precision --fp16-allreduce --gradient-predivide-factor 2"
    result = run_command(
        [str(python_for("openmpi")), str(EXAMPLES / "pytorch/pytorch_mnist.py"), *flags.split()], timeout=120
    )
    assert result.output.count(AGREED) == 1, str(result)
    losses = numbers(r"Average loss: ([\d.]+)", result.output)
    assert len(losses) == 3 and losses[-1] < losses[0] / 2


def test_synthetic_benchmark_prints_what_horovods_does(printed: dict[str, str]) -> None:
    assert_horovods_lines(printed["benchmark"], 1019384)


@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnet152", 60_192_808)]
)
def test_the_benchmarks_models_are_those_of_the_paper(model: str, parameters: int) -> None:
    benchmark = runpy.run_path(str(EXAMPLES / "pytorch/pytorch_synthetic_benchmark.py"))
    blocks, width, pixels = benchmark["MODELS"][model]
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        network = benchmark["resnet"](blocks, width, torch.nn.BatchNorm2d)
        assert sum(parameter.numel() for parameter in network.parameters()) == parameters
        stem, last = network[:4], network[:-3]
        pictures = torch.empty(1, 3, pixels, pixels)
        assert stem(pictures).shape == (1, 64, 56, 56) and last(pictures).shape == (1, 2048, 7, 7)


def test_gan_comes_nearer_to_the_digits(printed: dict[str, str]) -> None:
    distances = numbers(r"Distance: ([\d.]+)", printed["gan"])
    assert len(distances) == 3 and distances[-1] < distances[0] / 2


def test_transformer_learns(printed: dict[str, str]) -> None:
    output = printed["transformer"]
    losses = numbers(r"Test loss: ([\d.]+)", output)
    assert len(losses) == 3 and losses[0] > 4.5 and losses[-1] < 3.2
    assert len(output.partition("It writes: ")[2]) == 201  # and the end of the line


def test_adasum_gets_further_than_averaging_in_as_many_steps(printed: dict[str, str]) -> None:
    average, adasum = numbers(r"(?:Average|Adasum): loss after 50 steps ([\d.e-]+)", printed["adasum"])
    assert 0 <= adasum < average / 2 < 100


VARIANTS = [  # an example, its flags, what it then prints
    ("pytorch/pytorch_mnist.py", "--epochs 2 --use-adasum", "Train Epoch: 2 [0/719 (0%)]"),
    (BENCHMARK, "--batch-size 2 --num-warmup-batches 1 --num-iters 1 --use-adasum", "Total img/sec on 2 CPU(s): "),
    (BENCHMARK, "--batch-size 2 --num-warmup-batches 1 --num-iters 1 --fp16-allreduce --sync-batch-norm", "Iter #0: "),
    (
        "pytorch/pytorch_transformer.py",
        "--steps 6 --batches-per-allreduce 2 --use-mixed-precision",
        "Step: 6\tTest loss: ",
    ),
    ("pytorch/pytorch_transformer.py", "--steps 3 --compile aot_eager", "Step: 3\tTest loss: "),
]


def test_as_horovod_with_nothing_changed_but_the_import(printed: dict[str, str], folder: Path, tmp_path: Path) -> None:
    """With flags that the other tests leave out. The first resumes a training, and ends as if it had never stopped."""
    shutil.copy(folder / "checkpoint-9.pth.tar", tmp_path)
    resuming = f"--epochs 10 --checkpoint-format {tmp_path}/checkpoint-{{epoch}}.pth.tar"
    examples = [(AS_THEY_ARE["mnist"][0], resuming), *((name, flags) for name, flags, _ in VARIANTS)]
    commands = [[f"{for_horovod(name, tmp_path)} --no-cuda {flags}"] for name, flags in examples]
    resumed, *outputs = together(commands, tmp_path, by_our_launcher("--as-horovod"), 200)
    for output, (_, _, text) in zip(outputs, VARIANTS, strict=True):
        assert text in output, output

    assert resumed.count("Resuming after epoch 9 from") == 1
    assert set(numbers(r"Train Epoch: (\d+)", resumed)) == {10}
    torch = importlib.import_module("torch")
    ends = [torch.load(where / "checkpoint-10.pth.tar", weights_only=True) for where in (folder, tmp_path)]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


# ---- TensorFlow, Keras, JAX and clusters

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
TF_BENCHMARK = "tensorflow2/tensorflow2_synthetic_benchmark.py"
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


def assert_alike(jobs: Sequence[Job], folder: Path, outputs: Sequence[str]) -> None:
    """Two ranks have come to the same parameters, bit by bit, and one to the same, to rounding, and they have learned.

    After few steps, and not element by element: the longer the way, the larger what becomes of rounding here and there.
    """
    for job, printed in zip(jobs, zip(outputs[::2], outputs[1::2], strict=True), strict=True):
        name = Path(job[0]).stem
        first, second, alone = (np.load(folder / f"{name}-{end}.npz") for end in ("2-0", "2-1", "1-0"))
        for array in first.files:
            np.testing.assert_array_equal(first[array], second[array])
            assert np.linalg.norm(first[array] - alone[array]) < 1e-4 * np.linalg.norm(alone[array]), (name, array)
        found = [float(re.findall(r"ccuracy: ([\d.]+)%", output)[-1]) for output in printed]
        assert found[0] == pytest.approx(found[1], abs=0.6) and found[0] > 15, found


@pytest.mark.timeout(300)
def test_tensorflow(tmp_path: Path) -> None:
    """On two ranks by Horovod's names. TensorFlow 1's way comes last, because it changes TensorFlow for all that comes
    after."""
    needs("tensorflow")
    jobs = [TF2, TF_KERAS, KERAS, TF1]
    commands = [[f"{for_horovod(name, tmp_path)} {flags}", f"{as_it_is(name)} {alone}"] for name, flags, alone in jobs]
    commands.insert(0, [f"{as_it_is(TF_BENCHMARK)} {BENCHMARKED}"])
    benchmark, *outputs = together(commands, tmp_path, by_our_launcher("--as-horovod"), 280)
    assert_alike(jobs, tmp_path, outputs)
    assert_horovods_lines(benchmark, 227160)
    assert len(re.findall(r"^Epoch \d: [\d.]+ images/s$", outputs[2 * jobs.index(KERAS)], re.MULTILINE)) == 2


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
    for output in outputs:
        assert float(re.findall(r"ccuracy: ([\d.]+)%", output)[-1]) > 80, outputs
    assert "Epoch 2: finished gradual learning rate warmup to 0.002" in outputs[1]
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
    assert_alike(jobs, tmp_path, outputs)
