"""Ranks that are threads (`collectives.worlds.local_world`): a device and programs of its own for each.

JAX keeps what it has traced and compiled for all threads of the process, and XLA runs programs in threads of its own.
So a call in a program has the number of its rank, and the number is part of the key by which JAX finds the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from collectives.base.errors import InvalidArgumentError
from collectives.jax import compat, eager
from collectives.worlds import local_world, runtime

_number: Any = jax.make_user_context(0) if hasattr(jax, "make_user_context") else None


def number() -> int:
    """The number of the calling thread's rank, for a call; 0 without a local world.

    Raises:
        InvalidArgumentError: JAX traces, and would use the program for other ranks, or run it beside theirs on one
            device.
    """
    own = local_world.number_of_rank()
    if not own or not compat.tracing():
        return own
    if _number is None or _number.value != own:
        remedy = (
            "install a JAX that has jax.make_user_context" if _number is None else "import collectives.jax before run()"
        )
        raise InvalidArgumentError(
            f"collectives.local_world: JAX would share one compiled program among all ranks; {remedy}, or call this "
            "outside jit [W8]"
        )
    size, devices = runtime.size(), jax.local_device_count()
    if size > devices:  # XLA runs a device's programs in as many threads as there are cores
        raise InvalidArgumentError(
            f"collectives.local_world: expected a device of JAX for each of {size} ranks, found {devices}: ranks that "
            f"share a device can deadlock; set XLA_FLAGS=--xla_force_host_platform_device_count={size} before JAX "
            "starts, or call this outside jit [W65]"
        )
    return own


@contextmanager
def _on_own_device(own: int, rank: int) -> Iterator[None]:
    """Have a rank's arrays made on the device of its number, and its programs end within."""
    if _number is None:
        yield
        return
    devices = jax.local_devices()
    with jax.default_device(devices[rank % len(devices)]), _number(own):
        try:
            yield
        finally:
            eager.wait_for_effects()


local_world.entering.append(_on_own_device)
