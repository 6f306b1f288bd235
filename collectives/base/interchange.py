"""The engine's own values that ranks exchange, as JSON: nothing that they say is unpickled.

    None, bool, int, float, str    as JSON has them; a class of its own becomes the one that it is made of
    list                           an array
    tuple                          {"tuple": array}
    bytes, dict                    {"bytes": hexadecimal}, {"dict": array of pairs}
    an `exchangeable` class        {"of": name, "has": array of pairs, of the fields that differ from their defaults}

Reading makes objects of these classes and of no others.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])

_NONE = object()
_classes: dict[str, type[Any]] = {}
_fields: dict[type[Any], tuple[tuple[str, Any], ...]] = {}
"""By class: each field, with its default."""


def exchangeable(cls: Class) -> Class:
    """Mark a dataclass or a named tuple as one that ranks exchange. A decorator."""
    if dataclasses.is_dataclass(cls):
        _fields[cls] = tuple(
            (field.name, _NONE if field.default is dataclasses.MISSING else field.default)
            for field in dataclasses.fields(cls)
        )
    else:
        _fields[cls] = tuple((name, cls._field_defaults.get(name, _NONE)) for name in cls._fields)
    assert _classes.setdefault(cls.__name__, cls) is cls
    return cls


def to_json(value: Any) -> bytes:
    """A value's text.

    Raises:
        TypeError: it is of another type.
    """
    return _encode(_plain(value)).encode()


def from_json(text: bytes) -> Any:
    """The value of a text.

    Raises:
        ValueError: it is none of `to_json`.
    """
    try:
        return _decode(text.decode())
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a value that ranks exchange: {error!r}") from None


def _plain(value: Any) -> Any:
    """A value in JSON's own types."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind is tuple:
        return {"tuple": [_plain(item) for item in value]}
    if kind is list:
        return [_plain(item) for item in value]
    fields = _fields.get(kind)
    if fields is not None:
        every = ((name, getattr(value, name), default) for name, default in fields)
        return {"of": kind.__name__, "has": [[name, _plain(one)] for name, one, default in every if one is not default]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is dict:
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, numbers.Integral):  # NumPy's
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):  # of a class of its own, such as NumPy's
        return str.__str__(value)
    if isinstance(value, tuple):
        return _plain(tuple(value))
    raise TypeError(f"ranks do not exchange values of {kind.__name__}: {value!r}")


def _restored(read: dict[str, Any]) -> Any:
    """What an object of JSON stands for; the objects within it have been restored."""
    if "of" in read:
        return _classes[read["of"]](**dict(read["has"]))
    ((kind, content),) = read.items()
    if kind == "tuple":
        return tuple(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    return dict(content)


_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder(object_hook=_restored).decode
