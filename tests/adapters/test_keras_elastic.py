"""Keras 3 on each backend, and Keras 2: the state of a model and its optimizer, and the callbacks that commit it."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.elastic import ElasticSampler, HostsUpdatedInterrupt, HostUpdateResult
from tests.adapters.keras_training import X, Y, keras, network, values

BATCHES, BATCH = 3, 8


def compiled(hvd: Any, seed: int) -> Any:
    model = network(seed)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    return model


def fit(hvd: Any, model: Any, callbacks: list[Any], epochs: int = 1) -> None:
    rows = slice(hvd.rank(), hvd.rank() + BATCHES * BATCH)
    model.fit(X[rows], Y[rows], BATCH, epochs, verbose=0, shuffle=False, callbacks=callbacks)


def seen(model: Any) -> list[Any]:
    return [value.tolist() for value in values(model, model.optimizer)]


def test_a_newcomer_gets_the_model_and_the_optimizer(hvd: Any) -> None:
    model = compiled(hvd, hvd.rank())
    sampler = ElasticSampler(range(3 * hvd.size()), shuffle=False)
    state = hvd.elastic.KerasState(model, batch=0, epoch=5 + hvd.rank(), sampler=sampler)
    state.sync()
    assert state.sampler is sampler and list(sampler) == list(range(hvd.rank(), 3 * hvd.size(), hvd.size()))
    assert state.epoch == 5 and all(each == seen(model) for each in hvd.allgather_object(seen(model)))
    fit(hvd, model, [])
    state.commit()
    if hvd.rank() == hvd.size() - 1:
        model = compiled(hvd, 99)
        state = hvd.elastic.KerasState(model, batch=0, epoch=0, sampler=sampler)
    state.sync()
    committed = seen(model)
    assert state.epoch == 5 and all(each == committed for each in hvd.allgather_object(committed))
    fit(hvd, model, [])
    assert seen(model) != committed
    state.restore()
    assert seen(model) == committed


def test_callbacks_count_and_commit(hvd: Any) -> None:
    model = compiled(hvd, 0)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    counts: list[tuple[int, int]] = []

    class Counting(hvd.elastic.CommitStateCallback):  # type: ignore[misc]
        def commit(self) -> None:
            counts.append((self.state.epoch, self.state.batch))
            super().commit()

    def callbacks() -> list[Any]:
        return [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            Counting(state, batches_per_commit=2),
        ]

    fit(hvd, model, callbacks(), epochs=2)
    assert counts == [(0, 1), (1, 0), (1, 0), (1, 2), (2, 0)]  # the count of batches goes on over the end of an epoch
    reached = seen(model)
    state.restore()
    assert seen(model) == reached and (state.epoch, state.batch) == (2, 0)
    fit(hvd, model, callbacks())
    assert counts[5:] == [(2, 1), (3, 0)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_ends_fit_within_an_epoch(hvd: Any, fails: bool) -> None:
    """A failure undoes the steps since the last commit, and an interrupt keeps them."""
    model = compiled(hvd, 0)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    after: list[Any] = []

    class Ending(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            after.append(seen(self.model))
            if batch == 1 and fails:
                raise ZeroDivisionError
            if batch == 1:
                if hvd.rank() == 0:
                    state.on_hosts_updated(1, HostUpdateResult.added)
                state.check_host_updates()

    with pytest.raises(ZeroDivisionError if fails else HostsUpdatedInterrupt):
        fit(hvd, model, [Ending(), hvd.elastic.CommitStateCallback(state)])
    if fails:
        state.restore()
    assert seen(model) == after[0 if fails else 1]
    fit(hvd, model, [hvd.elastic.CommitStateCallback(state)])
    assert all(each == seen(model) for each in hvd.allgather_object(seen(model)))
