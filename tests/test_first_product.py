"""What a process's first product on a GPU imports and reads: it must not wait for what only tuning needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupyq import bands, db, devices, kernels

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = kernels.Problem("w4a16", 16, 256, 256)
H100 = devices.get("h100-sxm")
SLOW = {
    "click", "cuda", "matplotlib", "optuna", "rich", "sqlite_utils",
    "cupyq.db.connect", "cupyq.db.migrations", "cupyq.db.queries", "cupyq.db.records", "cupyq.db.store",
    "cupyq.db.writer", "cupyq.emulator", "cupyq.formats", "cupyq.tuner",
}  # fmt: skip

SCRIPT = """
import json, sys, warnings
import numpy, ml_dtypes
import light_cupy
cupy = light_cupy.install()
warnings.simplefilter("ignore")
import cupyq
codes = numpy.zeros((256, 256), numpy.uint8)
scales = numpy.ones((2, 256), numpy.float16)
qw = cupyq.pack(codes, scales, scheme="w4a16", group_size=128).to_cupy()
x = cupy.zeros((16, 256), numpy.float16)
before = set(sys.modules)
cupyq.matmul(x, qw)
new = sorted(set(sys.modules) - before)
choice = cupyq.explain(16, qw).choice
print(json.dumps({"new": new, "rung": choice.rung, "preset": choice.preset}))
"""


def first_product(path, script=SCRIPT):
    """Run a first product in a process of its own and return what it printed."""
    environment = {**os.environ, "CUPYQ_DB": str(path), "PYTHONPATH": str(ROOT / "benchmarks")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def slow(new):
    return sorted(name for name in new if any(name == s or name.startswith(f"{s}.") for s in SLOW))


def test_without_a_database(tmp_path):
    said = first_product(tmp_path / "none.db")
    assert said["rung"] == "predictor"
    assert slow(said["new"]) == []


@pytest.mark.parametrize("path", ["fused", "dequant"])
def test_with_a_row_of_its_own(tmp_path, path):
    device = live_card()
    config = kernels.default(PROBLEM, device) if path == "fused" else kernels.DequantConfig()
    with db.open(tmp_path / "tuned.db") as store:
        store.add_trial(
            device=device, problem=PROBLEM, source="measured", path=path, config=config, time_us=5.0, verified=True,
            nvrtc_version="13.0",  # the stand-in's
        )  # fmt: skip
    said = first_product(tmp_path / "tuned.db")
    assert said["rung"] == "exact measured row"
    assert slow(said["new"]) == []
    assert "cupyq.predictor" not in said["new"], "nothing had to be predicted"


def live_card():
    """Return the card that `light_cupy` pretends to be."""
    script = """
import dataclasses, json, light_cupy
light_cupy.install()
from cupyq import devices
print(json.dumps(dataclasses.asdict(devices.live(0))))
"""
    fields = first_product("none.db", script)
    return devices.DeviceSpec(**{**fields, "cc": tuple(fields["cc"])})


def test_with_a_preset(tmp_path):
    config = kernels.default(PROBLEM, H100)
    preset = db.presets.Writing("h100-sxm", {})
    entry = [(kernels.to_dict(config), kernels.source_hash(config, PROBLEM), 4.0)]
    preset.add(PROBLEM, [entry] * len(bands.ends()))
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "h100-sxm.jsonl").write_text(preset.text())
    shipped = "from pathlib import Path\nfrom cupyq.db import presets\n"
    shipped += f"presets.folder = lambda: Path({str(folder)!r})\n"
    said = first_product(tmp_path / "none.db", SCRIPT.replace("before = set", f"{shipped}before = set"))
    assert (said["rung"], said["preset"]) == ("exact predicted row", True)
    assert slow(said["new"]) == []
    assert "cupyq.predictor" not in said["new"]


def test_importing_cupyq_imports_no_cupy_and_little_else():
    script = """
import json, sys, numpy, ml_dtypes
before = set(sys.modules)
import cupyq
print(json.dumps({"new": sorted(set(sys.modules) - before)}))
"""
    new = first_product("none.db", script)["new"]
    assert "cupy" not in new
    assert slow(new) == []
    assert not {"sqlite3", "cupyq.db", "cupyq.kernels", "cupyq.predictor"} & set(new)
