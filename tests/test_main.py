"""`python -m cupyq`: what its commands print, and how they fail."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec

import click
import pytest

import cupyq
from cupyq import __main__ as command_line
from cupyq import devices, doctor, roofline


@pytest.fixture
def run(capsys):
    """Run the command line; return (status, standard output, standard error)."""

    def run(*arguments):
        status = command_line.main(arguments)
        return (status, *capsys.readouterr())

    return run


def own(name):
    return command_line.cli.get_command(click.Context(command_line.cli), name)


@pytest.mark.parametrize("name", ["doctor", "roofline"])
def test_every_option_has_help(run, name):
    assert own(name).help
    status, text, _ = run(name, "--help")
    assert status == 0
    for option in own(name).params:
        assert option.help, option.opts
        assert option.help.endswith("."), option.help
        assert all(opt in text for opt in option.opts)


def test_the_bare_command_lists_the_commands(run):
    status, _, text = run()
    assert status == 2
    assert "doctor" in text
    assert "roofline" in text
    assert run("--version") == (0, f"cupyq, version {cupyq.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rooflin",), "cupyq: No such command 'rooflin'."),
        (("roofline", "--device", "h100-sx"), "cupyq: no device is called 'h100-sx'; nearest: h100-sxm"),
        (("roofline", "--bits", "four"), "cupyq: --bits is 'four'; a number is accepted"),
        (("roofline", "--bits", "0"), "cupyq: bits is 0.0; a positive number is needed"),
        (("roofline", "--bits", "nan"), "cupyq: bits is nan; a positive number is needed"),
        (("roofline", "--group-size", "0"), "cupyq: group_size is 0; a positive number is needed"),
        (("roofline", "-d", "a100-sxm", "--compute", "fp8"), "cupyq: NVIDIA A100 SXM 80 GB has no tensor"),
        (("roofline", "--compute", "fp7"), "cupyq: Invalid value for '--compute'"),
        (("doctor", "--jsn"), "cupyq: No such option"),
    ],
)
def test_errors_are_one_line_and_status_2(run, arguments, said):
    status, out, error = run(*arguments)
    assert (status, out) == (2, "")
    assert error.startswith(said)
    assert error.count("\n") == 1


# --- doctor -----------------------------------------------------------------------------------------------------------


def examined(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "examine", lambda: list(checks))


GOOD, WORSE = doctor.Check("driver", "ok", "runs CUDA 13.0"), doctor.Check("CuPy", "warning", "two", "pip uninstall x")
BAD = doctor.Check("cache", "problem", "no", "chmod")


def test_doctor_prints_plain_lines_with_the_commands(run, monkeypatch):
    examined(monkeypatch, GOOD, WORSE, BAD)
    assert run("doctor") == (
        1,
        "ok       driver  runs CUDA 13.0\n"
        "warning  CuPy    two\n"
        "                 > pip uninstall x\n"
        "problem  cache   no\n"
        "                 > chmod\n",
        "",
    )


@pytest.mark.parametrize(("checks", "status"), [((GOOD,), 0), ((GOOD, WORSE), 0), ((GOOD, WORSE, BAD), 1)])
def test_doctor_s_status_and_json(run, monkeypatch, checks, status):
    examined(monkeypatch, *checks)
    got, out, _ = run("doctor", "--json")
    assert got == status
    assert json.loads(out) == {"ok": status == 0, "checks": [check.as_json() for check in checks]}


def test_doctor_runs_here():
    done = subprocess.run([sys.executable, "-m", "cupyq", "doctor", "--json"], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert not done.stderr
    assert "\x1b" not in done.stdout


# --- roofline ---------------------------------------------------------------------------------------------------------


def test_roofline_of_the_known_ridges(run):
    status, out, _ = run("roofline", "--device", "h100-sxm,mi300x", "-d", "rtx-4090", "--bits", "16,8,4,2", "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["device"] for row in rows] == ["h100-sxm"] * 4 + ["mi300x"] * 4 + ["rtx-4090"] * 4
    assert [round(row["ridge_batch"], 1) for row in rows[:4]] == [295.4, 147.7, 73.8, 36.9]
    assert [round(rows[i]["ridge_batch"], 1) for i in (4, 6, 8, 10)] == [246.7, 61.7, 163.9, 41.0]
    assert round(rows[2]["ideal_speedup"], 2) == 3.88


def test_roofline_of_group_sizes_as_csv(run):
    _, out, _ = run("roofline", "-d", "h100-sxm", "--group-size", "16,128,-1", "--zero-bits", "8", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == list(command_line.ROOFLINE)
    assert [float(row["bits_per_weight"]) for row in rows] == [5.5, 4.1875, 4.0]
    want = [roofline.scale_overhead(g, 4, 16, 8) for g in (16, 128, -1)]
    assert [float(row["scale_overhead"]) for row in rows] == want


def test_roofline_of_the_whole_catalogue_in_plain_lines(run):
    _, out, _ = run("roofline")
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == list(command_line.ROOFLINE)
    assert [line[0] for line in lines[1:]] == devices.names()


def test_roofline_leaves_out_cards_that_cannot_compute_so(run):
    _, out, _ = run("roofline", "--compute", "fp8", "--bits", "8", "--json")
    names = [row["device"] for row in json.loads(out)]
    assert "h100-sxm" in names
    assert "a100-sxm" not in names


# --- report -----------------------------------------------------------------------------------------------------------


def test_report_is_imported_only_when_asked_for(run, monkeypatch):
    module = types.ModuleType("cupyq_report_of_the_test")

    @click.command()
    def command():
        """Write the page."""
        click.echo("written")

    module.command = command
    monkeypatch.setitem(command_line._ELSEWHERE, "report", ("cupyq_report_of_the_test", "command"))
    assert run("report")[0] == 2  # not installed
    assert "report" not in command_line.cli.list_commands(None)
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, "cupyq_report_of_the_test", module)
    assert "report" in command_line.cli.list_commands(None)
    assert run("report") == (0, "written\n", "")
