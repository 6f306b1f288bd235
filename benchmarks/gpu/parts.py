"""The parts of the GPU check, in their order. Each is a program of its own, so that a hang costs one part.

First the figures and the scenarios over CUDA IPC, which need nothing but a GPU; then what may hang or takes long: NCCL
between ranks that share a GPU, and compute-sanitizer. Last what needs cores and no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.gpu.runner import Part

_SEVERAL_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_DEBUG": "WARN",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""NCCL 2.30 lets ranks share a GPU only when asked; with more thread blocks a rank they starve each other, and with few
hardware queues one rank's kernel may be behind another's wait."""
_MEMCHECK, _RACECHECK = ("--tool", "memcheck"), ("--tool", "racecheck")
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no", "--print-limit", "20")
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-rs")
_KERNELS = (*_PYTEST, "tests/gpu/test_kernels.py")
_SCENARIOS = "tests.gpu.ranks"
_ALLREDUCE = "benchmarks.gpu.ipc"
_CPU = ("--device", "cpu")

GROUPS: Mapping[str, Sequence[str]] = {
    "tests-ipc": ("tests-ipc-2", "tests-ipc-4"),
    "tests-nccl": ("tests-nccl-2", "tests-nccl-4"),
    "torch": ("torch-streams", "torch-training", "torch-captures"),
    "memory": ("memory-kernels", "memory-ipc-2", "memory-races"),
    "cpu-rings": ("cpu-rings-4", "cpu-rings-8", "cpu-rings-16"),
}
"""Names for several parts at once."""


def python(*words: str) -> list[str]:
    """A program of this repository."""
    return [sys.executable, "-m", *words]


def ranks(size: int, *words: str, before: Sequence[str] = ()) -> list[str]:
    """The same on several ranks; ``before`` is put before each rank's command."""
    return [*python("collectives.launch", "-np", str(size)), *before, *python(*words)]


VERSIONS = Part("versions", python("benchmarks.gpu.versions"), 60, gpu=False)
"""What the check runs on; always run, because the rest depends on it."""


def parts() -> list[Part]:
    """All parts, `VERSIONS` first."""
    return [
        VERSIONS,
        Part("kernels", python("benchmarks.gpu.kernels"), 40),
        _allreduces("ipc-2", 2, 45),
        Part(
            "latency",
            ranks(2, "benchmarks.gpu.latency", "--transport", "auto,cuda-ipc,host"),
            30,
            rehearsal=ranks(2, "benchmarks.gpu.latency", *_CPU, "--transport", "auto"),
        ),
        Part(
            "tests-ipc-2",
            ranks(2, _SCENARIOS, "--makers", "cupy,torch", "--transport", "cuda-ipc"),
            60,
            rehearsal=ranks(2, _SCENARIOS, *_CPU, "--transport", "cuda-ipc"),
        ),
        Part("tests-kernels", python(*_KERNELS), 60),
        _allreduces("ipc-4", 4, 60),
        Part(
            "tests-ipc-4",
            ranks(4, _SCENARIOS, "--transport", "cuda-ipc"),
            60,
            rehearsal=ranks(4, _SCENARIOS, *_CPU, "--quick", "--transport", "cuda-ipc"),
        ),
        Part("tests-one", python(_SCENARIOS, "--makers", "cupy,torch"), 45, rehearsal=python(_SCENARIOS, *_CPU)),
        Part("torch-streams", ranks(2, "benchmarks.gpu.streams"), 60),
        Part(
            "torch-training",
            ranks(2, "benchmarks.gpu.training"),
            60,
            rehearsal=ranks(2, "benchmarks.gpu.training", *_CPU),
        ),
        Part("torch-captures", ranks(2, "benchmarks.gpu.captures"), 45),
        Part("tests-auto", ranks(2, _SCENARIOS), 45, rehearsal=ranks(2, _SCENARIOS, *_CPU)),
        Part(
            "tests-host",
            ranks(2, _SCENARIOS, "--transport", "host"),
            45,
            rehearsal=ranks(2, _SCENARIOS, *_CPU, "--transport", "host"),
        ),
        Part("tests-threads", python(*_PYTEST, "tests/gpu/test_threads.py"), 60, _SEVERAL_RANKS),
        Part("tests-nccl-2", ranks(2, _SCENARIOS, "--transport", "nccl"), 60, _SEVERAL_RANKS),
        Part("nccl", python("benchmarks.gpu.nccl"), 60, _SEVERAL_RANKS),
        Part("latency-nccl", ranks(2, "benchmarks.gpu.latency", "--transport", "nccl"), 30, _SEVERAL_RANKS),
        Part("tests-nccl-4", ranks(4, _SCENARIOS, "--transport", "nccl", "--quick"), 45, _SEVERAL_RANKS),
        Part("ipc-2-nccl", ranks(2, _ALLREDUCE, "--transport", "nccl", "--algorithm", "native"), 45, _SEVERAL_RANKS),
        Part("ipc-4-nccl", ranks(4, _ALLREDUCE, "--transport", "nccl", "--algorithm", "native"), 45, _SEVERAL_RANKS),
        _sanitized("memory-kernels", [*_SANITIZER, *_MEMCHECK, *python(*_KERNELS)]),
        _sanitized("memory-ipc-2", ranks(2, _SCENARIOS, "--quick", "--no-pool", before=(*_SANITIZER, *_MEMCHECK))),
        _sanitized("memory-races", [*_SANITIZER, *_RACECHECK, *python(*_KERNELS)]),
        *(_rings(size) for size in (4, 8, 16)),
    ]


def _allreduces(name: str, size: int, timeout: float) -> Part:
    command = ranks(size, _ALLREDUCE, "--transport", "cuda-ipc")
    return Part(name, command, timeout, rehearsal=ranks(size, _ALLREDUCE, *_CPU, "--sizes", "64K,1M"))


def _sanitized(name: str, command: Sequence[str]) -> Part:
    return Part(name, command, 60, needs=_SANITIZER[0])


def _rings(size: int) -> Part:
    """All-reduces on the CPU beside MPI's, a rank to a core."""
    words = (*_CPU, "--sizes", "64K,1M,16M,64M", "--algorithm", "ring", "--peers", "mpi")
    return Part(f"cpu-rings-{size}", ranks(size, _ALLREDUCE, *words), 40, gpu=False, cores=size)


def named(words: Sequence[str]) -> set[str]:
    """The names of the parts that these words name exactly; KeyError with the first that names nothing."""
    part_names = {part.name for part in parts()}
    names: set[str] = set()
    for word in words:
        if word not in GROUPS and word not in part_names:
            raise KeyError(word)
        names.update(GROUPS.get(word, (word,)))
    return names
