"""What stands on torch.distributed trains over our backend as over gloo: the same parameters after some steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")
if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as checkpoint  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.adapters.c10d_ranks import default_group, rank, size  # noqa: E402

STEPS = 3
WIDTH = 12  # divided by 2 and by 3 ranks


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(x + self.down(torch.relu(self.up(x))))


def transformer() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(Block(), Block())


def batch(step: int) -> Any:
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank()))


def trained(model: Any, optimizer: Any = None, parameters: Any = None) -> list[Any]:
    """The parameters after some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return whole(parameters or model.parameters())


def whole(tensors: Any) -> list[Any]:
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def plain_ddp() -> list[Any]:
    return trained(DistributedDataParallel(transformer(), bucket_cap_mb=0.004))


def static_graph() -> list[Any]:
    return trained(DistributedDataParallel(transformer(), static_graph=True, gradient_as_bucket_view=True))


def unused_parameters() -> list[Any]:
    model = transformer()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return trained(DistributedDataParallel(model, find_unused_parameters=True))


def no_sync() -> list[Any]:
    model = DistributedDataParallel(transformer())
    with model.no_sync():
        model(batch(7)).square().mean().backward()
    model(batch(8)).square().mean().backward()
    return whole(parameter.grad for parameter in model.parameters())


def join() -> list[Any]:
    model = DistributedDataParallel(transformer())
    with Join([model]):
        for step in range(1 + rank()):
            model(batch(step)).square().mean().backward()
    return whole(parameter.grad for parameter in model.parameters() if rank() == size() - 1)


def half_hook() -> list[Any]:
    model = DistributedDataParallel(transformer())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trained(model)


def power_sgd() -> list[Any]:
    model = DistributedDataParallel(transformer())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(model)


def zero() -> list[Any]:
    model = DistributedDataParallel(transformer())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return trained(model, optimizer)


def fsdp2() -> list[Any]:
    model = transformer()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    parameters = trained(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return parameters + whole(parameter.grad for parameter in model.parameters())


def fsdp1() -> list[Any]:
    model = FullyShardedDataParallel(transformer(), device_id=torch.device("cpu"), use_orig_params=False)
    trained(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return whole(model.parameters())


def tensor_parallel() -> list[Any]:
    mesh = init_device_mesh("cpu", (size(),))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()  # the same batch on all ranks
        optimizer.step()
    return whole(model.parameters())


def pipeline() -> list[Any]:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(size())]
    stage = PipelineStage(layers[rank()], rank(), size(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers[rank()].parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        arguments = (torch.ones(4, WIDTH),) if rank() == 0 else ()
        schedule.step(*arguments, **({"target": torch.zeros(4, WIDTH)} if rank() == size() - 1 else {}))
        optimizer.step()
    return whole(layers[rank()].parameters())


def dtensors() -> list[Any]:
    mesh = init_device_mesh("cpu", (size(),))
    torch.manual_seed(2)
    tensor = distribute_tensor(torch.randn(7, 4), mesh, [Shard(0)])
    moved = tensor.redistribute(placements=[Shard(1)])
    product = moved @ distribute_tensor(torch.randn(4, 5), mesh, [Shard(0)])
    return [tensor.full_tensor(), moved.full_tensor(), product.redistribute(placements=[Replicate()]).to_local()]


def distributed_checkpoint() -> list[Any]:
    model, folder = transformer(), MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if rank() == 0 else None)
    fully_shard(model)
    trained(model)
    saved = model.state_dict()
    checkpoint.save(saved, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.load(loaded, checkpoint_id=folder)
    return whole(loaded.values())


TRAININGS: list[Callable[[], list[Any]]] = [
    plain_ddp,
    static_graph,
    unused_parameters,
    no_sync,
    join,
    half_hook,
    power_sgd,
    zero,
    fsdp2,
    fsdp1,
    tensor_parallel,
    pipeline,
    dtensors,
    distributed_checkpoint,
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, list[Any]]]:
    """By backend, the outcome of each training."""
    outcomes: dict[str, dict[str, list[Any]]] = {}
    for backend in ("gloo", "collectives"):
        with default_group(backend):
            outcomes[backend] = {training.__name__: training() for training in TRAININGS}
    return outcomes


@pytest.mark.parametrize("name", [training.__name__ for training in TRAININGS])
def test_training(name: str, results: dict[str, dict[str, list[Any]]]) -> None:
    ours, expected = results["collectives"][name], results["gloo"][name]
    assert len(ours) == len(expected)
    for tensor, reference in zip(ours, expected, strict=True):
        if size() == 2 and name != "half_hook":  # the sum of two is the same in any order, and gloo's halves differ
            assert torch.equal(tensor, reference)
        else:
            torch.testing.assert_close(tensor, reference, rtol=1e-3, atol=1e-4)


def test_what_gloo_lacks() -> None:
    """bfloat16 through FSDP's own mixed precision, reduced in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with default_group():
        model = transformer()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
        assert all(tensor.isfinite().all() for tensor in trained(model))
        assert dist.get_backend() == "collectives"
