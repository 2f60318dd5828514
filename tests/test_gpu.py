"""The same kernels on a card: `pytest -m gpu`. Skipped only where there is no CUDA device.

Every result is held against the float64 reference and its bound, as in the emulator; what only a card can show
(streams, graphs, several devices, memory that lies around) is here alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import cupyq
from cupyq import compiler, devices, dispatch, emulator, kernels, launch, reference
from cupyq.arrays import BFLOAT16
from cupyq.compiler.gpu import DEFAULT_SHARED
from cupyq.errors import DeviceMismatch
from cupyq.kernels import Problem, W8A8Config
from cupyq.tuner.verify import ACCUMULATOR_BITS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::cupyq.dispatch.UntunedWarning")]

WEIGHT_ONLY = ("w2a16", "w4a16", "w8a16")
W8A8 = ("w8a8-int8", "w8a8-fp8", "w8a8-fp8-block")
SCHEMES = (*WEIGHT_ONLY, *W8A8)
RULES = {"static": W8A8[:2], "lopsided": W8A8[:1], "smooth": W8A8}  # of activations, with the schemes that take them
DTYPES = (np.dtype(np.float16), BFLOAT16)
NO_DEVICE = 100  # cudaErrorNoDevice


def missing_device() -> str | None:
    """Say why there is no CUDA device here, or None; anything else that is wrong is left to raise."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "no CUDA driver"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != NO_DEVICE:
            raise
        count = 0
    return None if count else "no CUDA device"


@pytest.fixture(scope="session")
def card():
    """CuPy, where it has a device."""
    reason = missing_device()
    if reason is not None:
        pytest.skip(reason)
    import cupy

    return cupy


@pytest.fixture
def cupy(card, monkeypatch, tmp_path):
    """CuPy, and a dispatcher that knows no database but an empty one."""
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
    launch.reset()
    yield card
    launch.reset()


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def weight(scheme="w4a16", k=256, n=96, **options):
    return cupyq.quantize(np.random.default_rng(1).standard_normal((k, n), dtype=np.float32), scheme, **options)


def limit_of(x, qw, dtype, bias=None, *, path="fused", config=None, device=None):
    """Return how far the product of one config may be from the reference on a device, element by element."""
    problem, device = Problem.of(math.prod(x.shape[:-1]), qw, dtype.name), device or devices.live(0)
    options = {
        "scaled_weights": path == "dequant" or (getattr(config, "scale", "") == "weights" and qw.group_size != -1)
    }
    if isinstance(config, W8A8Config):  # CuPy's own operations, where no kernel serves, add in float32
        bits = ACCUMULATOR_BITS.get(device.cc, 24)
        options |= {"accumulator_bits": bits, "promote_k": config.tensor_k(problem, device)}
    limit = reference.bound(x, qw, dtype, bias, **options)
    if path == "dequant" and bias is not None:  # cuBLAS rounds the product before the bias is added
        limit = limit + reference.bound(x, qw, dtype, **options)
    return limit


def check(x, qw, y, bias=None, m=None):
    """Hold a CuPy result against the reference on the host; x may be some of the `m` rows that were multiplied."""
    host = y.get()
    device = devices.live(int(y.device.id))
    problem = Problem.of(math.prod(x.shape[:-1]) if m is None else m, qw, host.dtype.name)
    choice = dispatch.choose(problem, device)
    limit = limit_of(x, qw, host.dtype, bias, path=choice.path, config=choice.config, device=device)
    result = reference.compare(host, reference.matmul(x, qw, bias), limit)
    assert result.ok, result


def need_fp8(scheme):
    """Skip where 8-bit floats are multiplied by CuPy's operations, for want of tensor cores that take them."""
    cc = devices.live(0).cc
    if scheme.startswith("w8a8-fp8") and cc < (8, 9):
        pytest.skip(f"no kernel multiplies 8-bit floats on compute capability {cc[0]}.{cc[1]}; from 8.9 on")


def force(monkeypatch, config, path="fused"):
    """Make the dispatcher choose `config` for everything."""

    def choose(problem, device):
        return dispatch.Choice(problem, device, path, config, dispatch.EXACT, None, None, ())

    monkeypatch.setattr(dispatch, "choose", choose)
    launch.reset()


