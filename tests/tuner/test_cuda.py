"""The measuring code, run against a stand-in for CuPy whose clock goes by launches: no GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest

from cupyq import compiler, devices, kernels
from cupyq.errors import CompileError
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
HOST_US = 4.0
GRAPH_HOST_US = 40.0
SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@pytest.fixture
def cupy(monkeypatch):
    """Stand for CuPy with two clocks, in microseconds: the GPU starts nothing before the CPU has queued it.

    A launch of a kernel takes the GPU 50 us, a product of cuBLAS 200; the CPU takes 4 to launch, 40 for a graph.
    """
    spec = importlib.util.spec_from_file_location("fake_cupy_for_timing", FAKE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    class Timed(module.FakeCuPy):
        def __init__(self):
            super().__init__(("rtx-4090",), run=False)
            self.clock_us, self.host_us, self.log, self.graph = 0.0, 0.0, [], None
            self.slowdown = lambda: 1.0
            self.ndarray.base = None  # views do not tell whose they are
            self.modules = weakref.WeakSet()  # those that are loaded
            self.limits = {}  # on shared memory, by function
            self.refuses = None  # status with which the driver answers a cubin
            fake = self

            class CUDADriverError(RuntimeError):
                def __init__(self, status):
                    super().__init__(status)

            class Stream(self.cuda.Stream):
                def synchronize(self):
                    fake.waits()

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
                    fake.host_us += GRAPH_HOST_US
                    for entry, args, kernel, shared_mem in self.nodes:
                        loaded = kernel()  # a graph does not keep modules loaded
                        if loaded is None or shared_mem > loaded.limit:
                            raise module.Misuse(f"{entry} is unloaded, or may not have {shared_mem} bytes any more")
                        fake.happens(entry, args)

            class Event:
                def record(self, stream):
                    fake.host_us += HOST_US
                    self.at = max(fake.clock_us, fake.host_us)

                def synchronize(self):
                    fake.waits()

            class Module:
                def load(self, cubin):
                    if fake.refuses is not None:
                        raise CUDADriverError(fake.refuses)
                    assert cubin[:4] == b"\x7fELF"
                    fake.modules.add(self)

                def get_function(self, entry):
                    return Function(entry, self)

            class Function:
                """What CuPy's own is: callable, with a handle, and nothing to ask of it."""

                def __init__(self, entry, module=None, key=None):
                    self.entry, self.module = entry, module
                    self.ptr = id(self) if key is None else key
                    fake.limits.setdefault(self.ptr, 49152)

                @property
                def limit(self):
                    return fake.limits[self.ptr]

                def __call__(self, grid, block, args, shared_mem=0):
                    if shared_mem > self.limit:
                        raise module.Misuse("more shared memory than allowed")
                    fake.does(self.entry, args, weakref.ref(self), shared_mem)

            class RawKernel(Function):
                num_regs, local_size_bytes = 77, 0

                @property
                def max_dynamic_shared_size_bytes(self):
                    return fake.limits[self.ptr]

                @max_dynamic_shared_size_bytes.setter
                def max_dynamic_shared_size_bytes(self, size):
                    fake.limits[self.ptr] = size

            class RawModule:
                def __init__(self, *, code, options=()):
                    self.code = code

                def get_function(self, entry):
                    if fake.cannot_compile:
                        raise fake.cuda.compiler.CompileException("no headers")
                    fake.compiled.append(entry)
                    return RawKernel(entry, key=self.code)  # modules are kept: one function for one source

            self.cannot_compile = False
            self.cuda.Stream = type("Stream", (Stream,), {"_cupy": self})
            self.cuda.Event, self.cuda.Module = Event, Module
            self.cuda.driver = types.SimpleNamespace(
                CUDADriverError=CUDADriverError,
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=SHARED_LIMIT,
                funcSetAttribute=self.set_attribute,
            )
            self.cuda.get_elapsed_time = lambda start, end: (end.at - start.at) / 1e3
            self.RawModule = RawModule

        def set_attribute(self, function, attribute, value):
            assert attribute == SHARED_LIMIT
            self.limits[function] = value

        def matmul(self, x, w, out):
            if self.graph is not None:
                raise NotImplementedError("cuBLAS cannot be captured")
            self.does("cublas", (x, w, out))

        def does(self, entry, args, kernel=None, shared_mem=0):
            if self.graph is not None:
                self.graph.append((entry, args, kernel, shared_mem))
            else:
                self.host_us += HOST_US
                self.happens(entry, args)

        def happens(self, entry, args):
            self.log.append((entry, args))
            took = CUBLAS_US if entry == "cublas" else LAUNCH_US
            if entry == "cupyq_spin":
                took = int(args[0]) / (devices.get("rtx-4090").clock_ghz * 1e3)
            self.clock_us = max(self.clock_us, self.host_us) + took * self.slowdown()

        def waits(self):
            self.host_us = max(self.host_us, self.clock_us)

    fake = Timed()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    compiler.gpu._load.cache_clear()
    yield fake
    compiler.gpu._load.cache_clear()


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
    log = cupy.log[-14:]
    assert [entry for entry, _ in log[:2]] == ["cupyq_read", "cupyq_spin"]
    copies = [args[0].data.ptr for _, args in log[2:]]
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


