"""Algorithms of the program's own: wrong ones are refused with a counterexample, right ones get the properties of their
steps, and execution plans of MSCCL++ become schedules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from collectives.algorithms import register_algorithm
from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError
from collectives.launch.command_line import make_parser
from collectives.schedules import copy, direct, from_mscclpp, receive, reduce, registry, send, tree
from collectives.schedules.proof.verify import ScheduleError
from collectives.schedules.schedule import Step
from collectives.tools import drawing, simulate
from tests.support.schedules import own
from tests.trials import mutants
from website import algorithms_table

Rounds = Sequence[Sequence[Step]]


@pytest.fixture(autouse=True)
def registered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ALL", dict(registry._ALL))


def around(rank: int, size: int) -> Rounds:
    """A ring whose last reduction is forgotten from three ranks on."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sums = [[send(after, (rank - k - 1) % size), reduce(before, (rank - k - 2) % size)] for k in range(size - 1)]
    copies = [[send(after, (rank - k) % size), receive(before, (rank - k - 1) % size)] for k in range(size - 1)]
    return [*sums[: max(1, size - 2)], *copies]


def other_orders(rank: int, size: int) -> Rounds:
    """Four ranks: rank 0 adds (0+1)+(2+3), rank 2 (1+2)+(0+3); the others take rank 0's."""
    if size != 4:
        return own.star(rank, size)
    return [
        [[reduce(1, 0), send(1, 0)], [reduce(3, 0)], [send(1, 0), send(3, 0)]],
        [[send(0, 0), send(2, 0), receive(0, 0), reduce(3, 0)], [send(2, 0)], [receive(0, 0)]],
        [[send(3, 0), reduce(1, 0)], [reduce(1, 0)], []],
        [[send(1, 0), reduce(2, 0)], [send(0, 0)], [receive(0, 0)]],
    ][rank]


