"""The benchmarks in torch: the models are what they say, the arithmetic of what communication adds, the check, the
clock, the tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import torch_hooks, torch_step  # noqa: E402
from benchmarks.models import resnet50  # noqa: E402
from benchmarks.record import OURS  # noqa: E402
from benchmarks.torch_models import MODELS, Gradients, ResNet50  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_the_real_resnet50_has_the_shapes_that_the_other_benchmarks_use() -> None:
    assert shapes(ResNet50()) == resnet50()
    assert list(shapes(Gradients(resnet50())).values()) == list(resnet50().values())


def test_the_small_model_is_many_tiny_tensors() -> None:
    make, _ = MODELS["mlp"]
    sizes = [parameter.numel() for parameter in make().parameters()]
    assert len(sizes) == 200
    assert max(sizes) == 256


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    model(torch.randn(shape)).backward()
    largest = [float(parameter.grad.abs().max()) for parameter in model.parameters()]
    assert np.isfinite(largest).all()
    assert min(largest) > 1e-6


def test_synthetic_gradients_are_the_input_the_last_layer_first() -> None:
    model = Gradients({"first": (2, 3), "second": (4,)})
    order: list[int] = []
    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(lambda parameter: order.append(parameter.numel()))
    inputs = torch.arange(10.0)
    model(inputs).backward()
    assert torch.equal(torch.cat([weight.grad.reshape(-1) for weight in model.weights]), inputs)
    assert order == [4, 6]


def test_what_is_added_is_counted_round_by_round_and_against_ddp() -> None:
    times = {
        torch_step.ALONE: np.array([10.0, 20.0, 30.0]),
        OURS: np.array([12.0, 22.0, 32.0]),
        "ddp": np.array([15.0, 24.0, 34.0]),
        torch_step.FLOOR: np.array([1.0, 1.0, 1.0]),
    }
    alone, ours, ddp, floor = torch_step.summarize(times, {torch_step.ALONE: None, OURS: 0, "ddp": 3})
    assert (alone["added"], alone["of_ddp"]) == (None, None)
    assert (ours["added"]["median"], ours["of_ddp"], ours["wrong"]) == (2.0, 0.5, 0)
    assert (ddp["added"]["median"], ddp["of_ddp"], ddp["wrong"]) == (4.0, 1.0, 3)
    assert (floor["time"], floor["added"]["median"], floor["of_ddp"], floor["wrong"]) == (None, 1.0, 0.25, None)
    title, *rows = torch_step.table([alone, ours, ddp, floor]).splitlines()
    assert {len(row) for row in rows} == {len(title)}
    assert rows[1].split() == [OURS, "22.000", "17.000", "27.000", "2.000", "2.000", "2.000", "0.50", "0"]
    without = torch_step.summarize({torch_step.ALONE: times[torch_step.ALONE], OURS: times[OURS]}, {OURS: 0})
    assert without[1]["of_ddp"] is None
    noise = torch_step.summarize({**times, "ddp": times[torch_step.ALONE] - 1}, {})
    assert [record["of_ddp"] for record in noise] == [None] * 4


def test_wrong_gradients_are_counted() -> None:
    expected = np.array([[1.0, -2.0], [100.0, 0.0]])
    assert torch_step.differing(expected * (1 + 1e-6), expected) == 0
    assert torch_step.differing(expected + np.array([[0, 0], [0, 1e-2]]), expected) == 1
    assert torch_step.differing(np.full((2, 2), np.nan), expected) == 4
    assert torch_step.differing(np.zeros(2), np.zeros(2)) == 0


def test_hooks_are_clocked_only_while_asked_for() -> None:
    register = torch.Tensor.register_post_accumulate_grad_hook
    weight, seen = torch.ones(3, requires_grad=True), []
    calls: list[float] = []
    with torch_hooks.clocked_hooks(calls):
        weight.register_post_accumulate_grad_hook(lambda parameter: (seen.append(parameter), sleep(0.01)))
    assert torch.Tensor.register_post_accumulate_grad_hook is register
    weight.sum().backward()
    assert seen == [weight]
    assert len(calls) == 1
    assert calls[0] > 0.009


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "flags"), [("torch_step", "--model mlp -n 2 -w 1 --peers memcpy"), ("torch_hooks", "-n 2 -w 1")]
)
def test_one_rank_runs_without_a_launcher(program: str, flags: str, tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    command = [sys.executable, "-m", f"benchmarks.{program}", *flags.split(), "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(written.read_text())
    assert (content["benchmark"], content["ranks"], content["model"]) == (program, 1, "mlp")
    assert not any(record.get("wrong") for record in content["records"])
