"""`python -m cupyq.tune`: what it writes, says and returns."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from cupyq import db, tune

QUICK = ("--device", "rtx-4090", "--shapes", "384x384", "--batches", "1,16", "--trials", "6")


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command on a fresh database; returns (status, stdout, stderr)."""

    def invoke(*arguments, path=tmp_path / "tuning.db"):
        status = tune.main([*arguments, *(("--db", str(path)) if path else ())])
        said = capsys.readouterr()
        return status, said.out, said.err

    invoke.path = tmp_path / "tuning.db"
    return invoke


def test_tuning_a_gpu_that_is_not_here(run):
    status, out, err = run(*QUICK)
    assert (status, err) == (0, "")
    assert "times and ratios predicted" in out
    assert "where the fused kernel stops paying" in out
    with db.open(run.path, readonly=True) as store:
        rows = store.best()
        assert [(row["band"], row["source"], row["trials"], row["stale"]) for row in rows] == [
            (1, "predicted", 6, False),
            (16, "predicted", 6, False),
        ]
        assert all(0 < row["error"] < 1e-3 for row in rows)
        assert all(row["speedup_vs_fp16"] > 0 for row in rows)
        trials = store.trials()
    assert {row["path"] for row in trials} == {"fused", "dequant", "fp16"}
    assert all(row["source"] == "predicted" for row in trials)


def test_a_second_run_resumes_and_adds_no_duplicate(run):
    run(*QUICK)
    with db.open(run.path) as store:
        before = store.trials()
    status, out, _ = run(*QUICK)
    assert status == 0
    assert "0 new trials" in out
    with db.open(run.path) as store:
        assert store.trials() == before
    run(*QUICK[:-1], "9")
    with db.open(run.path) as store:
        rows = store.trials()
    assert len(rows) == len(before) + 2 * 3
    keys = [(row["m"], row["path"], json.dumps(row["config"], sort_keys=True)) for row in rows]
    assert len(keys) == len(set(keys))


def test_json_is_all_that_stdout_has(run):
    status, out, _ = run(*QUICK, "--json")
    assert status == 0
    told = json.loads(out)
    assert (told["device"], told["source"], told["new_trials"]) == ("rtx-4090", "predicted", 12)
    assert [(p["k"], p["n"], p["band"], p["source"]) for p in told["problems"]] == [
        (384, 384, 1, "predicted"),
        (384, 384, 16, "predicted"),
    ]
    assert set(told["problems"][0]["paths_us"]) == {"fused", "dequant", "fp16"}
    assert told["crossover"][0]["source"] == "predicted"


def test_quiet_says_nothing(run):
    assert run(*QUICK, "--quiet") == (0, "", "")


def test_8_bit_weights_take_part_in_the_crossover(run):
    status, out, _ = run(*QUICK, "--op", "w4a16,w8a8-int8", "--json")
    assert status == 0
    told = json.loads(out)
    assert {(p["op"], p["group_size"]) for p in told["problems"]} == {("w4a16", 128), ("w8a8-int8", -1)}


def test_group_sizes_and_the_other_options(run):
    status, out, _ = run(
        "--device", "a100-sxm", "--k", "256", "--n", "128", "--m", "4", "--group-sizes", "32,64", "--asymmetric",
        "--dtype", "bfloat16", "--trials", "4", "--json",
    )  # fmt: skip
    assert status == 0
    problems = json.loads(out)["problems"]
    assert [(p["group_size"], p["symmetric"], p["dtype"], p["band"]) for p in problems] == [
        (32, False, "bfloat16", 4),
        (64, False, "bfloat16", 4),
    ]