def split_config(problem, splits):
    """Return a legal config of the fused kernel that shares K among `splits` CTAs."""
    for config in kernels.configs(problem, devices.live(0)):
        if config.split_k == splits:
            return config
    pytest.fail(f"no config splits K={problem.k} {splits} times")


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(cupy, rng, scheme, dtype, with_bias):
    qw = weight(scheme, 512, 200)
    x = rng.standard_normal((33, 512)).astype(dtype)
    bias = rng.standard_normal(200).astype(dtype) if with_bias else None
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy(), None if bias is None else cupy.asarray(bias))
    check(x, qw, y, bias)


@pytest.mark.parametrize(("rule", "scheme"), [(rule, scheme) for rule, some in RULES.items() for scheme in some])
@pytest.mark.parametrize("m", [2, 40])
def test_activations_by_rule(cupy, rng, scheme, rule, m):
    w, x = rng.standard_normal((512, 200)).astype(np.float32), (rng.standard_normal((m, 512)) + 1).astype(np.float16)
    factor = cupyq.smoothing_factor(np.abs(x.astype(np.float32)).max(axis=0), w)
    rules = {
        "static": lambda: cupyq.Activations.covering(x, scheme),
        "lopsided": lambda: cupyq.Activations(symmetric=False),
        "smooth": lambda: cupyq.Activations(factor=factor),
    }
    qw = cupyq.quantize(w, scheme, activations=rules[rule]())
    check(x, qw, cupyq.matmul(cupy.asarray(x), qw.to_cupy()))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [1, 3, 16, 40])
def test_the_card_agrees_with_the_emulator(cupy, rng, scheme, m):
    """The same PTX on both: integers bit for bit, floats as the order and the bits of tensor cores' sums allow."""
    need_fp8(scheme)
    qw = weight(scheme, 256, 64)
    x = rng.standard_normal((m, 256)).astype(np.float16)
    problem, device = Problem.of(m, qw), devices.live(0)
    config = kernels.default(problem, device)
    options = {}
    left = x
    if scheme in W8A8 and not config.fused:
        left, options["x_scale"] = reference.quantize_activations(x, scheme)
        left = left.view(np.int8 if scheme == "w8a8-int8" else np.uint8)  # CuPy has no 8-bit floats
    compiled = compiler.compile_kernel(config, problem, device.arch)
    call = kernels.call(config, problem, left, qw, **options)
    emulator.launch(compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes)
    on_card = kernels.call(
        config, problem, cupy.asarray(left), qw.to_cupy(), **{k: cupy.asarray(v) for k, v in options.items()}
    )
    compiler.load(config, problem)(on_card.grid, on_card.block, on_card.args, shared_mem=on_card.shared_bytes)
    here, there = call.out, on_card.out.get()
    if scheme == "w8a8-int8":
        assert np.array_equal(here, there)
        return
    limit, want = limit_of(x, qw, here.dtype, config=config), reference.matmul(x, qw)
    for result in (
        reference.compare(here, want, limit),
        reference.compare(there, want, limit),
        reference.compare(there, here.astype(np.float64), 2 * limit),
    ):
        assert result.ok, result


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)])
def test_empty_batch(cupy, rng, scheme, shape):  # b1
    qw = weight(scheme)
    there = qw.to_cupy()
    assert cupyq.matmul(cupy.empty(shape, np.float16), there).shape == (*shape[:-1], 96)
    assert cupyq.matmul(cupy.ones((2, 256), np.float16), weight(scheme, n=0).to_cupy()).shape == (2, 0)
    x = rng.standard_normal((2, 256)).astype(np.float16)
    check(x, qw, cupyq.matmul(cupy.asarray(x), there))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [*range(1, 18), 31, 33, 63, 65, 127, 129, 329])
def test_ragged_m(cupy, rng, scheme, m):  # b2
    qw = weight(scheme, 136, 40)
    x = rng.standard_normal((m, 136)).astype(np.float16)
    guarded = cupy.full((m + 16, 40), np.nan, np.float16)
    cupyq.matmul(cupy.asarray(x), qw.to_cupy(), out=guarded[8:-8])
    check(x, qw, guarded[8:-8])
    rest = guarded.get()
    assert np.isnan(rest[:8]).all()
    assert np.isnan(rest[-8:]).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("k", [16, 48, 136, 10944])
