"""Bad arguments of ``collectives simulate``: each ends in one line that names the option, what is expected, and what is
found."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.tools.simulate import main

COMMANDS = {
    "collective": ["--bytes=8", "-np=4"],
    "planner": ["--bytes=8", "-np=4"],
    "step": ["--gradients=8", "--compute=1", "-np=4"],
    "chakra": ["ring", "--bytes=8", "-np=4", "--to=traces"],
}
"""With arguments that are right."""
EVERY = "collective planner step chakra"
NONSENSE = ("", "x", "nan", "-1", "-inf", "1e30")
RANKS = "expected a whole number from 1 to 1048576, got"
BYTES = "expected a number of bytes from 1 to 4096G, such as 64K, got"
SECONDS = "expected a number of seconds from 0 to 1e9, got"
RATE = "expected a number of bytes per second, 1 or more, "
SHARE = "expected a number above 0 and at most 1, got"
ALGORITHM = "expected one of auto, ring,"
OPTIONS = [
    ("collective step", "-np", (*NONSENSE, "0", "1.5", "inf"), RANKS),
    ("planner", "-np", (*NONSENSE, "0", "8,", "8,x", "8,0", ","), RANKS),
    ("chakra", "-np", (*NONSENSE, "0", "1", "inf"), "expected a whole number, 2 or more, got"),
    (EVERY, "--local-size", (*NONSENSE, "0", "inf"), RANKS),
    *((EVERY, flag, (*NONSENSE, "inf"), SECONDS) for flag in ("--latency", "--local-latency", "--message")),
    *((EVERY, flag, (*NONSENSE[:-1], "0", "inf"), RATE + "got") for flag in ("--bandwidth", "--local-bandwidth")),
    *((EVERY, flag, (*NONSENSE[:-1], "0"), RATE + "or inf, got") for flag in ("--uplink", "--leaf-uplink")),
    (EVERY, "--reduction", (*NONSENSE[:-1], "0"), RATE + "or inf, got"),
    ("collective chakra", "--bytes", (*NONSENSE, "0", "-5", "inf", "4X", "1e400"), BYTES),
    ("planner", "--bytes", (*NONSENSE, "0", "64K,", "64K,0"), BYTES),
    ("collective", "--segment", (*NONSENSE, "0"), BYTES),
    ("step", "--gradients", (*NONSENSE, "0", "4X", "4M,", "4M,0"), BYTES),
    ("step", "--fusion", NONSENSE[:-1], "expected a number of bytes such as 4096, 64K or 1G, got"),
    ("step", "--compute", (*NONSENSE, "0", "inf"), "expected a number of seconds above 0, at most 1e9, got"),
    ("step", "--compression", (*NONSENSE, "0", "2", "inf"), SHARE),
    ("step", "--slower", (*NONSENSE, "0", "0.5", "inf"), "expected a number from 1 to 1e9, got"),
    ("step", "--late", (*NONSENSE, "inf"), SECONDS),
    *(("step", flag, ("nowhere/x", "."), "expected a file in a folder") for flag in ("--html", "--json", "--plot")),
]


def error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line in which a command ends with status 2."""
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse
        code = end.code  # type: ignore[assignment]
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("collectives simulate")
    return line.partition(": error: ")[2].removesuffix("; --help shows the arguments [U1]")


@pytest.mark.parametrize(
    ("command", "flag", "values", "expected"),
    [(command, *row) for commands, *row in OPTIONS for command in commands.split()],
)
def test_an_option_refuses_values_without_sense(
    command: str, flag: str, values: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        line = error([command, *COMMANDS[command], f"{flag}={value}"], capsys)
        assert line.startswith(f"argument {flag}: {expected}")
        assert line.endswith(f"got {value.rsplit(',')[-1]!r}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--late=one", "argument --late: expected RANK=SECONDS, such as 3=0.005, got 'one'"),
        ("--late=-1=1", "argument --late: expected a whole number, 0 or more, got '-1'"),
        ("--late=1.5=1", "argument --late: expected a whole number, 0 or more, got '1.5'"),
        ("--late=1=-1", f"argument --late: {SECONDS} '-1'"),
        ("--late=1=nan", f"argument --late: {SECONDS} 'nan'"),
        ("--late=4=1", "late: expected ranks from 0 to 3, found 4"),
        ("--late=99999999999999999999=1", "late: expected ranks from 0 to 3, found 99999999999999999999"),
        ("--lower=", "argument --lower: expected LINK=SHARE, such as 'host 3 out=0.5', got ''"),
        *((f"--lower=rank 0 out={share}", f"argument --lower: {SHARE} {share!r}") for share in ("0", "2", "nan", "")),
        ("--lower=cable 1=0.5", "link 'cable 1': expected 'rank N out', "),
        ("--lower=rank 4 out=0.5", "of 4 ranks on 4 hosts"),
        ("--lose=rank 0 out", "argument --lose: expected LINK@SECONDS, such as 'rank 2 out@0.001', got 'rank 0 out'"),
        ("--lose=rank 0 out@-1", f"argument --lose: {SECONDS} '-1'"),
        ("--lose=@1", "link '': expected 'rank N out', "),
        ("--algorithm=", f"argument --algorithm: algorithm='': {ALGORITHM}"),
        ("--algorithm=moon", f"argument --algorithm: algorithm='moon': {ALGORITHM}"),
        ("--cluster=moon", "cluster 'moon': No such file"),
        ("--cluster=", "cluster '': Is a directory; expected one of h100-rails, "),
        (f"--cluster={__file__}", "expected 'field: value' on each line, such as 'ranks: 64': "),
    ],
)
def test_what_a_collective_is_not_simulated_with(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error(["collective", *COMMANDS["collective"], arguments], capsys)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *(
            (
                f"--model={model}",
                f"--model '{model}': expected package.module:name of a model, or of a function that makes one: ",
            )
            for model in ("", ":x", ".x:y", "nowhere:x", "json", "json:nothing", "json:loads", "math:pi")
        ),
        (
            "--model=json:JSONDecoder",
            "--model 'json:JSONDecoder': expected trainable parameters, got a JSONDecoder without any",
        ),
        ("--timeline=", "cannot read the timeline '': Is a directory"),
        ("--timeline=moon", "cannot read the timeline 'moon': No such file"),
        (f"--timeline={__file__}", "has no all-reduce with a number of bytes"),
    ],
)
def test_what_has_no_gradients(source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(["step", "--compute=1", source], capsys)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("", f"algorithm='': {ALGORITHM}"),
        ("auto", "an algorithm of allreduce: ring"),
        ("native", "an algorithm of allreduce: ring"),
    ],
)
def test_what_has_no_traces(algorithm: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(["chakra", algorithm, "--bytes=8", f"--to={tmp_path}"], capsys)
    (tmp_path / "file").touch()
    assert "File exists" in error(["chakra", "ring", "--bytes=8", f"--to={tmp_path / 'file'}"], capsys)
