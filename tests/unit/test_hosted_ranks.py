"""Places of ranks in processes that another system starts."""

import itertools
import os
import threading

import pytest

from collectives.base import exclusion
from collectives.base.errors import CollectiveTimeoutError
from collectives.launch import hosted_ranks
from collectives.launch.hosted_ranks import Site, arrange, as_rank
from collectives.worlds import runtime
from tests.support.interrupting import interrupted

PORTS = (1000, 1001)


def site(host: str) -> Site:
    return Site(host, f"name of {host}", f"{host}.net", PORTS)


def test_ranks_of_a_host_follow_each_other() -> None:
    variables = arrange([site("a"), site("b"), site("a"), site("b"), site("b")])
    assert [each["COLLECTIVES_RANK"] for each in variables] == ["0", "2", "1", "3", "4"]
    assert [each["COLLECTIVES_LOCAL_RANK"] for each in variables] == ["0", "0", "1", "1", "2"]
    assert [each["LOCAL_WORLD_SIZE"] for each in variables] == ["2", "3", "2", "3", "3"]
    assert [each["HOROVOD_CROSS_RANK"] for each in variables] == ["0", "1", "0", "1", "0"]
    assert [each["HOROVOD_CROSS_SIZE"] for each in variables] == ["2", "2", "2", "2", "1"]
    assert {each["COLLECTIVES_SIZE"] for each in variables} == {"5"}
    assert {each["COLLECTIVES_RENDEZVOUS"] for each in variables} == {"tcp://a.net:1000"}
    assert {each["MASTER_ADDR"] + each["MASTER_PORT"] for each in variables} == {"a.net1001"}
    assert len({each["COLLECTIVES_KEY"] for each in variables}) == 1


def test_ranks_of_one_host_meet_by_loopback() -> None:
    assert arrange([site("a"), site("a")])[1]["COLLECTIVES_RENDEZVOUS"] == "tcp://127.0.0.1:1000"


def test_each_job_has_a_key_of_its_own() -> None:
    keys = {arrange([site("a")])[0]["COLLECTIVES_KEY"] for _ in range(2)}
    assert len(keys) == 2


def test_a_place_is_forgotten_also_where_leaving_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("as asked")

    monkeypatch.setattr(runtime, "shutdown", fail)
    monkeypatch.setenv("COLLECTIVES_SIZE", "7")
    for _ in range(2):  # the second time too: the first one has let go
        with pytest.raises(MemoryError, match="as asked"):
            as_rank({"COLLECTIVES_RANK": "3", "COLLECTIVES_SIZE": "4"}, expect_rank, "3")
        assert "COLLECTIVES_RANK" not in os.environ and os.environ["COLLECTIVES_SIZE"] == "7"


def expect_rank(rank: str) -> None:
    assert os.environ["COLLECTIVES_RANK"] == rank


def test_an_interrupt_at_any_instruction_leaves_no_place_and_no_lock() -> None:
    """So does `give_up`, which raises in the thread of the rank."""
    within = [hosted_ranks.__file__, exclusion.__file__]
    for at in itertools.count(1):
        if not interrupted(lambda: as_rank({"COLLECTIVES_RANK": "3"}, expect_rank, "3"), at, within):
            break
        assert "COLLECTIVES_RANK" not in os.environ and not hosted_ranks._rank_thread
        assert not hosted_ranks._guard._is_owned() and not hosted_ranks._one_call._is_owned()
    assert at > 100


def test_a_process_is_one_rank_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_ranks, "_FREE_WITHIN", 0.01)
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=as_rank, args=({"COLLECTIVES_RANK": "3"}, lambda: (entered.set(), leave.wait(60))), daemon=True
    )
    thread.start()
    assert entered.wait(60)
    with pytest.raises(CollectiveTimeoutError, match=r"is still rank 3 of an earlier call, .* \[L79\]"):
        as_rank({"COLLECTIVES_RANK": "4"}, expect_rank, "4")
    leave.set()
    thread.join(60)
    as_rank({"COLLECTIVES_RANK": "4"}, expect_rank, "4")
