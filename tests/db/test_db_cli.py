"""The command line: every verb, every format, one line on the standard error, exit statuses 0, 1 and 2."""

import csv
import io
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from db_values import A100, H100, HERE, PROBLEM

import cupyq.db
from cupyq.db import cli
from cupyq.errors import ArgumentError, NotInstalled, VerificationError


@pytest.fixture
def run(fresh_db, monkeypatch):
    """Run a verb on the fresh database and return the result; a failure that was not expected shows its output."""
    monkeypatch.setenv("CUPYQ_DB", str(fresh_db.path))
    monkeypatch.setattr(cupyq.db.environment, "_here", lambda: HERE)

    def run(*arguments, status=0, text=None):
        result = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], input=text)
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture
def filled(fresh_db, add):
    add(10.0, tile=1, error=0.01)
    add(12.0, tile=2, source="predicted", problem=PROBLEM.with_m(64))
    add(5.0, tile=3, device=A100)
    add(40.0, path="fp16", config=None)
    add(None, tile=4, state="failed", reason="illegal address", verified=False)


def lines(result):
    return [line.split("\t") for line in result.stdout.splitlines()]


def test_best_prints_plain_lines_when_not_on_a_terminal(run, filled):
    assert lines(run("best")) == [
        ["device", "op", "dtype", "k", "n", "group_size", "symmetric", "band", "path", "time_us", "speedup_vs_fp16",
         "error", "source", "stale", "trials", "config"],
        ["a100-sxm", "w4a16", "float16", "8192", "4096", "128", "yes", "16", "fused", "5", "-", "-", "measured", "no",
         "1", "tile=3"],
        ["h100-sxm", "w4a16", "float16", "8192", "4096", "128", "yes", "16", "fused", "10", "4", "0.01", "measured",
         "no", "3", "tile=1"],
        ["h100-sxm", "w4a16", "float16", "8192", "4096", "128", "yes", "64", "fused", "12", "-", "-", "predicted",
         "no", "1", "tile=2"],
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["best", "trials", "devices", "crossover", "pareto"])
def test_the_formats_hold_the_same_rows(run, fresh_db, filled, verb):
    rows = json.loads(json.dumps(getattr(fresh_db, verb)()))
    assert json.loads(run(verb, "--json").stdout) == rows
    assert [json.loads(line) for line in run(verb, "--nl").stdout.splitlines()] == rows
    table = list(csv.DictReader(io.StringIO(run(verb, "--csv").stdout)))
    assert [row.get("device") for row in table] == [row["device"] for row in rows]
    assert all(row["device"] in run(verb, "--table").stdout for row in rows)


def test_csv_whole(run, filled):
    result = run("best", "--csv", "--device", "a100-sxm")
    assert result.stdout.splitlines() == [
        "device,compute_capability,op,dtype,n,k,group_size,symmetric,band,path,config,time_us,time_low_us,"
        "time_high_us,speedup_vs_fp16,error,source,stale,trials",
        'a100-sxm,8.0,w4a16,float16,4096,8192,128,1,16,fused,"{""tile"":3}",5.0,,,,,measured,0,1',
    ]


def test_an_empty_database_prints_its_header_or_nothing(run):
    assert run("best", "--json").stdout == "[]\n"
    assert run("best", "--nl").stdout == ""
    assert lines(run("devices"))[0][0] == "device"


@pytest.mark.parametrize(
    ("options", "times"),
    [
        (["--device", "a100-sxm"], {5}), (["--op", "w8a8-int8"], set()), (["--shape", "8192x4096"], {10, 12, 5}),
        (["--shape", "4096x8192"], set()), (["--group-size", "128"], {10, 12, 5}), (["--dtype", "bfloat16"], set()),
        (["--band", "50"], {12}), (["--path", "fused"], {10, 12, 5}), (["--source", "predicted"], {12}),
        (["--fresh"], {10, 12, 5}), (["--stale"], set()), (["--limit", "1"], {5}),
    ],
    ids=str,
)  # fmt: skip
def test_best_is_narrowed(run, filled, options, times):
    assert {row["time_us"] for row in json.loads(run("best", "--json", *options).stdout)} == times


def test_a_shape_is_k_by_n(run, filled):
    row = json.loads(run("best", "--json", "--shape", "8192X4096", "--limit", "1").stdout)[0]
    assert (row["k"], row["n"]) == (8192, 4096)


