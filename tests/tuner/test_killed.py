"""SIGKILL at any moment: the database stays valid, at most the running trial is lost, and the run goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tuning_fakes import PROBLEM

from cupyq import db

HERE = Path(__file__).resolve().parent
TRIALS = 24
PROGRAM = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import time
from tuning_fakes import DEVICE, PROBLEM, QUICK, in_order, steady
from cupyq import db
from cupyq.tuner.fake import FakeDevice, FakeVerifier
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.study import Silent, Tuner

class Slow(Silent):
    def trial(self, problem, candidate, outcome):
        time.sleep(0.01)

fake = FakeDevice(DEVICE, steady, search=QUICK, final=QUICK)
with db.open(sys.argv[1]) as store:
    print("ready", flush=True)
    Tuner(store, DEVICE, fake, FakeVerifier(), in_order, Settings({TRIALS}, "sweep"), progress=Slow()).run([PROBLEM])
"""


def start(path):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def kill_and_look(path, wait):
    """Kill a run after `wait` seconds; return how many trials it left unfinished."""
    process = start(path)
    time.sleep(wait)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with db.open(path) as store, store.reading() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        return len(store.trials(state="running"))


@pytest.mark.parametrize("moments", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_exactly(tmp_path, moments):
    path, rng, lost = tmp_path / "tuning.db", random.Random(moments), 0
    for _ in range(moments):
        running = kill_and_look(path, rng.uniform(0.0, 0.25))
        assert running <= 1, "at most the trial that ran"
        lost += running
    assert start(path).wait(120) == 0
    with db.open(path) as store:
        rows = [row for row in store.trials() if row["phase"] == "search"]
        [best] = store.best()
    keys = [(row["path"], str(row["config"])) for row in rows]
    failed = [row for row in rows if row["state"] == "failed"]
    assert len(failed) == lost
    assert all("stopped while this trial ran" in row["reason"] for row in failed)
    twice = len(keys) - len(set(keys))
    assert twice <= lost, "only a default that was cut off is tried again"
    assert len(rows) - twice == TRIALS
    sound = [row for row in rows if row["state"] == "complete" and row["path"] == "fused"]
    assert best["time_us"] == pytest.approx(min(row["time_us"] for row in sound))
    assert best["band"] == PROBLEM.m
