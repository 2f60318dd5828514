"""docs/database.md holds every command and option, no other, and its transcripts are what is printed."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cupyq.db import cli, views

PAGE = Path(__file__).resolve().parents[2] / "docs" / "database.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = sorted(cli.cli.commands)
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w])")


def section(title):
    """Return the text from the heading to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"docs/database.md has no section {title!r}"
    return match[2]


def options(command):
    return [parameter for parameter in cli.cli.commands[command].params if isinstance(parameter, click.Option)]


def test_the_verbs_of_the_contract():
    verbs = {"best", "trials", "devices", "crossover", "pareto", "export", "import", "merge", "verify", "prune"}
    assert verbs <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command):
    documented = set(OPTION.findall(section("Common options") + section(f"`{command}`")))
    for option in options(command):
        assert set(option.opts) <= documented, f"{command} {option.opts}"
        assert set(option.secondary_opts) <= documented, f"{command} {option.secondary_opts}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command):
    assert cli.cli.commands[command].help
    for option in options(command):
        assert option.help, f"{command} {option.opts}"
        assert option.help.endswith("."), f"{command} {option.opts}: {option.help}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_question_has_every_format_and_the_file(command):
    if command == "presets":
        return  # asks nothing of a database
    names = {name for option in options(command) for name in option.opts}
    assert {"--json", "--csv", "--nl", "--table", "--db"} <= names


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_is_documented_that_does_not_exist(command):
    known = {name for option in options(command) for name in [*option.opts, *option.secondary_opts]} | {"-o"}
    text = re.sub(r"`python -m cupyq\.tune[^`]*`", "", section(f"`{command}`"))
    assert set(OPTION.findall(text)) <= known


def test_every_command_is_documented_and_no_other():
    found = re.findall(r"^### `(\w+)`$", section_tree("Command line"), re.MULTILINE)
    assert sorted(found) == COMMANDS


def section_tree(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)[1]


def test_every_column_of_best_is_documented():
    described = re.findall(r"^\| (`.*?) \|", section("The view `best`"), re.MULTILINE)
    assert [name.strip("`") for cell in described for name in cell.split(", ")] == list(views.BEST_COLUMNS)


def test_the_command_line_transcripts(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
    (python,) = re.findall(r"^```python\n(.*?)^```", section("A first look"), re.MULTILINE | re.DOTALL)
    code = "\n".join(line[4:] for line in python.splitlines() if line.startswith((">>> ", "... ")))
    exec(code, {})
    (console,) = re.findall(r"^```console\n(.*?)^```", section("A first look"), re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^\$ python -m cupyq\.db (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)
    assert len(steps) == console.count("$ ")
    for arguments, printed in steps:
        assert CliRunner().invoke(cli.cli, shlex.split(arguments)).output == printed, arguments
