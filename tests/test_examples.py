"""The examples, as a user starts them: on two ranks, with less to do, judged by what they print and write.

Each run ends with every rank's parameters compared bit by bit, which the example does by itself.
"""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest

from tests.mpirun import ROOT, Result, python_for, run_command

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
AGREED = "All ranks hold the same parameters"


def launch(*arguments: object, options: tuple[str, ...] = (), timeout: float = 120) -> Result:
    """Run a script with its flags on two ranks."""
    python = str(python_for("openmpi"))
    command = [python, "-m", "collectives.launch", "--no-tag", "-np", "2", *options, python, *map(str, arguments)]
    return run_command(command, timeout=timeout)


def example(name: str, flags: str, *more: object) -> str:
    """Run an example on the CPU; returns what it printed."""
    result = launch(EXAMPLES / name, "--no-cuda", *flags.split(), *more)
    assert result.output.count(AGREED) == 1, str(result)
    return result.output


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers that the pattern finds, in the order in which they were printed."""
    return [float(found) for found in re.findall(pattern, output)]


def test_mnist_learns_and_resumes_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    output = example(
        "pytorch/pytorch_mnist.py", "--epochs 10", "--checkpoint-format", first / "checkpoint-{epoch}.pth.tar"
    )
    assert numbers(r"Accuracy: ([\d.]+)%", output)[-1] > 95
    assert "Resuming" not in output
    assert sorted(path.name for path in first.iterdir()) == sorted(
        f"checkpoint-{epoch}.pth.tar" for epoch in range(1, 11)
    )

    shutil.copy(first / "checkpoint-9.pth.tar", second)
    resumed = example(
        "pytorch/pytorch_mnist.py", "--epochs 10", "--checkpoint-format", second / "checkpoint-{epoch}.pth.tar"
    )
    assert resumed.count("Resuming after epoch 9 from") == 1
    assert set(numbers(r"Train Epoch: (\d+)", resumed)) == {10}
    ends = [torch.load(folder / "checkpoint-10.pth.tar", weights_only=True) for folder in (first, second)]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_mnist_in_mixed_precision_on_ranks_that_it_starts_by_itself() -> None:
    flags = "--num-proc 2 --no-cuda --epochs 3 --use-mixed-precision --fp16-allreduce --gradient-predivide-factor 2"
    result = run_command(
        [str(python_for("openmpi")), str(EXAMPLES / "pytorch/pytorch_mnist.py"), *flags.split()], timeout=120
    )
    assert result.output.count(AGREED) == 1, str(result)
    losses = numbers(r"Average loss: ([\d.]+)", result.output)
    assert len(losses) == 3 and losses[-1] < losses[0] / 2


def test_synthetic_benchmark_prints_what_horovods_does() -> None:
    flags = "--batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"
    output = example("pytorch/pytorch_synthetic_benchmark.py", flags)
    head = [
        "Model: small",
        "Parameters: 1019384",
        "Batch size: 4",
        "Number of CPUs: 2",
        "Running warmup...",
        "Running benchmark...",
    ]
    assert "\n".join(head) in output
    assert re.findall(r"^Iter #(\d): [\d.]+ img/sec per CPU$", output, re.MULTILINE) == ["0", "1", "2"]
    each = re.search(r"^Img/sec per CPU: ([\d.]+) \+-([\d.]+)$", output, re.MULTILINE)
    total = re.search(r"^Total img/sec on 2 CPU\(s\): ([\d.]+) \+-([\d.]+)$", output, re.MULTILINE)
    assert each and total
    # Each is rounded to a tenth after it was multiplied.
    assert [float(found) for found in total.groups()] == pytest.approx(
        [2 * float(found) for found in each.groups()], abs=0.16
    )


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


def test_gan_comes_nearer_to_the_digits() -> None:
    output = example("pytorch/pytorch_gan.py", "--epochs 4 --log-interval 2")
    distances = numbers(r"Distance: ([\d.]+)", output)
    assert len(distances) == 3 and distances[-1] < distances[0] / 2


def test_transformer_learns() -> None:
    output = example("pytorch/pytorch_transformer.py", "--steps 40 --log-interval 20 --width 64 --batch-size 8")
    losses = numbers(r"Test loss: ([\d.]+)", output)
    assert len(losses) == 3 and losses[0] > 4.5 and losses[-1] < 3.2
    assert len(output.partition("It writes: ")[2].partition(AGREED)[0]) == 201  # and the end of the line


def test_adasum_gets_further_than_averaging_in_as_many_steps() -> None:
    output = example("adasum/adasum_small_model.py", "--steps 50")
    average, adasum = numbers(r"(?:Average|Adasum): loss after 50 steps ([\d.e-]+)", output)
    assert 0 <= adasum < average / 2 < 100


BENCHMARK = "pytorch/pytorch_synthetic_benchmark.py"
VARIANTS = [  # an example, its flags, what it then prints
    ("pytorch/pytorch_mnist.py", "--epochs 2 --use-adasum", "Train Epoch: 2 [0/719 (0%)]"),
    (BENCHMARK, "--batch-size 2 --num-warmup-batches 1 --num-iters 1 --use-adasum", "Total img/sec on 2 CPU(s): "),
    (BENCHMARK, "--batch-size 2 --num-warmup-batches 1 --num-iters 1 --fp16-allreduce --sync-batch-norm", "Iter #0: "),
    ("pytorch/pytorch_gan.py", "--epochs 1 --fp16-allreduce", "Train Epoch: 1\tDistance: "),
    (
        "pytorch/pytorch_transformer.py",
        "--steps 6 --batches-per-allreduce 2 --use-mixed-precision",
        "Step: 6\tTest loss: ",
    ),
    ("pytorch/pytorch_transformer.py", "--steps 3 --compile aot_eager", "Step: 3\tTest loss: "),
    ("adasum/adasum_small_model.py", "--mode cubic --op Adasum", "Adasum: loss after 50 steps "),
]


def test_as_horovod_with_nothing_changed_but_the_import(tmp_path: Path) -> None:
    """One job runs them all, one after the other, with flags that the other tests leave out."""
    lines = ["import runpy, sys"]
    for name, flags, _ in VARIANTS:
        script = tmp_path / Path(name).name
        source = (EXAMPLES / name).read_text()
        assert source.count("import collectives.torch as hvd") == 1
        script.write_text(source.replace("import collectives.torch as hvd", "import horovod.torch as hvd"))
        lines += [
            f"sys.argv = {[str(script), '--no-cuda', *flags.split()]!r}",
            f"runpy.run_path({str(script)!r}, run_name='__main__')",
        ]
    program = tmp_path / "all.py"
    program.write_text("\n".join(lines))

    result = launch(program, options=("--as-horovod",), timeout=180)
    outputs = result.output.split(AGREED)[:-1]
    assert len(outputs) == len(VARIANTS), str(result)
    for output, (_, _, printed) in zip(outputs, VARIANTS, strict=True):
        assert printed in output, str(result)
