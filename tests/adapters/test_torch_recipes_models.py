"""Recipes around the model: layers across ranks, sparse and shared parameters, freezing, several optimizers,
compilers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.adapters.torch_recipes import (
    INPUTS,
    OUTPUTS,
    ROWS,
    WIDTH,
    Model,
    Ranks,
    Side,
    batches,
    momentum,
    network,
    recipe,
    train,
)

# ---- batch normalisation ---------------------------------------------------------------------------------------------


def normed() -> Model:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (2, INPUTS // 2)),
        nn.Conv1d(2, 6, 3, dtype=torch.float64),
        nn.BatchNorm1d(6, momentum=None, dtype=torch.float64),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(OUTPUTS, dtype=torch.float64),
    )


def built() -> Model:
    model = normed()
    model(batches()[0][0])
    model[2].reset_running_stats()
    return model


@recipe(built)
def test_sync_batch_norm(side: Side, model: Model) -> Any:
    """Its statistics are part of what is compared."""
    if isinstance(side, Ranks):
        weights = model.state_dict()
        synchronized = side.hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        assert synchronized is model and weights.keys() == model.state_dict().keys()
        assert any(isinstance(layer, side.hvd.SyncBatchNorm) for layer in model.modules())
    train(side, model, side.optimizer(momentum(model.parameters()), model))


# ---- sparse embeddings -----------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Some words, which are rows of a table with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.EmbeddingBag(11, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, OUTPUTS, dtype=torch.float64)

    def forward(self, bags: Any, used: bool = True) -> Any:
        return self.last(self.table(bags) if used else torch.ones(len(bags), WIDTH, dtype=torch.float64) * bags[:, :1])


def sentences(count: int = 4) -> list[Any]:
    source = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(0, 11, (ROWS, 3), generator=source),
            torch.randn(ROWS, OUTPUTS, generator=source, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def embedded(side: Side, model: Model, **options: Any) -> None:
    train(
        side, model, side.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model, **options), data=sentences()
    )


test_sparse_embedding = recipe(Words)(embedded)
test_sparse_as_dense = recipe(Words)(partial(embedded, sparse_as_dense=True))


def embedded_on_some(side: Side, model: Model, **options: Any) -> None:
    """In the first step only the last rank uses the table, in the second nobody, then others in turn."""
    optimizer = side.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for step, batch in enumerate(sentences(5)):
        optimizer.zero_grad()
        for rank, (bags, targets) in side.parts(batch):
            used = step != 1 and rank == (side.size - 1 if step == 0 else (step + 1) % side.size)
            side.mean((model(bags, used) - targets).square()).backward()
        optimizer.step()
        gradient = model.table.weight.grad
        if isinstance(side, Ranks) and not side.options["gradient_as_bucket_view"]:
            assert (gradient is None) if step == 1 else gradient.is_sparse


test_sparse_embedding_unused_on_some_ranks = recipe(Words)(embedded_on_some)
test_sparse_as_dense_unused_on_some_ranks = recipe(Words)(partial(embedded_on_some, sparse_as_dense=True))


@recipe(Words, views=False)
def test_sparse_adam(side: Side, model: Model) -> None:
    """Two optimizers for one model."""
    optimizers = [
        side.optimizer(torch.optim.SparseAdam(model.table.parameters(), lr=0.05), model.table),
        side.optimizer(torch.optim.Adam(model.last.parameters(), lr=0.05), model.last),
    ]
    for batch in sentences():
        for optimizer in optimizers:
            optimizer.zero_grad()
        side.loss(model, side.rows(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()


# ---- uneven data -----------------------------------------------------------------------------------------------------


@recipe()
def test_join(side: Side, model: Model) -> None:
    """In each epoch rank r has r + 1 batches. Who has no more helps the others, and gets the state of who was last."""
    optimizer = side.optimizer(momentum(model.parameters()), model)
    for epoch in range(2):
        for step, batch in enumerate(batches(side.size)):
            parts = [tuple(rows + epoch for rows in part) for rank, part in side.parts(batch) if step <= rank]
            if parts:
                optimizer.zero_grad()
                for part in parts:
                    side.loss(model, part).backward()
                optimizer.step()
        if isinstance(side, Ranks):
            last = side.hvd.join()
            assert last == side.size - 1
            side.hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            side.hvd.broadcast_optimizer_state(optimizer, root_rank=last)


# ---- several optimizers, freezing ------------------------------------------------------------------------------------


def players() -> Model:
    """Their parameters have the same names."""
    return nn.ModuleList([network(last=INPUTS), network(last=1)])


@recipe(players)
def test_gan(side: Side, model: Model) -> None:
    """Generator and critic in turn; the critic is frozen in the generator's turn."""
    generator, critic = model
    optimizers = [side.optimizer(torch.optim.Adam(part.parameters(), lr=0.01), part) for part in model]
    for batch in batches():
        noise, _ = side.rows(batch)
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        side.mean(critic(generator(noise).detach()).tanh() - critic(noise.square()).tanh()).backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        side.mean(-critic(generator(noise)).tanh()).backward()
        optimizers[0].step()
    critic.requires_grad_(True)