def test_trials_by_state(run, filled):
    (row,) = json.loads(run("trials", "--state", "failed", "--json").stdout)
    assert (row["reason"], row["time_us"]) == ("illegal address", None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["best", "--op", "w2a2"], "'--op'"), (["best", "--shape", "4096"], "K x N"),
        (["best", "--band", "0"], "--band"),
        (["nonsense"], "nonsense"), (["best", "--nonsense"], "nonsense"), (["prune"], "name what to delete"),
        (["merge"], "FILES"), (["merge", "missing.db"], "missing.db"), (["import", "missing.jsonl"], "missing.jsonl"),
        (["best", "--db", "missing.db"], "missing.db"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_status_2(run, arguments, said):
    result = run(*arguments, status=2)
    assert result.stderr.startswith("cupyq.db: ")
    assert said in result.stderr
    assert (result.stderr.count("\n"), result.stdout) == (1, "")


@pytest.mark.parametrize("arguments", [["best"], ["export"], ["prune", "--failed"], ["import", "-"]], ids=str)
def test_a_damaged_file_is_one_line_and_status_1(run, tmp_path, monkeypatch, arguments):
    damaged = tmp_path / "damaged.db"
    damaged.write_text("a note " * 100)
    monkeypatch.setenv("CUPYQ_DB", str(damaged))
    result = run(*arguments, status=1)
    assert result.stderr == (
        f"cupyq.db: {damaged} is not an SQLite database; it is left as it is "
        "(name another file with $CUPYQ_DB or --db)\n"
    )
    assert damaged.read_text() == "a note " * 100


def test_nothing_stored_yet_is_no_error(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "none.db"))
    result = run("best", "--json")
    assert (result.stdout, "python -m cupyq.tune" in result.stderr) == ("[]\n", True)
    assert not (tmp_path / "none.db").exists()


def test_export_and_import(run, filled, tmp_path, fresh_db):
    exported = run("export").stdout
    assert len(exported.splitlines()) == 5
    result = run("import", "-", "--json", "--db", tmp_path / "new.db", text=exported)
    assert json.loads(result.stdout) == [{"added": 5, "known": 0, "conflicts": 0}]
    assert run("best", "--json", "--db", tmp_path / "new.db").stdout == run("best", "--json").stdout
    array = run("export", "--json").stdout
    assert json.loads(run("import", "-", "--nl", text=array).stdout) == {"added": 0, "known": 5, "conflicts": 0}


def test_export_to_a_file_and_of_the_best(run, filled, tmp_path):
    result = run("export", "--best", "--source", "measured", "-o", tmp_path / "best.jsonl")
    assert (result.stdout, "3 trials written" in result.stderr) == ("", True)
    assert len((tmp_path / "best.jsonl").read_text().splitlines()) == 3
    assert "cannot be written" in run("export", "-o", tmp_path / "no" / "x", status=1).stderr


def test_export_compact(run, filled, tmp_path):
    lines = run("export", "--compact").stdout.splitlines()
    assert all("null" not in json.dumps(json.loads(line)["trial"]) for line in lines)
    run("import", "-", "--db", tmp_path / "new.db", text="\n".join(lines))
    assert run("best", "--json", "--db", tmp_path / "new.db").stdout == run("best", "--json").stdout


def test_export_as_csv_has_one_header_for_all(run, fresh_db, add):
    add(1.0)
    add(2.0, study=fresh_db.start_study("s"))
    rows = list(csv.DictReader(io.StringIO(run("export", "--csv").stdout)))
    assert [(row["study_name"], row["trial_time_us"], row["problem_k"]) for row in rows] == [
        ("", "1.0", "8192"), ("s", "2.0", "8192"),
    ]  # fmt: skip


def test_import_of_nonsense_is_status_1(run):
    assert "line 1 is not a trial" in run("import", "-", text="nonsense\n", status=1).stderr
    assert "no JSON array" in run("import", "-", text="[nonsense\n", status=1).stderr


def test_merge(run, filled, fresh_db, tmp_path):
    with cupyq.db.open(tmp_path / "new.db"):
        pass
    result = run("merge", fresh_db.path, fresh_db.path, "--json", "--db", tmp_path / "new.db")
    assert json.loads(result.stdout) == [
        {"file": str(fresh_db.path), "added": 5, "known": 0, "conflicts": 0},
        {"file": str(fresh_db.path), "added": 0, "known": 5, "conflicts": 0},
    ]


