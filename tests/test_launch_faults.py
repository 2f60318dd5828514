"""What went wrong in such libraries between launches: shared workspaces, captured graphs, streams, devices, batches.

All on the fake CuPy: every launch runs in the emulator, which reports races and reads of memory nobody wrote.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest

import cupyq
from cupyq import compiler, db, devices, dispatch, kernels, launch, reference
from cupyq.errors import CompileError, IllegalConfig
from cupyq.kernels import DequantConfig, Problem, W4A16Config, W8A8Config
from fake_cupy import FakeCuPy, _Stream

SPLIT = W4A16Config(block_m=8, strips=1, warps_n=1, warps_k=2, stages=2, split_k=2)
FIELDS = {"source": "measured", "time_us": 1.0, "verified": True}


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a function that installs a fake CuPy with an empty database."""

    def forget():
        devices._read_live.cache_clear()
        compiler.gpu._load.cache_clear()
        launch.reset()
        launch.scratch.clear()
        _Stream.capturing.clear()

    def make(cards=("h100-sxm",), run=True):
        fake = FakeCuPy(cards, run)
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
        forget()
        return fake

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.UntunedWarning)
        yield make
    forget()


@pytest.fixture
def cupy(make):
    return make()


@pytest.fixture
def rng():
    return np.random.default_rng(9)


def weight(scheme="w4a16", k=256, n=48, **options):
    return cupyq.quantize(np.random.default_rng(1).standard_normal((k, n)), scheme, **options)


def tune(problem, config, path="fused"):
    with db.open() as store:
        store.add_trial(device=devices.live(0), problem=problem, config=config, path=path, **FIELDS)
    launch.reset()


def check(x, qw, y):
    limit = reference.bound(x, qw, y.dtype, None, scaled_weights=qw.weight_only)
    result = reference.compare(y.get(), reference.matmul(x, qw), limit)
    assert result.ok, result


# --- split-K ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [2, 3, 4])
def test_split_sums_survive_a_dirty_result_and_a_used_workspace(cupy, rng, split):  # c1, c3
    qw = weight(k=512)
    tune(Problem.of(8, qw), replace(SPLIT, split_k=split))
    there, runs = qw.to_cupy(), []
    for _ in range(4):
        x = rng.standard_normal((8, 512)).astype(np.float16)
        out = cupy.full((8, 48), np.nan, np.float16)
        cupyq.matmul(cupy.asarray(x), there, out=out)
        check(x, qw, out)
        runs.append(cupyq.matmul(cupy.asarray(x), there).get())
        assert np.array_equal(runs[-1], out.get())
        [(partials, arrivals)] = launch.scratch._workspaces.values()
        partials._a[...] = 0xFFFFFFFF  # what another launch of this stream could leave
        assert (arrivals.get() == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 3, 4, 6, 8])
def test_split_sums_of_the_report(cupy, rng, split):  # c1
    qw = weight(k=1024, n=512)
    tune(Problem.of(8, qw), replace(SPLIT, split_k=split))
    x = rng.standard_normal((8, 1024)).astype(np.float16)
    out = cupy.full((8, 512), np.nan, np.float16)
    cupyq.matmul(cupy.asarray(x), qw.to_cupy(), out=out)
    check(x, qw, out)


