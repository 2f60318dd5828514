"""The measuring code, run against a stand-in for CuPy whose clock goes by launches: no GPU is needed."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyq import compiler, devices, kernels
from cupyq.kernels import DequantConfig, Problem, W4A16Config
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.cuda import MeasuredObjective
from cupyq.tuner.nvml import THROTTLED, Monitor, State
from cupyq.tuner.sampling import Stopping

FAKE = Path(__file__).resolve().parents[1] / "fake_cupy.py"
TEN = Stopping(least=10, most=10)
PROBLEM = Problem("w4a16", 16, 384, 384)
LAUNCH_US = 50.0
CUBLAS_US = 200.0


@pytest.fixture
def cupy(monkeypatch):
    """Stand for CuPy with a clock: every launch of a kernel takes 50 us, every product of cuBLAS 200."""
    spec = importlib.util.spec_from_file_location("fake_cupy_for_timing", FAKE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    class Timed(module.FakeCuPy):
        def __init__(self):
            super().__init__(("rtx-4090",), run=False)
            self.clock_us, self.log, self.graph = 0.0, [], None
            self.slowdown = lambda: 1.0
            self.ndarray.base = None  # views do not tell whose they are
            fake = self

            class Stream(self.cuda.Stream):
                def synchronize(self): ...

                def begin_capture(self):
                    super().begin_capture()
                    fake.graph = []

                def end_capture(self):
                    super().end_capture()
                    nodes, fake.graph = fake.graph, None
                    return Graph(nodes)

            class Graph:
                def __init__(self, nodes):
                    self.nodes = nodes

                def launch(self, stream):
                    for node in self.nodes:
                        fake.happens(*node)

            class Event:
                def record(self, stream):
                    self.at = fake.clock_us

                def synchronize(self): ...

            class RawModule:
                def __init__(self, code=None, options=(), path=None):
                    self.cubin = Path(path).read_bytes() if path else None

                def get_function(self, entry):
                    return Kernel(entry)

            class Kernel:
                max_dynamic_shared_size_bytes = 49152

                def __init__(self, entry):
                    self.entry = entry

                def __call__(self, grid, block, args, *, shared_mem=0):
                    if shared_mem > self.max_dynamic_shared_size_bytes:
                        raise module.Misuse("more shared memory than allowed")
                    fake.does(self.entry, args)

            self.cuda.Stream = type("Stream", (Stream,), {"_cupy": self})
            self.cuda.Event = Event
            self.cuda.get_elapsed_time = lambda start, end: (end.at - start.at) / 1e3
            self.RawModule = RawModule

        def matmul(self, x, w, out):
            if self.graph is not None:
                raise NotImplementedError("cuBLAS cannot be captured")
            self.does("cublas", (x, w, out))

        def does(self, entry, args):
            if self.graph is not None:
                self.graph.append((entry, args))
            else:
                self.happens(entry, args)

        def happens(self, entry, args):
            self.log.append((entry, args))
            took = CUBLAS_US if entry == "cublas" else LAUNCH_US
            self.clock_us += took * self.slowdown()

    fake = Timed()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def objective(cupy):
    device = dataclasses.replace(devices.get("rtx-4090"), live=True, ordinal=0)
    return MeasuredObjective(device, search=TEN, final=TEN, launches=12)


def fused(problem=PROBLEM):
    return Candidate("fused", kernels.default(problem, "rtx-4090"))


def entries(cupy):
    return [entry for entry, _ in cupy.log]


def test_a_sample_is_a_graph_of_launches_over_its_length(cupy, objective):
    outcome = objective.evaluate(fused(), PROBLEM)
    assert (outcome.state, outcome.source) == ("complete", "measured"), outcome.reason
    assert outcome.time_us == pytest.approx(LAUNCH_US)
    assert (outcome.cache, outcome.launch) == ("cold", "graph")
    assert outcome.registers > 0
    assert outcome.spill_bytes == 0
    assert len(outcome.samples_us) == 10


def test_weights_are_cold_each_time(cupy, objective):
    """e4: every launch of a sample reads another copy; copies that fit in L2 are emptied out of it first."""
    objective.evaluate(fused(), PROBLEM)
    log = cupy.log[-13:]
    assert [entry for entry, _ in log[:1]] == ["cupyq_read"]
    copies = [args[0].data.ptr for _, args in log[1:]]
    assert len(copies) == len(set(copies)) == 12
    flushed = log[0][1][0]
    assert flushed.nbytes >= 2 * devices.get("rtx-4090").l2_bytes


def test_large_weights_need_no_flush(cupy, objective):
    large = Problem("w4a16", 16, 8192, 8192)
    outcome = objective.evaluate(fused(large), large)
    assert outcome.reason is None or "impossible" not in outcome.reason
    assert "cupyq_read" not in entries(cupy)
    read = {args[0].data.ptr: args[0].nbytes for entry, args in cupy.log if entry.startswith("cupyq_w4a16")}
    assert sum(read.values()) > 2 * devices.get("rtx-4090").l2_bytes


def test_data_is_random_and_never_zero(cupy, objective):
    objective.evaluate(fused(), PROBLEM)
    args = cupy.log[-1][1]
    packed, scales, x = args[0].get(), args[1].get(), args[3].get()
    assert len(np.unique(packed)) > packed.size * 0.9
    assert (scales > 0).all()
    assert np.isfinite(scales.astype(np.float64)).all()
    assert (x != 0).all()
    assert np.isfinite(x.astype(np.float64)).all()
    assert len(np.unique(x)) > 100


def test_cublas_cannot_be_captured_and_is_queued_behind_a_spin(cupy, objective):
    outcome = objective.evaluate(Candidate("fp16"), PROBLEM)
    assert outcome.time_us == pytest.approx(CUBLAS_US)
    assert outcome.launch == "eager"
    assert entries(cupy)[-14:] == ["cupyq_read", "cupyq_spin", *["cublas"] * 12]
    weights = [args[1].data.ptr for entry, args in cupy.log[-12:]]
    assert len(set(weights)) == 12


def test_dequantizing_is_both_steps(cupy, objective):
    outcome = objective.evaluate(Candidate("dequant", DequantConfig()), PROBLEM)
    assert outcome.time_us == pytest.approx(LAUNCH_US + CUBLAS_US)
    first, second = cupy.log[-2:]
    assert first[0].startswith("cupyq_dequant")
    assert first[1][3].data.ptr == second[1][1].data.ptr, "the product reads what was dequantized"


@pytest.mark.parametrize("op", ["w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"])
def test_quantizing_activations_is_part_of_a_w8a8_product(cupy, objective, op):
    problem = Problem(op, 16, 384, 384)
    config = kernels.default(problem, objective.device, fused=False)
    outcome = objective.evaluate(Candidate("fused", config), problem)
    assert outcome.time_us == pytest.approx(2 * LAUNCH_US), outcome.reason
    names = entries(cupy)[-2:]
    assert names[0].startswith("cupyq_quantize_activations")
    assert names[1].startswith("cupyq_w8a8")


@pytest.mark.parametrize("op", ["w8a8-int8", "w8a8-fp8"])
def test_a_kernel_that_quantizes_activations_itself_is_launched_alone(cupy, objective, op):
    problem = Problem(op, 8, 384, 384)
    config = kernels.default(problem, objective.device, fused=True)
    outcome = objective.evaluate(Candidate("fused", config), problem)
    assert outcome.time_us == pytest.approx(LAUNCH_US), outcome.reason
    assert not any(name.startswith("cupyq_quantize") for name in entries(cupy))


def test_fp8_weights_hold_no_nan(cupy, objective):
    problem = Problem("w8a8-fp8", 16, 384, 384)
    objective.evaluate(fused(problem), problem)
    codes = cupy.log[-1][1][0].get().view(np.uint8)
    assert ((codes & 0x7F) != 0x7F).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_weight_can_be_made(cupy, objective, symmetric, dtype):
    problem = Problem("w4a16", 5, 90, 200, 64, symmetric, dtype)
    assert objective.evaluate(fused(problem), problem).ok


def test_split_k_gets_a_clean_workspace(cupy, objective):
    cfg = W4A16Config(block_m=16, strips=1, warps_n=2, warps_k=1, stages=2, split_k=2)
    outcome = objective.evaluate(Candidate("fused", cfg), PROBLEM)
    assert outcome.ok, outcome.reason
    arrivals = [a for a in cupy.log[-1][1] if hasattr(a, "dtype") and a.dtype == np.uint32 and a.ndim == 1]
    assert not arrivals[-1].get().any()


def test_a_kernel_that_spills_is_pruned_before_it_runs(cupy, objective, monkeypatch):
    real = compiler.compile_kernel
    monkeypatch.setattr(compiler, "compile_kernel", lambda *a: dataclasses.replace(real(*a), spill_bytes=48))
    before = len(cupy.log)
    outcome = objective.evaluate(fused(), PROBLEM)
    assert (outcome.state, outcome.reason) == ("pruned", "spills 48 bytes a thread to local memory")
    assert len(cupy.log) == before


def test_finalists_are_interleaved(cupy, objective):
    other = Candidate("fused", W4A16Config(block_m=16, strips=1, warps_n=2, warps_k=1, stages=2))
    [one, two] = objective.finals([fused(), other], PROBLEM)
    assert one.ok
    assert two.ok
    assert len(one.samples_us) == len(two.samples_us) == 10
    order = [entry for entry in entries(cupy) if entry.startswith("cupyq_w4a16")][::12]
    assert sum(a != b for a, b in itertools.pairwise(order)) >= 5


def test_throttled_samples_are_thrown_away(cupy, objective):
    seen = []

    def read():
        seen.append(0)
        return State(clock_mhz=2500.0, power_w=400.0, temperature_c=60.0, throttled=len(seen) % 2 == 0)

    objective.monitor.read = read
    objective.search = Stopping(least=10, most=20)
    outcome = objective.evaluate(fused(), PROBLEM)
    assert (len(seen), len(outcome.samples_us)) == (20, 10)
    assert (outcome.clock_mhz, outcome.power_w, outcome.temperature_c) == (2500.0, 400.0, 60.0)


def test_without_nvml_nothing_is_known_and_nothing_fails():
    assert Monitor(None).read() == State()
    assert THROTTLED & 0x4 == 0, "a card at its power cap runs as it does in production"


def test_a_capture_that_fails_is_a_failed_trial(cupy, objective, monkeypatch):
    monkeypatch.setattr(cupy, "does", lambda entry, args: (_ for _ in ()).throw(RuntimeError("invalid argument")))
    outcome = objective.evaluate(fused(), PROBLEM)
    assert (outcome.state, outcome.reason) == ("failed", "RuntimeError: invalid argument")
