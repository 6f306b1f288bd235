"""The examples, as a user starts them: on two ranks, with less to do, judged by what they print and write.

Each ends with every rank's parameters compared bit by bit, which the example does by itself. Starting PyTorch takes
longer than most of them, so that they share jobs.
"""

from __future__ import annotations

import re
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes.test_examples_frameworks import assert_horovods_lines
from tests.support.launching.mpirun import ROOT, python_for, run_command

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
AGREED = "All ranks hold the same parameters"
"""The last words of an example."""
BENCHMARK = "pytorch/pytorch_synthetic_benchmark.py"
AS_THEY_ARE = {
    "mnist": ("pytorch/pytorch_mnist.py", "--epochs 10 --checkpoint-format {folder}/checkpoint-{{epoch}}.pth.tar"),
    "benchmark": (BENCHMARK, "--batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"),
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
    commands = [(str(EXAMPLES / script), flags.format(folder=folder)) for script, flags in AS_THEY_ARE.values()]
    return dict(zip(AS_THEY_ARE, in_one_job(commands, folder / "as-they-are.py"), strict=True))


def in_one_job(commands: Sequence[tuple[str, str]], program: Path, *options: str) -> list[str]:
    """Run scripts with their flags, one after the other on the same two ranks, on the CPU; returns what each printed.

    Args:
        program: where the program is written that runs them.
        options: of ``collectivesrun``.
    """
    lines = ["import runpy, sys"]
    for script, flags in commands:
        lines += [
            f"sys.argv = {[script, '--no-cuda', *flags.split()]!r}",
            f"runpy.run_path({script!r}, run_name='__main__')",
        ]
    program.write_text("\n".join(lines))
    python = str(python_for("openmpi"))
    command = [python, "-m", "collectives.launch", "--no-tag", "-np", "2", *options, python, str(program)]
    result = run_command(command, timeout=200)
    *outputs, rest = result.output.split(AGREED)
    assert len(outputs) == len(commands) and not rest.strip(), str(result)
    return outputs


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
    commands = []
    for name, flags in [(AS_THEY_ARE["mnist"][0], resuming), *((name, flags) for name, flags, _ in VARIANTS)]:
        script = tmp_path / Path(name).name
        source = (EXAMPLES / name).read_text()
        assert source.count("import collectives.torch as hvd") == 1
        script.write_text(source.replace("import collectives.torch as hvd", "import horovod.torch as hvd"))
        commands.append((str(script), flags))
    resumed, *outputs = in_one_job(commands, tmp_path / "all.py", "--as-horovod")
    for output, (_, _, text) in zip(outputs, VARIANTS, strict=True):
        assert text in output, output

    assert resumed.count("Resuming after epoch 9 from") == 1
    assert set(numbers(r"Train Epoch: (\d+)", resumed)) == {10}
    ends = [torch.load(where / "checkpoint-10.pth.tar", weights_only=True) for where in (folder, tmp_path)]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
