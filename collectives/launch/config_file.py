"""``--config-file``: a YAML file in Horovod's form.

    verbose: false
    controller: mpi (as --launcher mpi) or gloo (as --launcher ssh)
    params:       fusion_threshold_mb, cycle_time_ms, cache_capacity,
                  hierarchical_allreduce, hierarchical_allgather, torus_allreduce
    autotune:     enabled, log_file, warmup_samples, steps_per_sample, bayes_opt_max_samples, gaussian_process_noise
    timeline:     filename, mark_cycles
    stall_check:  enabled, warning_time_seconds, shutdown_time_seconds
    logging:      level, with_timestamp
    library_options: ...

An unknown key is reported, because it is most likely misspelt, and ignored as in Horovod. The file is read as nodes
instead of values, because nodes have line numbers and the text that the table of options parses.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives.base.config import parse_bool
from collectives.base.errors import InvalidArgumentError, MissingDependencyError
from collectives.launch.options import IGNORED, SWITCHES, VALUES, parsed

_VALUES = {value.key: value for value in VALUES if value.key}
_SWITCHES = {switch.key: switch for switch in SWITCHES}
_IGNORED = {key: row for row in IGNORED for key in row.keys}
_KNOWN = ("verbose", "controller", *_VALUES, *_SWITCHES, *_IGNORED)
_TOP = tuple(dict.fromkeys(key.partition(".")[0] for key in _KNOWN))
_SECTIONS = {
    name: [key.partition(".")[2] for key in _KNOWN if key.startswith(f"{name}.")] for name in _TOP if name not in _KNOWN
}
_THERE_ARE = f"there are {', '.join(_TOP)}"
_LAUNCHERS = {"mpi": "mpi", "gloo": "ssh"}
_NULL = "tag:yaml.org,2002:null"


@dataclass(slots=True)
class ConfigFile:
    """The contents of a configuration file.

    Attributes:
        chosen: settings, for `rank_environment.merge`.
        verbose: whether to print the command.
        launcher: how to start the ranks, "mpi" or "ssh"; empty: the file does not say.
        ignored: messages about keys without effect.
        variables: the variables that ``horovodrun`` would set for these keys.
    """

    chosen: dict[str, str | bool] = field(default_factory=dict)
    verbose: bool = False
    launcher: str = ""
    ignored: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def read(path: str) -> ConfigFile:
    """Read a configuration file; raises InvalidArgumentError with file and line, or MissingDependencyError (PyYAML)."""
    settings = ConfigFile()
    for place, key, text in _entries(path, settings.ignored):
        try:
            if key in _VALUES:
                settings.chosen[_VALUES[key].flags[0]] = _VALUES[key].text(text)
            elif key in _SWITCHES:
                settings.chosen[_SWITCHES[key].flags[0]] = parsed(parse_bool, text, "true or false")
            elif key == "verbose":
                settings.verbose = parsed(parse_bool, text, "true or false")
            elif key == "controller":
                settings.launcher = parsed(lambda word: _LAUNCHERS[word.lower()], text, "mpi or gloo")
            else:
                settings.variables.update(_IGNORED[key].variables(key, text))
                settings.ignored.append(f"{place} has no effect: {_IGNORED[key].why} [L46]")
        except ValueError as error:
            raise InvalidArgumentError(f"{place}: {error}") from None
    return settings


def _entries(path: str, unknown: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield place, ``section.key`` and text of each entry with a value; append messages about unknown keys."""
    yaml = _yaml()
    root = _root(yaml, path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise InvalidArgumentError(
            f"{path}:{root.start_mark.line + 1}: expected sections such as 'params:', got {_shown(root)} [L47]"
        )
    seen: set[str] = set()
    for line, key, node in _leaves(root, yaml.MappingNode):
        place = f"{path}:{line}: {key}"
        section = key.partition(".")[0]
        if key in seen:
            raise InvalidArgumentError(f"{place}: duplicate key; remove one of the two [L48]")
        seen.add(key)
        if key in _SECTIONS and node.tag != _NULL:
            raise InvalidArgumentError(
                f"{place}: expected a section with {', '.join(_SECTIONS[key])}, got {_shown(node)} [L49]"
            )
        if key not in _KNOWN and key not in _SECTIONS:
            expected = f"{section} has {', '.join(_SECTIONS[section])}" if section in _SECTIONS else _THERE_ARE
            unknown.append(f"{place} has no effect: unknown key; {expected} [L50]")
        elif not isinstance(node, yaml.ScalarNode):
            raise InvalidArgumentError(f"{place}: expected a single value, got {_shown(node)} [L51]")
        elif node.tag != _NULL:
            yield place, key, node.value


def _root(yaml: Any, path: str) -> Any:
    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"--config-file: cannot read {path!r}: {getattr(error, 'strerror', None) or error} [L52]"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgumentError(
            f"--config-file: {path!r} is not valid YAML: {' '.join(str(error).split())} [L53]"
        ) from None


def _leaves(node: Any, mapping: type, prefix: str = "") -> Iterator[tuple[int, str, Any]]:
    """Yield line, key and node of each entry; the key is ``section.key`` within a section."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, mapping) and not prefix:
            yield from _leaves(value, mapping, f"{name}.")
        else:
            yield key.start_mark.line + 1, name, value


def _shown(node: Any) -> str:
    return {"mapping": "a section", "sequence": "a list"}.get(node.id, repr(node.value))


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise MissingDependencyError('--config-file needs PyYAML: pip install "pyyaml>=6.0" [L54]') from None