@recipe(players)
def test_gan_without_freezing(side: Side, model: Model) -> None:
    """The generator's turn leaves gradients in the critic, which its own turn clears."""
    generator, critic = model
    optimizers = [side.optimizer(torch.optim.Adam(part.parameters(), lr=0.01), part) for part in model]
    for batch in batches():
        noise, _ = side.rows(batch)
        optimizers[0].zero_grad()
        side.mean(-critic(generator(noise)).tanh()).backward()
        optimizers[0].step()
        side.synchronize(optimizers[1])
        optimizers[1].zero_grad()
        side.mean(critic(generator(noise).detach()).tanh() - critic(noise.square()).tanh()).backward()
        optimizers[1].step()


@recipe()
def test_freezing_and_unfreezing(side: Side, model: Model) -> None:
    """The first layer is frozen at first, the last one later, and neither at the end."""
    model[0].requires_grad_(False)
    optimizer = side.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    for step, batch in enumerate(batches(6)):
        model[0].requires_grad_(step >= 2)
        model[4].requires_grad_(step < 2 or step >= 4)
        optimizer.zero_grad()
        side.loss(model, side.rows(batch)).backward()
        optimizer.step()


@recipe()
def test_parameters_added_later(side: Side, model: Model) -> None:
    """The model's first layer comes to the optimizer in the third step, with a learning rate of its own."""
    optimizer = side.optimizer(momentum([*model[2].parameters(), *model[4].parameters()]))
    train(side, model, optimizer, data=batches()[:2])
    model.zero_grad()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
    train(side, model, optimizer)


class Tied(nn.Module):
    """A language model in small: the table of the inputs is that of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.Embedding(90, WIDTH, dtype=torch.float64)  # of a size that is not packed
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.decoder = nn.Linear(WIDTH, 90, bias=False, dtype=torch.float64)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Any) -> Any:
        return self.decoder(torch.tanh(self.middle(self.encoder(words)))).flatten(1)


@recipe(Tied)
def test_tied_weights(side: Side, model: Model) -> None:
    """Broadcast under both names, trained as one."""
    if isinstance(side, Ranks):
        with torch.no_grad():
            model.encoder.weight += side.rank
        side.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        assert model.decoder.weight is model.encoder.weight
    optimizer = side.optimizer(momentum(model.parameters()), model)
    train(side, model, optimizer, data=[(words, targets.sum(1, keepdim=True)) for words, targets in sentences()])


# ---- what programs do with gradients and weights ---------------------------------------------------------------------


@recipe()
def test_hooks_of_tensors(side: Side, model: Model) -> None:
    """They see this rank's gradients, before they are combined."""
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = side.optimizer(momentum(model.parameters()), model)
    model[2].weight.register_hook(lambda gradient: gradient * 2)
    model[4].register_full_backward_hook(lambda layer, inputs, outputs: tuple(gradient * 3 for gradient in inputs))
    train(side, model, optimizer)


