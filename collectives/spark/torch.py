"""`TorchEstimator`: trains a torch module on a frame of Spark."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import collectives.torch
from collectives.spark.estimator import FrameEstimator, FrameModel
from collectives.spark.runner import run
from collectives.spark.store import Share


class TorchEstimator(FrameEstimator):
    """Trains a ``torch.nn.Module`` on a Spark frame, on several ranks, with `collectives.torch.DistributedOptimizer`.

    Inputs have the dtype of the module's parameters. A label with as many numbers as its output gets the output's shape
    and dtype; others, such as numbers of classes, stay as they are.

    Args:
        optimizer: of the module's parameters.
        loss: ``loss(output, label)``, the mean over rows.
        input_shapes: the shape of each input, with -1 for its rows, such as ``[[-1, 1, 28, 28]]``; by default as in the
            frame.
        use_gpu: whether ranks train on GPU number ``local_rank()``, if it exists.

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
        state, history, is_list = run(_train, (self, paths), num_proc=ranks)[0]
        model = copy.deepcopy(self.model)
        model.load_state_dict(state)
        return TorchModel(model, _Predict(self.input_shapes), history, is_list, self)


TorchModel = FrameModel


class _Predict:
    def __init__(self, shapes: Sequence[Sequence[int]] | None) -> None:
        self._shapes = shapes

    def __call__(self, model: torch.nn.Module, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        model.eval()
        with torch.no_grad():
            output: torch.Tensor = model(*_inputs(inputs, model, self._shapes, "cpu"))
        return output.numpy()


def _train(estimator: TorchEstimator, paths: Mapping[str, str]) -> tuple[Any, dict[str, list[float]], bool]:
    """On a rank: returns the state of the module, the losses, and whether its output is a list."""
    collectives.init()
    rank, model, loss_of = collectives.rank(), estimator.model, estimator.loss
    device = f"cuda:{collectives.local_rank()}" if estimator.use_gpu and torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = estimator.optimizer
    optimizer.load_state_dict(optimizer.state_dict())  # its state follows the module to the device
    optimizer = collectives.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    columns = estimator.feature_cols + estimator.label_cols
    shares = {name: Share(path, columns, rank, collectives.size()) for name, path in paths.items()}
    history: dict[str, list[float]] = {}
    random = np.random.default_rng(rank) if estimator.shuffle else None
    for epoch in range(estimator.epochs):
        for name, share in shares.items():
            trains = name == "train"
            model.train(trains)
            total = 0.0
            for *features, values in share.epoch(estimator.batch_size, random if trains else None):
                label = torch.from_numpy(values.copy()).to(device)
                with torch.set_grad_enabled(trains):
                    output = model(*_inputs(features, model, estimator.input_shapes, device))
                    is_alike = label.numel() == output.numel()
                    loss = loss_of(output, label.reshape(output.shape).to(output.dtype) if is_alike else label)
                if trains:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                total += loss.item() * len(label)
            mean = float(collectives.allreduce(np.array([total / share.rows]), average=True, name=name)[0])
            history.setdefault("loss" if trains else "val_loss", []).append(mean)
        if rank == 0 and estimator.verbose:
            print(f"epoch {epoch}: " + ", ".join(f"{name} {values[-1]:.6g}" for name, values in history.items()))
    model.to("cpu")
    return model.state_dict(), history, output.numel() > len(output)


def _inputs(
    values: Sequence[np.ndarray[Any, Any]], model: torch.nn.Module, shapes: Sequence[Sequence[int]] | None, device: str
) -> list[torch.Tensor]:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())
    tensors = [torch.from_numpy(array.copy()).to(device, dtype) for array in values]
    return [tensor.reshape(tuple(shape)) for tensor, shape in zip(tensors, shapes, strict=True)] if shapes else tensors
