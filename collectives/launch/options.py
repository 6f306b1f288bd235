"""Which option of ``collectivesrun``, and which key of a configuration file, sets which setting: one table for both.

Names and meanings are Horovod's where Horovod has them, so that its command lines and files go on working. An option
beats the file, which beats the environment; each ends as the ``COLLECTIVES_...`` variable of its setting, which the
ranks read. Programs written for Horovod get Horovod's variables instead, as ``horovodrun`` would set them: they read
them, and may change them before ``init()``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.base.config import Config, parse_bool, parse_bytes
from collectives.base.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Value:
    """An option that is followed by a value.

    Attributes:
        flags: its spellings; the first is its name in the table.
        setting: what it sets.
        metavar, help: for ``--help``.
        key: ``section.key`` in a configuration file; empty: none.
        template: makes the variable's text of the option's.
        expected: what the text should be, where that is not what the variable's should be.
    """

    flags: tuple[str, ...]
    setting: str
    metavar: str
    help: str
    key: str = ""
    template: str = "{}"
    expected: str = ""

    def text(self, word: str) -> str:
        """The variable's text.

        Raises:
            ValueError: the text cannot be understood; says what is expected.
        """
        metadata = Config.__dataclass_fields__[self.setting].metadata
        parse = metadata["sources"][metadata["variable"]]
        text = self.template.format(word)
        try:
            if not word.strip():
                raise ValueError(word)
            parse(text)
        except (ValueError, IndexError):
            raise ValueError(f"expected {self.expected or parse.__doc__}, got {word!r}") from None
        return text


@dataclass(frozen=True, slots=True)
class Switch:
    """An option without a value: ``--autotune``, and ``--no-autotune`` if it can be switched off.

    Attributes:
        flags: its spelling.
        on: variables' texts by setting; values that are given as well go before these.
        off: variables' texts by setting; these go before values.
        help: for ``--help``.
        key: ``section.key`` in a configuration file.
        tells: a variable by which ``horovodrun`` tells the ranks, and its texts for on and off; empty: that of the
            setting.
    """

    flags: tuple[str]
    on: Mapping[str, str]
    off: Mapping[str, str]
    help: str
    key: str
    tells: tuple[str, ...] = ()


def _anything(text: str) -> str:
    """some text"""
    if not text.strip():
        raise ValueError(text)
    return text


def _number(text: str) -> int:
    """a whole number, 0 or more"""
    if not text.strip().isdecimal():
        raise ValueError(text)
    return int(text)


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of Horovod's that changes nothing here; that it does not is said, and why.

    Attributes:
        flags: its spellings; one that begins with ``--no-`` switches off what it is about.
        why: why it has no effect.
        parse: reads its value; its docstring says what is expected. None: it has no value.
        keys: ``section.key`` in a configuration file.
        variable: by which ``horovodrun`` tells the ranks; empty: by none.
        on, off: the variable's texts, without a value.
    """

    flags: tuple[str, ...]
    why: str
    parse: Callable[[str], Any] | None = None
    keys: tuple[str, ...] = ()
    variable: str = ""
    on: str = "1"
    off: str = "0"

    def told(self, name: str, text: str | None) -> dict[str, str]:
        """What ranks are told.

        Args:
            name: the spelling, or the key.
            text: what follows it; None: nothing does.

        Raises:
            ValueError: the text cannot be understood; says what is expected.
        """
        parse = self.parse or parse_bool
        try:
            on = not name.startswith("--no-") if text is None else parse(text)
        except ValueError:
            raise ValueError(f"expected {parse.__doc__}, got {text!r}") from None
        if not self.variable:
            return {}
        return {self.variable: str(on) if self.parse else (self.on if on else self.off)}


Chosen = Mapping[str, "str | bool"]
"""What has been chosen, by the option's first spelling: a value's text for its variable, or whether a switch is on."""