def hooked(side: Side, model: Model, *, before: bool) -> None:
    """Hooks that change this rank's gradients, made before wrapping or after it."""

    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    optimizer = None if before else side.optimizer(momentum(model.parameters()), model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    train(side, model, optimizer or side.optimizer(momentum(model.parameters()), model))


test_hooks_after_accumulation_made_before_wrapping = recipe()(partial(hooked, before=True))
test_hooks_after_accumulation_made_after_wrapping = recipe()(partial(hooked, before=False))


# ---- checkpoints of activations --------------------------------------------------------------------------------------


def checkpointed(side: Side, model: Model, *, reentrant: bool, shared: bool) -> None:
    def forward(inputs: Any) -> Any:
        hidden = model[:2](inputs.requires_grad_())
        for _ in range(1 + shared):
            hidden = checkpoint(model[2:4], hidden, use_reentrant=reentrant)
        return model[4](hidden)

    train(side, model, side.optimizer(momentum(model.parameters()), model), forward)


test_checkpointing = recipe()(partial(checkpointed, reentrant=False, shared=False))
test_reentrant_checkpointing = recipe()(partial(checkpointed, reentrant=True, shared=False))
test_checkpointing_of_a_shared_layer = recipe()(partial(checkpointed, reentrant=False, shared=True))


@recipe()
def test_reentrant_checkpointing_of_a_shared_layer(side: Side, model: Model) -> None:
    """Refused on every rank; training goes on without."""
    attempt = partial(checkpointed, side, copy.deepcopy(model), reentrant=True, shared=True)
    side.refuses(
        attempt,
        AssertionError,
        "several reentrant checkpoints share this layer, one pass counts several times: pass use_reentrant=False",
    )
    checkpointed(side, model, reentrant=False, shared=True)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def compiled(side: Side, function: Any, backend: str, **options: Any) -> Any:
    """Compiled on the ranks."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **options) if isinstance(side, Ranks) else function


@recipe(built, views=False)
def test_compiled_model(side: Side, model: Model) -> None:
    """As one graph, whose batch normalisation meets the other ranks in forward and in backward."""
    if isinstance(side, Ranks):
        side.hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    forward = compiled(side, model, "aot_eager", fullgraph=True)
    train(side, model, side.optimizer(momentum(model.parameters()), model), forward)


@recipe(views=False)
def test_compiled_step(side: Side, model: Model) -> None:
    """Forward, backward and step in one function."""
    optimizer = side.optimizer(momentum(model.parameters()), model)

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        side.loss(model, (inputs, targets)).backward()
        optimizer.step()

    run = compiled(side, step, "eager")
    for batch in batches():
        run(*side.rows(batch))


@recipe(views=False)
def test_compiled_optimizer(side: Side, model: Model) -> None:
    optimizer = side.optimizer(momentum(model.parameters()), model)
    step = compiled(side, optimizer.step, "eager")
    for batch in batches():
        optimizer.zero_grad()
        side.loss(model, side.rows(batch)).backward()
        step()


# ---- losses over all ranks, other ways to combine --------------------------------------------------------------------


@recipe()
def test_contrastive_loss(side: Side, model: Model) -> None:
    """Each row is told from the rows of all ranks, which are gathered with their gradients."""
    optimizer = side.optimizer(momentum(model.parameters()), model)
    for batch in batches():
        inputs, _ = side.rows(batch)
        left = nn.functional.normalize(model(inputs))
        right = nn.functional.normalize(model(inputs + 0.1))
        offset = 0
        everything = right
        if isinstance(side, Ranks):
            everything = side.hvd.allgather(right)
            offset = sum(side.hvd.allgather_object(len(right))[: side.rank])
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(
            left @ everything.T * 5, torch.arange(len(left)) + offset, reduction="none"
        )
        side.mean(losses[:, None]).backward()
        optimizer.step()


def compressed(side: Side, model: Model, *, name: str) -> None:
    options = {"compression": getattr(side.hvd.Compression, name)} if isinstance(side, Ranks) else {}
    train(side, model, side.optimizer(momentum(model.parameters()), model, **options))


test_compression_fp16 = recipe(tolerance={"rtol": 0, "atol": 1e-4})(partial(compressed, name="fp16"))
test_compression_bf16 = recipe(tolerance={"rtol": 0, "atol": 1e-3})(partial(compressed, name="bf16"))


def adasum(deltas: list[Any]) -> Any:
    """Neighbours are combined, level by level; an odd one passes up."""
    while len(deltas) > 1:
        pairs = [deltas[at : at + 2] for at in range(0, len(deltas), 2)]
        deltas = [
            pair[0]
            if len(pair) == 1
            else sum(vector * (1 - (pair[0] * pair[1]).sum() / (2 * (vector * vector).sum())) for vector in pair)
            for pair in pairs
        ]
    return deltas[0]


@recipe(views=False)
def test_adasum(side: Side, model: Model) -> None:
    """Each rank steps by itself with Adam; what the steps did is combined."""
    if isinstance(side, Ranks):
        optimizer = side.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, op=side.hvd.Adasum)
        train(side, model, optimizer)
        return
    twins = [copy.deepcopy(model) for _ in range(side.size)]
    optimizers = [torch.optim.Adam(twin.parameters(), lr=0.01) for twin in twins]
    for batch in batches():
        for (_, part), twin, optimizer in zip(side.parts(batch), twins, optimizers, strict=True):
            twin.load_state_dict(model.state_dict())
            optimizer.zero_grad()
            (side.loss(twin, part) * side.size).backward()
            optimizer.step()
        with torch.no_grad():
            for parameter, *theirs in zip(model.parameters(), *(twin.parameters() for twin in twins), strict=True):
                parameter += adasum([their - parameter for their in theirs])
