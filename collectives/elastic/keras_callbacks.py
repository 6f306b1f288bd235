"""Callbacks that commit a state while ``fit`` trains, and that count its batches and epochs.

For Keras 3 and Keras 2, whose callback class each is combined with. `run` calls ``fit`` again after a reset, with the
epochs that are left::

    @hvd.elastic.run
    def train(state):
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),     # last, so that it saves what the others have counted
        ])
"""

from __future__ import annotations

from typing import Any

from collectives.elastic.state import State
from collectives.frontends.keras_callbacks import CallbackMixin, Logs


class CommitState(CallbackMixin):
    """Commits a state after every so many batches, and after every epoch; all ranks must do so.

    Args:
        state: the state to commit.
        batches_per_commit: the number of batches between two commits.

    Example:
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10)
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state: Any = state
        self.batches_per_commit = self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        self.batches_remaining = self.batches_per_commit  # a newcomer counts from here, too

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.commit()

    def commit(self) -> None:
        """Commit the state; for subclasses to add to."""
        self.state.commit()


class UpdateBatchState(CallbackMixin):
    """Sets ``state.batch`` to the number of the batch after each batch, and to 0 after each epoch.

    Where Keras knows the steps of an epoch, it reports the first epoch after a reset to be shorter by ``state.batch``.

    Example:
        hvd.elastic.UpdateBatchStateCallback(hvd.elastic.KerasState(model, batch=0))
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self.params.get("steps"):
            self.steps_per_epoch = self.steps_per_epoch or self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = 0


class UpdateEpochState(CallbackMixin):
    """Sets ``state.epoch`` to the number of finished epochs after each epoch, those before the last reset included.

    Example:
        hvd.elastic.UpdateEpochStateCallback(hvd.elastic.KerasState(model, epoch=0))
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
