"""The benchmarks: what they count is right on a small weight, bars are held, and no GPU means no number."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cupyq import devices, dispatch
from cupyq.kernels import Problem
from cupyq.tuner.fake import FakeDevice

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def script(name):
    """Return a benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def static():
    return script("bench_static")


@pytest.fixture(scope="module")
def rows(static):
    kinds = ("fp16", "zeros", "w8a8", "helpers")
    found = [static.count(case, "sm_80") for case in static.cases("sm_80", 2048, 256, (8,), kinds)]
    return {row.kernel: row for row in static.judged(found)}


def test_every_family_has_a_row(rows):
    assert list(rows) == [
        "w4a16", "w4a16 undivided", "w4a16 zeros", "w8a8-int8", "dequant", "pack", "quantize_activations"
    ]  # fmt: skip


def test_nothing_is_moved_twice(rows):
    for row in rows.values():
        assert row.spills == row.loop_conflicts == 0, row
        assert row.dram == pytest.approx(1, abs=0.02), row


def test_a_loop_is_a_part_of_the_kernel(rows):
    row = rows["w4a16 undivided"]
    assert 8 < row.ptx_loop < row.ptx
    assert 8 < row.sass_loop < row.ptx
    assert rows["pack"].ptx_loop is None


def test_bars_are_held(static, rows):
    plain = dataclasses.replace(rows["w4a16"], m=8, ptx=18.0, sass_loop=14.0, missed=None)
    zeros = dataclasses.replace(rows["w4a16 zeros"], m=8, ptx=19.0, missed=None)
    assert [row.met for row in static.judged([plain, zeros])] == ["met", "met"]
    slow = dataclasses.replace(plain, ptx=18.1, sass_loop=14.1, spills=8, loop_conflicts=1, dram=1.03)
    assert static.judged([slow])[0].met == "not met: PTX > 18, SASS > 14, spills, conflicts, DRAM > 1.02"
    more = dataclasses.replace(zeros, ptx=19.1)
    assert static.judged([plain, more])[1].met == "not met: PTX > fp16's + 1"


def test_workspace_counts_whole_sectors(static):
    import numpy as np

    partials = np.full(20, 0xFFFFFFFF, np.uint32)
    partials[[0, 1, 17]] = 0
    assert static._workspace(partials, np.zeros(9, np.uint32)) == 2 * 32 + 2 * 32


def test_flight_needs_latency_times_bandwidth(static):
    device = devices.get("a100-sxm")
    prob = Problem("w4a16", 8, 4096, 4096)
    cfg = static.UNDIVIDED[8]
    have, need = static.bytes_in_flight(cfg, prob, device)
    assert need == pytest.approx(0.69e-6 * device.dram_gbps * 1e9 / 108 / 1e3)
    assert have == pytest.approx(3 * 64 * 512 * (0.5 + 2 / 128) / 1e3)  # one CTA an SM: 64 tiles on 108 SMs


def test_the_command_prints_json(tmp_path):
    command = [sys.executable, FOLDER / "bench_static.py", "--shape", "256x128", "--batches", "8", "--kinds", "fp16"]
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    found = json.loads(printed)
    assert [row["kernel"] for row in found["kernels"]] == ["w4a16", "w4a16 undivided"]
    assert {row["sms"] for row in found["waves"]} == {72, 108, 132, 170}
    assert len(found["bytes_in_flight"]) == sum(devices.get(name).runs_kernels for name in devices.names())


def test_times_come_from_the_objective(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
    dispatch.reset()
    bench = script("bench")
    device = devices.get("a100-sxm")
    problem = Problem("w4a16", 8, 4096, 4096)
    times = {"fused": 8.0, "dequant": 40.0, "fp16": 24.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.UntunedWarning)
        rows = bench.measure(problem, device, FakeDevice(device, lambda candidate, _: times[candidate.path]))
    found = {row.what: row for row in rows}
    assert found["default"].time_us == 8
    assert found["default"].speedup == 3
    assert found["default"].gbps == pytest.approx(4096 * 4096 / 2 / 8e3)
    assert found["dequant"].speedup == pytest.approx(0.6)
    assert found["cuBLAS"].speedup == 1
    dispatch.reset()


@pytest.mark.skipif(devices.live_count() > 0, reason="there is a GPU")
def test_no_gpu_no_number():
    done = subprocess.run([sys.executable, FOLDER / "bench.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("Error: nothing to measure: ")
