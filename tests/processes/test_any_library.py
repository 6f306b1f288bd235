"""Whatever holds the numbers: `allreduce(tensor, average=True)` gives back what it was given.

Every row says what a user has and what they expect to get. Both ranks go through all rows in one run, and each names
the rows that failed. Nobody wrote code for array-api-strict: it stands for every library that speaks DLPack and the
array API.
"""

from __future__ import annotations

import importlib.util

from tests.support.launching.mpirun import run_ranks

NUMBERS = "[[1, 2, 3], [4, 5, 6]]"
ROWS = [
    # what it is, library, how a user makes it of NUMBERS times factor, the type that comes back
    ("a NumPy array", "numpy", "np.array({0}, np.float32) * factor", "np.ndarray"),
    (
        "a NumPy array that Fortran would like",
        "numpy",
        "np.asfortranarray(np.array({0}, np.float32)) * factor",
        "np.ndarray",
    ),
    (
        "every other column of a NumPy array",
        "numpy",
        "np.repeat(np.array({0}, np.float32), 2, axis=1)[:, ::2] * factor",
        "np.ndarray",
    ),
    (
        "a NumPy array of bfloat16",
        "ml_dtypes",
        "np.array({0}, 'bfloat16') * np.array(factor, 'bfloat16')",
        "np.ndarray",
    ),
    ("a Python float", "numpy", "3.0 * factor", "float"),
    ("a NumPy scalar", "numpy", "np.float64(3.0) * factor", "np.float64"),
    ("an array of Python's array module", "numpy", "array.array('d', [factor, 2 * factor])", "array.array"),
    ("a CuPy array on a GPU", "cupy", "cupy.array({0}, 'float32') * factor", "cupy.ndarray"),
    ("a torch tensor", "torch", "torch.tensor({0}, dtype=torch.float32) * factor", "torch.Tensor"),
    ("a torch tensor of bfloat16", "torch", "torch.tensor({0}, dtype=torch.bfloat16) * factor", "torch.Tensor"),
    (
        "a torch parameter",
        "torch",
        "torch.nn.Parameter(torch.tensor({0}, dtype=torch.float32) * factor)",
        "torch.Tensor",
    ),
    ("a JAX array", "jax", "jax.numpy.array({0}, 'float32') * factor", "jax.Array"),
    ("a JAX array of bfloat16", "jax", "jax.numpy.array({0}, 'bfloat16') * factor", "jax.Array"),
    (
        "an array of a library that nobody wrote code for",
        "array_api_strict",
        "array_api_strict.asarray({0}, dtype=array_api_strict.float32) * array_api_strict.asarray(factor, "
        "dtype=array_api_strict.float32)",
        "type(array_api_strict.ones(1))",
    ),
]
HEAD = """
import array
import importlib
import numpy as np
import collectives
from collectives import allreduce, rank, size

collectives.init()
factor = float(2 * rank() + 1)  # 1 and 3: the average is twice the first rank's
failed = []


def numbers(thing):
    if hasattr(thing, "detach"):
        thing = thing.detach().float()
    return np.asarray(thing).astype(np.float64)


def row(what, make, expected):
    try:
        given = make()
        before = numbers(given).copy()
        got = allreduce(given, average=True)
        assert isinstance(got, expected()), f"expected {expected()}, got {type(got)}"
        assert np.array_equal(numbers(got), before / factor * 2), f"expected {before / factor * 2}, got {got}"
        assert np.array_equal(numbers(given), before), "what was given has changed"
        for attribute in ("dtype", "shape"):
            assert getattr(got, attribute, None) == getattr(given, attribute, None), f"{attribute}: {got!r}"
    except Exception as error:
        failed.append(f"{what}: {type(error).__name__}: {error}")
    else:
        print(f"{what}: comes back as {type(got).__module__}.{type(got).__qualname__}")

"""


def test_what_comes_in_comes_out() -> None:
    """Rows whose library is not installed are left out. CuPy's has tests of its own on an emulated GPU; those of
    TensorFlow and Keras, which take long to import, are in ``tests/unit/test_arrays.py`` and ``tests/adapters``."""
    present = [entry for entry in ROWS if importlib.util.find_spec(entry[1]) is not None]
    libraries = sorted({library for _, library, _, _ in present} - {"numpy"})
    program = HEAD + "".join(f"{library} = importlib.import_module({library!r})\n" for library in libraries)
    for what, _, make, expected in present:
        program += f"row({what!r}, lambda: {make.format(NUMBERS)}, lambda: {expected})\n"
    program += "assert size() == 2 and not failed, '\\n'.join(failed)\n"
    result = run_ranks(2, program, timeout=120)
    for output in result.ranks:
        assert [what for what, _, _, _ in present if f"{what}: comes back as" not in output] == [], str(result)
