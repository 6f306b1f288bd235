"""The command of each MPI, and how an mpirun is recognised."""

from __future__ import annotations

import pytest

from collectives.launch.hosts import Host
from collectives.launch.mpirun import Launcher, Vendor, build, recognise

PROGRAM = ["python", "train.py", "--mpi-args", "x y", "--", "-np", "3"]
HOSTS = (Host("h1", 2), Host("h2", 2))
ENVIRONMENT = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "COLLECTIVES_TIMEOUT": "60",
    "COLLECTIVES_ALGORITHM": "ring",
    "NCCL_DEBUG": "INFO",
}


def command(vendor: Vendor, **options: object) -> list[str]:
    launcher = Launcher("/opt/mpirun", vendor, "5.0")
    return build(launcher, 4, PROGRAM, ENVIRONMENT, machinefile="/tmp/run/hosts", cores=4, **options)  # type: ignore[arg-type]


def test_open_mpi_on_this_host() -> None:
    expected = [
        "/opt/mpirun",
        "-n",
        "4",
        "--bind-to",
        "none",
        "-x",
        "COLLECTIVES_ALGORITHM",
        "-x",
        "COLLECTIVES_TIMEOUT",
        *PROGRAM,
    ]
    assert command(Vendor.OPEN_MPI) == expected


def test_open_mpi_as_root_with_more_ranks_than_cores() -> None:
    assert build(Launcher("mpirun", Vendor.OPEN_MPI, ""), 4, PROGRAM, {}, root=True, cores=3) == [
        "mpirun", "-n", "4", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *PROGRAM,
    ]  # fmt: skip


def test_open_mpi_on_several_hosts_forwards_what_ranks_need_there() -> None:
    built = command(Vendor.OPEN_MPI, hosts=HOSTS)
    assert built[3:5] == ["--host", "h1:2,h2:2"]
    forwarded = [built[position + 1] for position, word in enumerate(built[: -len(PROGRAM)]) if word == "-x"]
    assert forwarded == ["COLLECTIVES_ALGORITHM", "COLLECTIVES_TIMEOUT", "NCCL_DEBUG", "PATH"]
    assert "--oversubscribe" not in built


@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["this host", "other hosts"])
@pytest.mark.parametrize("vendor", Vendor)
def test_horovods_settings_reach_the_ranks_too(vendor: Vendor, hosts: tuple[Host, ...]) -> None:
    built = " ".join(
        build(Launcher("mpirun", vendor, ""), 4, PROGRAM, {"HOROVOD_CYCLE_TIME": "2"}, hosts=hosts, cores=4)
    )
    assert ("-x HOROVOD_CYCLE_TIME" if vendor is Vendor.OPEN_MPI else "-genvall") in built


def test_mpich() -> None:
    assert command(Vendor.MPICH, root=True) == ["/opt/mpirun", "-n", "4", "-genvall", *PROGRAM]
    assert command(Vendor.MPICH, hosts=HOSTS) == ["/opt/mpirun", "-n", "4", "-hosts", "h1:2,h2:2", "-genvall", *PROGRAM]


@pytest.mark.parametrize("choice", [["-genvnone"], ["-genvlist", "A,B"], ["-genvall"]])
def test_who_chooses_hydras_variables_has_no_second_choice(choice: list[str]) -> None:
    built = command(Vendor.MPICH, mpi_args=choice)
    assert built[: -len(PROGRAM)] == ["/opt/mpirun", "-n", "4", *choice]


@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["this host", "other hosts"])
@pytest.mark.parametrize("vendor", Vendor)
def test_no_value_of_a_variable_is_on_a_command_line(vendor: Vendor, hosts: tuple[Host, ...]) -> None:
    names = ("COLLECTIVES_NOTEBOOK", "COLLECTIVES_KEY", "HOROVOD_SECRET", "MASTER_ADDR", "NCCL_X", "PYTHONPATH", "HOME")
    environment = dict.fromkeys(names, "the-secret")
    built = build(Launcher("mpirun", vendor, ""), 4, PROGRAM, environment, hosts=hosts, machinefile="f", cores=4)
    assert "the-secret" not in " ".join(built)


def test_intel_mpi_takes_hosts_from_a_file() -> None:
    assert command(Vendor.INTEL_MPI, hosts=HOSTS)[:5] == ["/opt/mpirun", "-n", "4", "-machinefile", "/tmp/run/hosts"]
    assert command(Vendor.INTEL_MPI)[-len(PROGRAM) :] == PROGRAM


@pytest.mark.parametrize("vendor", Vendor)
def test_further_arguments_stand_right_before_the_program(vendor: Vendor) -> None:
    built = command(vendor, mpi_args=["--bind-to", "none"])
    assert built[-len(PROGRAM) - 2 :] == ["--bind-to", "none", *PROGRAM]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", (Vendor.OPEN_MPI, "5.0.11")),
        ("mpirun (Open MPI) 4.1.6", (Vendor.OPEN_MPI, "4.1.6")),
        ("prterun (PRRTE) 3.0.8", (Vendor.OPEN_MPI, "3.0.8")),
        (
            "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: ...",
            (Vendor.MPICH, "5.0.2"),
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260301 (id: 1a2b)\nCopyright ...",
            (Vendor.INTEL_MPI, "2021.18"),
        ),
        ("slurm 23.02", None),
        ("", None),
    ],
)
def test_whose_mpirun_it_is(text: str, expected: tuple[Vendor, str] | None) -> None:
    assert recognise(text) == expected


def test_a_binding_of_ones_own_is_left_alone() -> None:
    built = build(Launcher("mpirun", Vendor.OPEN_MPI, ""), 2, PROGRAM, {}, mpi_args=["--bind-to", "core"], cores=4)
    assert built.count("--bind-to") == 1
