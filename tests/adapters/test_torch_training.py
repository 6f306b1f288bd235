"""Training on any number of ranks is training on one: the same parameters to rounding, and bit for bit the same on all
ranks.

Each rank also trains a plain copy of the model on the whole global batch by itself; that copy is what the distributed
one has to become. A rank's share of a batch is every size-th row, so that 12 rows give 1, 2, 3 and 4 ranks shares of
one size.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.mpi

ROWS, INPUTS, OUTPUTS, STEPS = 12, 5, 3, 4
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 2e-5}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.02},
    "AdamW": {"lr": 0.02, "amsgrad": True},
    "Adagrad": {"lr": 0.05},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.02},
    "ASGD": {"lr": 0.1},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.02},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
}

Model = Any
Loss = Callable[[Model, Any, Any], Any]


def perceptron(dtype: Any = torch.float64, bias: bool = True) -> Model:
    """The same weights on every rank."""
    torch.manual_seed(5)
    first, second, last = (nn.Linear(*widths, bias=bias, dtype=dtype) for widths in ((INPUTS, 8), (8, 8), (8, OUTPUTS)))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def batches(dtype: Any = torch.float64, count: int = STEPS) -> list[tuple[Any, Any]]:
    """The global batches, the same on every rank, each row different."""
    source = torch.Generator().manual_seed(9)
    return [
        (
            torch.randn(ROWS, INPUTS, generator=source, dtype=dtype),
            torch.randn(ROWS, OUTPUTS, generator=source, dtype=dtype),
        )
        for _ in range(count)
    ]


def share(hvd: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's rows of a global batch."""
    return tuple(rows[hvd.rank() :: hvd.size()] for rows in batch)


def loss_of(model: Model, inputs: Any, targets: Any) -> Any:
    return (model(inputs) - targets).square().mean()


def train(model: Model, optimizer: Any, data: list[Any], loss: Loss = loss_of) -> None:
    """The plainest loop."""
    for batch in data:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()


def parameters_of(model: Model) -> list[Any]:
    return [parameter.detach() for parameter in model.parameters()]


def assert_trained_alike(hvd: Any, model: Model, reference: Model, initial: Model, **tolerance: float) -> None:
    """All ranks' parameters are bitwise equal, near the reference's, and no longer what they were."""
    digest = hashlib.sha256(
        b"".join(parameter.contiguous().numpy().tobytes() for parameter in parameters_of(model))
    ).hexdigest()
    assert len(set(hvd.allgather_object(digest))) == 1, "the ranks' parameters differ"
    hvd.check_consistency(parameters_of(model))
    tolerance = tolerance or TOLERANCES[parameters_of(model)[0].dtype]
    torch.testing.assert_close(parameters_of(model), parameters_of(reference), **tolerance)
    moved = [not torch.equal(now, then) for now, then in zip(parameters_of(model), parameters_of(initial), strict=True)]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    assert moved == trained, "a parameter was not trained, or a frozen one was"


def check(
    hvd: Any, make_optimizer: Callable[[Model], Any], tolerance: dict[str, float] | None = None, **options: Any
) -> None:
    """Train the perceptron on shares through the distributed optimizer and, by itself, on whole batches."""
    initial = perceptron()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters(), **options)
    train(model, optimizer, [share(hvd, batch) for batch in batches()])
    train(reference, make_optimizer(reference), batches())
    assert_trained_alike(hvd, model, reference, initial, **(tolerance or {}))


def momentum(model: Model) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(hvd: Any, name: str, dtype: Any) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    initial = perceptron(dtype, bias=name != "Muon")  # Muon takes matrices only
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    optimizer = hvd.DistributedOptimizer(
        getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name]), named_parameters=model.named_parameters()
    )
    assert isinstance(optimizer, getattr(torch.optim, name))
    train(model, optimizer, [share(hvd, batch) for batch in batches(dtype)])
    train(reference, getattr(torch.optim, name)(reference.parameters(), **OPTIMIZERS[name]), batches(dtype))
    assert_trained_alike(hvd, model, reference, initial)


@pytest.mark.parametrize("factor", (0.5, 4.0))
def test_predivide_factor(hvd: Any, factor: float) -> None:
    check(hvd, momentum, gradient_predivide_factor=factor)