@pytest.mark.parametrize("m", [16, 32, 33, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_identity_gives_the_weights(cupy, m):  # c2
    qw = weight(k=512, n=48)
    x = np.zeros((m, 512), np.float16)
    x[np.arange(m), np.arange(m) * 3 % 512] = 1
    first, second = (cupyq.matmul(cupy.asarray(x), qw.to_cupy()).get() for _ in range(2))
    assert np.array_equal(first, cupyq.dequantize(qw, "float16")[np.arange(m) * 3 % 512])
    assert np.array_equal(first, second)


# --- streams and graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8-int8", "w8a8-fp8"])
@pytest.mark.parametrize("planned", [False, True])
def test_a_replayed_graph_sees_new_activations(cupy, rng, scheme, planned):  # c3, c4
    qw = weight(scheme, k=512)
    if scheme == "w4a16":
        tune(Problem.of(3, qw), SPLIT)
    there = qw.to_cupy()
    plan = cupyq.plan(there, 3)
    x, out = cupy.zeros((3, 512), np.float16), cupy.full((3, 48), np.nan, np.float16)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        plan(x, out=out) if planned else cupyq.matmul(x, there, out=out)
        graph = stream.end_capture()
        assert np.isnan(out.get()).all()  # captured, not run
        for _ in range(3):
            new = rng.standard_normal((3, 512)).astype(np.float16)
            x[...] = cupy.asarray(new)
            graph.launch()
            check(new, qw, out)
            other = rng.standard_normal((3, 512)).astype(np.float16)
            check(other, qw, plan(cupy.asarray(other)))  # between replays, with scratch of the stream's own


def test_a_plan_made_before_serves_every_stream(make):  # c3
    dry = make(run=False)
    plan, x = cupyq.plan(weight().to_cupy(), 3), dry.zeros((3, 256), np.float16)
    streams = [dry.cuda.Stream() for _ in range(3)]
    for stream in streams:
        with stream:
            plan(x)
    assert [launched.stream for launched in dry.launches] == [stream.ptr for stream in streams]


def test_several_devices_and_scratch(make):  # c3, c5
    dry = make(("h100-sxm", "a100-sxm"), run=False)
    qw = weight(k=512)
    there = [qw.to_cupy(i) for i in range(2)]
    for i in (0, 1, 0, 1):
        with dry.cuda.Device(i):
            x = dry.zeros((3, 512), np.float16)
        with dry.cuda.Device(1 - i):  # the other one is current
            assert cupyq.matmul(x, there[i]).device.id == i
            assert cupyq.plan(there[i], 3)(x).device.id == i
    assert [launched.device for launched in dry.launches] == [0, 0, 1, 1] * 2
    assert [cupyq.plan(qw, 3).choice.device.name for qw in there] == ["h100-sxm", "a100-sxm"]


# --- shared memory ----------------------------------------------------------------------------------------------------


def test_shared_memory_up_down_up(make):  # c6
    dry = make(("h100-sxm", "h100-sxm"), run=False)
    large = W4A16Config(block_m=32, strips=1, warps_n=2, warps_k=2, warp_k=64, stages=6)
    small = replace(SPLIT, split_k=1)
    qw = weight(k=1024, n=96)
    there = [qw.to_cupy(i) for i in range(2)]
    tune(Problem.of(64, qw), large)
    tune(Problem.of(4, qw), small)
    bytes_of = {m: cfg.launch(Problem.of(m, qw)).shared_bytes for m, cfg in ((64, large), (4, small))}
    assert bytes_of[64] > compiler.gpu.DEFAULT_SHARED > bytes_of[4]
    wrong, turn = [], threading.Lock()

    def work(device):
        try:
            for m in (64, 4, 64):
                with turn, dry.cuda.Device(device):  # the fake's current device is one for all threads
                    cupyq.matmul(dry.zeros((m, 1024), np.float16), there[device])
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for device in (0, 1):
        used = [launched.shared for launched in dry.launches if launched.device == device]
        assert used == [bytes_of[64], bytes_of[4], bytes_of[64]]


def test_problems_that_share_a_kernel_have_their_own_shared_memory(make):
    """Fused W8A8: the longer K, the more shared memory, and the same source, which CuPy loads once."""
    dry = make(("h100-sxm",), run=False)
    config = W8A8Config(8, 8, 4, 1, 4, 64, 4, fused=True)
    layers = {k: weight("w8a8-int8", k=k, n=64) for k in (6144, 2048)}
    for qw in layers.values():
        tune(Problem.of(4, qw), config)
    sizes = {k: config.launch(Problem.of(4, qw)).shared_bytes for k, qw in layers.items()}
    assert sizes[6144] > sizes[2048] > compiler.gpu.DEFAULT_SHARED
    there = {k: qw.to_cupy() for k, qw in layers.items()}
    for k in (6144, 2048, 6144):
        cupyq.matmul(dry.zeros((4, k), np.float16), there[k])
    assert [launched.shared for launched in dry.launches] == [sizes[6144], sizes[2048], sizes[6144]]


# --- threads, captures, devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
def test_two_threads_on_one_stream_keep_their_activations_apart(cupy, rng, monkeypatch, act_order):
    """A second product that comes between the two kernels of the first must not overwrite its codes."""
    scheme = "w4a16" if act_order else "w8a8-int8"
    qw = weight(scheme)
    if act_order:
        qw = replace(qw, perm=rng.permutation(256).astype(np.int32))
    else:
        tune(Problem.of(3, qw), W8A8Config(8, 8, 1, 2, 1, 64, 2))
    plan = cupyq.plan(qw.to_cupy(), 3)
    xs = [rng.standard_normal((3, 256)).astype(np.float16) for _ in range(2)]
    results = [None, None]

    def work(i):
        results[i] = plan(cupy.asarray(xs[i]))

    second = threading.Thread(target=work, args=(1,))
    multiply = launch._Fused.__call__

    def late(self, *arrays):
        if threading.current_thread() is not second and not second.is_alive() and results[1] is None:
            second.start()
            second.join(0.5)  # it would be through by now if nothing held it back
        multiply(self, *arrays)

    monkeypatch.setattr(launch._Fused, "__call__", late)
    work(0)
    second.join()
    for x, y in zip(xs, results, strict=True):
        check(x, qw, y)


def test_a_captured_product_does_without_cublas(cupy, rng):
    qw = weight()
    tune(Problem.of(3, qw), DequantConfig(), "dequant")
    plan = cupyq.plan(qw.to_cupy(), 3)
    assert plan.choice.path == "dequant"
    x = rng.standard_normal((3, 256)).astype(np.float16)
    there = cupy.asarray(x)
    check(x, qw, plan(there))
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        y = plan(there)
        graph = stream.end_capture()
        graph.launch()
        check(x, qw, y)
        check(x, qw, plan(there))


def test_a_captured_product_without_a_kernel_says_so(make):
    cupy = make(("t4",))
    qw = weight("w8a8-fp8")
    plan, x = cupyq.plan(qw.to_cupy(), 3), cupy.zeros((3, 256), np.float16)
    assert plan.choice.path == "dense"
    plan(x)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        with pytest.raises(IllegalConfig, match="CUDA graph"):
            plan(x)
        stream.end_capture()


def test_a_graph_keeps_a_result_that_nobody_else_keeps(make):
    cupy = make(run=False)
    plan, x = cupyq.plan(weight().to_cupy(), 3), cupy.zeros((3, 256), np.float16)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        kept = weakref.ref(plan(x))
        stream.end_capture()
    gc.collect()
    assert kept() is not None


def test_what_a_product_keeps_is_finished_before_other_streams_read_it(make, rng, monkeypatch):
    cupy = make(run=False)
    waited = []
    monkeypatch.setattr(cupy.cuda.Stream, "synchronize", lambda stream: waited.append(stream.ptr))
    rule = cupyq.Activations(scale=0.02, zero=3)
    qw = weight("w8a8-int8", activations=rule).to_cupy()
    x = cupy.zeros((3, 256), np.float16)
    cupyq.matmul(x, qw)
    made = len(waited)
    assert made
    cupyq.matmul(x, qw)
    assert len(waited) == made
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        cupyq.matmul(cupy.zeros((5, 256), np.float16), qw)
        stream.end_capture()
    assert len(waited) > made
    assert stream.ptr not in waited[made:]  # which is captured, so nothing on it has run


def test_quantizing_happens_where_the_weight_lives(make, rng):
    cupy = make(("a100-sxm", "h100-sxm"))
    with cupy.cuda.Device(1):
        w = cupy.asarray(rng.standard_normal((256, 48)))
        largest = cupy.asarray(np.ones(256, np.float32))
    qw = cupyq.quantize(w, "w4a16")
    codes, scales, zeros = cupyq.unpack(qw)
    again = cupyq.pack(codes, scales, zeros, scheme="w4a16", group_size=128)
    factor = cupyq.smoothing_factor(largest, w)
    rule = cupyq.Activations.covering(w, "w8a8-int8")
    assert [a.device.id for a in (qw.packed, codes, again.packed, factor)] == [1] * 4
    assert rule.scale is not None
    assert cupy.cuda.runtime.getDevice() == 0


def test_a_weight_that_is_a_misaligned_view_is_copied(cupy, rng):
    qw = weight(symmetric=False)

    def moved(array):
        view = cupy.empty(array.size + 1, array.dtype)[1:].reshape(array.shape)
        view[...] = cupy.asarray(array)
        return view

    there = replace(qw, packed=moved(qw.packed), scales=moved(qw.scales), zeros=moved(qw.zeros))
    x = rng.standard_normal((3, 256)).astype(np.float16)
    check(x, qw, cupyq.matmul(cupy.asarray(x), there))
    assert np.array_equal(cupyq.dequantize(there, "float16").get(), cupyq.dequantize(qw, "float16"))


# --- architectures ----------------------------------------------------------------------------------------------------


def test_a_gpu_newer_than_nvrtc_gets_ptx_of_the_newest_known(make, rng):  # d5
    cupy = make()
    known = [75, 80]
    cupy.cuda.nvrtc.getSupportedArchs = lambda: known
    x, qw = rng.standard_normal((3, 256)).astype(np.float16), weight()
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy())
    check(x, qw, y)
    assert cupy.compiled == []
    assert cupy.cuda.nvrtc.options == {1: ("-arch=compute_80", *compiler.nvrtc.OPTIONS)}


def test_a_gpu_between_those_that_nvrtc_knows_gets_ptx_of_the_one_before(make, rng):
    cupy = make(("h100-sxm",))
    cupy.cuda.nvrtc.getSupportedArchs = lambda: [75, 80, 100]
    x, qw = rng.standard_normal((3, 256)).astype(np.float16), weight()
    check(x, qw, cupyq.matmul(cupy.asarray(x), qw.to_cupy()))
    assert cupy.cuda.nvrtc.options[1][0] == "-arch=compute_80"


def test_a_driver_that_refuses_machine_code_is_a_compile_error(make, monkeypatch):
    cupy = make(run=False)

    def refused(*args, **options):
        raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(cupy, "RawModule", refused)
    with pytest.raises(CompileError, match=r"UNSUPPORTED_PTX_VERSION.*doctor"):
        cupyq.matmul(cupy.zeros((3, 256), np.float16), weight().to_cupy())


# --- a row's bits are its own -----------------------------------------------------------------------------------------


def cancelling(rng, m, scheme="w4a16"):
    """Return x and a weight whose second half of K takes back most of what the first adds: the order of sums shows."""
    half = np.random.default_rng(1).standard_normal((256, 48))
    x = (rng.standard_normal((m, 256)) * 30).astype(np.float16)
    small = (rng.standard_normal((m, 256)) / 16).astype(np.float16)
    return np.concatenate([x, small - x], axis=1), cupyq.quantize(np.tile(half, (2, 1)), scheme)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8-int8", "w8a8-fp8"])
def test_batch_invariant_bits(cupy, rng, scheme):
    x, qw = cancelling(rng, 40, scheme)
    # Rows for every band that differ as much as they can: splits, stripes, warps along k.
    if scheme == "w4a16":
        tune(Problem.of(1, qw), replace(SPLIT, split_k=4))
        tune(Problem.of(16, qw), replace(SPLIT, block_m=16, warps_k=4, split_k=1, ctas=5))
        tune(Problem.of(64, qw), W4A16Config(block_m=32, strips=1, warps_n=2, warps_k=1, warp_k=128, stages=2))
    there = qw.to_cupy()
    whole = cupyq.matmul(cupy.asarray(x), there, batch_invariant=True)
    check(x, qw, whole)
    whole = whole.get()
    for m in (1, 2, 9, 17):
        part = cupyq.matmul(cupy.asarray(x[:m]), there, batch_invariant=True).get()
        assert part.tobytes() == whole[:m].tobytes()
        planned = cupyq.plan(there, m, batch_invariant=True)(cupy.asarray(x[40 - m :])).get()
        assert planned.tobytes() == whole[40 - m :].tobytes()


def test_without_it_the_bits_do_depend_on_the_batch(cupy, rng):
    x, qw = cancelling(rng, 16)
    tune(Problem.of(1, qw), replace(SPLIT, split_k=4))
    tune(Problem.of(16, qw), W4A16Config(block_m=16, strips=1, warps_n=2, warps_k=1, warp_k=128, stages=2))
    there = qw.to_cupy()
    free = [cupyq.matmul(cupy.asarray(x[:m]), there).get() for m in (1, 16)]
    assert not np.array_equal(free[0], free[1][:1])
    fixed = [cupyq.matmul(cupy.asarray(x[:m]), there, batch_invariant=True).get() for m in (1, 16)]
    assert np.array_equal(fixed[0], fixed[1][:1])


def test_batch_invariance_never_goes_through_cublas(cupy):
    qw = weight()
    for m in (1, 16, 4096):
        tune(Problem.of(m, qw), DequantConfig(), "dequant")
    there = qw.to_cupy()
    assert cupyq.plan(there, 16).choice.path == "dequant"
    plan = cupyq.plan(there, 16, batch_invariant=True)
    assert (plan.choice.path, plan.choice.config.ctas) == ("fused", 0)
    [warm] = cupyq.warmup(there, 16, batch_invariant=True)
    assert warm.choice.config == plan.choice.config


def test_batch_invariance_where_no_kernel_runs(make):
    cupy = make(("a100-sxm",))
    with pytest.raises(IllegalConfig, match="batch_invariant=True needs a kernel of cupyq for w8a8-fp8"):
        cupyq.matmul(cupy.zeros((2, 256), np.float16), weight("w8a8-fp8").to_cupy(), batch_invariant=True)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"])
def test_batch_invariant_bits_on_the_host(rng, scheme):
    qw = weight(scheme, k=640, n=150)
    x = (rng.standard_normal((2, 20, 640)) * 30).astype(np.float16)
    bias = rng.standard_normal(150).astype(np.float16)
    whole = cupyq.matmul(x, qw, bias, batch_invariant=True).reshape(40, 150)
    for m in (1, 2, 9, 17):
        assert cupyq.matmul(x.reshape(40, 640)[:m], qw, bias, batch_invariant=True).tobytes() == whole[:m].tobytes()
    planned = cupyq.plan(qw, 3, bias=bias, batch_invariant=True)(x.reshape(40, 640)[5:8])
    assert planned.tobytes() == whole[5:8].tobytes()
    if scheme != "w8a8-fp8-block":
        codes, x_scale = cupyq.quantize_activations(x, scheme) if scheme != "w4a16" else (None, None)
        if codes is not None:
            again = cupyq.matmul(codes, qw, bias, x_scale=x_scale, batch_invariant=True)
            assert again.reshape(40, 150).tobytes() == whole.tobytes()


# --- a row whose kernel quantizes activations itself ------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
def test_a_kernel_that_quantizes_x_itself(cupy, rng, scheme):
    config = W8A8Config(block_m=8, warp_tokens=8, strips=1, warps_n=2, warps_k=1, stages=2, fused=True)
    qw = weight(scheme)
    problem = Problem.of(5, qw)
    assert kernels.check(config, problem, devices.live(0)) is None
    x = rng.standard_normal((5, 256)).astype(np.float16)
    there = qw.to_cupy()
    apart = cupyq.matmul(cupy.asarray(x), there).get()
    tune(problem, config)
    before = len(cupy.launches)
    y = cupyq.matmul(cupy.asarray(x), there)
    assert [launched.entry.count("fused") for launched in cupy.launches[before:]] == [1]
    check(x, qw, y)
    codes, x_scale = cupyq.quantize_activations(cupy.asarray(x), scheme)
    again = cupyq.matmul(codes, there, x_scale=x_scale)
    check(x, qw, again)
    if scheme == "w8a8-int8":
        assert np.array_equal(y.get(), apart)
        assert np.array_equal(again.get(), apart)
