"""Messages of tensors of the frameworks, and of tensors on emulated GPUs; ranks are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.ranks import emulated, on_threads
from tests.support.scenarios.gpu_makers import EmulatedMaker

COUNTS = (3, 50_000)


def as_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


def as_tensorflow(array: np.ndarray) -> Any:
    return pytest.importorskip("tensorflow").constant(array)


def as_jax(array: np.ndarray) -> Any:
    return pytest.importorskip("jax.numpy").asarray(array)


@pytest.mark.parametrize("make", (as_torch, as_tensorflow, as_jax))
def test_tensors_of_a_framework(make: Any) -> None:
    """A new tensor is of the type of the one that it is to be like; in place only where tensors can be written."""
    make(np.zeros(1, np.float32))

    def program(world: World) -> None:
        peer = 1 - world.rank
        for count in COUNTS:
            mine = make(np.full((count, 2), world.rank + 1, np.float32))
            got = world.sendrecv(mine, peer, None, peer)
            assert type(got) is type(mine) and tuple(got.shape) == (count, 2)
            np.testing.assert_array_equal(np.asarray(got), peer + 1)
            handle = world.isend(mine, peer, 1)
            other = world.recv(None, peer, 1, like=mine, shape=(count, 2), dtype=mine.dtype)
            handle.wait()
            assert type(other) is type(mine)
            np.testing.assert_array_equal(np.asarray(other), peer + 1)
            if make is not as_torch:
                with pytest.raises(InvalidArgumentError):
                    world.recv(mine, peer)
                continue
            handle = world.isend(mine, peer, 2)
            into = mine.new_zeros((2, count)).T
            assert world.recv(into, peer, 2) is into
            handle.wait()
            np.testing.assert_array_equal(into.numpy(), peer + 1)

    thread_groups.run(2, program, make_world=World)


def test_torchs_bfloat16() -> None:
    torch = pytest.importorskip("torch")

    def program(world: World) -> None:
        got = world.sendrecv(torch.full((3,), 0.5, dtype=torch.bfloat16), 1 - world.rank, None, 1 - world.rank)
        assert got.dtype == torch.bfloat16 and (got == 0.5).all()

    thread_groups.run(2, program, make_world=World)


@pytest.mark.usefixtures("kernels")
def test_tensors_on_gpus() -> None:
    """They pass through host memory; the receiver's stream is the one in which the result is fetched."""

    def program(world: World, maker: EmulatedMaker) -> None:
        peer = 1 - world.rank
        for count in COUNTS:
            mine = maker.device(np.full(count, world.rank + 1, np.float32))
            into = maker.device(np.zeros(count + 2, np.float32))
            assert world.sendrecv(mine, peer, into, peer) is into
            np.testing.assert_array_equal(maker.host(into), [peer + 1] * count + [0, 0])
            receiving, sending = world.irecv(None, peer, 1, like=mine), world.isend(mine, peer, 1)
            new = receiving.wait()
            assert receiving.wait() is new
            np.testing.assert_array_equal(maker.host(new), peer + 1)
            sending.wait()
            receiving, sending = world.irecv(into, peer, 2), world.isend(mine, peer, 2)
            assert world.synchronize(receiving) is into
            sending.wait()
            world.send(np.zeros(count + 3, np.float32), world.rank, 3)
            with pytest.raises(MismatchError, match=f"expected at most {count + 2} elements"):
                world.recv(into, world.rank, 3)
            np.testing.assert_array_equal(maker.host(into), [peer + 1] * count + [0, 0])

    with emulated(1, delays=3) as provider:
        on_threads(2, program, provider)