def test_without_verifying_nothing_is_used(run):
    status, out, _ = run(*QUICK, "--no-verify")
    assert status == 0
    assert "not verified" in out
    with db.open(run.path) as store:
        assert store.best() == []
    assert run(*QUICK)[0] == 0
    with db.open(run.path) as store:
        assert len(store.best()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "rtx-4091", "--shapes", "64x64"), ("rtx-4091", "rtx-4090")),
        (("--device", "mi300x", "--shapes", "64x64"), ("rooflines only",)),
        (("--device", "rtx-4090"), ("--shapes", "--model")),
        (("--device", "rtx-4090", "--shapes", "64by64"), ("64by64", "KxN")),
        (("--device", "rtx-4090", "--model", "lama-3-8b"), ("llama-3-8b",)),
        (("--device", "rtx-4090", "--k", "64"), ("--n",)),
        (("--device", "rtx-4090", "--shapes", "64x64", "--op", "w1a1"), ("w1a1", "w8a8-int8")),
        (("--device", "rtx-4090", "--shapes", "64x64", "--group-sizes", "48"), ("48", "128")),
        (("--device", "rtx-4090", "--shapes", "64x64", "--batches", "0"), ("0",)),
        (("--device", "rtx-4090", "--shapes", "64x64", "--batches", "two"), ("two",)),
        (("--device", "rtx-4090", "--shapes", "64x64", "--trials", "0"), ("--trials",)),
        (("--device", "rtx-4090", "--shapes", "64x64", "--sampler", "luck"), ("luck", "tpe")),
        (("--device", "rtx-4090", "--shapes", "64x64", "--op", ","), ("op is empty", "w4a16")),
        (("--device", "rtx-4090", "--shapes", "64x64", "--tensor-parallel", "2"), ("--tensor-parallel", "--model")),
        (("--device", "rtx-4090", "--shapes", "64x64", "--layers", "both"), ("--layers", "--model")),
        (("--device", "rtx-4090", "--model", "llama-3-8b", "--tensor-parallel", "3"), ("32 heads", "1, 2, 4")),
        (("--device", "rtx-4090", "--model", "llama-3-8b", "--tensor-parallel", "0"), ("--tensor-parallel",)),
        (("--device", "rtx-4090", "--weights", "none.safetensors:a.weight"), ("none.safetensors",)),
        (("--device", "rtx-4090", "--devices", "all", "--shapes", "64x64"), ("--device and --devices",)),
        (("--device", "rtx-4090", "--shapes", "64x64", "--frobnicate"), ("--frobnicate",)),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2_and_touch_no_file(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("cupyq.tune: ")
    assert all(word in err for word in words)
    assert not run.path.exists()


def test_without_a_gpu_the_way_out_is_named(run, monkeypatch):
    if tune.devices.live_count():
        pytest.skip("there is a GPU here")
    status, _, err = run("--shapes", "64x64")
    assert (status, err.count("\n")) == (2, 1)
    assert "--device" in err
    for fleet in ("all", "0", "0,1"):
        status, _, err = run("--devices", fleet, "--shapes", "64x64")
        assert (status, err.count("\n")) == (2, 1)
        assert "--device rtx-4090" in err
    assert not run.path.exists()


def test_out_of_time_is_status_1_and_goes_on(run):
    status, out, _ = run(*QUICK, "--seconds", "0.000001")
    assert status == 1
    assert "out of time: the same command goes on" in out
    assert run(*QUICK)[0] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_in_the_middle_keeps_what_is_done(run):
    command = [
        sys.executable, "-m", "cupyq.tune", "--device", "a100-sxm", "--shapes", "1024x1024,2048x1024", "--trials", "24",
        "--db", str(run.path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(3)]  # what there is to do, and two problems
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, lines
    assert err == ""
    assert "interrupted: what is done is kept, the same command goes on" in out
    with db.open(run.path) as store:
        assert len(store.best()) >= 2


def test_a_database_that_cannot_be_written(run, tmp_path):
    file = tmp_path / "not-a-folder"
    file.write_text("mine")
    status, _, err = run(*QUICK, path=file / "tuning.db")
    assert (status, err.count("\n")) == (2, 1)
    assert file.read_text() == "mine"
    status, _, err = run(*QUICK, path=file)
    assert (status, err.count("\n")) == (2, 1)
    assert file.read_text() == "mine"


def test_a_newer_schema_is_left_alone(run):
    run(*QUICK)
    connection = sqlite3.connect(run.path)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()
    content = run.path.read_bytes()
    status, _, err = run(*QUICK, "--seed", "3")
    assert (status, err.count("\n")) == (2, 1)
    assert "newer" in err or "schema 99" in err
    assert run.path.read_bytes() == content


def test_what_no_kernel_can_run_is_status_1(run):
    status, _, err = run("--device", "a100-sxm", "--shapes", "64x64", "--batches", "1", "--op", "w8a8-fp8")
    assert (status, err.count("\n")) == (1, 1)
    assert "8.9" in err


@pytest.mark.slow
def test_the_module_runs_as_a_command(tmp_path):
    environment = {**os.environ, "CUPYQ_DB": str(tmp_path / "mine.db")}
    command = [sys.executable, "-m", "cupyq.tune", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "predicted" in done.stdout
    assert (tmp_path / "mine.db").exists()