@pytest.mark.parametrize("view", (False, True), ids=("gradients", "views"))
@pytest.mark.parametrize("groups", (1, 2, 4))
def test_number_of_groups(hvd: Any, groups: int, view: bool) -> None:
    check(hvd, momentum, groups=groups, gradient_as_bucket_view=view)


def test_explicit_groups(hvd: Any) -> None:
    initial = perceptron()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    parameters = list(model.parameters())
    groups = [[parameters[0], parameters[5]], [parameters[2], parameters[1]]]  # 3 and 4 are in none
    optimizer = hvd.DistributedOptimizer(momentum(model), named_parameters=model.named_parameters(), groups=groups)
    train(model, optimizer, [share(hvd, batch) for batch in batches()])
    train(reference, momentum(reference), batches())
    assert_trained_alike(hvd, model, reference, initial)


def test_without_names(hvd: Any) -> None:
    initial = perceptron()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    layers = [
        {"params": model[0].parameters(), "lr": 0.2},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    theirs = [
        {"params": reference[0].parameters(), "lr": 0.2},
        {"params": [*reference[2].parameters(), *reference[4].parameters()]},
    ]
    train(model, hvd.DistributedOptimizer(torch.optim.SGD(layers, lr=0.1)), [share(hvd, batch) for batch in batches()])
    train(reference, torch.optim.SGD(theirs, lr=0.1), batches())
    assert_trained_alike(hvd, model, reference, initial)


def test_sum_is_the_average_times_the_ranks(hvd: Any) -> None:
    initial = perceptron()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    optimizer = hvd.DistributedOptimizer(momentum(model), named_parameters=model.named_parameters(), op=hvd.Sum)
    train(model, optimizer, [share(hvd, batch) for batch in batches()])
    train(reference, momentum(reference), batches(), lambda *given: loss_of(*given) * hvd.size())
    assert_trained_alike(hvd, model, reference, initial)


@pytest.mark.parametrize("view", (False, True), ids=("gradients", "views"))
def test_groups_and_several_backward_passes_a_step(hvd: Any, view: bool) -> None:
    initial = perceptron()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)

    def accumulate(trained: Model, optimizer: Any, data: list[Any]) -> None:
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            loss_of(trained, *first).backward()
            loss_of(trained, *second).backward()
            optimizer.step()

    optimizer = hvd.DistributedOptimizer(
        momentum(model),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
        groups=2,
        gradient_as_bucket_view=view,
    )
    accumulate(model, optimizer, [share(hvd, batch) for batch in batches()])
    accumulate(reference, momentum(reference), batches())
    assert_trained_alike(hvd, model, reference, initial)


