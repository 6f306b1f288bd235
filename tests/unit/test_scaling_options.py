"""Scaling's command line: what it understands, and that a mistake is told before the first run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scaling import others, shared_cores
from benchmarks.scaling_communication import milliseconds, spread
from benchmarks.scaling_options import Settings, parser, settings_of
from benchmarks.scaling_plan import Case, Work
from benchmarks.scaling_throughput import KNOWN

TRAIN = ["--", "python", "train.py", "--batch-size", "{batch}"]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def words(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


def parse(*arguments: str) -> tuple[Settings, list[Case]]:
    return settings_of(parser(), arguments)


def test_defaults() -> None:
    settings, plan = parse("strong", "-np", "1,2", "--total", "64", *TRAIN)
    assert settings.patterns == KNOWN
    assert (settings.take, settings.repeats, settings.launch, settings.gradient_bytes) == ("median", 3, (), ())
    assert settings.output == Path("scaling-output") and settings.output.is_dir()
    assert [case.command for case in plan] == [
        ("python", "train.py", "--batch-size", "64"),
        ("python", "train.py", "--batch-size", "32"),
    ]
    json.dumps(settings.as_dict())


def test_everything_given() -> None:
    settings, plan = parse(
        *words(
            "sweep -np 4,2,4 --values 8@1,16,wide=3 --batch 3 --unit tokens --repeats 2 --best --timeout 9 "
            "--per-rank --take last"
        ),
        *("--pattern", r"speed (\d+)", "--launch", "-H a:2,b:2 --mpi-args '--bind-to core'"),
        *words("--gradient-bytes 1K,2K,1M --gradient-tensors 7 --predict 16,8 --output out -- x -np {value} -- y"),
    )
    assert settings.ranks == (2, 4)
    assert settings.values == (("8", 1), ("16", None), ("wide=3", None))
    assert settings.command == ("x", "-np", "{value}", "--", "y")
    assert settings.launch == ("-H", "a:2,b:2", "--mpi-args", "--bind-to core")
    assert [pattern.per_rank for pattern in settings.patterns] == [True]
    assert (settings.gradient_bytes, settings.gradient_tensors, settings.predict) == ((1024, 2048, 1 << 20), 7, (8, 16))
    assert (settings.work, settings.take, settings.unit, settings.repeats, settings.timeout) == (
        Work(batch=3),
        "last",
        "tokens",
        2,
        9,
    )
    assert settings.best
    assert [(case.value, case.ranks) for case in plan] == [("8", 1), ("16", 2), ("16", 4), ("wide=3", 2), ("wide=3", 4)]


def test_a_models_gradients_are_so_many_bytes() -> None:
    settings, _ = parse("weak", "-np", "1,2", "--gradient-model", "resnet50", "--", "x")
    assert settings.gradient_bytes == (25_557_032 * 4,)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "mode"),
        ("mighty -np 1 -- x", "mighty"),
        ("strong -- x", "-np"),
        ("strong -np 1,zero -- x", "'zero'"),
        ("strong -np 0 -- x", "'0'"),
        ("strong -np , -- x", "numbers of ranks such as 1,2,4"),
        ("strong -np 1,2 --total 64", "put it behind --"),
        ("strong -np 1,2 --total 64 python train.py", "unrecognized arguments: python train.py"),
        ("strong -np 1,3 --total 64 -- x {batch}", "64 items cannot be divided evenly among 3 ranks"),
        ("weak -np 1 --batch value -- x", "argument --batch: 'value' is for a sweep"),
        ("weak -np 1 --batch few -- x", "--batch"),
        ("sweep -np 1 --values 8,8 -- x {value}", "different values"),
        ("sweep -np 1 --values @2 -- x {value}", "different values"),
        ("sweep -np 1 --values 8@none -- x {value}", "'none'"),
        ("weak -np 1 --pattern ([ -- x", "expected a regular expression"),
        ("weak -np 1 --per-rank -- x", "argument --per-rank: it says what --pattern finds"),
        ("weak -np 1 --per-rank --pattern (x) --take sum -- x", "argument --per-rank: with --take sum"),
        ("weak -np 1 --take first -- x", "--take"),
        ("weak -np 1 --repeats 0 -- x", "--repeats"),
        ("weak -np 1 --timeout 0 -- x", "--timeout"),
        ("weak -np 1 --gradient-bytes 0 -- x", "--gradient-bytes"),
        ("weak -np 1 --gradient-bytes 1M --gradient-model mlp -- x", "--gradient-bytes and --gradient-model"),
        ("weak -np 8 --launch=-Za:4 -- x", "unknown option '-Za:4'"),
        ("weak -np 8 --launch=-Ha:4 -- x", "the hosts take 4 ranks"),
        ("weak -np 8 --launch=--hosts=a:4 -- x", "the hosts take 4 ranks"),
        ("weak -np 1 --launch=-np=3 -- x", "-np=3 cannot be given here"),
        ("weak -np 1 --launch python -- x", "expected options of collectivesrun, got 'python'"),
        ("weak -np 1 --launch ' -- x", "No closing quotation"),
        ("weak -np 1 --output /proc/there/is/none -- x", "/proc/there"),
    ],
)
def test_a_mistake_is_named(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words(line))
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.err.count("error:") == 1
    assert shown.out == ""


def test_it_is_no_rank_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(SystemExit):
        parse("weak", "-np", "1", "--", "x")
    assert "without collectivesrun or mpirun" in capsys.readouterr().err


def test_oversubscription_is_told_unless_the_hosts_are_named() -> None:
    settings, plan = parse("weak", "-np", "1,4", "--", "x")
    (said,) = shared_cores(settings, plan, 2)
    assert "4 ranks on 2 cores: the machine is oversubscribed" in said
    assert shared_cores(settings, plan, 4) == []
    settings, plan = parse("weak", "-np", "1,4", "--launch=-H a:2,b:2", "--", "x")
    assert shared_cores(settings, plan, 2) == []


def test_a_busy_machine_is_told() -> None:
    assert others(0.0, 1) == others(0.4, 2) == others(15.0, 64) == []
    assert "3.5 of 2 cores are wanted already" in others(3.5, 2)[0]


@pytest.mark.parametrize(
    ("nbytes", "tensors", "sizes"), [(40, 3, [4, 3, 3]), (1, 1, [1]), (0, 2, [1, 1]), (41, 1, [11]), (4, 3, [1] * 3)]
)
def test_bytes_are_spread_over_tensors(nbytes: int, tensors: int, sizes: list[int]) -> None:
    assert [count for (count,) in spread(nbytes, tensors).values()] == sizes


def test_the_measured_communication_is_read() -> None:
    line = "communication: 2 tensors, 80 bytes, 2 ranks: 1.250000 ms a step, quartiles 1.000000 and 2.000000\n"
    assert milliseconds(f"a warning\n{line}") == 1.25
    with pytest.raises(ValueError, match="has printed no time"):
        milliseconds("a warning")
