"""Several `DistributedOptimizer` at once: of models in threads of their own, and of the same parameters."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from collectives.torch import backward_reducer
from collectives.torch.buckets import SMALL


def model(*names: str) -> Any:
    """A tiny, a packed and a large parameter of zeros under each name."""
    sizes = {"tiny": 3, "packed": 5000, "large": SMALL}
    return torch.nn.ModuleDict(
        {
            name: torch.nn.ParameterDict({kind: torch.nn.Parameter(torch.zeros(size)) for kind, size in sizes.items()})
            for name in names
        }
    )


def loss(trained: Any, factor: float) -> Any:
    return sum(param.sum() for param in trained.parameters()) * factor


def mean(hvd: Any) -> float:
    return (hvd.size() + 1) / 2


def step(hvd: Any, trained: Any, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    loss(trained, factor * (hvd.rank() + 1)).backward()
    optimizer.step()


def all_equal(trained: Any, value: float) -> bool:
    return all(torch.equal(param.detach(), torch.full_like(param, value)) for param in trained.parameters())


STEPS = 8


@pytest.mark.parametrize("one_core", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"groups": 2}, {"op": "Adasum"}], ids=str)
@pytest.mark.parametrize("names", [(("a",), ("b",)), (("a", "b"), ("a", "c")), (("a",), ("a", "b"))], ids=str)
def test_two_models_in_two_threads(
    hvd: Any, monkeypatch: pytest.MonkeyPatch, names: Any, options: dict[str, Any], one_core: bool
) -> None:
    monkeypatch.setattr(backward_reducer, "holds_back", lambda world: one_core)
    options = {key: getattr(hvd, value) if key == "op" else value for key, value in options.items()}
    models = [model(*each) for each in names]
    failures: list[BaseException] = []

    def train(trained: Any, factor: float) -> None:
        try:
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(trained.parameters(), lr=1.0), trained.named_parameters(), **options
            )
            for _ in range(STEPS):
                step(hvd, trained, optimizer, factor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(each, 2.0**number)) for number, each in enumerate(models)]
    for thread in threads if hvd.rank() % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)
    for number, trained in enumerate(models):
        if "op" not in options:
            assert all_equal(trained, -STEPS * mean(hvd) * 2.0**number)
        hvd.check_consistency([param.detach() for param in trained.parameters()])


@pytest.mark.parametrize("views", [False, True], ids=["gradients", "views"])
@pytest.mark.parametrize("which", [("body", "head"), ("head",)], ids=["whole", "head"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_second_optimizer_takes_over_from_one_that_a_scheduler_keeps_alive(
    hvd: Any, views: bool, which: tuple[str, ...], passes: int
) -> None:
    trained = model("body", "head")
    tuned = torch.nn.ModuleDict({name: trained[name] for name in which})

    def optimizer_of(part: Any, passes: int) -> Any:
        return hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=1.0),
            part.named_parameters(),
            gradient_as_bucket_view=views,
            backward_passes_per_step=passes,
        )

    first = optimizer_of(trained, passes)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
    for _ in range(passes):
        loss(trained, hvd.rank() + 1.0).backward()
    first.step()
    scheduler.step()
    first.zero_grad()
    if passes > 1:
        loss(trained, 7.0).backward()  # the last batch of an odd number
    second = optimizer_of(tuned, 1)
    for _ in range(3):
        trained.zero_grad()
        loss(trained, hvd.rank() + 1.0).backward()
        torch.nn.utils.clip_grad_norm_(tuned.parameters(), 1e9)
        second.step()
    assert all_equal(tuned, -(3 + passes) * mean(hvd))
    assert scheduler.get_last_lr() == [0.1]


def test_an_optimizer_whose_parameters_a_newer_one_has_is_refused_until_that_is_gone(hvd: Any) -> None:
    trained = model("it")
    first = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=1.0), trained.named_parameters())
    step(hvd, trained, first)
    second = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=1.0), trained.named_parameters())
    third = hvd.DistributedOptimizer(torch.optim.SGD(trained["it"].parameters(), lr=1.0), op=hvd.Adasum)
    step(hvd, trained, third)
    for replaced in (first, second):
        with pytest.raises(ValueError, match=r"'it.*': step\(\) was called on an earlier DistributedOptimizer"):
            step(hvd, trained, replaced)
    before = trained["it"]["tiny"][0].item()
    del third, replaced
    gc.collect()
    step(hvd, trained, second)
    del second
    gc.collect()
    step(hvd, trained, first)
    assert all_equal(trained, before - 2 * mean(hvd))


def test_gradients_of_a_replaced_optimizer_that_are_still_in_flight_are_refused(hvd: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(SMALL))
    first = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()
    second = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(ValueError, match=r"noname.0.0': it is still in flight from an earlier DistributedOptimizer"):
        weight.sum().backward()
    with pytest.raises(ValueError, match="changed between"):
        first.step()
    second.zero_grad()
    (weight.sum() * (hvd.rank() + 1)).backward()
    second.step()
    assert torch.equal(weight.detach(), torch.full_like(weight, -mean(hvd)))
