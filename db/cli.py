"""`python -m cupyq.db`: questions to the tuning database, and its upkeep."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from cupyq import bands, db
from cupyq.db import exchange, output
from cupyq.db.queries import Filters
from cupyq.errors import ArgumentError, CupyqError, DatabaseError, NotInstalled, SchemaTooNew

OPS = ("w2a16", "w4a16", "w8a16", "w8a8-int8", "w8a8-fp8", "w8a8-fp8-block")
BEST = (
    "device", "op", "dtype", "k", "n", "group_size", "symmetric", "band", "path", "time_us", "speedup_vs_fp16",
    "error", "source", "stale", "trials", "config",
)  # fmt: skip
TRIALS = (
    "id", "device", "op", "dtype", "k", "n", "group_size", "m", "path", "state", "source", "verified", "time_us",
    "error", "reason", "config", "finished_at",
)  # fmt: skip
DEVICES = (
    "device", "title", "compute_capability", "sms", "l2_bytes", "memory_gib", "dram_gbps", "trials", "measured",
    "predicted", "last_trial",
)  # fmt: skip
CROSSOVER = (
    "device", "op", "dtype", "k", "n", "group_size", "symmetric", "source", "crossover", "winner", "fused_us",
    "other_us", "against", "ideal", "first_band", "last_band", "bands", "stale",
)  # fmt: skip
PARETO = (
    "device", "dtype", "k", "n", "band", "weights", "op", "group_size", "symmetric", "path", "time_us",
    "quantization_error", "source", "stale", "config",
)  # fmt: skip
VERIFIED = ("id", "device", "op", "k", "n", "group_size", "m", "path", "ok", "error", "reason")


class OneLineErrors(click.Group):
    """A group of commands that says what went wrong in one line on the standard error.

    Exit status 2 for a wrong command line or argument, such as a file of a newer cupyq, 1 for what failed.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line with the arguments of `click.Group.main`."""
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        try:
            result = run(*args, standalone_mode=False, **extra)
            sys.exit(result if isinstance(result, int) else 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else "", err=True)
            sys.exit(2)
        except click.ClickException as error:
            _complain(error.format_message())
            sys.exit(2)
        except click.Abort:
            _complain("interrupted")
            sys.exit(1)
        except CupyqError as error:
            _complain(str(error))
            sys.exit(2 if isinstance(error, (ArgumentError, SchemaTooNew)) else 1)
        except BrokenPipeError:
            # Whoever read the output has seen enough; Python must not complain again while it closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)


def _complain(message: str) -> None:
    click.echo("cupyq.db: " + " ".join(message.split()), err=True)


class Shape(click.ParamType):
    """K x N of the weights, such as 4096x14336."""

    name = "KxN"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return KxN as it is written; click would put it in capitals."""
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return (K, N)."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)[xX*,](\d+)", value.strip())
        if match is None:
            self.fail(f"{value!r} is no shape; K x N of the weights is accepted, such as 4096x14336", param, ctx)
        return int(match[1]), int(match[2])


