"""`python -m cupyq report`: a page, plots or JSON about what the tuning database holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from cupyq import db
from cupyq.errors import ArgumentError, CupyqError
from cupyq.report import data, page, png


@click.command("report", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--db",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The database. Default: $CUPYQ_DB, else tuning.db in the user's data folder.",
)
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the page here. Default: report.html, unless --png or --json is asked for.",
)
@click.option("--device", metavar="NAME", help="Only this device, by its label (see `python -m cupyq.db devices`).")
@click.option("--png", "folder", type=click.Path(path_type=Path), metavar="FOLDER", help="Write PNG plots here.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts that the page shows as JSON on stdout.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def command(
    path: Path | None, target: Path | None, device: str | None, folder: Path | None, as_json: bool, quiet: bool
) -> None:  # fmt: skip
    """Write what the tuning database holds as one self-contained HTML page.

    The page needs no network. Times that were predicted are labelled so everywhere.
    """
    if target is None and folder is None and not as_json:
        target = Path("report.html")
    with _reading(path) as store:
        facts = data.gather(store, device)
    written: list[Path] = []
    if folder is not None:
        written += png.write(facts, folder)
    if target is not None:
        page.write(facts, target)
        written.append(target)
    if as_json:
        click.echo(json.dumps(facts, indent=2, allow_nan=False))
    if not quiet:
        for file in written:
            click.echo(f"wrote {file} ({file.stat().st_size / 1024:.0f} KiB)", err=as_json)


def _reading(path: Path | None) -> db.Store:
    """Open the database. Nothing was ever tuned where the default file is missing: that report is an empty one."""
    if path is None and not db.default_path().exists():
        return db.open(":memory:")
    if path is not None and not path.is_file():
        raise ArgumentError(f"--db is {path}, which is {'a folder' if path.is_dir() else 'no file'}")
    return db.open(path, readonly=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 failed (a damaged file), 2 wrong arguments."""
    try:
        status = command.main(arguments, prog_name="python -m cupyq report", standalone_mode=False)
        return int(status or 0)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except (click.ClickException, CupyqError) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("cupyq report: " + " ".join(said.split()), err=True)
        return 2 if isinstance(error, (click.ClickException, ArgumentError)) else 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("cupyq report: interrupted", err=True)
        return 1
