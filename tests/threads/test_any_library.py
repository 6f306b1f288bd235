"""Whatever holds the numbers: an all-reduce gives back the type that it was given; ranks are threads."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

Array = np.ndarray[Any, Any]
MADE: dict[str, tuple[str, Callable[[Any, Array], Any]]] = {
    "NumPy": ("numpy", lambda _, values: values),
    "Fortran order": ("numpy", lambda _, values: np.asfortranarray(values)),
    "every other column": ("numpy", lambda _, values: np.repeat(values, 2, axis=1)[:, ::2]),
    "NumPy's bfloat16": ("numpy", lambda _, values: values.astype(ml_dtypes.bfloat16)),
    "NumPy's scalar": ("numpy", lambda _, values: np.float64(values[0, 0])),
    "Python's float": ("numpy", lambda _, values: float(values[0, 0])),
    "Python's array": ("numpy", lambda _, values: array.array("d", values[0].tolist())),
    "torch": ("torch", lambda torch, values: torch.tensor(values)),
    "torch's bfloat16": ("torch", lambda torch, values: torch.tensor(values, dtype=torch.bfloat16)),
    "torch's parameter": ("torch", lambda torch, values: torch.nn.Parameter(torch.tensor(values))),
    "JAX": ("jax.numpy", lambda jnp, values: jnp.array(values)),
    "JAX's bfloat16": ("jax.numpy", lambda jnp, values: jnp.array(values, "bfloat16")),
    "a library that nobody wrote code for": ("array_api_strict", lambda strict, values: strict.asarray(values)),
}
"""By name: the library, and how a tensor of it is made."""


def numbers(tensor: Any) -> Array:
    return np.asarray(tensor.detach().float() if hasattr(tensor, "detach") else tensor).astype(np.float64)


@pytest.mark.parametrize(("library", "make"), MADE.values(), ids=MADE)
def test_what_comes_in_comes_out(library: str, make: Callable[[Any, Array], Any]) -> None:
    module = pytest.importorskip(library)

    def program(world: World) -> None:
        first, second, average = (
            make(module, factor * np.arange(1, 7, dtype=np.float32).reshape(2, 3)) for factor in (1, 3, 2)
        )
        tensor = second if world.rank else first
        before = numbers(tensor)
        result = world.allreduce(tensor, average=True)
        assert type(result) is (module.Tensor if library == "torch" else type(tensor))
        np.testing.assert_array_equal(numbers(result), numbers(average))
        np.testing.assert_array_equal(numbers(tensor), before, "the tensor was changed")
        for attribute in ("dtype", "shape"):
            assert getattr(result, attribute, None) == getattr(tensor, attribute, None)

    thread_groups.run(2, program, make_world=World)
