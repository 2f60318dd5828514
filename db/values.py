"""What a value looks like in the file: numbers as numbers, JSON that is the same for the same content, times in UTC."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from cupyq.errors import ArgumentError


def plain(value: Any) -> Any:
    """Turn `value` into Python's own types: NumPy and CuPy scalars become numbers, arrays and tuples become lists.

    SQLite would otherwise store a `numpy.float32` as four bytes of a blob. A float that is not finite becomes None,
    because neither SQL nor JSON has a word for it.
    """
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def text(value: Any) -> str:
    """Return `value` as JSON with sorted keys and no spaces, so that equal content is equal text."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def number(name: str, value: Any) -> float | None:
    """Return `value` as a float, None when it is None or not finite; ArgumentError when it is no number."""
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, (bool, int, float)):
        return float(value)
    raise ArgumentError(f"{name} is {value!r}; a number is accepted")


def integer(name: str, value: Any) -> int | None:
    """Return `value` as an int, None when it is None; ArgumentError when it is no whole number."""
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ArgumentError(f"{name} is {value!r}; a whole number is accepted")


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    """Return `value` when it is one of `accepted`; ArgumentError naming them otherwise."""
    if value in accepted:
        return str(value)
    raise ArgumentError(f"{name} is {value!r}; accepted are {', '.join(accepted)}")


def now() -> str:
    """Return this moment in UTC as ISO 8601 with milliseconds, such as 2026-01-31T12:00:00.000+00:00."""
    return _iso(datetime.now(timezone.utc))


def moment(name: str, value: datetime | str | None) -> str | None:
    """Return a point in time as ISO 8601 in UTC; ArgumentError when it carries no time zone."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            raise ArgumentError(f"{name} is {value!r}; an ISO 8601 time is accepted") from None
    if value.tzinfo is None:
        raise ArgumentError(f"{name} is {value.isoformat()} with no time zone; a time with one is accepted")
    return _iso(value)


def _iso(value: datetime) -> str:
    return value.astimezone(timezone.utc).isoformat(timespec="milliseconds")