@pytest.mark.parametrize("path", ["fused", "fp16"])
def test_what_the_cpu_takes_to_launch_is_not_timed(cupy, objective, path):
    """With no flush before it the stream is idle, and its start would wait for nothing."""
    large = Problem("w4a16", 16, 8192, 8192)
    candidate = fused(large) if path == "fused" else Candidate("fp16")
    runner = objective.prepare(candidate, large)
    took = [runner.take() for _ in range(3)]
    assert "cupyq_read" not in entries(cupy)
    assert took == pytest.approx([LAUNCH_US if path == "fused" else CUBLAS_US] * 3)
    spins = [int(args[0]) for entry, args in cupy.log if entry == "cupyq_spin"]
    assert len(spins) == 3
    assert spins[0] / (objective.device.clock_ghz * 1e6) == pytest.approx(0.3 if path == "fused" else 3.0)


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


def shares_source():
    """Two problems whose fused kernels have one source, the first with more shared memory; both ask for theirs."""
    cfg = kernels.W8A8Config(8, 8, 2, 2, 2, 64, 3, fused=True)
    problems = [Problem("w8a8-int8", 8, 384, k) for k in (8192, 6144)]
    [source] = {kernels.source(cfg, problem) for problem in problems}
    long, short = (cfg.launch(problem).shared_bytes for problem in problems)
    assert 49152 < short < long
    return Candidate("fused", cfg), problems, source


@pytest.mark.parametrize("refused", [False, True])
def test_a_candidate_does_not_lower_the_shared_memory_of_another(cupy, objective, refused):
    candidate, (long, short), source = shares_source()
    cupy.refuses = "CUDA_ERROR_INVALID_IMAGE" if refused else None
    with pytest.warns(RuntimeWarning) if refused else contextlib.nullcontext():
        first = objective.prepare(candidate, long)
    second = objective.prepare(candidate, short)
    assert first.take() == pytest.approx(LAUNCH_US)
    assert second.take() == pytest.approx(LAUNCH_US)
    third = objective.prepare(candidate, long)
    assert third.take() == pytest.approx(LAUNCH_US)
    if refused:
        assert cupy.limits[source] == candidate.config.launch(long).shared_bytes


def test_modules_are_unloaded_with_their_candidate(cupy, objective):
    """CuPy's RawModule would keep thousands of them, and their machine code, on the GPU."""
    problem = Problem("w8a8-int8", 16, 384, 384)
    separate = Candidate("fused", kernels.default(problem, objective.device, fused=False))
    runner = objective.prepare(separate, problem)
    assert len(cupy.modules) == 2, "one to quantize activations, one to multiply: not one a launch"
    runner.take()
    runner.close()
    assert not cupy.modules
    objective.finals([fused(), Candidate("dequant", DequantConfig())], PROBLEM)
    assert not cupy.modules


def test_cupy_compiles_what_the_driver_refuses(cupy, objective):
    cupy.refuses = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    with pytest.warns(RuntimeWarning, match=r"refused the cubin of NVRTC [\d.]+ \(CUDA_ERROR_NO_BINARY") as caught:
        outcomes = [objective.evaluate(fused(), PROBLEM), objective.evaluate(fused(), PROBLEM.with_m(64))]
    assert len(caught) == 1, "said once"
    assert [outcome.state for outcome in outcomes] == ["complete"] * 2, outcomes[0].reason
    assert outcomes[0].registers == 77
    assert set(cupy.compiled) >= {fused().config.entry(PROBLEM)}


def test_a_refused_cubin_shows_where_cupy_fails_too(cupy, objective):
    cupy.refuses, cupy.cannot_compile = "CUDA_ERROR_INVALID_IMAGE", True
    outcome = objective.evaluate(fused(), PROBLEM)
    assert outcome.state == "failed"
    assert outcome.reason.startswith("CompileError: the driver refused the cubin of NVRTC")
    assert "CUDA_ERROR_INVALID_IMAGE" in outcome.reason
    assert "no headers" in outcome.reason


def test_what_cupy_compiles_may_spill_too(cupy, objective, monkeypatch):
    def refuse(*a):
        raise CompileError("sm_999 is not known")

    monkeypatch.setattr(compiler, "compile_kernel", refuse)
    spilling = types.SimpleNamespace(num_regs=255, local_size_bytes=16, max_dynamic_shared_size_bytes=49152)
    monkeypatch.setattr(compiler, "load", lambda *a: spilling)
    outcome = objective.evaluate(fused(), PROBLEM)
    assert (outcome.state, outcome.reason) == ("pruned", "spills 16 bytes a thread to local memory")


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
    monkeypatch.setattr(cupy, "does", lambda *a: (_ for _ in ()).throw(RuntimeError("invalid argument")))
    outcome = objective.evaluate(fused(), PROBLEM)
    assert (outcome.state, outcome.reason) == ("failed", "RuntimeError: invalid argument")
