"""`TorchEstimator`: trains a torch module on a frame of Spark."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import collectives.torch
from collectives.spark.estimator import FrameEstimator, FrameModel
from collectives.spark.store import read_share

Losses = Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


class TorchEstimator(FrameEstimator):
    """Trains a ``torch.nn.Module`` on a Spark frame, on several ranks, with `collectives.torch.DistributedOptimizer`.

    Inputs have the dtype of the module's parameters. A label with as many numbers as its output gets the output's shape
    and dtype; others, such as numbers of classes, stay as they are. Each rank keeps its part of the rows in memory.

    Args:
        optimizer: of the module's parameters.
        loss: ``loss(output, label)``, the mean over rows; or a list of them, one for each output, which are added.
        input_shapes: of each input, -1 for its rows, such as ``[[-1, 1, 28, 28]]``; by default as in the frame.
        use_gpu: whether ranks train on a GPU, of the number ``local_rank()``, where there is one.

    Other arguments are those of `collectives.spark.estimator.FrameEstimator`.

    Example:
        estimator = TorchEstimator(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
            loss=torch.nn.functional.mse_loss, store=Store.create("/shared/runs"), feature_cols=["features"],
            label_cols=["label"], batch_size=64, epochs=3, num_proc=4)
        estimator.fit(frame).transform(frame).select("label", "label__output").show()
    """

    _WHAT = "TorchEstimator"

    def __init__(
        self, *, input_shapes: Sequence[Sequence[int]] | None = None, use_gpu: bool = True, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.input_shapes = input_shapes
        self.use_gpu = use_gpu

    def _train(self, paths: Mapping[str, str], ranks: int) -> FrameModel:
        state, history, shapes = self._run(_train, (self, dict(paths)), ranks)
        model = copy.deepcopy(self.model)
        model.load_state_dict(state)
        return TorchModel(model, _Predict(self.input_shapes), history, shapes, self)


class TorchModel(FrameModel):
    """A trained module that adds predictions to frames."""


class _Predict:
    def __init__(self, shapes: Sequence[Sequence[int]] | None) -> None:
        self._shapes = shapes

    def __call__(self, model: torch.nn.Module, inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        model.eval()
        with torch.no_grad():
            outputs = _call(model, _inputs(inputs, model, self._shapes, "cpu"))
        return [output.numpy() for output in outputs]


def _train(estimator: TorchEstimator, paths: Mapping[str, str]) -> tuple[Any, dict[str, list[float]], list[Any]]:
    """On a rank: returns the state of the module, the losses, and the shapes of an output's row."""
    collectives.init()
    rank, model = collectives.rank(), estimator.model
    device = f"cuda:{collectives.local_rank()}" if estimator.use_gpu and torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = estimator.optimizer
    optimizer.load_state_dict(optimizer.state_dict())  # its state follows the module to the device
    optimizer = collectives.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    columns = estimator.feature_cols + estimator.label_cols
    losses: Losses = estimator.loss if isinstance(estimator.loss, (list, tuple)) else [estimator.loss]
    data = {}
    for name, path in paths.items():
        values = read_share(path, columns, rank, collectives.size())
        features = [values[column] for column in estimator.feature_cols]
        labels = [torch.from_numpy(values[column].copy()).to(device) for column in estimator.label_cols]
        data[name] = (_inputs(features, model, estimator.input_shapes, device), labels)
    history: dict[str, list[float]] = {}
    random = torch.Generator().manual_seed(rank)
    for epoch in range(estimator.epochs):
        for name, (inputs, labels) in data.items():
            trains = name == "train"
            model.train(trains)
            rows = len(labels[0])
            order = torch.randperm(rows, generator=random) if trains and estimator.shuffle else torch.arange(rows)
            total = 0.0
            for chosen in order.to(device).split(estimator.batch_size):
                with torch.set_grad_enabled(trains):
                    outputs = _call(model, [each[chosen] for each in inputs])
                    parts = zip(losses, outputs, labels, strict=True)
                    each_loss = [one(output, _alike(label[chosen], output)) for one, output, label in parts]
                    loss = torch.stack(each_loss).sum()
                if trains:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                total += loss.item() * len(chosen)
            mean = float(collectives.allreduce(np.array([total / rows]), average=True, name=name)[0])
            history.setdefault("loss" if trains else "val_loss", []).append(mean)
        if rank == 0 and estimator.verbose:
            print(f"epoch {epoch}: " + ", ".join(f"{name} {values[-1]:.6g}" for name, values in history.items()))
    model.to("cpu")
    return model.state_dict(), history, [tuple(output.shape[1:]) for output in outputs]


def _inputs(
    values: Sequence[np.ndarray[Any, Any]], model: torch.nn.Module, shapes: Sequence[Sequence[int]] | None, device: str
) -> list[torch.Tensor]:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())
    tensors = [torch.from_numpy(array.copy()).to(device, dtype) for array in values]
    return [tensor.reshape(tuple(shape)) for tensor, shape in zip(tensors, shapes, strict=True)] if shapes else tensors


def _alike(label: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return label.reshape(output.shape).to(output.dtype) if label.numel() == output.numel() else label


def _call(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    outputs = model(*inputs)
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]