def test_prune(run, filled, fresh_db):
    assert json.loads(run("prune", "--failed", "--dry-run", "--nl").stdout) == {"trials": 1, "dry_run": True}
    assert len(fresh_db.trials()) == 5
    assert json.loads(run("prune", "--failed", "--vacuum", "--nl").stdout) == {"trials": 1, "dry_run": False}
    assert len(fresh_db.trials()) == 4
    assert json.loads(run("prune", "--vacuum", "--nl").stdout) == {"trials": 0, "dry_run": False}
    assert json.loads(run("prune", "--older-than", "0", "--nl").stdout)["trials"] == 0


def test_vacuum(run, filled, fresh_db, add):
    for _ in range(50):
        add(samples_us=[0.5] * 5000)
    fresh_db.vacuum()
    fresh_db.prune(cupyq.db.Prune(samples=True))
    said = json.loads(run("vacuum", "--nl").stdout)
    assert said["bytes_after"] < said["bytes_before"] / 5
    assert said["bytes_after"] == fresh_db.path.stat().st_size


@pytest.fixture
def verifier(monkeypatch):
    """Stand for `cupyq.tuner.verify`, which runs kernels: outcomes by tile."""
    seen = []

    def verify_row(row):
        seen.append(row)
        outcome = outcomes[row["config"]["tile"]]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    outcomes = {
        1: 0.02,
        2: VerificationError("y[0, 3] is 1.5, not 2.0"),
        3: ArgumentError("config is of another version"),
    }
    outcomes |= {5: float("nan"), 6: NotInstalled("no emulator: pip install 'cupyq[offline]'")}
    module = type(sys)("cupyq.tuner.verify")
    module.verify_row = verify_row
    monkeypatch.setitem(sys.modules, "cupyq.tuner.verify", module)
    return seen


def test_verify_checks_and_writes_down_what_came_out(run, filled, fresh_db, verifier):
    rows = [json.loads(line) for line in run("verify", "--nl", status=1).stdout.splitlines()]
    assert [(row["config"], row["ok"], row["error"], row["reason"]) for row in rows] == [
        ({"tile": 1}, True, 0.02, None),
        ({"tile": 2}, False, None, "y[0, 3] is 1.5, not 2.0"),
        ({"tile": 3}, False, None, "not run: config is of another version"),
    ]
    stored = {row["config"].get("tile"): (row["state"], row["error"], row["verified"]) for row in fresh_db.trials()}
    assert stored[1] == ("complete", 0.02, True)
    assert stored[2] == ("failed", None, False)
    assert stored[3] == ("complete", None, True), "a kernel that cannot run here is not wrong"
    assert verifier[0]["spec"]["name"] == H100.name


def test_verify_is_narrowed(run, filled, add, verifier):
    add(11.0, tile=2)
    run("verify", "--best", "--device", "h100-sxm", "--source", "measured")
    assert [row["config"] for row in verifier] == [{"tile": 1}]


def test_an_error_that_is_not_a_number_is_wrong(run, fresh_db, add, verifier):
    add(tile=5)
    run("verify", status=1)
    (row,) = fresh_db.trials()
    assert (row["state"], row["error"], row["reason"]) == ("failed", None, "the error against the reference is nan")


def test_verify_without_what_it_needs_changes_nothing(run, fresh_db, add, verifier):
    add(tile=6, error=0.5)
    assert run("verify", status=1).stderr == "cupyq.db: no emulator: pip install 'cupyq[offline]'\n"
    assert [(row["state"], row["error"]) for row in fresh_db.trials()] == [("complete", 0.5)]


def test_the_module_runs(tmp_path):
    command = [sys.executable, "-m", "cupyq.db"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: python -m cupyq.db")
    done = subprocess.run([*command, "best", "--db", tmp_path / "no.db"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_without_a_verb_the_help_is_shown(run):
    assert "Commands:" in run(status=2).stderr


def test_where(run, fresh_db):
    rows = {row["what"]: row for row in json.loads(run("where", "--json").stdout)}
    assert rows["database"] == {"what": "database", "path": str(fresh_db.path), "exists": True}
    assert rows["metadata"]["path"].endswith("metadata.yml")
    assert rows["metadata"]["exists"]


@pytest.mark.parametrize("verb", ["best", "trials", "devices", "crossover"])
def test_a_file_of_a_newer_cupyq_is_a_wrong_argument(run, fresh_db, verb):
    with fresh_db.writing() as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    result = run(verb, status=2)
    assert "schema 99" in result.stderr
    assert result.stderr.count("\n") == 1
