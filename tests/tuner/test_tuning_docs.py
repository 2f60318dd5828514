"""The page on tuning documents every option, and the replay benchmark runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyq import tune
from cupyq.kernels import Problem

ROOT = Path(__file__).resolve().parents[2]


def test_every_option_is_documented():
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    options = [name for parameter in tune.cli.params for name in (*parameter.opts, *parameter.secondary_opts)]
    documented = [name for name in options if name not in ("--verify", "-q")]
    assert [name for name in documented if name not in page] == []


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("tuner_benchmark", ROOT / "benchmarks" / "tuner.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_replay_tells_samplers_apart(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "PROBLEMS", (("rtx-4090", Problem("w4a16", 1, 64, 128)),))
    tables = benchmark.predicted_tables(0.0, 0)
    [table] = tables.values()
    assert len(table) > 100
    curves = benchmark.study(tables, ["random", "sweep"], 30, 2)
    for rows in curves.values():
        assert rows.shape == (2, 30)
        assert (np.diff(rows, axis=1) <= 0).all(), "the best so far never gets worse"
        assert (rows >= 0).all()
    [whole] = benchmark.study(tables, ["sweep"], len(table), 1)["sweep"]
    assert whole[-1] == 0
