"""The file of a state: what it has after a commit, what of it is read, and what is refused."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.base.errors import InvalidArgumentError
from collectives.elastic.object_state import Attributes, ObjectState
from collectives.elastic.shadow import Shadow
from collectives.elastic.state_file import StateFile
from tests.trials.hostile import Bomb


class Owner:
    """What has the state."""

    def __init__(self, value: float) -> None:
        self.weights = np.full(1000, value)
        self.history = [np.full(3, value + 1)]
        self.epoch = int(value)


def shadow_of(owner: Owner, part: str = "state") -> Shadow:
    shadow = Shadow({part: Attributes(owner, list(vars(owner)))})
    shadow.fill()
    shadow.flip()
    return shadow


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file, writer, reader = StateFile(tmp_path / "state", 1), Owner(7), Owner(1)
    assert file.load(shadow_of(reader)) == 0 and reader.epoch == 1
    file.write(shadow_of(writer), 12)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    shadow, weights = shadow_of(reader), reader.weights
    assert file.load(shadow) == 12
    assert reader.epoch == 7 and reader.history[0].tolist() == [8] * 3
    assert reader.weights is weights and set(weights) == {7}
    reader.weights += 1
    shadow.restore()
    assert set(reader.weights) == {7}


def test_it_is_written_at_every_so_many_commits(tmp_path: Path) -> None:
    file, owner = StateFile(tmp_path / "state", 3), Owner(2)
    for version in range(1, 6):
        owner.epoch = version
        file.write(shadow_of(owner), version)
    assert file.load(shadow_of(owner)) == 3 and owner.epoch == 3


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file, owner = StateFile(tmp_path / "state", 1), Owner(2)
    file.write(shadow_of(owner), 1)
    shadow = shadow_of(owner)
    shadow.current["state"].rest = lambda: None  # type: ignore[assignment]
    with pytest.raises(Exception, match=r"pickle|local object"):  # as Python has it before and from 3.13 on
        file.write(shadow, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["state"] and file.load(shadow_of(owner)) == 1


@pytest.mark.parametrize("content", [b"", b"a model\n", b'{"kind": "other"}\n', None])
def test_another_file_is_refused_by_its_name(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "state"
    file, owner = StateFile(path, 1), Owner(2)
    file.write(shadow_of(Owner(5)), 9)
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(InvalidArgumentError, match=f"save_to: {path} does not hold this state .*remove it"):
        file.load(shadow_of(owner))
    assert owner.epoch == 2 and set(owner.weights) == {2}


def test_the_file_of_another_state_is_refused(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state", 1)
    file.write(shadow_of(Owner(5), "model"), 9)
    with pytest.raises(InvalidArgumentError, match="it has model, and the state has state"):
        file.load(shadow_of(Owner(2)))


def test_a_file_of_other_shapes_is_refused_and_one_whose_arrays_grew_is_not(tmp_path: Path) -> None:
    file, writer = StateFile(tmp_path / "state", 1), Owner(5.0)
    file.write(shadow_of(writer), 1)
    other = Owner(2.0)
    other.weights = np.zeros((10, 100))
    reason = r"'weights' was float64 of shape \(1000,\) when .* is float64 of shape \(10, 100\) now"
    with pytest.raises(InvalidArgumentError, match=reason):
        StateFile(tmp_path / "state", 1).load(shadow_of(other))
    assert other.epoch == 2 and not other.weights.any()
    writer.weights = np.full(3000, 6.0)
    file.write(shadow_of(writer), 2)
    reader = Owner(2.0)
    assert StateFile(tmp_path / "state", 1).load(shadow_of(reader)) == 2 and reader.weights.tolist() == [6.0] * 3000


def test_the_file_is_the_users_alone_and_another_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "state"
    file = StateFile(path, 1)
    file.write(shadow_of(Owner(5)), 9)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n" + pickle.dumps(Bomb(tmp_path / "canary")))
    for mode in (0o666, 0o620):
        path.chmod(mode)
        with pytest.raises(InvalidArgumentError, match=f"has mode {mode:o}, and reading it may execute code"):
            file.load(shadow_of(Owner(2)))
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 1234, -1)
        with pytest.raises(InvalidArgumentError, match="it belongs to user 1234"):
            file.load(shadow_of(Owner(2)))
    assert not (tmp_path / "canary").exists()


def test_a_state_goes_on_from_its_file(tmp_path: Path) -> None:
    collectives.init()
    try:
        state = ObjectState(total=np.zeros(3), step=0)
        state.save_to(tmp_path / "state")
        state.sync()
        for _ in range(4):
            state.total += 2
            state.step += 1
            state.commit()
        state.step = 100  # not committed
        again = ObjectState(total=np.zeros(3), step=0)
        again.save_to(tmp_path / "state")
        again.sync()
        assert again.step == 4 and again.total.tolist() == [8] * 3
        again.step = 5
        again.commit()
        state.sync()  # which has been synchronized, and does not read it
        assert state.step == 100
        third = ObjectState(total=np.zeros(3), step=0)
        third.save_to(tmp_path / "state", every=2)
        third.sync()
        assert third.step == 5
        with pytest.raises(InvalidArgumentError, match="every"):
            third.save_to(tmp_path, every=0)
    finally:
        collectives.shutdown()


def test_what_a_death_has_left_is_removed_by_the_next_one_who_writes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = f"state[1].{socket.gethostname()}"
    for name in (
        f"{own}.{ended.pid}",
        f"{own}.{os.getppid()}",
        f"{own}.backup",
        f"state[1].elsewhere.{ended.pid}",
        "state1",
    ):
        (tmp_path / name).touch()
    StateFile(tmp_path / "state[1]", 1).write(shadow_of(Owner(7)), 1)
    kept = [f"{own}.{os.getppid()}", f"{own}.backup", f"state[1].elsewhere.{ended.pid}", "state1", "state[1]"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
