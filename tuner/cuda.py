"""Measuring on a GPU, with CuPy: cold weights, CUDA graphs, events.

One sample is at least ten launches, each on the next of several copies of the weights that together exceed twice L2;
where copies are small, L2 is emptied by reading something else before the sample. Launches are replayed from a CUDA
graph, as a model runs them. CuPy refuses to capture cuBLAS, so paths with a cuBLAS product are launched one by one, and
their rows say "eager". Either way a kernel spins on the GPU until all of it is queued: the CPU's part is not timed.

Each candidate has its kernels to itself: a module of its own, which is unloaded when the candidate is done with.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyq import compiler, kernels, layout
from cupyq.compiler.gpu import DEFAULT_SHARED
from cupyq.devices import DeviceSpec
from cupyq.errors import CompileError, NotInstalled
from cupyq.kernels import DequantConfig, Problem, quantize_activations
from cupyq.kernels.problem import NUMPY_DTYPES
from cupyq.weights import QuantizedWeight

from .candidate import Candidate
from .measure import FINAL, SEARCH, Pruned, Timed
from .nvml import Monitor
from .sampling import Stopping
from .verify import Verification, Verifier

LAUNCHES = 20
"""Launches of one sample."""

SPIN_MS = 3.0
"""How long the GPU spins while the CPU queues eager launches."""

GRAPH_SPIN_MS = 0.3
"""The same for a graph, which the CPU launches in some ten microseconds, or a hundred when it is disturbed."""

_HELPERS = r"""
extern "C" __global__ void cupyq_read(const uint4* data, unsigned long long count, unsigned* sink) {
    unsigned seen = 0;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x) {
        uint4 v = data[i];
        seen ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (seen == 0x9e3779b9u) *sink = seen;
}
extern "C" __global__ void cupyq_spin(long long clocks) {
    long long start = clock64();
    while (clock64() - start < clocks) {}
}
"""

Step = Callable[[], None]


@dataclass
class _Build:
    """What the launches of one candidate share: its kernels, by their configs, and facts of the one that multiplies."""

    kernels: dict[kernels.Config, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class MeasuredObjective(Timed):
    """Times candidates on a GPU of this machine.

    Parameters
    ----------
    device : DeviceSpec
        A live one.
    seed : int
        Of the random data.
    search, final : Stopping
    launches : int
        Launches of one sample.
    """

    def __init__(
        self,
        device: DeviceSpec,
        seed: int = 0,
        search: Stopping = SEARCH,
        final: Stopping = FINAL,
        launches: int = LAUNCHES,
    ) -> None:
        super().__init__(device, search, final)
        import cupy

        self._cupy = cupy
        self.seed = seed
        self.launches = launches
        self._rng = np.random.default_rng(seed)
        self._ordinal = device.ordinal or 0
        with cupy.cuda.Device(self._ordinal):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            helpers = cupy.RawModule(code=_HELPERS, options=("-std=c++17",))
            self._read, self._spin = helpers.get_function("cupyq_read"), helpers.get_function("cupyq_spin")
            # Small words repeated: random enough for DRAM and tensor cores, and made in no time.
            self._noise = cupy.asarray(self._rng.integers(0, 2**32, 1 << 20, dtype=np.uint32))
            self._flushed = cupy.resize(self._noise, max(1 << 20, 2 * device.l2_bytes // 4))
            self._sink = cupy.zeros(1, np.uint32)
        self._verifier = Verifier(device, seed)
        self.monitor = Monitor(_bus_id(cupy, self._ordinal))
        self._data: tuple[Any, _Data] | None = None
        self._said_refused = False

    def prepare(self, candidate: Candidate, problem: Problem) -> CudaRunner:
        """Build the launches of one sample.

        Raises
        ------
        Pruned
            The compiled kernel spills.
        """
        with self._cupy.cuda.Device(self._ordinal), self._stream:
            data = self._data_of(problem)
            build = _Build()
            steps = [self._step(candidate, data, i, build) for i in range(self.launches)]
            for step in steps[:2]:
                step()  # loads modules and lets cuBLAS choose, outside of what is timed
            self._stream.synchronize()
            return CudaRunner(self, steps, data.warm(candidate.path), candidate.path == "fused", build.facts)

    def verify(self, candidate: Candidate, problem: Problem) -> Verification:
        """Verify a candidate on this GPU."""
        with self._cupy.cuda.Device(self._ordinal):
            return self._verifier.verify(candidate, problem)

    def close(self) -> None:
        """Free the weights of the last problem."""
        self._data = None

    def _data_of(self, problem: Problem) -> _Data:
        if self._data is None or self._data[0] != problem:
            self._data = None  # the old copies go before new ones come
            self._data = (problem, _Data(self._cupy, problem, self.device, self._noise, self.launches))
        return self._data[1]

    def _step(self, candidate: Candidate, data: _Data, index: int, build: _Build) -> Step:
        cupy, problem = self._cupy, data.problem
        if candidate.path == "fp16":
            w = data.dense[index % len(data.dense)]
            return lambda: cupy.matmul(data.x, w, out=data.y)
        qw = data.packed[index % len(data.packed)]
        cfg = candidate.config
        assert cfg is not None  # only fp16 goes without
        if isinstance(cfg, DequantConfig):
            unpack = self._launch(cfg, problem, kernels.call(cfg, problem, None, qw, out=data.scratch), build)

            def both() -> None:
                unpack()
                cupy.matmul(data.x, data.scratch, out=data.y)

            return both
        if not problem.weight_only and not getattr(cfg, "fused", False):
            return self._step_w8a8(cfg, data, qw, build)
        call = kernels.call(cfg, problem, data.x, qw, out=data.y, workspace=data.workspace(cfg))
        return self._launch(cfg, problem, call, build)

    def _step_w8a8(self, cfg: kernels.Config, data: _Data, qw: QuantizedWeight, build: _Build) -> Step:
        # Quantizing the activations is part of what a W8A8 product costs, where its kernel does not do it itself.
        problem = data.problem
        first = quantize_activations.default(problem)
        codes = kernels.call(first, problem, data.x, out=data.codes)
        call = kernels.call(
            cfg, problem, codes.out, qw, x_scale=codes.x_scale, out=data.y, workspace=data.workspace(cfg)
        )
        quantize = self._launch(first, problem, codes, build)
        multiply = self._launch(cfg, problem, call, build)  # the last to be built: its facts are kept

        def both() -> None:
            quantize()
            multiply()

        return both

    def _launch(self, cfg: kernels.Config, problem: Problem, call: kernels.Call, build: _Build) -> Step:
        if cfg not in build.kernels:
            build.kernels[cfg], build.facts = self._load(cfg, problem, call.shared_bytes)
        kernel, args, shared = build.kernels[cfg], call.args, call.shared_bytes
        return lambda: kernel(call.grid, call.block, args, shared_mem=shared)

    def _load(self, cfg: kernels.Config, problem: Problem, shared_bytes: int) -> tuple[Any, dict[str, Any]]:
        """Return the loaded kernel and its facts: from the cubin compiled ahead or, where there is none, by CuPy."""
        try:
            compiled = compiler.compile_kernel(cfg, problem, self.device.arch)
        except (NotInstalled, CompileError):  # NVRTC's own wheel is missing, or older than the GPU
            return self._from_source(cfg, problem, shared_bytes)
        _refuse_spills(compiled.spill_bytes)
        try:
            kernel = self._from_cubin(compiled, shared_bytes)
        except self._cupy.cuda.driver.CUDADriverError as refusal:
            return self._instead_of_cubin(cfg, problem, shared_bytes, compiled, refusal)
        return kernel, {
            "registers": compiled.registers,
            "spill_bytes": compiled.spill_bytes,
            "shared_bytes": compiled.shared_bytes,
        }

    def _from_cubin(self, compiled: compiler.CompiledKernel, shared_bytes: int) -> Any:
        # CuPy's RawModule keeps every module for good. Through one of our own the memory comes back, and no other
        # candidate of the same source, with less shared memory, lowers this one's limit.
        cuda = self._cupy.cuda
        module = cuda.Module()
        module.load(compiled.cubin)
        kernel = module.get_function(compiled.entry)
        if shared_bytes > DEFAULT_SHARED:
            limit = cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            cuda.driver.funcSetAttribute(kernel.ptr, limit, shared_bytes)
        return kernel

    def _from_source(self, cfg: kernels.Config, problem: Problem, shared_bytes: int) -> tuple[Any, dict[str, Any]]:
        kernel = compiler.load(cfg, problem)
        facts = {"registers": int(kernel.num_regs), "spill_bytes": int(kernel.local_size_bytes)}
        _refuse_spills(facts["spill_bytes"])
        # Here candidates of one source share the function, so its limit is never lowered.
        if shared_bytes > kernel.max_dynamic_shared_size_bytes:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        return kernel, facts

    def _instead_of_cubin(
        self,
        cfg: kernels.Config,
        problem: Problem,
        shared_bytes: int,
        compiled: compiler.CompiledKernel,
        refusal: Exception,
    ) -> tuple[Any, dict[str, Any]]:
        """Let CuPy compile what the driver did not take; NVRTC may be newer than the driver."""
        refused = f"the driver refused the cubin of NVRTC {compiled.nvrtc_version} ({refusal})"
        try:
            found = self._from_source(cfg, problem, shared_bytes)
        except CompileError as error:
            raise CompileError(f"{refused}, and CuPy could not compile it: {error}") from refusal
        except RuntimeError as error:
            raise RuntimeError(f"{refused}, and what CuPy compiled failed too: {error}") from refusal
        if not self._said_refused:
            self._said_refused = True
            warnings.warn(
                f"{refused}; kernels are compiled by CuPy instead, which takes longer", RuntimeWarning, stacklevel=2
            )
        return found

    def flush(self) -> None:
        """Empty L2 by reading twice its size; reading leaves no dirty lines for the next kernel to pay for."""
        count = np.uint64(self._flushed.nbytes // 16)
        self._read((4 * self.device.sms, 1, 1), (256, 1, 1), (self._flushed, count, self._sink))

    def spin(self, milliseconds: float) -> None:
        """Keep the GPU busy while launches are queued."""
        self._spin((1, 1, 1), (1, 1, 1), (np.int64(milliseconds * 1e6 * self.device.clock_ghz),))


def _refuse_spills(spill_bytes: int) -> None:
    if spill_bytes:
        raise Pruned(f"spills {spill_bytes} bytes a thread to local memory")


class CudaRunner:
    """The launches of one sample, captured where that is possible.

    Parameters
    ----------
    objective : MeasuredObjective
    steps : list of callable
    warm : bool
        The copies fit in L2: empty it before each sample.
    capture : bool
        Replay from a CUDA graph.
    facts : mapping
        Of the compiled kernel.
    """

    def __init__(
        self, objective: MeasuredObjective, steps: list[Step], warm: bool, capture: bool, facts: Mapping[str, Any]
    ) -> None:
        self._objective = objective
        self._cupy = objective._cupy
        self._steps = steps
        self._warm = warm
        self._graph = self._capture() if capture else None
        self._start, self._end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self.facts: dict[str, Any] = {
            **facts,
            "cache": "cold",
            "launch": "eager" if self._graph is None else "graph",
        }

    def _capture(self) -> Any:
        stream = self._objective._stream
        with stream:
            stream.begin_capture()
            try:
                for step in self._steps:
                    step()
            except BaseException:
                with contextlib.suppress(Exception):  # the capture is void already; what matters is why
                    stream.end_capture()
                raise
            return stream.end_capture()

    def take(self) -> float | None:
        """Return the time of one launch, microseconds, over one sample; None when the GPU was throttled."""
        objective, stream = self._objective, self._objective._stream
        with self._cupy.cuda.Device(objective._ordinal), stream:
            if self._warm:
                objective.flush()
            # On an idle stream the start would be noted at once, and the wait for the CPU's launch be timed.
            objective.spin(SPIN_MS if self._graph is None else GRAPH_SPIN_MS)
            self._start.record(stream)
            if self._graph is None:
                for step in self._steps:
                    step()
            else:
                self._graph.launch(stream)
            self._end.record(stream)
            # Asked while the GPU works: its clock says nothing once it idles.
            state = objective.monitor.read()
            self._end.synchronize()
            elapsed_ms = float(self._cupy.cuda.get_elapsed_time(self._start, self._end))
        self.facts.update(clock_mhz=state.clock_mhz, power_w=state.power_w, temperature_c=state.temperature_c)
        return None if state.throttled else elapsed_ms * 1e3 / len(self._steps)

    def close(self) -> None:
        """Let go of the graph, and of the kernels and arrays that its launches hold."""
        objective = self._objective
        with self._cupy.cuda.Device(objective._ordinal):  # modules are unloaded here
            with contextlib.suppress(RuntimeError):  # a kernel that faults: its sample said so
                objective._stream.synchronize()
            self._graph = None
            self._steps = []


class _Data:
    """Arrays of one problem on the GPU: activations, output, and as many copies of the weights as make them cold."""

    def __init__(self, cupy: Any, problem: Problem, device: DeviceSpec, noise: Any, launches: int) -> None:
        self._cupy, self.problem, self._noise = cupy, problem, noise
        self._device, self._launches = device, launches
        dtype = NUMPY_DTYPES[problem.dtype]
        self.x = self._floats((problem.m, problem.k), dtype)
        self.y = cupy.empty((problem.m, problem.n), dtype)
        self._lazy: dict[str, Any] = {}
        self._workspaces: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._bytes: dict[str, int] = {}

    def warm(self, path: str) -> bool:
        """Whether the copies of the weights that a path reads would stay in L2."""
        return self._bytes["dense" if path == "fp16" else "packed"] <= 2 * self._device.l2_bytes

    def _copies(self, name: str, each: int) -> int:
        """Return how many copies of `each` bytes exceed twice L2, at most one a launch."""
        count = max(2, min(self._launches, 2 * self._device.l2_bytes // each + 2))
        self._bytes[name] = count * each
        return count

    @property
    def packed(self) -> list[QuantizedWeight]:
        """Copies of the quantized weight."""
        if "packed" not in self._lazy:
            one = self._weight()
            each = int(one.packed.nbytes + one.scales.nbytes)
            self._lazy["packed"] = [one, *(self._weight() for _ in range(self._copies("packed", each) - 1))]
        return self._lazy["packed"]

    @property
    def dense(self) -> list[Any]:
        """Copies of the 16-bit weight."""
        if "dense" not in self._lazy:
            shape, dtype = (self.problem.k, self.problem.n), NUMPY_DTYPES[self.problem.dtype]
            count = self._copies("dense", 2 * self.problem.k * self.problem.n)
            self._lazy["dense"] = [self._floats(shape, dtype) for _ in range(count)]
        return self._lazy["dense"]

    @property
    def scratch(self) -> Any:
        """Where the dequantizing kernel puts the dense weight."""
        if "scratch" not in self._lazy:
            shape = (self.problem.k, self.problem.n)
            self._lazy["scratch"] = self._cupy.empty(shape, NUMPY_DTYPES[self.problem.dtype])
        return self._lazy["scratch"]

    @property
    def codes(self) -> Any:
        """Where quantized activations go."""
        if "codes" not in self._lazy:
            dtype = np.int8 if self.problem.op == "w8a8-int8" else np.uint8
            shape = (self.problem.m, -(-self.problem.k // 16) * 16)
            self._lazy["codes"] = self._cupy.zeros(shape, dtype)
        return self._lazy["codes"]

    def workspace(self, cfg: kernels.Config) -> tuple[Any, Any] | None:
        """Return split-K's partial sums and arrival counters, None where there is no split."""
        launch = cfg.launch(self.problem)
        if not launch.partial_words:
            return None
        size = (launch.partial_words, launch.tiles)
        if size not in self._workspaces:
            self._workspaces[size] = (
                self._cupy.empty(size[0], np.uint32),
                self._cupy.zeros(size[1], np.uint32),
            )
        return self._workspaces[size]

    def _weight(self) -> QuantizedWeight:
        problem, cupy = self.problem, self._cupy
        shape = layout.packed_shape(problem.k, problem.n, problem.bits)
        words = cupy.resize(self._noise, shape)
        if problem.op.startswith("w8a8-fp8"):
            words = words & np.uint32(0xBFBFBFBF)  # no exponent that holds NaN
        strips = layout.strips(problem.n)
        groups = (strips, problem.groups, layout.STRIP)
        scale_dtype = NUMPY_DTYPES[problem.scale_dtype] if problem.weight_only else np.dtype(np.float32)
        scales = abs(self._floats(groups, scale_dtype)) / scale_dtype.type(64)
        zeros = None
        if not problem.symmetric:
            zeros = (cupy.resize(self._noise, groups) & np.uint32(2**problem.bits - 1)).astype(np.uint8)
        return QuantizedWeight(
            problem.op, problem.k, problem.n, problem.group_size, problem.symmetric, words, scales, zeros
        )

    def _floats(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return numbers of both signs between 1/2 and 2 in size: random bits, so that wires toggle as in life."""
        bits = self._cupy.resize(self._noise, shape)
        small = (bits & np.uint32(0x80FFFFFF)) | np.uint32(0x3F000000)
        return small.view(np.float32).astype(dtype)


def _bus_id(cupy: Any, ordinal: int) -> str | None:
    try:
        return str(cupy.cuda.runtime.deviceGetPCIBusId(ordinal))
    except (AttributeError, RuntimeError):
        return None
