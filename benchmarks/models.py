"""The shapes of models' parameters: what a data-parallel training all-reduces at each step. By construction, so that
they can be checked.

ResNet-50 is written as torchvision has it (stride in the 3x3 convolution, no bias before a batch normalisation): He et
al., "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

Shapes = dict[str, tuple[int, ...]]
"""Name of a parameter -> its shape; the first layer first."""


def resnet50() -> Shapes:
    """161 parameters, 25,557,032 elements: 53 convolutions with their normalisations, and one dense layer."""
    shapes: Shapes = {}

    def convolution(name: str, normalisation: str, inputs: int, outputs: int, width: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, width, width)
        shapes[f"{normalisation}.weight"] = shapes[f"{normalisation}.bias"] = (outputs,)

    convolution("conv1", "bn1", 3, 64, 7)
    inputs = 64
    for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            convolution(f"{name}.conv1", f"{name}.bn1", inputs, width, 1)
            convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            convolution(f"{name}.conv3", f"{name}.bn3", width, 4 * width, 1)
            if block == 0:
                convolution(f"{name}.downsample.0", f"{name}.downsample.1", inputs, 4 * width, 1)
            inputs = 4 * width
    shapes["fc.weight"] = (1000, inputs)
    shapes["fc.bias"] = (1000,)
    return shapes


def small() -> Shapes:
    """1,000 tensors of 1 KiB in float32: the cost of each operation outweighs its bytes."""
    return {f"parameter{index}": (256,) for index in range(1000)}


def mlp() -> Shapes:
    """A perceptron 784-2048-2048-2048-10: few tensors, up to 16 MiB in float32."""
    widths = (784, 2048, 2048, 2048, 10)
    shapes: Shapes = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        shapes[f"dense{layer}.weight"] = (outputs, inputs)
        shapes[f"dense{layer}.bias"] = (outputs,)
    return shapes


MODELS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50, "small": small, "mlp": mlp}


def elements(shapes: Shapes) -> int:
    """The number of elements of all parameters together."""
    return sum(prod(shape) for shape in shapes.values())