@pytest.mark.parametrize(
    ("collective", "build", "text"),
    [
        (
            "allreduce",
            around,
            "of 3 ranks: chunk 0 of rank 0 lacks the contributions of ranks 1, 2 after the last round, 2",
        ),
        ("allreduce", other_orders, "of 4 ranks: rank 2 combines chunk 0 in another order than rank 0"),
        ("allreduce", lambda rank, size: [[send(1 - rank, 0)]], "rank 1 does not receive it in this round"),
        ("allreduce", lambda rank, size: [], "chunk 0 of rank 0 lacks the contribution of rank 1"),
        ("allgather", lambda rank, size: direct.allgather(rank, size).rounds[:1], "add copy(0, 0) to rank 0"),
        ("broadcast", lambda rank, size: tree.broadcast(rank, size, 1).rounds, "the root is rank 0"),
        ("broadcast", lambda rank, size: [[send(rank + 1, 0)]], "raised"),
        ("allreduce", lambda rank, size: [[("send", 1, 0)]], "found ('send', 1, 0)"),
        ("allreduce", lambda rank, size: 1 / 0, "build(0, 2) raised ZeroDivisionError"),
        (
            "allreduce",
            lambda rank, size: [
                [send(1 - rank, 0, push=True), receive(1 - rank, 0, push=True)],
                [send(1 - rank, 0), receive(1 - rank, 0)],
                *own.star(rank, size),
            ],
            "",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_a_counterexample(
    collective: str, build: Callable[[int, int], Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        register_algorithm(collective, "mine", build, sizes=None if build is around else [2, 3, 4])
    assert text in str(caught.value) or text == "raised"
    assert f"{collective}/mine" in str(caught.value)
    assert (collective, "mine") not in registry._ALL


def test_a_chunk_that_was_pushed_is_not_used_again() -> None:
    def build(rank: int, size: int) -> Rounds:
        if rank == 0:
            return [[copy(0, 0), send(1, 0, push=True)], []]
        return [[receive(0, 0, push=True)], [send(2, 0)]] if rank == 1 else [[], [receive(1, 0)]]

    with pytest.raises(InvalidArgumentError, match=r"round 1, rank 1: .*a peer has pushed into it"):
        register_algorithm("broadcast", "pushed", build, sizes=[3])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("allreduce", "ring", own.star), "another algorithm has this name"),
        (("alltoall", "ring", own.around), "another algorithm has this name"),
        (("allreduce", "a b", own.star), "expected letters"),
        (("allreduce", "auto", own.star), "not 'auto'"),
        (("barrier", "mine", own.star), "expected one of allreduce"),
        (("broadcast", "mine", own.two_levels, True), "only an allreduce"),
    ],
)
def test_names_and_collectives_that_cannot_be(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        register_algorithm(*arguments[:3], sizes=[2], spans_hosts=len(arguments) > 3)


def test_the_same_again_is_no_mistake_and_another_one_is() -> None:
    register_algorithm("allreduce", "mine", own.star, sizes=[2, 3])
    register_algorithm("allreduce", "mine", lambda rank, size: own.star(rank, size), sizes=(3, 2))
    for build, sizes in ((own.star, [2]), (own.halves, [2, 3])):
        with pytest.raises(InvalidArgumentError, match="another algorithm has this name"):
            register_algorithm("allreduce", "mine", build, sizes=sizes)


def test_a_function_that_returns_other_steps_later_is_refused() -> None:
    chosen = [own.star]
    register_algorithm("allreduce", "mine", lambda rank, size: chosen[0](rank, size), sizes=[2])
    chosen[0] = own.halves
    with pytest.raises(ScheduleError, match="other steps than those that were proved"):
        registry.find("allreduce", "mine").schedules([range(2)])(0)


def test_properties_are_derived_from_the_steps() -> None:
    with own.registered([2, 3, 4]):
        entries = {name: registry.find(of, name) for of, name, _ in own.OWN if of == "allreduce"}
        assert {name for name, each in entries.items() if each.one_chunk} == {"own-star", "own-ordered", "own-exchange"}
        assert {name for name, each in entries.items() if each.versioned} == {"own-ordered", "own-exchange"}
        assert {name for name, each in entries.items() if each.on_gpu} == {*entries} - {"own-ordered", "own-exchange"}
        assert entries["own-levels"].spans_hosts
        for each in (entry for entry in drawing.with_schedules() if not entry.digest):
            if each.spans_hosts:
                continue
            register_algorithm(
                each.collective, "again", lambda r, n, a=each: a.schedules([range(n)])(r).rounds, sizes=range(2, 8)
            )
            again = registry._ALL.pop((each.collective, "again"))
            for name in ("one_chunk", "versioned"):
                assert getattr(again, name) == getattr(each, name), (each, name)
            assert again.by_messages or not each.by_messages
            assert again.passes_on or not each.passes_on


def test_it_is_simulated_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    register_algorithm("allreduce", "mine", own.bidirectional, sizes=[2, 3, 4])
    for arguments in ("-np 4", "-np 4 --exact"):
        assert simulate.main(f"collective allreduce {arguments} --bytes 1M --algorithm mine".split()) == 0
        assert "mine" in capsys.readouterr().out
        five = f"collective allreduce {arguments.replace('4', '5')} --bytes 1M --algorithm mine"
        assert simulate.main(five.split()) == 2
        assert "mine" in capsys.readouterr().err
    assert "6 rounds" in drawing.page_element("allreduce", "mine", 4) and "`mine`" not in algorithms_table.table()
    with pytest.raises(InvalidArgumentError, match="proved for 2, 3, 4 ranks, not for 5"):
        drawing.page_element("allreduce", "mine", 5)


def test_a_setting_and_an_option_name_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import collectives\nfrom tests.support.schedules import own\n"
        "collectives.register_algorithm('allreduce', 'filed', own.star, sizes=[2])\n"
    )
    config = Config.from_environment({"COLLECTIVES_ALGORITHM": f"{file}:filed"})
    assert config.algorithm == registry.signed("filed") and config.algorithm.startswith("filed@")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(file.read_text().replace("own.star", "lambda rank, size: []"))
    broken = tmp_path / "broken.py"
    broken.write_text("[][0]")
    for text, expected in (
        (f"{wrong}:filed", "lacks the contribution"),
        (f"{broken}:filed", "broken.py cannot be used: list index out of range"),
        (f"{tmp_path}/none.py:filed", "No such file"),
        (f"{file}:other", "expected one of auto, ring"),
        ("other", "one registered before init"),
    ):
        with pytest.raises(InvalidArgumentError, match=expected):
            Config.from_environment({"COLLECTIVES_ALGORITHM": text})
        with pytest.raises(InvalidArgumentError, match=f"--algorithm: .*{expected}"):
            make_parser().parse_args(["--algorithm", text])


def test_the_prover_refuses_mutants_that_are_wrong() -> None:
    """``python -m tests.trials.mutants`` judges a thousand, and has the engine run those that are let through."""
    kinds, missed = mutants.trial(56, 3, engine=False)
    assert not missed and kinds["wrong, refused"] > 30 and kinds["right, let through"] > 2, kinds


# ---- execution plans of MSCCL++, as its DSL writes them


def operation(name: str, sources: Sequence[Any] = (), targets: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    buffers = {"src_buff": sources, "dst_buff": targets} if sources else {}
    return {"name": name, "channel_type": "memory", "channel_ids": [0], "reduce_op": "sum", **buffers, **more}


def plan(collective: str, operations: Callable[[int], list[dict[str, Any]]], chunks: int, scratch: str = "i") -> str:
    """A plan of two GPUs with a thread block each; ``buffer_id`` 0 is the peer's input or scratch memory."""
    gpus = [
        {
            "id": rank,
            "input_chunks": chunks,
            "output_chunks": chunks,
            "scratch_chunks": 2,
            "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
            "remote_buffers": [{"rank": 1 - rank, "type": scratch, "access_channel_types": ["memory"]}],
            "threadblocks": [
                {
                    "id": 0,
                    "channels": [{"channel_type": "memory", "channel_ids": [0]}],
                    "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}],
                    "ops": operations(rank),
                }
            ],
        }
        for rank in range(2)
    ]
    return json.dumps({"name": "from-json", "collective": collective, "inplace": True, "gpus": gpus})


def local(index: int, kind: str = "i") -> dict[str, Any]:
    return {"type": kind, "index": index, "size": 1}


def remote(index: int) -> dict[str, Any]:
    return {"buffer_id": 0, "index": index, "size": 1}


def reads_and_stores(rank: int) -> list[dict[str, Any]]:
    """Combine the own chunk with the peer's, and store the sum there, too."""
    sides = [local(rank), remote(rank)]
    meet = [operation("signal"), operation("wait")]
    return [*meet, operation("rres", sides, sides), *meet]


def through_scratch(rank: int) -> list[dict[str, Any]]:
    """Put both chunks into the peer's scratch memory, and add what came; packets, which are waited for."""
    puts = [operation("ppkt", [local(k)], [remote(k)]) for k in range(2)]
    return [*puts, *(operation("repkt", [local(k), local(k, "s")], [local(k)]) for k in range(2))]


@pytest.mark.parametrize(("operations", "buffer", "rounds"), [(reads_and_stores, "i", 2), (through_scratch, "s", 1)])
def test_a_plan_of_mscclpp_is_proved_and_registered(
    tmp_path: Path, operations: Callable[[int], Any], buffer: str, rounds: int
) -> None:
    text = plan("allreduce", operations, 2, buffer)
    found = from_mscclpp(text)
    register_algorithm(found.collective, found.name, found.build, sizes=found.sizes)
    entry = registry.find("allreduce", "from-json")
    assert entry.sizes == {2} and len(entry.schedules([range(2)])(0).rounds) == rounds
    file = tmp_path / "shared.json"
    file.write_text(text)
    assert Config.from_environment({"COLLECTIVES_ALGORITHM": str(file)}).algorithm.startswith("shared@")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", r"no execution plan of MSCCL\+\+: KeyError"),
        (plan("allreduce", lambda rank: [operation("glres", [local(0)], [local(0)])], 2), "operation 'glres' of GPU 0"),
        (plan("allreduce", lambda rank: [operation("wait")], 2), r"\(0, 0\), \(1, 0\)\] wait for ever"),
        (plan("allgather", reads_and_stores, 4), "4 input and 4 output chunks"),
        (
            plan("allreduce", lambda rank: [operation("put", [local(0)], [remote(1)])], 2),
            "'put' moves chunk 0 of GPU 0 to where chunk 1 of GPU 1 lies",
        ),
        (
            plan("allreduce", lambda rank: [operation("re", [local(0), local(0, "s")], [local(0)])], 2),
            "'re' reads place 0 of buffer 's' of GPU 0, never written",
        ),
        (
            plan("allreduce", lambda rank: [*through_scratch(rank)[:2], *through_scratch(rank)[2:] * 2], 2, "s"),
            "that GPU . has replaced in round",
        ),
    ],
)
def test_what_a_plan_has_beyond_the_four_steps_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(ScheduleError, match=expected):
        from_mscclpp(text)


def test_a_name_of_the_package_is_refused_for_every_collective() -> None:
    with pytest.raises(InvalidArgumentError, match="another algorithm has this name"):
        register_algorithm("alltoall", "ring", own.around, sizes=[2])
    assert "ring" not in registry.on_host("alltoall") and registry.signed("ring") == "ring"
