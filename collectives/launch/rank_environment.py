"""The environment of the ranks, from the options, the configuration file and the launcher's own environment.

An option takes precedence over the file, which takes precedence over the environment. Each setting ends as its
``COLLECTIVES_...`` variable, which the ranks read. Programs written for Horovod get Horovod's variables instead, as
``horovodrun`` would set them: they read them, and may change them before ``init()``.
"""

from __future__ import annotations

from collections.abc import Mapping

from collectives.base.config import Config, parse_bytes
from collectives.base.launchers import VARIABLES
from collectives.launch.options import SWITCHES, VALUES

Chosen = Mapping[str, "str | bool"]
"""Chosen settings by an option's first spelling: a value's text for its variable, or whether a switch is on."""

_OF_RANKS = (
    "COLLECTIVES_RENDEZVOUS",
    "COLLECTIVES_RANK",
    "COLLECTIVES_SIZE",
    "COLLECTIVES_LOCAL_RANK",
    "COLLECTIVES_KEY",
    "COLLECTIVES_MEMBER",
)
_OF_TORCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLLECTIVES_TORCHS_PLACE"),
)
_OF_MPI = ("OMPI_COMM_", "PMI_", "PMIX_", "MPI_LOCAL")


def of_no_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the place in a job that an outer ``collectivesrun`` or torchrun has given.

    An MPI launcher replaces its own variables. ``MASTER_ADDR`` and ``MASTER_PORT`` without a rank are the user's.
    """
    is_rank = any(name in environment for name in ("RANK", "WORLD_SIZE", "COLLECTIVES_MEMBER"))
    return {
        name: text
        for name, text in environment.items()
        if name not in _OF_RANKS and not (is_rank and (name in _OF_TORCH or name.startswith("TORCHELASTIC_")))
    }


def of_no_process(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the place in a job that any outer launcher has given this process."""
    return {
        name: text
        for name, text in of_no_rank(environment).items()
        if name not in VARIABLES and not name.startswith(_OF_MPI)
    }


def merge(environment: Mapping[str, str], flags: Chosen, file: Chosen) -> dict[str, str]:
    """Return the environment for the ranks. Options precede the file, which precedes the environment."""
    return {**environment, **{_variable(setting): text for setting, text in _settings({**file, **flags}).items()}}


def merge_as_horovod(
    environment: Mapping[str, str], flags: Chosen, file: Chosen, variables: Mapping[str, str]
) -> dict[str, str]:
    """`merge` with Horovod's variables where it has them; ``variables`` are of options that have no effect here."""
    chosen = {**file, **flags}
    merged = {**environment, **variables}
    for setting, text in _settings(chosen).items():
        own_name, horovod_name = _variable(setting), _horovods(setting)
        if horovod_name:
            merged.pop(own_name, None)  # it would take precedence over Horovod's
        merged[horovod_name or own_name] = str(parse_bytes(text)) if setting == "fusion_threshold" else text
    for switch in SWITCHES:
        if switch.tells and switch.flags[0] in chosen:
            variable, on, off = switch.tells
            merged[variable] = on if chosen[switch.flags[0]] else off
    return merged


def _settings(chosen: Chosen) -> dict[str, str]:
    """Return texts by setting: a switch that is off precedes values, and they one that is on."""
    off: dict[str, str] = {}
    on: dict[str, str] = {}
    for switch in SWITCHES:
        state = chosen.get(switch.flags[0])
        if state is not None:
            (on if state else off).update(switch.on if state else switch.off)
    values = {value.setting: str(chosen[value.flags[0]]) for value in VALUES if value.flags[0] in chosen}
    return {**on, **values, **off}


def _horovods(setting: str) -> str:
    """Return Horovod's variable for a setting; empty if it has none."""
    sources = list(Config.__dataclass_fields__[setting].metadata["sources"])
    return sources[-1] if sources[-1].startswith("HOROVOD_") else ""


def _variable(setting: str) -> str:
    return str(Config.__dataclass_fields__[setting].metadata["variable"])
