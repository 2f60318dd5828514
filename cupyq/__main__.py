"""`python -m cupyq`: doctor, roofline, report."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from cupyq import __version__, devices, doctor, roofline
from cupyq.db import output
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CupyqError

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_COLOURS = {doctor.OK: "green", doctor.NOTE: "cyan", doctor.WARNING: "yellow", doctor.PROBLEM: "red"}

# Commands that live elsewhere and are imported only when asked for: name -> (module, attribute).
_ELSEWHERE = {"report": ("cupyq.report.cli", "command")}

COMPUTE = ("float16", "int8", "fp8", "fp4")
ROOFLINE = (
    "device", "bits", "group_size", "bits_per_weight", "ridge_batch", "fp16_ridge_batch", "ideal_speedup",
    "scale_overhead",
)  # fmt: skip


class Commands(click.Group):
    """A group of commands, some of which are imported when they are first asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands that are installed."""
        return sorted({*super().list_commands(ctx), *(name for name in _ELSEWHERE if _installed(name))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, or None."""
        if cmd_name in _ELSEWHERE and _installed(cmd_name):
            module, attribute = _ELSEWHERE[cmd_name]
            found: click.Command = getattr(importlib.import_module(module), attribute)
            return found
        return super().get_command(ctx, cmd_name)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(_ELSEWHERE[name][0]) is not None
    except ModuleNotFoundError:
        return False


@click.group(cls=Commands, context_settings=_SETTINGS)
@click.version_option(__version__, "--version", prog_name="cupyq", help="Print the version and leave.")
def cli() -> None:
    """Quantized matrix multiplication on NVIDIA GPUs.

    Tuning is `python -m cupyq.tune`, the tuning database `python -m cupyq.db`.
    """


# --- doctor -----------------------------------------------------------------------------------------------------------


@cli.command("doctor", context_settings=_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: ok, and the checks.")
def doctor_command(as_json: bool) -> None:
    """Say what is installed, what is missing, and the command that mends it.

    Exit status 1 if something cannot work as it is, else 0.
    """
    checks = doctor.examine()
    ok = all(check.state != doctor.PROBLEM for check in checks)
    if as_json:
        click.echo(json.dumps({"ok": ok, "checks": [check.as_json() for check in checks]}, indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            # click leaves colours out where the output is no terminal.
            state = click.style(f"{check.state:<7}", fg=_COLOURS[check.state])
            click.echo(f"{state}  {check.name:<{width}}  {check.said}")
            if check.mend is not None:
                click.echo(f"{'':7}  {'':{width}}  > {check.mend}")
    if not ok:
        raise click.exceptions.Exit(1)


# --- roofline ---------------------------------------------------------------------------------------------------------


def _list(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    """Split options that are given several times, or once with commas."""
    return [part.strip() for each in value for part in each.split(",") if part.strip()]


@cli.command("roofline", context_settings=_SETTINGS)
@click.option(
    "--device",
    "-d",
    "names",
    multiple=True,
    callback=_list,
    metavar="NAME,...",
    help="Devices of the catalogue, or cuda:0 for a card here; all of the catalogue by default.",
)
@click.option(
    "--bits",
    multiple=True,
    callback=_list,
    default=["4"],
    show_default=True,
    metavar="B,...",
    help="Bits of a weight's code.",
)
@click.option(
    "--group-size",
    multiple=True,
    callback=_list,
    default=["128"],
    show_default=True,
    metavar="G,...",
    help="Weights of a scale; -1 for one scale a column.",
)
@click.option("--scale-bits", type=click.IntRange(min=0), default=16, show_default=True, help="Bits of a scale.")
@click.option(
    "--zero-bits",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Bits of a group's zero point; cupyq stores 8 for asymmetric weights.",
)
@click.option(
    "--compute",
    type=click.Choice(COMPUTE),
    default="float16",
    show_default=True,
    help="What the tensor cores multiply in.",
)
@output.output_options
def roofline_command(
    names: list[str],
    bits: list[str],
    group_size: list[str],
    scale_bits: int,
    zero_bits: int,
    compute: str,
    fmt: str | None,
) -> None:
    """Print ridge batch, ideal speed-up and scale overhead: what no kernel can beat.

    \b
    bits_per_weight   bits + (scale bits + zero bits) / group size
    ridge_batch       batch from which tensor cores bind, not DRAM; codes only, without scales
    fp16_ridge_batch  the same for 16-bit weights: above it quantized weights gain nothing
    ideal_speedup     16 / bits_per_weight, while both are bound by DRAM
    scale_overhead    share of the weights' traffic that scales and zero points take
    """  # fmt: skip
    rows = [
        _roof(spec, _number("bits", each), int(_number("group-size", group, int)), scale_bits, zero_bits, compute)
        for spec in _devices(names, compute)
        for each in bits
        for group in group_size
    ]
    output.show(rows, fmt, ROOFLINE, f"roofline, computing in {compute}")


def _devices(names: list[str], compute: str) -> list[DeviceSpec]:
    if names:
        return [devices.resolve(name) for name in names]
    found = []
    for name in devices.names():
        spec = devices.get(name)
        try:
            spec.tensor_tops(compute)
        except CupyqError:  # a card without such tensor cores has no row
            continue
        found.append(spec)
    return found


def _number(option: str, value: str, kind: type = float) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ArgumentError(f"--{option} is {value!r}; a number is accepted") from None


def _roof(
    spec: DeviceSpec, bits: float, group_size: int, scale_bits: int, zero_bits: int, compute: str
) -> dict[str, Any]:
    return {
        "device": spec.name,
        "bits": bits,
        "group_size": group_size,
        "bits_per_weight": roofline.effective_bits(bits, group_size, scale_bits, zero_bits),
        "ridge_batch": roofline.ridge_batch(spec, bits, compute),
        "fp16_ridge_batch": roofline.ridge_batch(spec, 16, "float16"),
        "ideal_speedup": roofline.ideal_speedup(bits, group_size, scale_bits=scale_bits, zero_bits=zero_bits),
        "scale_overhead": roofline.scale_overhead(group_size, bits, scale_bits, zero_bits),
    }


# --- running ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 a command says so or was stopped, 2 wrong arguments.

    Whatever goes wrong is said in one line on the standard error.
    """
    try:
        status = cli.main(arguments, prog_name="python -m cupyq", standalone_mode=False)
        return int(status or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except (click.ClickException, CupyqError) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("cupyq: " + " ".join(said.split()), err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("cupyq: interrupted", err=True)
        return 1
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python must not complain again while it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
