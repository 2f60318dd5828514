"""Presets: predicted rows for common GPUs and layers, shipped as text, read beside the user's file and never into it.

`presets/NAME.jsonl` holds the lines that `python -m cupyq.db export --best --compact --source predicted` writes after
`python -m cupyq.tune --device NAME`, for the device of that name in the catalogue.
A file is read when its device is first asked about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyq import devices
from cupyq.db.environment import Environment
from cupyq.errors import DatabaseError

if TYPE_CHECKING:
    from cupyq.db.store import Store

_ENDING = ".jsonl"


def folder() -> Path:
    """Return the folder of the presets."""
    return Path(__file__).parent / "presets"


def names() -> list[str]:
    """Return the names of the devices that presets ship for."""
    return sorted(path.stem for path in folder().glob(f"*{_ENDING}"))


def name_of(spec: Any) -> str:
    """Return the catalogue's name of a device, which is its own where the catalogue does not have it."""
    listed = devices.match(spec) if getattr(spec, "live", False) else None
    return str(spec.name if listed is None else listed.name)


def read(name: str, environment: Environment) -> Store | None:
    """Return the presets of one device as a database in memory, None when there are none.

    Raises
    ------
    DatabaseError
        If the file holds anything but verified predictions for this device.
    """
    from cupyq.db.store import Store

    if name not in names():
        return None
    store = Store(":memory:", readonly=False, environment=environment, presets=False)
    store.load(_lines(name), origin=f"preset {name}")
    return store


def _lines(name: str) -> Iterator[dict[str, Any]]:
    content = (folder() / f"{name}{_ENDING}").read_text(encoding="utf-8")
    for count, line in enumerate(content.splitlines(), start=1):
        try:
            parts = json.loads(line)
            device, trial = parts["device"], parts["trial"]
            usable = (trial["source"], trial["state"], bool(trial["verified"])) == ("predicted", "complete", True)
        except (ValueError, LookupError, TypeError) as error:
            raise DatabaseError(f"preset {name}, line {count}, is no trial: {error}") from error
        if device["name"] != name or not usable:
            raise DatabaseError(f"preset {name}, line {count}, is no verified prediction for {name}")
        yield parts
