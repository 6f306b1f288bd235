"""The benchmarks' flags: nccl-tests' spellings, errors that are told once and name the flag, and the memory check."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli, room
from benchmarks.cli import Settings
from benchmarks.ranks import launched_rank

GIB = 1 << 30


def flags(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)


def parse(*words: str, reduces: bool = True, rooted: bool = False) -> Settings:
    return cli.settings(cli.parser("allreduce", reduces, rooted), words)


def test_defaults_are_nccl_tests() -> None:
    settings = parse()
    assert settings.sizes == (32 << 20,)
    assert (settings.iterations, settings.warmup, settings.dtypes, settings.ops) == (20, 5, ("float32",), ("sum",))
    assert settings.check
    assert settings.peers == settings.algorithms == settings.transports == ()
    assert settings.memories == ("private",)
    assert not settings.persistent


def test_everything_given() -> None:
    settings = parse(
        *flags(
            "-b 64K -e 1M -f 4 -n 3 -w 0 -d half,int32,complex64 -o sum,avg -c 0 -z 0 --peers gloo,mpi "
            "--algorithm ring "
            "--memory mapped,private --persistent"
        )
    )
    assert settings.sizes == (65536, 262144, 1048576)
    assert settings.dtypes == ("float16", "int32", "complex64")
    assert settings.ops == ("sum", "avg")
    assert settings.peers == ("gloo", "mpi")
    assert settings.algorithms == ("ring",)
    assert settings.memories == ("mapped", "private")
    assert settings.persistent
    assert (settings.iterations, settings.warmup, settings.check) == (3, 0, False)


def test_all_types_and_operations() -> None:
    settings = parse("-d", "all", "-o", "all")
    assert settings.dtypes == tuple(cli.NCCL_TYPES.values())
    assert settings.ops == ("sum", "prod", "min", "max", "avg")


@pytest.mark.parametrize(
    ("smallest", "largest", "factor", "step", "sizes"),
    [
        (4, 64, 4, 1, (4, 16, 64)),
        (4, 63, 4, 1, (4, 16)),
        (10, 30, 1, 10, (10, 20, 30)),
        (1, 4, 1.1, 1, (1, 2, 3, 4)),
        (0, 2, 2, 1, (0, 1, 2)),
        (8, 8, 2, 1, (8,)),
    ],
)
def test_sweep(smallest: int, largest: int, factor: float, step: int, sizes: tuple[int, ...]) -> None:
    assert cli.sweep(smallest, largest, factor, step) == sizes


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--nonsense", "--nonsense"),
        ("-b 4x", "-b/--minbytes"),
        ("-b 2K -e 1K", "-e/--maxbytes"),
        ("-f 0.5", "-f/--stepfactor"),
        ("-i 0", "-i/--stepbytes"),
        ("-n 0", "-n/--iters"),
        ("-w -1", "-w/--warmup_iters"),
        ("-d quaternion", "quaternion"),
        ("-d object", "object"),
        ("-d longdouble", "longdouble"),
        ("-o mean", "mean"),
        ("-r 1", "-r"),
        ("-c 2", "-c/--check"),
        ("--peers nccl", "nccl"),
        ("--memory shared", "shared"),
        ("--memory ,", "--memory"),
        ("--peers ,", "--peers"),
        ("--algorithm circle", "circle"),
        ("--transport pigeon", "pigeon"),
        ("--json no/such/folder/file.json", "no/such/folder"),
    ],
)
def test_a_wrong_flag_is_named(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.err.count("error:") == 1
    assert shown.out == ""


def test_other_ranks_stay_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    for words in (["--nonsense"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            parse(*words)
        assert not ended.value.code
    assert capsys.readouterr() == ("", "")


def test_launched_rank() -> None:
    assert launched_rank({}) == 0
    assert launched_rank({"OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert launched_rank({"PMI_RANK": "2"}) == 2
    assert launched_rank({"SLURM_PROCID": ""}) == 0


def test_root_only_where_there_is_one() -> None:
    assert parse("-r", "3", reduces=False, rooted=True).root == 3
    assert parse(reduces=False).ops == ("none",)


def test_available_memory(tmp_path: Path) -> None:
    meminfo = "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 50 kB\n"
    assert room.available_bytes(meminfo, "max\n", "123") == 50 * 1024
    assert room.available_bytes(meminfo, "40000\n", "30000\n") == 10_000
    assert room.available_bytes("", "", "") is None
    assert room.read(str(tmp_path / "absent")) == ""


def test_memory_is_refused_with_figures() -> None:
    assert room.check_memory(GIB, False, 2, 6 * GIB) is None
    assert room.check_memory(GIB, False, 2, None) is None
    assert room.check_memory(GIB, False, 2, 10 * GIB, memories=2) is None
    assert room.check_memory(GIB, False, 2, 10 * GIB - 1, memories=2) is not None
    problem = room.check_memory(GIB, True, 2, 6 * GIB)
    assert problem is not None
    for part in ("-e 1073741824", "2 ranks", "8.0 GiB", "6.0 GiB", "smaller -e"):
        assert part in problem
