"""The parts of the GPU check, the most important first. Each is a program of its own, so that a hang costs one part."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.gpu.runner import Part

_SEVERAL_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RUNTIME_CONNECT": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""NCCL 2.30 lets ranks share a GPU only when asked; with more thread blocks a rank they starve each other, and with few hardware queues one
rank's kernel may be behind another's wait."""
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no", "--print-limit", "20")


def python(*words: str) -> list[str]:
    """A program of this repository."""
    return [sys.executable, "-m", *words]


def ranks(size: int, *words: str, before: Sequence[str] = ()) -> list[str]:
    """The same on several ranks; ``before`` is put before each rank's command."""
    return [*python("collectives.launch", "-np", str(size)), *before, *python(*words)]


def parts(cpu: bool) -> list[Part]:
    """All parts; with ``cpu`` also what needs no GPU, but more cores than other machines have."""
    pytest = ("pytest", "-q", "-p", "no:cacheprovider", "-rs")
    scenarios = "tests.gpu.ranks"
    found = [
        Part("tests-kernels", python(*pytest, "tests/gpu/test_kernels.py"), 60),
        Part("tests-one-rank", python(scenarios, "--makers", "cupy,torch"), 45),
        Part("tests-ipc-2", ranks(2, scenarios, "--makers", "cupy,torch", "--transport", "cuda-ipc"), 60),
        Part("tests-ipc-4", ranks(4, scenarios, "--transport", "cuda-ipc"), 60),
        Part("tests-auto-2", ranks(2, scenarios), 45),
        Part("tests-host-2", ranks(2, scenarios, "--transport", "host"), 45),
        Part("tests-threads", python(*pytest, "tests/gpu/test_threads.py"), 60, _SEVERAL_RANKS),
        Part("tests-nccl-2", ranks(2, scenarios, "--transport", "nccl"), 60, _SEVERAL_RANKS),
        Part("tests-nccl-4", ranks(4, scenarios, "--transport", "nccl", "--quick"), 45, _SEVERAL_RANKS),
        Part("memory-kernels", [*_SANITIZER, "--tool", "memcheck", *python(*pytest, "tests/gpu/test_kernels.py")], 60, needs=_SANITIZER[0]),
        Part(
            "memory-ipc-2", ranks(2, scenarios, "--quick", "--no-pool", before=(*_SANITIZER, "--tool", "memcheck")), 60, needs=_SANITIZER[0]
        ),
        Part("kernels", python("benchmarks.gpu.kernels"), 40),
        Part("ipc-2", ranks(2, "benchmarks.gpu.ipc", "--transport", "cuda-ipc"), 45),
        Part("ipc-4", ranks(4, "benchmarks.gpu.ipc", "--transport", "cuda-ipc"), 60),
        Part("nccl", python("benchmarks.gpu.nccl"), 60, _SEVERAL_RANKS),
        Part("latency", ranks(2, "benchmarks.gpu.latency", "--transport", "auto,cuda-ipc,host"), 30),
        Part("latency-nccl", ranks(2, "benchmarks.gpu.latency", "--transport", "nccl"), 30, _SEVERAL_RANKS),
        Part("torch", ranks(2, "benchmarks.gpu.streams"), 60),
        Part("torch-training", ranks(2, "benchmarks.gpu.training"), 60),
        Part("ipc-2-nccl", ranks(2, "benchmarks.gpu.ipc", "--transport", "nccl", "--algorithm", "native"), 45, _SEVERAL_RANKS),
        Part("ipc-4-nccl", ranks(4, "benchmarks.gpu.ipc", "--transport", "nccl", "--algorithm", "native"), 45, _SEVERAL_RANKS),
        Part("memory-races", [*_SANITIZER, "--tool", "racecheck", *python(*pytest, "tests/gpu/test_kernels.py")], 60, needs=_SANITIZER[0]),
    ]
    if cpu:
        sizes = ("-b", "64K", "-e", "64M", "-f", "4", "-n", "10", "-w", "2", "-o", "sum")
        sweep = ("benchmarks.allreduce", *sizes, "--peers", "mpi", "--algorithm", "ring", "-J", "{result}")
        found += [Part(f"cpu-rings-{size}", ranks(size, *sweep), 60) for size in (4, 8, 16)]
    return found
