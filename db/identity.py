"""What makes two devices, and two problems, the same: the keys of the database."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from cupyq import bands
from cupyq.db.values import integer, plain, text
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CupyqError

#: The columns that identify a device. Its name does not: a MIG slice and a smaller card carry the same one.
#: The same columns, in the same order, as `DeviceSpec.identity`.
DEVICE_KEY = ("compute_capability", "sms", "l2_bytes", "shared_per_sm", "memory_gib", "dram_gbps")

#: The columns that identify a problem: every field of it.
PROBLEM_KEY = ("op", "m", "n", "k", "group_size", "symmetric", "dtype", "scale_dtype")

# Which GPU of this machine it is, and that it is here at all, says nothing about its kind.
_NOT_OF_THE_KIND = {"live", "ordinal"}


def device_row(spec: Any) -> dict[str, Any]:
    """Return the columns of table `device` for a DeviceSpec, `label` and `first_seen` excepted.

    Memory is rounded to GiB and bandwidth to GB/s, because one card reports slightly different values under
    different drivers.
    """
    try:
        capability = getattr(spec, "compute_capability", None) or "{}.{}".format(*spec.cc)
        row = {
            "name": str(spec.name),
            "title": str(getattr(spec, "title", "") or spec.name),
            "compute_capability": str(capability),
            "sms": integer("device.sms", spec.sms),
            "l2_bytes": integer("device.l2_bytes", spec.l2_bytes),
            "shared_per_sm": integer("device.shared_per_sm", spec.shared_per_sm),
            "memory_gib": round(plain(spec.memory_bytes) / 2**30),
            "dram_gbps": round(plain(spec.dram_gbps)),
        }
    except AttributeError as error:
        raise ArgumentError(f"device is {spec!r}; a cupyq.devices.DeviceSpec is accepted ({error})") from error
    fields = dataclasses.asdict(spec) if dataclasses.is_dataclass(spec) and not isinstance(spec, type) else vars(spec)
    row["spec"] = text({name: value for name, value in fields.items() if name not in _NOT_OF_THE_KIND})
    return row


def spec_of(spec: Any) -> DeviceSpec | None:
    """Return the DeviceSpec that table `device` keeps as `spec`, JSON or parsed; None for that of another age."""
    known = {field.name for field in dataclasses.fields(DeviceSpec)} - _NOT_OF_THE_KIND
    try:
        values = json.loads(spec) if isinstance(spec, str) else dict(spec or {})
        kept: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known
        }
        return DeviceSpec(**kept)
    except (CupyqError, LookupError, TypeError, ValueError):
        return None


def problem_row(problem: Any) -> dict[str, Any]:
    """Return the columns of table `problem` for a kernels.Problem (or the dict of its fields)."""
    try:
        fields = {name: problem[name] if isinstance(problem, dict) else getattr(problem, name) for name in PROBLEM_KEY}
    except (AttributeError, KeyError) as error:
        raise ArgumentError(f"problem is {problem!r}; a cupyq.kernels.Problem is accepted ({error})") from error
    for name in ("m", "n", "k", "group_size"):
        fields[name] = integer(f"problem.{name}", fields[name])
    fields["symmetric"] = int(bool(fields["symmetric"]))
    for name in ("op", "dtype", "scale_dtype"):
        fields[name] = str(fields[name])
    return {**fields, "band": bands.of(fields["m"])}


def problem_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a kernels.Problem from a row that has the columns of table `problem`."""
    return {name: bool(row[name]) if name == "symmetric" else row[name] for name in PROBLEM_KEY}


def label(name: str, row: dict[str, Any], taken: set[str]) -> str:
    """Return `name`, or `name` with what sets this device apart when another identity has the name already."""
    options = [name, f"{name} ({row['sms']} SMs, {row['memory_gib']} GiB)"]
    options += [f"{options[1][:-1]}, {row['dram_gbps']} GB/s)"]
    options += [f"{options[1]} #{i}" for i in range(2, len(taken) + 3)]
    return next(option for option in options if option not in taken)
