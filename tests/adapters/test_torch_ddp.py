"""DistributedDataParallel with our communication hook: the gradients of plain DistributedDataParallel, and errors that
end backward."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")
if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import collectives  # noqa: E402
from collectives import MismatchError  # noqa: E402
from collectives.torch.ddp import AllreduceState, allreduce_hook  # noqa: E402

BUCKET = 0.004
"""MiB: several buckets for a small model."""


@pytest.fixture(scope="module", autouse=True)
def gloo(hvd: Any) -> Iterator[None]:
    """Torch's own process group of the same ranks."""
    folder = collectives.broadcast_object(tempfile.mkdtemp(prefix="gloo-") if hvd.rank() == 0 else None, 0)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=hvd.rank(), world_size=hvd.size())
    yield
    hvd.barrier()
    distributed.destroy_process_group()
    hvd.barrier()  # torch looks for the file again when it ends, and waits for it if it is gone
    if hvd.rank() == 0:
        shutil.rmtree(folder)


class Branches(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model some of whose parameters may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.left, self.right, self.last = (torch.nn.Linear(30, 30) for _ in range(4))

    def forward(self, x: Any, branch: str = "both") -> Any:
        hidden = torch.tanh(self.first(x))
        parts = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[branch]
        return self.last(sum(part(hidden) for part in parts))


def wrapped(**options: Any) -> Any:
    return DistributedDataParallel(Branches(), bucket_cap_mb=BUCKET, **options)


def gradients(model: Any, hvd: Any, step: int, branch: str = "both") -> list[Any]:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    model.zero_grad()
    model(torch.randn(5, 30, generator=generator), branch).square().sum().backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options", ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}), ids=("plain", "views", "static")
)
def test_same_gradients(hvd: Any, options: dict[str, bool]) -> None:
    theirs, ours = wrapped(**options), wrapped(**options)
    ours.register_comm_hook(None, allreduce_hook)
    before = collectives.world().statistics.tensors
    for step in range(3):  # after the first there are several buckets
        torch.testing.assert_close(gradients(ours, hvd, step), gradients(theirs, hvd, step))
    if hvd.size() > 1:
        assert collectives.world().statistics.tensors - before >= (3 if "static_graph" in options else 5)


def test_parameters_that_are_not_used(hvd: Any) -> None:
    theirs, ours = wrapped(find_unused_parameters=True), wrapped(find_unused_parameters=True)
    ours.register_comm_hook(None, allreduce_hook)
    for step, branches in enumerate((["left"], ["left", "right"], ["both", "left"])):
        branch = branches[hvd.rank() % len(branches)]
        torch.testing.assert_close(gradients(ours, hvd, step, branch), gradients(theirs, hvd, step, branch))


@pytest.mark.parametrize("compression", ("fp16", "bf16"))
def test_compression_and_factors(hvd: Any, compression: str) -> None:
    theirs, ours = wrapped(), wrapped()
    state = AllreduceState(
        hvd.Sum, getattr(hvd.Compression, compression), prescale_factor=2.0, postscale_factor=0.5 / hvd.size()
    )
    ours.register_comm_hook(state, allreduce_hook)
    expected, found = gradients(theirs, hvd, 0), gradients(ours, hvd, 0)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if hvd.size() > 1:
        assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_models_in_one_backward_pass(hvd: Any) -> None:
    pairs = [[wrapped(), wrapped()] for _ in range(2)]
    for model in pairs[1]:
        model.register_comm_hook(AllreduceState(), allreduce_hook)
    x = torch.full((2, 30), hvd.rank() + 1.0)
    for models in pairs:
        (models[0](x) * models[1](x.flip(1))).sum().backward()
    for theirs, ours in zip(*pairs, strict=True):
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_a_process_set(hvd: Any) -> None:
    ranks = list(range(hvd.size() - 1))
    subset = hvd.add_process_set(ranks)
    group = distributed.new_group(ranks)
    if hvd.rank() in ranks:
        theirs, ours = wrapped(process_group=group), wrapped(process_group=group)
        ours.register_comm_hook(AllreduceState(process_set=subset), allreduce_hook)
        torch.testing.assert_close(gradients(ours, hvd, 0), gradients(theirs, hvd, 0))
        distributed.destroy_process_group(group)
    hvd.remove_process_set(subset)


def test_ranks_that_run_out_of_data(hvd: Any) -> None:
    found = []
    for hook in (None, allreduce_hook):
        model = wrapped()
        if hook is not None:
            model.register_comm_hook(AllreduceState(), hook)
        with Join([model]) if hook is None or hvd.size() > 1 else contextlib.nullcontext():
            results = [gradients(model, hvd, step) for step in range(2 + hvd.rank())]
        found.append(results)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("static", (False, True))
def test_a_mismatch_ends_backward(hvd: Any, static: bool) -> None:
    model = wrapped(static_graph=static)
    model.register_comm_hook(AllreduceState(prescale_factor=1.0 + hvd.rank()), allreduce_hook)
    # With a static graph, torch itself waits for the future first, and raises what C++ made of the error.
    with pytest.raises(RuntimeError if static else MismatchError, match="prescale"):
        gradients(model, hvd, 0)
    hvd.barrier()