def database_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --db."""
    option = click.option(
        "--db",
        "path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The database file. Default: $CUPYQ_DB, else tuning.db in the user's data folder.",
    )
    return option(command)


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that narrow its rows."""
    options = [
        click.option("--device", metavar="NAME", help="Only this device, by name or label (see `devices`)."),
        click.option("--op", type=click.Choice(OPS), help="Only this operation."),
        click.option("--shape", type=Shape(), help="Only weights of K x N, such as 4096x14336: K=4096, N=14336."),
        click.option("--group-size", type=int, metavar="G", help="Only groups of G along K; -1 is one group a column."),
        click.option("--dtype", type=click.Choice(("float16", "bfloat16")), help="Only this type of y."),
        click.option(
            "--band", type=click.IntRange(min=1), metavar="M", help="Only the band that holds M tokens: 5 is in band 8."
        ),
        click.option("--path", "way", type=click.Choice(db.records.PATHS), help="Only this way of computing."),
        click.option("--source", type=click.Choice(db.records.SOURCES), help="Only measured or only predicted times."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def limit_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --limit."""
    return click.option("--limit", type=click.IntRange(min=1), metavar="COUNT", help="Print at most COUNT rows.")(
        command
    )


def _filters(
    device: str | None,
    op: str | None,
    shape: tuple[int, int] | None,
    group_size: int | None,
    dtype: str | None,
    band: int | None,
    way: str | None,
    source: str | None,
    **more: Any,
) -> Filters:
    k, n = shape or (None, None)
    return Filters(
        device=device, op=op, k=k, n=n, group_size=group_size, dtype=dtype,
        band=None if band is None else bands.of(band), path=way, source=source, **more,
    )  # fmt: skip


def _reading(path: Path | None) -> db.Store:
    """Open the database for a question. Nothing was ever tuned where the default file is missing: that is no error."""
    if path is None and not db.default_path().exists():
        click.echo(f"cupyq.db: nothing is stored yet in {db.default_path()}; run python -m cupyq.tune", err=True)
        return db.open(":memory:")
    if path is not None and not path.exists():
        raise click.UsageError(f"--db is {path}, which does not exist")
    return db.open(path, readonly=True)


def _keeping(path: Path | None) -> db.Store:
    """Open the database for a change to rows that must be there already."""
    if path is not None and not path.exists():
        raise click.UsageError(f"--db is {path}, which does not exist")
    if path is None and not db.default_path().exists():
        raise DatabaseError(f"nothing is stored yet in {db.default_path()}; run python -m cupyq.tune")
    return db.open(path)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Ask the tuning database, and look after it.

    Times are in microseconds. Shapes are K x N, as the weights lie: K input features by N output features.
    A question prints a table on a terminal and tab-separated lines elsewhere, unless a format is named.
    """


@cli.command()
@filter_options
@click.option("--fresh/--stale", "fresh", default=None, help="Only rows that are not stale, or only stale ones.")
@click.option("--presets", is_flag=True, help="Also the predictions that cupyq ships, where the file has no row.")
@limit_option
@output.output_options
@database_option
def best(
    path: Path | None, fmt: str | None, fresh: bool | None, presets: bool, limit: int | None, **narrow: Any
) -> None:
    """Print the best row of each device, problem and band."""
    with _reading(path) as store:
        filters = _filters(**narrow, stale=None if fresh is None else not fresh, limit=limit)
        rows = store.best(filters, presets=presets)
    output.show(rows, fmt, BEST, "best")


@cli.command()
@filter_options
@click.option("--state", type=click.Choice(db.records.STATES), help="Only trials in this state.")
@limit_option
@output.output_options
@database_option
def trials(path: Path | None, fmt: str | None, state: str | None, limit: int | None, **narrow: Any) -> None:
    """Print every trial, newest first."""
    with _reading(path) as store:
        rows = store.trials(_filters(**narrow, state=state, limit=limit))
    output.show(rows, fmt, TRIALS, "trials")


@cli.command()
@output.output_options
@database_option
def devices(path: Path | None, fmt: str | None) -> None:
    """Print the devices that have trials."""
    with _reading(path) as store:
        output.show(store.devices(), fmt, DEVICES, "devices")


@cli.command()
@filter_options
@click.option("--presets", is_flag=True, help="Also from the predictions that cupyq ships, where the file has no row.")
@limit_option
@output.output_options
@database_option
def crossover(path: Path | None, fmt: str | None, presets: bool, limit: int | None, **narrow: Any) -> None:
    """Print from which band on others beat the fused kernel, and from which batch on the roofline lets them."""
    with _reading(path) as store:
        rows = store.crossover(_filters(**narrow, limit=limit), presets=presets)
    output.show(rows, fmt, CROSSOVER, "crossover")


@cli.command()
@filter_options
@limit_option
@output.output_options
@database_option
def pareto(path: Path | None, fmt: str | None, limit: int | None, **narrow: Any) -> None:
    """Print the group sizes that no other beats in both time and quantization error."""
    with _reading(path) as store:
        rows = store.pareto(_filters(**narrow, limit=limit))
    output.show(rows, fmt, PARETO, "pareto")


@cli.command()
@filter_options
@click.option("--best", "only_best", is_flag=True, help="Only the first-ranked trial of each problem, path and source.")
@click.option("-o", "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option("--compact", is_flag=True, help="Leave out of the JSON raw samples, the study and what is empty.")
@limit_option
@output.output_options
@database_option
def export(
    path: Path | None,
    fmt: str | None,
    only_best: bool,
    compact: bool,
    target: Path | None,
    limit: int | None,
    **narrow: Any,
) -> None:
    """Write trials as JSON lines, each complete with its device and problem, for `import`.

    With --csv or --table the same, flattened, for people: `import` reads JSON and JSON lines.
    """
    with _reading(path) as store:
        lines = list(store.export(_filters(**narrow, limit=limit), best=only_best))
    if fmt in ("csv", "table"):
        rows = _flattened(lines)
    else:
        rows = [exchange.compact(line) for line in lines] if compact else lines
    columns = tuple(rows[0]) if rows else ()
    if target is None:
        output.show(rows, fmt or "nl", columns)
        return
    try:
        with target.open("w", encoding="utf-8", newline="") as stream:
            output.show(rows, fmt or "nl", columns, stream=stream)
    except OSError as error:
        raise DatabaseError(f"{target} cannot be written ({error.strerror})") from error
    click.echo(f"{len(rows)} trials written to {target}", err=True)


def _flattened(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return export lines as flat rows, all with the same columns."""
    parts = ("device", "problem", "study", "trial")
    names = [(part, name) for part in parts for name in next((line[part] for line in lines if line[part]), {})]
    return [{f"{part}_{name}": (line[part] or {}).get(name) for part, name in names} for line in lines]


def _lines(stream: Any) -> Iterator[Any]:
    """Yield the trials of a file of JSON lines, or of one JSON array of them."""
    text = stream.read()
    if not text.lstrip().startswith("["):
        yield from text.splitlines()
        return
    try:
        yield from json.loads(text)
    except ValueError as error:
        raise DatabaseError(f"the file is no JSON array ({error})") from error


def _report(report: db.Report, fmt: str | None) -> None:
    row = {"added": report.added, "known": report.known, "conflicts": report.conflicts}
    output.show([row], fmt, tuple(row))


@cli.command("import")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@output.output_options
@database_option
def import_(path: Path | None, fmt: str | None, file: Any) -> None:
    """Add the trials of FILE, as `export` wrote them; - is the standard input. All of them, or none.

    Trials that are there already are left alone.
    """
    with db.open(path) as store:
        _report(store.load(_lines(file), origin=file.name), fmt)


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@output.output_options
@database_option
def merge(path: Path | None, fmt: str | None, files: tuple[Path, ...]) -> None:
    """Add the trials of other databases, FILES, which are only read. Merging twice adds nothing."""
    rows = []
    with db.open(path) as store:
        for file in files:
            report = store.merge(file)
            rows.append(
                {"file": str(file), "added": report.added, "known": report.known, "conflicts": report.conflicts}
            )
    output.show(rows, fmt, tuple(rows[0]))


@cli.command()
@filter_options
@click.option("--best", "only_best", is_flag=True, help="Only the trials that `best` shows.")
@limit_option
@output.output_options
@database_option
def verify(path: Path | None, fmt: str | None, only_best: bool, limit: int | None, **narrow: Any) -> None:
    """Run stored kernels again and compare with the reference, on the GPU or in the emulator.

    A trial whose output differs is marked failed and not used any more; the exit status is then 1.
    """
    try:
        from cupyq.tuner.verify import verify_row
    except ImportError as error:
        raise NotInstalled(f"checking kernels needs cupyq.tuner.verify, which cannot be imported ({error})") from error
    from cupyq.db.verifying import verify_trials

    with _keeping(path) as store:
        rows = verify_trials(store, _filters(**narrow, limit=limit), only_best, verify_row)
    output.show(rows, fmt, VERIFIED, "verify")
    if not all(row["ok"] for row in rows):
        raise click.exceptions.Exit(1)


@cli.command()
@filter_options
@click.option("--stale", is_flag=True, help="Delete stale trials.")
@click.option("--failed", is_flag=True, help="Delete failed and pruned trials, so that they may be tried again.")
@click.option("--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Delete trials that ended before.")
@click.option("--keep", type=click.IntRange(min=1), metavar="COUNT", help="Keep COUNT best of each problem and path.")
@click.option("--samples", is_flag=True, help="Delete raw samples, of the trials named above or of all, not trials.")
@click.option("--dry-run", is_flag=True, help="Only say how many.")
@click.option("--vacuum", is_flag=True, help="Give the freed space back to the file system.")
@output.output_options
@database_option
def prune(path: Path | None, fmt: str | None, vacuum: bool, **options: Any) -> None:
    """Delete trials. What ranks first stays, unless it is stale and --stale is given."""
    chosen = ("stale", "failed", "older_than", "keep", "samples", "dry_run")
    reasons = {name: options.pop(name) for name in chosen}
    with _keeping(path) as store:
        named = any(reasons[name] for name in chosen[:2] + chosen[4:5]) or not (
            reasons["older_than"] is None and reasons["keep"] is None
        )
        if not named and not vacuum:
            raise click.UsageError(
                "name what to delete: --stale, --failed, --older-than, --keep, --samples or --vacuum"
            )
        count = store.prune(db.Prune(**reasons, filters=_filters(**options))) if named else 0
        if vacuum and not reasons["dry_run"]:
            store.vacuum()
    row = {"trials": count, "dry_run": reasons["dry_run"]}
    output.show([row], fmt, tuple(row))


@cli.command()
@output.output_options
@database_option
def vacuum(path: Path | None, fmt: str | None) -> None:
    """Give the space of deleted rows back to the file system."""
    with _keeping(path) as store:
        file = Path(store.path)
        before = file.stat().st_size
        store.vacuum()
    row = {"bytes_before": before, "bytes_after": file.stat().st_size}
    output.show([row], fmt, tuple(row))


@cli.command()
@click.option("--device", "names", multiple=True, metavar="NAME", help="Only this device of the catalogue; repeatable.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Only this model's layers; repeatable.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="COUNT", help="Processes. Default: one a processor.")
@click.option("--check", is_flag=True, help="Write nothing: only check that a few rows of each file are current.")
@click.option(
    "-o", "--output", "target", type=click.Path(file_okay=False, path_type=Path),
    help="Write to this folder. Default: where cupyq reads them.",
)  # fmt: skip
def presets(
    names: tuple[str, ...], models: tuple[str, ...], jobs: int | None, check: bool, target: Path | None
) -> None:
    """Make the predictions that cupyq ships again: for its maintainers, after a change of kernels or predictor.

    For every device and every built-in model that takes some minutes. Kernels are compiled, so registers are true, and
    verified in the emulator; if one is wrong nothing is written, and the exit status is 1.
    """
    try:
        from cupyq.db import checking, making
        from cupyq.tuner import workloads
    except ImportError as error:
        raise NotInstalled(f"presets are made with cupyq.tuner, which cannot be imported ({error})") from error
    if check:
        said = [line for name in names or db.presets.names() for line in checking.check(name)]
        for line in said:
            click.echo(line, err=True)
        raise click.exceptions.Exit(1 if said else 0)
    shapes = [shape for model in models for shape in workloads.model_shapes(model)] or None
    start = time.monotonic()
    folder = target or db.presets.folder()
    made = making.make(names or None, folder, shapes, jobs, lambda line: click.echo(line, err=True))
    rows, seconds = sum(device.rows for device in made), time.monotonic() - start
    click.echo(f"{rows} rows for {len(made)} devices written to {folder} in {seconds:.0f} s", err=True)


@cli.command()
@output.output_options
@database_option
def where(path: Path | None, fmt: str | None) -> None:
    """Print where the database is, and Datasette's metadata and the presets that cupyq ships."""
    file = path or db.default_path()
    package = Path(__file__).parent
    places = {"database": file, "metadata": package / "metadata.yml", "presets": package / "presets"}
    rows = [{"what": what, "path": str(place), "exists": place.exists()} for what, place in places.items()]
    output.show(rows, fmt, ("what", "path", "exists"))
