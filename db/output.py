"""Printing rows: JSON, newline-delimited JSON, CSV, a table for people, plain lines for pipes."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

import click

FORMATS = ("json", "csv", "nl", "table")


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command the options --json, --csv, --nl and --table; the choice arrives as `fmt`."""
    helps = {
        "json": "Print one JSON array of objects.",
        "csv": "Print CSV with a header; values that are lists or objects as JSON.",
        "nl": "Print newline-delimited JSON, one object a line.",
        "table": "Print a table with rules, also when the output is no terminal.",
    }
    for name in reversed(FORMATS):
        flag = click.option(f"--{name}", "fmt", flag_value=name, default=None, type=str, help=helps[name])
        command = flag(command)
    return command


def show(
    rows: Sequence[Mapping[str, Any]],
    fmt: str | None,
    columns: Sequence[str],
    title: str = "",
    stream: TextIO | None = None,
) -> None:
    """Print rows to `stream`, the standard output when None.

    Parameters
    ----------
    rows : sequence of mapping
    fmt : {"json", "csv", "nl", "table", None}
        None prints a table on a terminal and plain lines elsewhere.
    columns : sequence of str
        What the table and the plain lines show, in order; the other formats print everything.
    title : str
        Above the table.
    """
    stream = stream or sys.stdout
    if fmt == "json":
        stream.write("[" + ",\n ".join(dumps(row) for row in rows) + "]\n")
    elif fmt == "nl":
        stream.writelines(dumps(row) + "\n" for row in rows)
    elif fmt == "csv":
        write_csv(rows, stream, columns)
    elif fmt == "table" or stream.isatty():
        _table(rows, columns, title, stream)
    else:
        _plain(rows, columns, stream)


def dumps(row: Mapping[str, Any]) -> str:
    """Return one row as one line of JSON."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def write_csv(rows: Iterable[Mapping[str, Any]], stream: TextIO, columns: Sequence[str] = ()) -> None:
    """Write rows as CSV; the header is that of the first row, or `columns` when there is none."""
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(stream, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _flat(value) for name, value in row.items()})
    if writer is None:
        csv.writer(stream, lineterminator="\n").writerow(columns)


def _flat(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if isinstance(value, (dict, list)) else value


def cell(name: str, value: Any) -> str:
    """Return a value as people read it: microseconds to four figures, a config as name=value, nothing as -."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, dict):
        return ",".join(f"{key}={_short(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return f"{len(value)} values"
    return str(value)


def _short(value: Any) -> Any:
    if value is None:
        return "never"
    return f"{value:.4g}" if isinstance(value, float) else _flat(value)


def _plain(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], stream: TextIO) -> None:
    """Write tab-separated lines under a header, which cut and awk read as they are."""
    stream.write("\t".join(columns) + "\n")
    for row in rows:
        stream.write("\t".join(cell(name, row.get(name)).replace("\t", " ") for name in columns) + "\n")


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str, stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    # A table that is piped somewhere keeps its full width instead of being cut to a terminal nobody looks at.
    console = Console(file=stream, width=None if stream.isatty() else max(80, 24 * len(columns)))
    table = Table(title=title or None)
    numbers = {name for name in columns if any(_is_number(row.get(name)) for row in rows)}
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(name, row.get(name)) for name in columns))
    console.print(table)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