VALUES = (
    Value(
        ("--algorithm",),
        "algorithm",
        "NAME",
        "the algorithm for every operation that has it: ring, direct, hierarchical, ...",
    ),
    Value(("--transport",), "transport", "NAME", "how ranks on one host exchange bytes: window, direct-read or mpi"),
    Value(
        ("--timeout",),
        "timeout",
        "SECONDS",
        "how long a call waits for a rank that is alive but does not come (default: 1800)",
    ),
    Value(
        ("--fusion-threshold-mb",),
        "fusion_threshold",
        "N",
        "most MiB of tensors that are reduced together; 0: each by itself (default: 128)",
        key="params.fusion_threshold_mb",
        template="{}M",
        expected="a number of MiB such as 64, 0 or more",
    ),
    Value(
        ("--cycle-time-ms",),
        "cycle_time",
        "X",
        "milliseconds that operations may gather before they are done (default: 1)",
        key="params.cycle_time_ms",
    ),
    Value(
        ("--cache-capacity",),
        "cache_capacity",
        "N",
        "how many operations are remembered (default: 1024)",
        key="params.cache_capacity",
    ),
    Value(
        ("--timeline-filename", "--timeline"),
        "timeline",
        "FILE",
        "record a timeline; in FILE.html a report to look at, with the trace in FILE.html.json",
        key="timeline.filename",
    ),
    Value(("--autotune-log-file",), "autotune_log", "FILE", "record what autotuning tries", key="autotune.log_file"),
    Value(
        ("--autotune-warmup-samples",),
        "autotune_warmup",
        "N",
        "samples that are discarded at first (default: 3)",
        key="autotune.warmup_samples",
    ),
    Value(
        ("--autotune-steps-per-sample",),
        "autotune_steps",
        "N",
        "steps that make one sample (default: 10)",
        key="autotune.steps_per_sample",
    ),
    Value(
        ("--autotune-bayes-opt-max-samples",),
        "autotune_samples",
        "N",
        "most samples before the best is kept (default: 20)",
        key="autotune.bayes_opt_max_samples",
    ),
    Value(
        ("--autotune-gaussian-process-noise",),
        "autotune_noise",
        "X",
        "the noise assumed in a sample, from 0 to 1 (default: 0.8)",
        key="autotune.gaussian_process_noise",
    ),
    Value(
        ("--stall-check-warning-time-seconds",),
        "stall_warning",
        "SECONDS",
        "when to warn of an operation that some ranks have not submitted; 0: never (default: 60)",
        key="stall_check.warning_time_seconds",
    ),
    Value(
        ("--stall-check-shutdown-time-seconds",),
        "stall_shutdown",
        "SECONDS",
        "when to end the job because of it; 0: never (default: 0)",
        key="stall_check.shutdown_time_seconds",
    ),
    Value(
        ("--log-level",),
        "log_level",
        "LEVEL",
        "trace, debug, info, warning, error or fatal (default: warning)",
        key="logging.level",
    ),
)

