"""`python -m cupyq.tune`: tune this machine's GPU, or predict for one that is not here."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cupyq import db, devices, kernels
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CupyqError, NoDevice, NotInstalled, TuningError
from cupyq.tuner import display, samplers, study, workloads
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.predicted import PredictedObjective, ranking
from cupyq.tuner.verify import Verifier

OPS = ("w4a16", "w8a8-int8", "w8a8-fp8")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--device", metavar="NAME", help="A GPU that is not here, from the catalogue: its times are predicted.")
@click.option("--shapes", metavar="KxN,...", help="Weights to tune: input features x output features.")
@click.option("--model", metavar="NAME|FILE", help="A built-in model (minilm, llama-3-8b, ...) or a config.json.")
@click.option("--tensor-parallel", type=int, default=1, show_default=True, metavar="GPUS", help="Share --model so.")
@click.option("--k", "one_k", type=int, metavar="K", help="With --n: one shape, as --shapes KxN.")
@click.option("--n", "one_n", type=int, metavar="N", help="With --k.")
@click.option("--batches", "--m", metavar="M,...", help="Tokens; each stands for its band. All bands by default.")
@click.option("--op", "ops", default="w4a16", show_default=True, metavar="OP,...", help=f"Of {', '.join(OPS)}.")
@click.option("--group-sizes", default="128", show_default=True, metavar="G,...", help="16, 32, 64, 128, 256; -1: K.")
@click.option("--asymmetric", is_flag=True, help="4-bit weights have zero points.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="A problem's, earlier runs' included [64].")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Budget of the whole run.")
@click.option("--sampler", type=click.Choice(samplers.NAMES), default="auto", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler and of the verifier's inputs.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Check winners against the reference.")
@click.option("--db", "path", type=click.Path(path_type=Path), metavar="PATH", help="The database; default $CUPYQ_DB.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON, and nothing else, on stdout.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def cli(**options: Any) -> None:
    """Tune cupyq's kernels: find, verify and store the fastest config of each weight shape and batch band.

    Without --device the GPU of this machine is measured. Running the same command again goes on where it stopped.
    """
    target = _device(options["device"])
    problems = _problems(options)
    settings = Settings(options["trials"], options["sampler"], options["seed"], options["verify"])
    console = _console(options)
    with db.open(options["path"]) as store, _progress(console) as progress:
        tuner = _tuner(store, target, settings, options, progress)
        try:
            result = tuner.run(problems)
        finally:
            tuner.objective.close()
    source = tuner.objective.source
    if options["as_json"]:
        click.echo(json.dumps(display.as_json(result, target.name, source)))
    else:
        display.show(console, result, source, store.path)
    if result.interrupted or result.failed:
        raise click.exceptions.Exit(1)


def _tuner(
    store: db.Store, device: DeviceSpec, settings: Settings, options: dict[str, Any], progress: study.Progress
) -> study.Tuner:
    objective: Any
    if device.live:
        from cupyq.tuner.cuda import MeasuredObjective

        objective = MeasuredObjective(device, seed=options["seed"])
    else:
        objective = PredictedObjective(device)
    verifier = Verifier(device, options["seed"])
    return study.Tuner(
        store, device, objective, verifier, ranking(device), settings, options["seconds"], progress
    )  # fmt: skip


def _device(name: str | None) -> DeviceSpec:
    if name is None:
        try:
            found = devices.resolve(None)
        except (NoDevice, NotInstalled) as error:
            raise type(error)(f"{error}; or name a GPU to predict for: --device rtx-4090") from None
    else:
        found = devices.resolve(name)
    found.require_kernels()
    return found


def _problems(options: dict[str, Any]) -> list[kernels.Problem]:
    shapes: list[tuple[int, int]] = []
    if options["shapes"] is not None:
        shapes += workloads.parse_shapes(options["shapes"])
    if options["model"] is not None:
        shapes += workloads.model_shapes(options["model"], options["tensor_parallel"])
    if (options["one_k"] is None) != (options["one_n"] is None):
        raise ArgumentError("--k and --n belong together")
    if options["one_k"] is not None:
        shapes.append((options["one_k"], options["one_n"]))
    if not shapes:
        raise ArgumentError("nothing to tune: name --shapes KxN,... or --model NAME")
    ops = [part.strip() for part in options["ops"].split(",") if part.strip()]
    for op in ops:
        if op not in OPS:
            raise ArgumentError(f"op={op!r} is unknown; accepted: {', '.join(OPS)}")
    batches = None if options["batches"] is None else workloads.parse_numbers("batches", options["batches"])
    groups = workloads.parse_numbers("group-sizes", options["group_sizes"])
    return study.problems_of(shapes, ops, batches, groups, options["dtype"], not options["asymmetric"])


def _console(options: dict[str, Any]) -> Console:
    console = Console(stderr=options["as_json"], quiet=options["quiet"])
    # A log or a pipe has no width of its own; the tables need this much.
    return console if console.is_terminal else Console(stderr=options["as_json"], quiet=options["quiet"], width=140)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[study.Progress]:
    if console.quiet:
        yield study.Silent()
    elif console.is_terminal:
        with display.Bar(console) as bar:
            yield bar
    else:
        yield display.Lines(console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 not everything could be tuned, 2 wrong arguments."""
    try:
        status = cli.main(arguments, prog_name="python -m cupyq.tune", standalone_mode=False)
        return int(status or 0)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except (click.ClickException, CupyqError) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("cupyq.tune: " + " ".join(said.split()), err=True)
        return 1 if isinstance(error, TuningError) else 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("cupyq.tune: interrupted", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
