"""The CUDA C++ source of each kernel: the common templates, followed by one line that instantiates them."""

from __future__ import annotations

from typing import NamedTuple

from collectives.device.kernel_templates import TEMPLATES

WAYS = 8
"""The maximum number of sources, and of targets, of a job."""
JOBS = 8
"""The maximum number of jobs of a launch."""
COMBINE_THREADS = 512
"""Threads per block of the combine kernels. Two such blocks occupy half of a multiprocessor's threads, each with eight
loads in flight: enough for the full memory bandwidth, with room for the program's own kernels."""
PACK_THREADS = 256
TILE_BYTES = 16384
"""What one block packs: part of one tensor, in bytes of the wider of its two dtypes; four 16-byte words per thread."""

ITEMS = {
    "bool": "Bool",
    "int8": "Plain<signed char>",
    "int16": "Plain<short>",
    "int32": "Plain<int>",
    "int64": "Plain<long long>",
    "uint8": "Plain<unsigned char>",
    "uint16": "Plain<unsigned short>",
    "uint32": "Plain<unsigned>",
    "uint64": "Plain<unsigned long long>",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float32": "Plain<float>",
    "float64": "Plain<double>",
    "complex64": "Plain<Complex<float>>",
    "complex128": "Plain<Complex<double>>",
}
"""The templates' name of each dtype."""


class Kernel(NamedTuple):
    """One kernel: its name, and the line that instantiates it from the templates."""

    name: str
    line: str


def combine(operation: str, dtype: str, scaling: str, stepwise: bool = False) -> Kernel:
    """The kernel that combines sources; ``operation`` and ``scaling`` name structures of the templates. ``stepwise``:
    rounds to the dtype after every combination."""
    name, item = f"combine_{operation}_{dtype}_{scaling}", ITEMS[dtype]
    if stepwise:
        name, operation = f"{name}_stepwise", f"Stepwise<{item}, {operation}>"
    return _jobs(name, f"combine<{item}, {operation}, {scaling}>")


def copy(dtype: str, scaling: str) -> Kernel:
    """The kernel for jobs of one source each: copies and scales."""
    return _jobs(f"copy_{dtype}_{scaling}", f"copy<{ITEMS[dtype]}, {scaling}>")


def pack(dtype: str, wire: str, scaling: str) -> Kernel:
    """The kernel that copies tensors of ``dtype`` into a buffer of ``wire``."""
    return _move("pack", dtype, wire, scaling)


def unpack(dtype: str, wire: str, scaling: str) -> Kernel:
    """The kernel that copies a buffer of ``wire`` back into tensors of ``dtype``."""
    return _move("unpack", dtype, wire, scaling)


def source(*kernels: Kernel) -> str:
    """The complete source of these kernels."""
    constants = (("WAYS", WAYS), ("JOBS", JOBS), ("TILE_BYTES", TILE_BYTES))
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in constants),
            TEMPLATES,
            *(kernel.line for kernel in kernels),
            "",
        ]
    )


def _jobs(name: str, template: str) -> Kernel:
    parameters = "const __grid_constant__ Pointers pointers, const __grid_constant__ Shape shape, const Scaling scaling"
    return _kernel(name, COMBINE_THREADS, 2, parameters, f"{template}(pointers.at[blockIdx.y], shape, scaling)")


def _move(direction: str, dtype: str, wire: str, scaling: str) -> Kernel:
    packs = "true" if direction == "pack" else "false"
    call = f"move_tile<{packs}, {ITEMS[dtype]}, {ITEMS[wire]}, {scaling}>(tiles, scaling)"
    return _kernel(
        f"{direction}_{dtype}_{wire}_{scaling}", PACK_THREADS, 4, "const Tiles tiles, const Scaling scaling", call
    )


def _kernel(name: str, threads: int, blocks: int, parameters: str, call: str) -> Kernel:
    name = name.lower()
    return Kernel(
        name, f'extern "C" __global__ void __launch_bounds__({threads}, {blocks}) {name}({parameters}) {{ {call}; }}'
    )