class Branches(nn.Module):  # type: ignore[misc, name-defined]
    """One layer twice in a forward, one frozen, one that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.twice, self.sometimes, self.last = (
            nn.Linear(INPUTS, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, OUTPUTS),
        )
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.double()

    def forward(self, inputs: Any, branch: bool = True) -> Any:
        rows = self.frozen(torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.first(inputs)))))))
        return self.last(torch.tanh(self.sometimes(rows) if branch else rows))


@pytest.mark.parametrize("view", (False, True), ids=("gradients", "views"))
@pytest.mark.parametrize("groups", (None, 2), ids=("single", "groups"))
def test_shared_frozen_and_sometimes_unused_parameters(hvd: Any, view: bool, groups: int | None) -> None:
    """The last rank never uses the branch, the others in every other step; who does not, adds zeros to the average."""
    initial = Branches()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    uses = [
        [step % 2 == 0 and (rank < hvd.size() - 1 or hvd.size() == 1) for rank in range(hvd.size())]
        for step in range(STEPS)
    ]
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(), groups=groups, gradient_as_bucket_view=view
    )
    for (inputs, targets), used in zip(batches(), uses, strict=True):
        mine = share(hvd, (inputs, targets))
        optimizer.zero_grad()
        (model(mine[0], used[hvd.rank()]) - mine[1]).square().mean().backward()
        optimizer.step()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for (inputs, targets), used in zip(batches(), uses, strict=True):
        theirs.zero_grad()
        for rank in range(hvd.size()):
            output = reference(inputs[rank :: hvd.size()], used[rank])
            ((output - targets[rank :: hvd.size()]).square().mean() / hvd.size()).backward()
        theirs.step()
    assert_trained_alike(hvd, model, reference, initial)


def test_loading_into_an_optimizer_in_use(hvd: Any) -> None:
    initial = perceptron()
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    optimizer = hvd.DistributedOptimizer(momentum(model), named_parameters=model.named_parameters())
    fresh = copy.deepcopy(optimizer.state_dict())
    mine = [share(hvd, batch) for batch in batches()]
    train(model, optimizer, mine)
    model.load_state_dict(initial.state_dict())
    optimizer.load_state_dict(fresh)
    train(model, optimizer, mine)
    train(reference, momentum(reference), batches())
    assert_trained_alike(hvd, model, reference, initial)


def test_training_from_what_the_root_broadcasts(hvd: Any) -> None:
    """Every rank begins with weights, momentum and learning rate of its own."""
    root = hvd.size() - 1

    def start(rank: int) -> tuple[Model, Any]:
        torch.manual_seed(100 + rank)
        model = nn.Linear(INPUTS, OUTPUTS).double()
        plain = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank), momentum=0.5)
        train(model, plain, batches()[:1])
        return model, plain

    model, plain = start(hvd.rank())
    reference, theirs = start(root)
    initial = copy.deepcopy(reference)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(plain, root_rank=root)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    train(model, optimizer, [share(hvd, batch) for batch in batches()])
    train(reference, theirs, batches())
    assert_trained_alike(hvd, model, reference, initial)


class Tied(nn.Module):
    """One weight in two places, under two names in its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Linear(INPUTS, width, bias=False, dtype=torch.float64)
        self.decoder = nn.Linear(INPUTS, width, bias=False, dtype=torch.float64)
        self.decoder.weight = self.encoder.weight
        self.last = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, inputs: Any) -> Any:
        return self.last((torch.tanh(self.encoder(inputs)) @ self.decoder.weight) / 10)


def test_large_tied_parameters(hvd: Any) -> None:
    """They are broadcast under both names, through `broadcast_parameters` and one by one, and trained once."""
    initial = Tied(width=8000)
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += hvd.rank()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for handle in [hvd.broadcast_async_(tensor, 0, name=name) for name, tensor in model.state_dict().items()]:
        hvd.synchronize(handle)
    assert model.decoder.weight is model.encoder.weight
    optimizer = hvd.DistributedOptimizer(momentum(model), named_parameters=model.named_parameters())
    train(model, optimizer, [share(hvd, batch) for batch in batches()])
    train(reference, momentum(reference), batches())
    assert_trained_alike(hvd, model, reference, initial)


class Twins(nn.Module):
    """Two parameters whose gradients are made to be one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(INPUTS, width, bias=False, dtype=torch.float64)
        self.second = nn.Linear(INPUTS, width, bias=False, dtype=torch.float64)
        self.last = nn.Linear(width, OUTPUTS, dtype=torch.float64)

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.tanh(self.first(inputs)) * self.second(inputs)) / 10


@pytest.mark.parametrize("width", (8, 500, 30_000), ids=("tiny", "packed", "grouped"))
def test_parameters_that_share_a_gradient(hvd: Any, width: int) -> None:
    initial = Twins(width)
    model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
    # A sum, because averaging what is averaged already would change nothing.
    plain = torch.optim.SGD(model.parameters(), lr=0.1 / hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), op=hvd.Sum)

    def steps(trained: Model, optimizer: Any, data: list[Any]) -> None:
        trained.first.weight.grad = trained.second.weight.grad = torch.zeros_like(trained.first.weight)
        for batch in data:
            optimizer.zero_grad(set_to_none=False)
            loss_of(trained, *batch).backward()
            assert trained.first.weight.grad is trained.second.weight.grad
            optimizer.step()

    steps(model, optimizer, [share(hvd, batch) for batch in batches()])
    steps(reference, momentum(reference), batches())
    assert_trained_alike(hvd, model, reference, initial)