SWITCHES = (
    Switch(
        ("--hierarchical-allreduce",),
        on={"algorithm": "hierarchical"},
        off={},
        help="the same as --algorithm hierarchical; --algorithm goes before it",
        key="params.hierarchical_allreduce",
        tells=("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "0"),
    ),
    Switch(
        ("--autotune",),
        {"autotune": "1"},
        {"autotune": "0"},
        "tune the settings while the program runs",
        "autotune.enabled",
    ),
    Switch(
        ("--timeline-mark-cycles",),
        on={"timeline_mark_cycles": "1"},
        off={"timeline_mark_cycles": "0"},
        help="show in the timeline when each cycle begins",
        key="timeline.mark_cycles",
    ),
    Switch(
        ("--stall-check",),
        on={"stall_warning": str(Config().stall_warning)},
        off={"stall_warning": "0", "stall_shutdown": "0"},
        help="whether to watch for operations that some ranks have not submitted (default: yes)",
        key="stall_check.enabled",
        tells=("HOROVOD_STALL_CHECK_DISABLE", "0", "1"),
    ),
)

_BY_MPI = "the ranks are started and connected by MPI; see --mpi-args"
_BY_SSH = "mpirun makes the connections; set it in ~/.ssh/config, or for mpirun by --mpi-args"
_BY_LOGGING = "messages are logged by Python's logging"
_BY_SYSTEM = "threads stay where the system puts them"
_BY_SIZE = "what is hierarchical is chosen by size and hosts; --algorithm chooses another"
IGNORED = (
    Ignored(("--no-hierarchical-allreduce",), _BY_SIZE, variable="HOROVOD_HIERARCHICAL_ALLREDUCE"),
    Ignored(
        ("--torus-allreduce", "--no-torus-allreduce"),
        _BY_SIZE,
        keys=("params.torus_allreduce",),
        variable="HOROVOD_TORUS_ALLREDUCE",
    ),
    Ignored(
        ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "an allgather has one algorithm for ranks on several hosts",
        keys=("params.hierarchical_allgather",),
        variable="HOROVOD_HIERARCHICAL_ALLGATHER",
    ),
    Ignored(("--gloo", "--jsrun"), _BY_MPI),
    Ignored(("--tcp",), "for MPI, see --mpi-args; NCCL is told not to use InfiniBand", variable="NCCL_IB_DISABLE"),
    Ignored(("--network-interface", "--network-interfaces"), _BY_MPI, _anything),
    Ignored(("-p", "--ssh-port"), _BY_SSH, _number),
    Ignored(("-i", "--ssh-identity-file"), _BY_SSH, _anything),
    Ignored(("--start-timeout",), "mpirun decides how long starting may take; --timeout bounds init()", _number),
    Ignored(("--disable-cache",), "nothing is remembered between jobs"),
    Ignored(
        ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "MPI is started with the threads that are needed",
        keys=("library_options.mpi_threads_disable",),
        variable="HOROVOD_MPI_THREADS_DISABLE",
    ),
    Ignored(
        ("--num-nccl-streams",),
        "NCCL has one stream",
        _number,
        keys=("library_options.num_nccl_streams",),
        variable="HOROVOD_NUM_NCCL_STREAMS",
    ),
    Ignored(
        ("--thread-affinity",),
        _BY_SYSTEM,
        _number,
        keys=("library_options.thread_affinity",),
        variable="HOROVOD_THREAD_AFFINITY",
    ),
    Ignored(
        ("--ccl-bgt-affinity", "--mlsl-bgt-affinity"),
        _BY_SYSTEM,
        _number,
        keys=("library_options.ccl_bgt_affinity", "library_options.mlsl_bgt_affinity"),
    ),
    Ignored(
        ("--gloo-timeout-seconds",),
        "gloo is not used; see --timeout",
        _number,
        keys=("library_options.gloo_timeout_seconds",),
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
    ),
    Ignored(
        ("--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        _BY_LOGGING,
        keys=("logging.hide_timestamp",),
        variable="HOROVOD_LOG_HIDE_TIME",
    ),
    Ignored(
        ("--log-with-timestamp",),
        _BY_LOGGING,
        keys=("logging.with_timestamp",),
        variable="HOROVOD_LOG_HIDE_TIME",
        on="0",
        off="1",
    ),
    Ignored(
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        "lines are tagged with their rank; --no-tag leaves them as they are",
    ),
)
REFUSED = (
    *("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host", "--host-discovery-script"),
    *("--elastic-timeout", "--reset-limit", "--blacklist-cooldown-range"),
)
"""Horovod's options of elastic jobs, of which there are none."""
_ONE_OF = (
    ("--gloo", "--mpi", "--jsrun"),
    (
        *("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
    ),
)
"""Options of which at most one can be given; besides these, every ``--x`` with its ``--no-x``."""


def check_together(flags: Sequence[str]) -> None:
    """Look whether the options, in full, can be given together.

    Raises:
        InvalidArgumentError: no; names two of them.
    """
    given = list(dict.fromkeys(flags))
    pairs = [(f"--{flag.removeprefix('--no-')}", flag) for flag in given if flag.startswith("--no-")]
    for group in (*_ONE_OF, *pairs):
        both = [flag for flag in given if flag in group]
        if len(both) > 1:
            raise InvalidArgumentError(f"{both[0]} and {both[1]} contradict each other: expected one of them")


class _Ignore(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        row = next(row for row in IGNORED if option_string in row.flags)
        try:
            told = row.told(option_string, values if row.parse else None)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.told = {**namespace.told, **told}
        namespace.ignored = [*namespace.ignored, f"{option_string} has no effect: {row.why}"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Give the parser all options of the table."""
    group = parser.add_argument_group("settings, for all ranks")
    for value in VALUES:
        group.add_argument(*value.flags, dest=value.flags[0], metavar=value.metavar, help=value.help, type=_Text(value))
    for switch in SWITCHES:
        if switch.off:
            group.add_argument(
                *switch.flags, dest=switch.flags[0], help=switch.help, action=argparse.BooleanOptionalAction
            )
        else:
            group.add_argument(*switch.flags, dest=switch.flags[0], help=switch.help, action="store_const", const=True)
    parser.set_defaults(ignored=[], told={})
    for row in IGNORED:
        for flag in row.flags:
            nargs = None if row.parse else 0
            parser.add_argument(
                flag, dest="ignored", action=_Ignore, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


class _Text:
    """A value's text as argparse wants it: argparse shows an ``ArgumentTypeError`` as it is."""

    def __init__(self, value: Value) -> None:
        self._value = value

    def __call__(self, text: str) -> str:
        try:
            return self._value.text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def chosen(options: argparse.Namespace) -> dict[str, str | bool]:
    """What the parsed options choose."""
    names = [row.flags[0] for row in (*VALUES, *SWITCHES)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def merge(environment: Mapping[str, str], flags: Chosen, file: Chosen) -> dict[str, str]:
    """The environment for the ranks.

    Args:
        environment: as it is.
        flags: what the options choose; goes before the file.
        file: what the configuration file chooses; goes before the environment.
    """
    return {**environment, **{_variable(setting): text for setting, text in _settings({**file, **flags}).items()}}


def merge_as_horovod(
    environment: Mapping[str, str], flags: Chosen, file: Chosen, told: Mapping[str, str]
) -> dict[str, str]:
    """The same with Horovod's variables, where Horovod has the setting.

    Args:
        told: by what ``horovodrun`` would tell the ranks about what has no effect here.
    """
    chosen = {**file, **flags}
    merged = {**environment, **told}
    for setting, text in _settings(chosen).items():
        ours, theirs = _variable(setting), _horovods(setting)
        if theirs:
            merged.pop(ours, None)  # it would go before Horovod's
        merged[theirs or ours] = str(parse_bytes(text)) if setting == "fusion_threshold" else text
    for switch in SWITCHES:
        if switch.tells and switch.flags[0] in chosen:
            variable, on, off = switch.tells
            merged[variable] = on if chosen[switch.flags[0]] else off
    return merged


def _settings(chosen: Chosen) -> dict[str, str]:
    """The variables' texts by setting. A switch that is off goes before values, one that is on after them."""
    off: dict[str, str] = {}
    on: dict[str, str] = {}
    for switch in SWITCHES:
        state = chosen.get(switch.flags[0])
        if state is not None:
            (on if state else off).update(switch.on if state else switch.off)
    values = {value.setting: str(chosen[value.flags[0]]) for value in VALUES if value.flags[0] in chosen}
    return {**on, **values, **off}


def _horovods(setting: str) -> str:
    """Horovod's variable for the setting; empty: it has none."""
    sources = list(Config.__dataclass_fields__[setting].metadata["sources"])
    return sources[-1] if sources[-1].startswith("HOROVOD_") else ""


def _variable(setting: str) -> str:
    return str(Config.__dataclass_fields__[setting].metadata["variable"])