@pytest.mark.parametrize("n", [1, 7, 8, 24, 64, 72, 127, 192])
def test_ragged_n_and_k(cupy, rng, scheme, k, n):  # b3
    qw = weight(scheme, k, n)
    x = rng.standard_normal((3, k)).astype(np.float16)
    check(x, qw, cupyq.matmul(cupy.asarray(x), qw.to_cupy()))


@pytest.mark.parametrize("m", [65_537, 1_048_561])
def test_huge_m(cupy, m):  # b4
    qw = weight(k=32, n=8)
    x = cupy.zeros((m, 32), np.float16)
    x[-1] = cupy.arange(32, dtype=np.float16)
    y = cupyq.matmul(x, qw.to_cupy())
    assert not y[:-1].any()
    check(x[-1:].get(), qw, y[-1:], m=m)


VIEWS = {
    "columns": lambda a, xp: xp.concatenate([a, a], axis=1)[:, : a.shape[1]],
    "every_other_row": lambda a, xp: xp.repeat(a, 2, axis=0)[::2],
    "transposed": lambda a, xp: xp.ascontiguousarray(a.T).T,
    "reversed": lambda a, xp: a[::-1].copy()[::-1],
    "misaligned": lambda a, xp: xp.concatenate([a.ravel()[:1], a.ravel()])[1:].reshape(a.shape),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("view", VIEWS)
def test_views(cupy, rng, scheme, view):  # b6, b8
    qw = weight(scheme).to_cupy()
    x = cupy.asarray(rng.standard_normal((6, 256)).astype(np.float16))
    want = cupyq.matmul(x, qw)
    seen = VIEWS[view](x, cupy)
    out = VIEWS[view](cupy.full((6, 96), np.nan, np.float16), cupy)
    cupyq.matmul(seen, qw, out=out)
    assert np.array_equal(out.get(), want.get())
    cupy.cuda.runtime.deviceSynchronize()  # the context is alive


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_and_quantizing_on_the_card(cupy, rng, scheme):
    w = rng.standard_normal((300, 72)).astype(np.float32)
    there, here = cupyq.quantize(cupy.asarray(w), scheme), cupyq.quantize(w, scheme)
    error = np.abs(cupyq.dequantize(there).get() - cupyq.dequantize(here))  # division may round differently: -ftz
    assert error.max() <= np.abs(w).max() * (2.0**-3 if scheme.startswith("w8a8-fp8") else 1.01)
    assert (error > 0).mean() < 1e-3
    codes, scales, zeros = cupyq.unpack(here.to_cupy())
    assert cupyq.pack(codes, scales, zeros, scheme=scheme).packed.get().tobytes() == here.packed.tobytes()


@pytest.mark.parametrize("scheme", W8A8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(cupy, rng, scheme, dtype):  # a9
    x = rng.standard_normal((9, 520)).astype(dtype)
    x[4] = 0
    codes, x_scale = cupyq.quantize_activations(cupy.asarray(x), scheme)
    want_codes, want_scale = reference.quantize_activations(x, scheme)
    assert np.array_equal(x_scale.get(), want_scale)
    assert np.array_equal(codes.get().view(np.uint8), want_codes.view(np.uint8))


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize(cupy, scheme, dtype):
    qw = weight(scheme, 300, 72, symmetric=False)
    assert cupyq.dequantize(qw.to_cupy(), dtype).get().tobytes() == reference.dequantize(qw, dtype).tobytes()


# --- concurrency ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_split_k_is_right_and_the_same_every_time(cupy, rng, monkeypatch, splits):  # a18, c1
    qw = weight(k=4096, n=512)
    force(monkeypatch, split_config(Problem.of(8, qw), splits))
    x = rng.standard_normal((8, 4096)).astype(np.float16)
    on_card, there = cupy.asarray(x), qw.to_cupy()
    first = None
    for _ in range(200):
        out = cupy.full((8, 512), np.nan, np.float16)
        cupyq.matmul(on_card, there, out=out)
        first = out.get() if first is None else first
        assert out.get().tobytes() == first.tobytes()
    check(x, qw, out)


@pytest.mark.parametrize("m", [16, 32, 33, 64, 128])
def test_identity_every_time(cupy, m):  # c2
    qw = weight(k=512, n=256)
    x = cupy.asarray(np.eye(m, 512, dtype=np.float16))
    want = cupyq.dequantize(qw, "float16")[:m]
    there = qw.to_cupy()
    results = {cupyq.matmul(x, there).get().tobytes() for _ in range(50)}
    assert results == {want.tobytes()}


def test_streams_and_threads(cupy, rng, monkeypatch):  # c3
    qw = weight(k=2048, n=256)
    force(monkeypatch, split_config(Problem.of(8, qw), 4))
    x = cupy.asarray(rng.standard_normal((8, 2048)).astype(np.float16))
    there, wrong = qw.to_cupy(), []
    want = cupyq.matmul(x, there).get().tobytes()

    def work():
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            results = [cupyq.matmul(x, there) for _ in range(1000)]
        stream.synchronize()
        wrong.extend(i for i, y in enumerate(results) if y.get().tobytes() != want)

    cupy.cuda.runtime.deviceSynchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
def test_two_threads_on_one_stream(cupy, rng, monkeypatch, scheme):  # c3
    """The stream runs launches in the order they come in, and those of two threads come in mixed."""
    need_fp8(scheme)
    qw = weight(scheme, 2048, 256)
    force(monkeypatch, kernels.default(Problem.of(8, qw), devices.live(0), fused=False))
    stream = cupy.cuda.Stream(non_blocking=True)
    there, wrong = qw.to_cupy(), []
    inputs = [cupy.asarray(rng.standard_normal((8, 2048)).astype(np.float16)) for _ in range(2)]
    wants = [cupyq.matmul(x, there).get().tobytes() for x in inputs]
    start = threading.Barrier(2)

    def work(x, want):
        start.wait()
        with stream:
            results = [cupyq.matmul(x, there) for _ in range(1000)]
        stream.synchronize()
        wrong.extend(i for i, y in enumerate(results) if y.get().tobytes() != want)

    cupy.cuda.runtime.deviceSynchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wants, strict=True)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # often between the launch that quantizes and the one that multiplies
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("scheme", SCHEMES)
def test_current_stream(cupy, rng, scheme):  # c4
    """A slow producer on a stream, then the product under it: it must see the new data."""
    qw = weight(scheme)
    there = qw.to_cupy()
    x = rng.standard_normal((4, 256)).astype(np.float16)
    new, on_card = cupy.asarray(x), cupy.zeros((4, 256), np.float16)
    slow = cupy.ones((4096, 4096), np.float32)
    cupyq.matmul(on_card, there)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(10):
            slow = slow @ slow * 1e-4
        on_card[...] = new
        y = cupyq.matmul(on_card, there)
    stream.synchronize()
    check(x, qw, y)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("split", [False, True])
def test_graph_replay(cupy, rng, monkeypatch, scheme, split):  # c3, c4
    need_fp8(scheme)  # without kernels of ours cuBLAS multiplies, which CuPy cannot capture
    qw = weight(scheme, k=2048)
    if split:
        force(monkeypatch, split_config(Problem.of(4, qw), 4))
    there = qw.to_cupy()
    x = cupy.zeros((4, 2048), np.float16)
    out = cupy.empty((4, 96), np.float16)
    plan = cupyq.plan(there, 4)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        plan(x, out=out)
        stream.begin_capture()
        plan(x, out=out)
        graph = stream.end_capture()
    other = cupy.cuda.Stream(non_blocking=True)
    for _ in range(50):
        new = rng.standard_normal((4, 2048)).astype(np.float16)
        x[...] = cupy.asarray(new)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        with other:  # eager work meanwhile must not touch what the graph uses
            plan(x)
        stream.synchronize()
        other.synchronize()
        check(new, qw, out)


def test_another_device(cupy, rng):  # c5
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device")
    qw = weight()
    x = rng.standard_normal((4, 256)).astype(np.float16)
    with cupy.cuda.Device(1):
        there, on_card = qw.to_cupy(), cupy.asarray(x)
    y = cupyq.matmul(on_card, there)
    assert y.device.id == 1
    check(x, qw, y)
    with pytest.raises(DeviceMismatch):
        cupyq.matmul(cupy.asarray(x), there)


def test_shared_memory_up_and_down(cupy, rng, monkeypatch):  # c6
    qw = weight(k=1024, n=256)
    problem, device = Problem.of(64, qw), devices.live(0)
    legal = sorted(kernels.configs(problem, device), key=lambda c: c.launch(problem).shared_bytes)
    x = rng.standard_normal((64, 1024)).astype(np.float16)
    on_card, there = cupy.asarray(x), qw.to_cupy()
    for config in (legal[-1], legal[0], legal[-1]):
        force(monkeypatch, config)
        check(x, qw, cupyq.matmul(on_card, there))


def sharing_config(long, short):
    """Return a config whose kernel for two problems has one source, and asks for more shared memory for the first."""
    device = devices.live(0)
    for config in kernels.configs(long, device):
        if not config.fused or kernels.check(config, short, device) is not None:
            continue
        sizes = config.launch(long).shared_bytes, config.launch(short).shared_bytes
        if sizes[0] > sizes[1] > DEFAULT_SHARED and kernels.source(config, long) == kernels.source(config, short):
            return config
    pytest.fail(f"no config needs more than {DEFAULT_SHARED} bytes of shared memory, and less for K={short.k}")


def test_layers_that_share_a_kernel_but_not_its_shared_memory(cupy, rng, monkeypatch):  # c6
    """Kernels that quantize activations keep their codes in shared memory, by K; CuPy has one function for both."""
    layers = [weight("w8a8-int8", k, 96) for k in (5120, 4096)]
    force(monkeypatch, sharing_config(*(Problem.of(4, qw) for qw in layers)))
    inputs = [rng.standard_normal((4, qw.k)).astype(np.float16) for qw in layers]
    plans = [cupyq.plan(qw.to_cupy(), 4) for qw in layers]
    for _ in range(3):
        for qw, x, plan in zip(layers, inputs, plans, strict=True):
            check(x, qw, plan(cupy.asarray(x)))


def test_dirty_pool_memory(cupy, rng):  # c3
    """Results do not depend on what freed memory held."""
    for fill in (0, 0xFF, 0x7F):
        held = [cupy.full((1 << 20,), fill, np.uint8) for _ in range(8)]
        del held
        launch.scratch.clear()
        for scheme in SCHEMES:
            qw = weight(scheme, 1000, 96)
            x = rng.standard_normal((5, 1000)).astype(np.float16)
            check(x, qw, cupyq.matmul(cupy.asarray(x), qw.to_cupy()))


# --- cost -------------------------------------------------------------------------------------------------------------


def test_a_plan_costs_little_more_than_a_bare_launch(cupy):
    """2 us on the host beside the launch and the allocation of the result; up to 4 here, where others run too."""
    qw = weight(k=4096, n=4096).to_cupy()
    plan, x = cupyq.plan(qw, 1), cupy.zeros((1, 4096), np.float16)
    fused = plan._run._fused
    call = kernels.call(fused.cfg, fused.problem, x, qw)

    def seconds(work):
        best = float("inf")
        for _ in range(20):
            cupy.cuda.runtime.deviceSynchronize()
            start = time.perf_counter()
            for _ in range(200):
                work()
            best = min(best, (time.perf_counter() - start) / 200)
        return best

    def bare():
        cupy.empty((1, 4096), np.float16)
        fused.step.kernel(call.grid, call.block, call.args, shared_mem=call.shared_bytes)

    assert seconds(lambda: plan(x)) - seconds(bare) < 4e-6


def test_a_second_process_compiles_nothing(cupy, tmp_path):  # d4
    code = (
        "import time, numpy, cupy, cupyq; qw = cupyq.quantize(numpy.ones((256, 96), numpy.float32)).to_cupy();"
        "cupy.cuda.runtime.deviceSynchronize(); start = time.perf_counter(); cupyq.plan(qw, 4);"
        "print(time.perf_counter() - start)"
    )
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"}
    first, second = (
        float(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(2)
    )
    assert second < first / 2


def test_the_tuning_warning_names_this_card(cupy):
    qw = weight().to_cupy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cupyq.matmul(cupy.zeros((3, 256), np.float16), qw)
    [warning] = [w for w in caught if w.category is dispatch.UntunedWarning]
    assert devices.live(0).title in str(warning.message)
    assert "--device" not in str(warning.message)
