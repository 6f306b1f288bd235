"""Models in torch: the real ResNet-50 on small images, its gradients alone, and many tiny layers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import Shapes, resnet50

IMAGE = 64
"""Rows and columns of an image: enough for a batch normalisation of a single one in the last layers."""
WIDTH, DEPTH = 16, 100


class ResNet50(nn.Module):
    """torchvision's ResNet-50, with the parameters that `benchmarks.models.resnet50` lists.

    It has no running statistics: of the contestants only DistributedDataParallel broadcasts them, in each forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), _normalisation(64)
        inputs = 64
        for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            stride = 1 if layer == 1 else 2
            first, *rest = [
                _Bottleneck(inputs if block == 0 else 4 * width, width, stride if block == 0 else 1)
                for block in range(blocks)
            ]
            setattr(self, f"layer{layer}", nn.Sequential(first, *rest))
            inputs = 4 * width
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, images: Any) -> Any:
        """Images of shape (N, 3, IMAGE, IMAGE) -> a loss."""
        rows = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for layer in range(1, 5):
            rows = self.get_submodule(f"layer{layer}")(rows)
        scores = self.fc(rows.mean((2, 3)))
        return functional.cross_entropy(scores, torch.arange(len(scores)))


def _normalisation(channels: int) -> Any:
    return nn.BatchNorm2d(channels, track_running_stats=False)


class _Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), _normalisation(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), _normalisation(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), _normalisation(4 * width)
        self.downsample: Any = None
        if inputs != 4 * width or stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), _normalisation(4 * width)
            )

    def forward(self, rows: Any) -> Any:
        shortcut = rows if self.downsample is None else self.downsample(rows)
        rows = functional.relu(self.bn1(self.conv1(rows)))
        rows = functional.relu(self.bn2(self.conv2(rows)))
        return functional.relu(self.bn3(self.conv3(rows)) + shortcut)


class Gradients(nn.Module):
    """Parameters of given shapes; the loss is the dot product of all of them with the input."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.names = list(shapes)
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes.values())

    def forward(self, inputs: Any) -> Any:
        """One element per parameter element -> a loss, whose gradients are the input itself, the last layer's first."""
        parts = inputs.split([weight.numel() for weight in self.weights])
        return sum(torch.dot(weight.reshape(-1), part) for weight, part in zip(self.weights, parts, strict=True))


class Tiny(nn.Module):
    """DEPTH layers of WIDTH x WIDTH, 200 tensors; shortcuts keep the gradients from vanishing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, rows: Any) -> Any:
        """Rows of shape (N, WIDTH) -> a loss."""
        for layer in self.layers:
            rows = rows + 0.1 * torch.tanh(layer(rows))
        return rows.square().mean()


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "resnet50": (ResNet50, (1, 3, IMAGE, IMAGE)),
    "resnet50-gradients": (lambda: Gradients(resnet50()), (sum(map(prod, resnet50().values())),)),
    "mlp": (Tiny, (8, WIDTH)),
}
"""Name -> (what makes the model, the shape of a step's input)."""
