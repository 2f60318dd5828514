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
from cupyq.kernels.problem import OPS
from cupyq.tuner import display, quality, samplers, study, workloads
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.predicted import PredictedObjective, ranking
from cupyq.tuner.shared import Storage
from cupyq.tuner.verify import Verifier


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--device", metavar="NAME", help="A GPU that is not here, from the catalogue: its times are predicted.")
@click.option("--devices", "fleet", metavar="all|0,1,...", help="Measure on several GPUs of this machine at once.")
@click.option("--shapes", metavar="KxN,...", help="Weights to tune: input features x output features.")
@click.option("--model", metavar="NAME|FILE", help="A built-in model (minilm, llama-3-8b, ...) or a config.json.")
@click.option("--tensor-parallel", type=click.IntRange(min=1), metavar="GPUS", help="Share --model among so many.")
@click.option("--layers", type=click.Choice([*workloads.LAYERS]), help="Of --model: q, k, v as one product or apart.")
@click.option("--k", "one_k", type=int, metavar="K", help="With --n: one shape, as --shapes KxN.")
@click.option("--n", "one_n", type=int, metavar="N", help="With --k.")
@click.option("--weights", metavar="FILE[:TENSOR]", help="Also take the quantization error on these (safetensors).")
@click.option("--batches", "--m", metavar="M,...", help="Tokens; each stands for its band. All bands by default.")
@click.option("--op", "ops", default="w4a16", show_default=True, metavar="OP,...", help="Of " + ", ".join(OPS) + ".")
@click.option("--group-sizes", default="128", show_default=True, metavar="G,...", help="16, 32, 64, 128, 256; -1: K.")
@click.option("--asymmetric", is_flag=True, help="4-bit weights have zero points.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="A problem's, earlier runs' included [64].")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Budget of the whole run.")
@click.option("--sampler", type=click.Choice(samplers.NAMES), default="auto", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler and of the verifier's inputs.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Check winners against the reference.")
@click.option("--db", "path", type=click.Path(path_type=Path), metavar="PATH", help="The database; default $CUPYQ_DB.")
@click.option("--storage", metavar="URL", help="Share the work with other machines: postgresql://USER@HOST/DATABASE.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON, and nothing else, on stdout.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def cli(**options: Any) -> None:
    """Tune cupyq's kernels: find, verify and store the fastest config of each weight shape and batch band.

    Without --device the GPU of this machine is measured. Running the same command again goes on where it stopped.
    """
    fleet = _fleet(options)
    given = None if options["weights"] is None else quality.Weights(options["weights"])
    problems = _problems(options, given)
    errors = {} if given is None else given.errors(problems)
    settings = Settings(options["trials"], options["sampler"], options["seed"], options["verify"])
    console = _console(options)
    with (
        _storage(options["storage"]) as storage,
        db.open(options["path"]) as store,
        _progress(console, len(fleet)) as progress,
    ):

        def make(device: DeviceSpec) -> study.Tuner:
            tuner = _tuner(store, device, settings, options, progress)
            tuner.quantization_errors = errors
            tuner.weights = None if given is None else given.name
            tuner.storage = storage
            return tuner

        if len(fleet) == 1:
            tuner = make(fleet[0])
            try:
                results = [(fleet[0], tuner.run(problems))]
            finally:
                tuner.close()
        else:
            from cupyq.tuner import fleet as several

            results = several.run(fleet, problems, make)
        front = [row for row in store.pareto() if given is not None and row["weights"] == given.name]
    source = "measured" if fleet[0].live else "predicted"
    if options["as_json"]:
        told = [display.as_json(result, device.name, source) for device, result in results]
        click.echo(json.dumps(told[0] if options["fleet"] is None else told))
    else:
        for device, result in results:
            if len(results) > 1:
                console.print(device.title, markup=False)
            display.show(console, result, source, store.path)
            if given is not None:
                console.print(display.pareto_table([r for r in front if r["device"] == device.name], given.name))
    if any(result.interrupted or result.failed or result.out_of_time for _, result in results):
        raise click.exceptions.Exit(1)


def _tuner(
    store: db.Store, device: DeviceSpec, settings: Settings, options: dict[str, Any], progress: study.Progress
) -> study.Tuner:
    rank = ranking(device)
    if not device.live:
        verifier = Verifier(device, options["seed"])
        return study.Tuner(
            store, device, PredictedObjective(device), verifier, rank, settings, options["seconds"], progress
        )
    from cupyq.tuner.ahead import Ahead
    from cupyq.tuner.cuda import MeasuredObjective
    from cupyq.tuner.worker import WorkerObjective

    # The GPU belongs to a process of its own: a kernel that hangs or crashes takes only that along.
    worker = WorkerObjective(MeasuredObjective, (device, options["seed"]))
    return study.Tuner(
        store, device, worker, worker, rank, settings, options["seconds"], progress, ahead=Ahead(device.arch)
    )


@contextlib.contextmanager
def _storage(url: str | None) -> Iterator[Storage | None]:
    if url is None:
        yield None
        return
    with contextlib.closing(Storage(url)) as storage:
        yield storage


def _fleet(options: dict[str, Any]) -> list[DeviceSpec]:
    if options["fleet"] is None:
        return [_device(options["device"])]
    if options["device"] is not None:
        raise ArgumentError("--device and --devices were both given; one of them is accepted")
    count = devices.live_count()
    if count == 0:
        _device(None)  # raises, saying what is missing
        raise NoDevice("no CUDA device can be used here")
    named = range(count) if options["fleet"] == "all" else workloads.parse_numbers("devices", options["fleet"])
    fleet = [devices.live(ordinal) for ordinal in named]
    for device in fleet:
        device.require_kernels()
    return fleet


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


def _problems(options: dict[str, Any], given: quality.Weights | None) -> list[kernels.Problem]:
    shapes: list[tuple[int, int]] = []
    if options["shapes"] is not None:
        shapes += workloads.parse_shapes(options["shapes"])
    if options["model"] is not None:
        shapes += workloads.model_shapes(
            options["model"], options["tensor_parallel"] or 1, options["layers"] or "usual"
        )
    for name in ("tensor_parallel", "layers"):
        if options[name] is not None and options["model"] is None:
            raise ArgumentError(f"--{name.replace('_', '-')} says how to take --model apart, and there is no --model")
    if (options["one_k"] is None) != (options["one_n"] is None):
        raise ArgumentError("--k and --n belong together")
    if options["one_k"] is not None:
        shapes.append((options["one_k"], options["one_n"]))
    if not shapes and given is not None:
        shapes += given.shapes()
    if not shapes:
        raise ArgumentError("nothing to tune: name --shapes KxN,..., --model NAME or --weights FILE")
    ops = [part.strip() for part in options["ops"].split(",") if part.strip()]
    if not ops:
        raise ArgumentError(f"op is empty; accepted: {', '.join(OPS)}")
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
def _progress(console: Console, gpus: int) -> Iterator[study.Progress]:
    if console.quiet:
        yield study.Silent()
    elif console.is_terminal and gpus == 1:
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
