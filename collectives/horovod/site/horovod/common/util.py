"""Helpers that programs import from Horovod: build information, GPU detection, versions and utilities."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from collectives.worlds import capabilities

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
"""The frameworks that Horovod supports; not all of them have an adapter here."""
_T = TypeVar("_T")
_cache = functools.cache
_HAS_GPU: dict[str, Callable[[Any], bool]] = {
    "torch": lambda torch: torch.cuda.is_available(),
    "tensorflow": lambda tensorflow: bool(tensorflow.config.list_physical_devices("GPU")),
}


def _ignoring_verbose(built: Callable[[], _T]) -> Callable[..., _T]:
    """Add Horovod's argument ``verbose``, which is ignored."""

    def call(verbose: bool = False) -> _T:
        return built()

    call.__name__, call.__doc__ = built.__name__, built.__doc__
    return call


mpi_built = _ignoring_verbose(capabilities.mpi_built)
gloo_built = _ignoring_verbose(capabilities.gloo_built)
nccl_built = _ignoring_verbose(capabilities.nccl_built)
ddl_built = _ignoring_verbose(capabilities.ddl_built)
ccl_built = _ignoring_verbose(capabilities.ccl_built)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework (``"torch"``) is installed and has an adapter here; imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in (ext_base_name, f"collectives.{ext_base_name}"))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise an ImportError unless ``"horovod.torch"`` (or another) can be used."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} cannot be used: {framework} is not installed, or collectives has no adapter for it [F112]"
        )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework, such as ``"torch"``, is installed and sees a GPU."""
    if ext_base_name not in _HAS_GPU or importlib.util.find_spec(ext_base_name) is None:
        return False
    return _HAS_GPU[ext_base_name](importlib.import_module(ext_base_name))


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number of ranks is a power of two, which Adasum does not require here."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[_T], n: int) -> list[Sequence[_T]]:  # noqa: E741
    """Cut a list into ``n`` parts whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(len(l), n)
    ends = [number * length + min(number, longer) for number in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Whether an object is iterable."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within a context; None leaves one unchanged."""
    changes = {name: text for name, text in kwargs.items() if text is not None}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return the function ``(op, average) -> op`` that translates the older argument to one of ``reduce_ops``."""

    def choose(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError(f"expected op or average, got both: op={op}, average={average} [F38]")
        if average is not None:
            warnings.warn("average is deprecated: use op=Average or op=Sum [F39]", DeprecationWarning, stacklevel=3)
            return reduce_ops.Average if average else reduce_ops.Sum
        return reduce_ops.Average if op is None else op

    return choose


def get_ext_suffix() -> str:
    """Return the suffix of compiled modules' file names."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path of the compiled module ``args`` (folders, then its name) of a package at ``pkg_path``."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: nothing is compiled against a version of the framework."""


@_cache
def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether the version ``ver`` is ``target`` or later. Needs ``packaging``, which PyTorch and TensorFlow install.

    A ValueError names what is no string, or a ``target`` that is not of the form major.minor.patch.
    """
    from packaging.version import Version

    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(
            f"expected two versions as strings, the second of the form major.minor.patch; got {ver!r} and {target!r} "
            "[F113]"
        )
    return Version(ver) >= Version(target)
