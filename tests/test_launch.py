"""The GPU path without a GPU: a fake CuPy checks every launch, and the emulator runs it."""

from __future__ import annotations

import gc
import sys
import threading
import warnings

import numpy as np
import pytest

import cupyq
from cupyq import compiler, db, devices, dispatch, kernels, launch, reference
from cupyq.arrays import BFLOAT16
from cupyq.errors import DeviceMismatch, DTypeError, ShapeError
from cupyq.kernels import DequantConfig, Problem, W4A16Config
from fake_cupy import FakeCuPy, Misuse, _Stream

SCHEMES = ("w4a16", "w8a8-int8", "w8a8-fp8")
DTYPES = (np.dtype(np.float16), BFLOAT16)
SPLIT = W4A16Config(block_m=8, strips=1, warps_n=1, warps_k=2, stages=2, split_k=2)


def install(monkeypatch, tmp_path, cards=("h100-sxm",), run=True):
    fake = FakeCuPy(cards, run)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
    _forget()
    return fake


def _forget():
    devices._read_live.cache_clear()
    compiler.gpu._load.cache_clear()
    launch.reset()
    launch.scratch.clear()
    _Stream.capturing.clear()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.UntunedWarning)
        yield
    _forget()


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """A fake H100 whose launches run in the emulator."""
    return install(monkeypatch, tmp_path)


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """Two fake H100s whose launches are checked and written down, but do not run."""
    return install(monkeypatch, tmp_path, ("h100-sxm", "h100-sxm"), run=False)


@pytest.fixture
def rng():
    return np.random.default_rng(9)


def weight(scheme="w4a16", k=64, n=24, **options):
    return cupyq.quantize(np.random.default_rng(1).standard_normal((k, n)), scheme, **options)


def act_order(k=64, n=24):
    codes, scales, _ = cupyq.unpack(weight(k=k, n=n, group_size=32))
    perm = np.random.default_rng(2).permutation(k)
    return cupyq.pack(codes, scales, scheme="w4a16", group_size=32, perm=perm)


def tune(problem, config, path="fused"):
    """Record `config` as the measured best of `problem` on the fake device."""
    with db.open() as store:
        store.add_trial(
            device=devices.live(0),
            problem=problem,
            config=config,
            path=path,
            source="measured",
            time_us=1.0,
            verified=True,
        )
    launch.reset()


def check(x, qw, y, bias=None, **options):
    """Hold a fake CuPy result against the reference on the host."""
    assert type(y).__module__ == "cupy"
    host = y.get()
    limit = reference.bound(x, qw, host.dtype, bias, scaled_weights=qw.weight_only, **options)
    result = reference.compare(host, reference.matmul(x, qw, bias), limit)
    assert result.ok, result


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "with_bias"), [(5, False), (5, True), (40, True)])
def test_product(cupy, rng, scheme, dtype, m, with_bias):
    qw = weight(scheme, 136, 40)
    x = rng.standard_normal((m, 136)).astype(dtype)
    bias = rng.standard_normal(40).astype(dtype) if with_bias else None
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy(), None if bias is None else cupy.asarray(bias))
    assert (y.shape, y.dtype, y.device.id) == ((m, 40), dtype, 0)
    check(x, qw, y, bias)
    # Where it is predicted to be faster the W8A8 kernel quantizes activations itself.
    config = dispatch.choose(Problem.of(m, qw, np.dtype(dtype).name), devices.live()).config
    apart = scheme != "w4a16" and not config.fused
    assert len(cupy.launches) == (2 if apart else 1)
    assert m > 5 or not apart


@pytest.mark.parametrize(
    "options", [{"group_size": 32, "symmetric": False}, {"group_size": -1}, {"scale_dtype": "bfloat16"}]
)
def test_groups_and_zero_points(cupy, rng, options):
    qw = weight(k=100, n=17, **options)
    x = rng.standard_normal((3, 100)).astype(np.float16)
    check(x, qw, cupyq.matmul(cupy.asarray(x), qw.to_cupy()))


@pytest.mark.parametrize("scheme", ["w2a16", "w8a16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_other_bits(cupy, rng, scheme, dtype, symmetric):
    qw = weight(scheme, 200, 24, group_size=64, symmetric=symmetric)
    x = rng.standard_normal((3, 200)).astype(dtype)
    check(x, qw, cupyq.matmul(cupy.asarray(x), qw.to_cupy()))
    w = cupyq.dequantize(qw.to_cupy(), dtype)
    assert w.get().tobytes() == reference.dequantize(qw, dtype).tobytes()
    assert len(cupy.launches) == 2


def test_leading_axes_and_one_row(cupy, rng):
    qw = weight()
    x = rng.standard_normal((2, 3, 64)).astype(np.float16)
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy())
    assert y.shape == (2, 3, 24)
    check(x, qw, y)
    y = cupyq.matmul(cupy.asarray(x[0, 0]), qw.to_cupy())
    assert y.shape == (24,)
    check(x[0, 0], qw, y)


@pytest.mark.parametrize("with_bias", [False, True])
def test_act_order(cupy, rng, with_bias):  # a17
    qw = act_order()
    x = rng.standard_normal((3, 64)).astype(np.float16)
    bias = np.ones(24, np.float16) if with_bias else None
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy(), None if bias is None else cupy.asarray(bias))
    check(x, qw, y, bias)


VIEWS = {
    "columns": lambda a: (np.concatenate([a, a], axis=1), lambda w: w[:, : a.shape[1]]),
    "every_other_row": lambda a: (np.repeat(a, 2, axis=0), lambda w: w[::2]),
    "transposed": lambda a: (np.ascontiguousarray(a.T), lambda w: w.T),
    "reversed": lambda a: (a[::-1].copy(), lambda w: w[::-1]),
    "misaligned": lambda a: (np.concatenate([a.ravel()[:1], a.ravel()]), lambda w: w[1:].reshape(a.shape)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_x_equal_their_copies(cupy, rng, scheme, view):  # b6, b8
    qw = weight(scheme).to_cupy()
    x = rng.standard_normal((4, 64)).astype(np.float16)
    whole, cut = VIEWS[view](x)
    seen = cut(cupy.asarray(whole))
    assert np.array_equal(seen.get(), x)
    assert np.array_equal(cupyq.matmul(seen, qw).get(), cupyq.matmul(cupy.asarray(x), qw).get())


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_out(cupy, rng, view):  # b6, b8
    qw = weight()
    x = rng.standard_normal((4, 64)).astype(np.float16)
    whole, cut = VIEWS[view](np.zeros((4, 24), np.float16))
    out = cut(cupy.full(whole.shape, np.nan, np.float16))
    assert cupyq.matmul(cupy.asarray(x), qw.to_cupy(), out=out) is out
    check(x, qw, out)


def test_out_may_overlap_x(cupy, rng):
    qw = weight(k=32, n=32)
    x = rng.standard_normal((4, 32)).astype(np.float16)
    on_gpu = cupy.asarray(x)
    cupyq.matmul(on_gpu, qw.to_cupy(), out=on_gpu)
    check(x, qw, on_gpu)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_empty_batch_launches_nothing(cupy, scheme, shape):  # b1
    qw = weight(scheme).to_cupy()
    y = cupyq.matmul(cupy.empty(shape, np.float16), qw)
    assert (y.shape, cupy.launches) == ((*shape[:-1], 24), [])
    assert cupyq.matmul(cupy.zeros((3, 64), np.float16), weight(scheme, n=0).to_cupy()).shape == (3, 0)
    assert cupy.launches == []
    assert (cupyq.matmul(cupy.zeros((1, 64), np.float16), qw).get() == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_activations_quantized_beforehand(cupy, rng, scheme):
    qw = weight(scheme, k=72)
    x = rng.standard_normal((2, 3, 72)).astype(np.float16)
    codes, x_scale = cupyq.quantize_activations(cupy.asarray(x), scheme)
    want_codes, want_scale = reference.quantize_activations(x, scheme)
    assert (codes.shape, x_scale.shape) == ((2, 3, 72), (2, 3))
    assert np.array_equal(codes.get().view(np.uint8), want_codes.view(np.uint8))
    assert np.array_equal(x_scale.get(), want_scale)
    y = cupyq.matmul(codes, qw.to_cupy(), x_scale=x_scale)
    assert np.array_equal(y.get(), cupyq.matmul(cupy.asarray(x), qw.to_cupy()).get())


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_zero_row(cupy, rng, scheme):  # a9
    qw = weight(scheme, 256)
    x = rng.standard_normal((4, 256)).astype(np.float16)
    x[2] = 0
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy())
    assert (y.get()[2] == 0).all()
    check(x, qw, y)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_static_scales_and_float32_go_through_cupy(cupy, rng, scheme):
    x = (rng.standard_normal((3, 40)) * 300).astype(np.float32)
    for scale in (None, 0.5):
        codes, x_scale = cupyq.quantize_activations(cupy.asarray(x), scheme, scale)
        want_codes, want_scale = reference.quantize_activations(x, scheme, scale)
        assert np.array_equal(codes.get().view(np.uint8), want_codes.view(np.uint8))
        assert np.array_equal(x_scale.get(), want_scale)
    assert cupy.launches == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dequantize(cupy, scheme, dtype):
    qw = weight(scheme, 100, 40)
    w = cupyq.dequantize(qw.to_cupy(), dtype)
    want = reference.dequantize(qw, dtype)
    assert (w.dtype, w.get().tobytes()) == (want.dtype, want.tobytes())
    assert len(cupy.launches) == (1 if scheme == "w4a16" and dtype.endswith("t16") else 0)


def test_dequantize_undoes_act_order(cupy):
    qw = act_order()
    assert np.array_equal(cupyq.dequantize(qw.to_cupy(), "float16").get(), reference.dequantize(qw, "float16"))
    assert len(cupy.launches) == 1


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("make", [weight, act_order])
def test_dequant_path(cupy, rng, make, with_bias):
    qw = make()
    x = rng.standard_normal((5, 64)).astype(np.float16)
    bias = rng.standard_normal(24).astype(np.float16) if with_bias else None
    tune(Problem.of(5, qw), DequantConfig(), "dequant")
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy(), None if bias is None else cupy.asarray(bias))
    [launched] = cupy.launches
    assert launched.entry.startswith("cupyq_dequant")
    limit = 2 * reference.bound(x, qw, np.float16, bias, scaled_weights=True)  # rounds before the bias, too
    result = reference.compare(y.get(), reference.matmul(x, qw, bias), limit)
    assert result.ok, result


@pytest.mark.parametrize(
    ("card", "scheme"), [("a100-sxm", "w8a8-fp8"), ("a100-sxm", "w8a8-int8"), ("a100-sxm", "w8a8-fp8-block")]
)
def test_where_no_kernel_runs(monkeypatch, tmp_path, rng, card, scheme):
    cupy = install(monkeypatch, tmp_path, (card,))
    if scheme == "w8a8-int8":  # sums that could overflow 32 bits
        monkeypatch.setattr("cupyq.kernels.w8a8.SAFE_K", 100)
    qw = weight(scheme, 200, 24)
    x = rng.standard_normal((3, 200)).astype(np.float16)
    bias = np.ones(24, np.float16)
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy(), cupy.asarray(bias))
    check(x, qw, y, bias)
    codes, x_scale = reference.quantize_activations(x, scheme)
    again = cupyq.matmul(
        cupy.asarray(codes.view(np.int8 if scheme == "w8a8-int8" else np.uint8)),
        qw.to_cupy(),
        cupy.asarray(bias),
        x_scale=cupy.asarray(x_scale),
    )
    assert np.array_equal(again.get(), y.get())
    assert not [launched for launched in cupy.launches if "w8a8" in launched.entry]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_on_the_gpu_equals_packing_on_the_host(cupy, rng, scheme):
    w = rng.standard_normal((100, 40)).astype(np.float32)
    there, here = cupyq.quantize(cupy.asarray(w), scheme, clip="search"), cupyq.quantize(w, scheme, clip="search")
    assert there.device == 0
    for name in ("packed", "scales"):
        assert getattr(there, name).get().tobytes() == getattr(here, name).tobytes()
    codes, scales, _ = cupyq.unpack(there)
    assert np.array_equal(codes.get().view(np.uint8), cupyq.unpack(here)[0].view(np.uint8))
    again = cupyq.pack(codes, scales, scheme=scheme)
    assert again.packed.get().tobytes() == here.packed.tobytes()


# --- where a launch goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_on_the_device_of_x_whichever_is_current(dry, scheme):  # c5
    with dry.cuda.Device(1):
        x, qw = dry.zeros((3, 64), np.float16), weight(scheme).to_cupy()
    assert qw.device == 1
    y = cupyq.matmul(x, qw)
    assert y.device.id == 1
    assert {launched.device for launched in dry.launches} == {1}
    assert dry.cuda.runtime.getDevice() == 0
    z = cupyq.plan(qw, 3)(x)
    assert z.device.id == 1


def test_moving_a_weight(dry):
    qw = weight()
    zero, one = qw.to_cupy(0), qw.to_cupy(1)
    assert (zero.device, one.device) == (0, 1)
    assert zero.to_cupy(0) is zero
    assert zero.to_cupy() is zero
    assert zero.to_cupy(1).device == 1
    assert zero.to_numpy().packed.tobytes() == qw.packed.tobytes()
    assert "on CUDA device 1" in repr(one)


def test_mixed_places_are_an_error(dry):  # c5
    x, qw = dry.zeros((3, 64), np.float16), weight()
    with pytest.raises(DeviceMismatch, match=r"qw lives in host memory \(NumPy\) but x lives on CUDA device 0"):
        cupyq.matmul(x, qw)
    with pytest.raises(DeviceMismatch, match="qw lives on CUDA device 1 but x lives on CUDA device 0"):
        cupyq.matmul(x, qw.to_cupy(1))
    with pytest.raises(ValueError, match="bias lives in host memory"):
        cupyq.matmul(x, qw.to_cupy(), np.ones(24, np.float16))
    with pytest.raises(DeviceMismatch, match="out lives in host memory"):
        cupyq.matmul(x, qw.to_cupy(), out=np.ones((3, 24), np.float16))
    with pytest.raises(DeviceMismatch, match="lives"):
        cupyq.matmul(np.zeros((3, 64), np.float16), qw.to_cupy())
    with pytest.raises(DeviceMismatch, match="scales lives"):
        cupyq.QuantizedWeight("w4a16", 64, 24, 128, True, qw.to_cupy().packed, qw.scales)
    assert dry.launches == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_on_the_current_stream(dry, scheme):  # c4
    x, qw = dry.zeros((3, 64), np.float16), weight(scheme).to_cupy()
    plan = cupyq.plan(qw, 3)
    stream = dry.cuda.Stream()
    with stream:
        cupyq.matmul(x, qw)
        plan(x)
    cupyq.matmul(x, qw)
    per_call = len(dry.launches) // 3
    assert [launched.stream for launched in dry.launches] == [stream.ptr] * 2 * per_call + [0] * per_call


def test_streams_do_not_share_scratch(dry):  # c3
    qw = weight(k=512).to_cupy()
    tune(Problem.of(3, qw), SPLIT)
    x = dry.zeros((3, 512), np.float16)
    plan = cupyq.plan(qw, 3)
    streams = [dry.cuda.Stream() for _ in range(2)]
    for stream in streams * 2:
        with stream:
            plan(x)
            cupyq.matmul(x, qw)
    with dry.cuda.Device(1):
        there, weight_there = dry.zeros((3, 512), np.float16), qw.to_cupy(1)
        cupyq.matmul(there, weight_there)
    used = {}
    for launched in dry.launches:
        arrays = [a for a in launched.args if not isinstance(a, np.generic)]
        own = {a.data.ptr for a in arrays if a.dtype == np.uint32 and a.ndim == 1}
        used.setdefault((launched.device, launched.stream), set()).update(own)
    assert [len(own) for own in used.values()] == [2, 2, 2]  # sums and arrivals, made once a stream
    assert len(set.union(*used.values())) == 6


def test_threads_do_not_share_the_per_thread_stream(dry):  # c3
    dry._streams[0] = 2  # cudaStreamPerThread
    found, together = [], threading.Barrier(3)

    def work():
        together.wait()
        found.append(launch.scratch.get("partials", (100,), np.uint32))
        together.wait()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({a.data.ptr for a in found}) == 3


def test_scratch_grows_and_stays(dry):
    small = launch.scratch.get("partials", (10,), np.uint32)
    assert launch.scratch.get("partials", (5, 2), np.uint32).data.ptr == small.data.ptr
    large = launch.scratch.get("partials", (1000,), np.uint32, zero=True)
    assert (large.get() == 0).all()
    assert launch.scratch.get("partials", (10,), np.uint32).data.ptr == large.data.ptr
    assert launch.scratch.get("arrivals", (10,), np.uint32).data.ptr != large.data.ptr


def test_the_workspace_grows_and_starts_from_zero(dry):
    sums, arrivals = launch.scratch.workspace(100, 4)
    assert (arrivals.get() == 0).all()
    again = launch.scratch.workspace(50, 4)
    assert again[0] is sums
    assert again[1] is arrivals
    wide, more = launch.scratch.workspace(50, 9)
    assert (wide.size, more.size) == (100, 9)
    assert (more.get() == 0).all()
    assert launch.scratch.workspace(100, 9)[0] is wide


def pointers(launches):
    """Return the address of every array among the arguments of some launches."""
    return {a.data.ptr for launched in launches for a in launched.args if not isinstance(a, np.generic)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_captured_launch_has_memory_of_its_own(dry, scheme):  # c3, c4
    qw = weight(scheme, k=512)
    problem = Problem.of(3, qw)  # either way it needs scratch memory: partial sums, or codes
    tune(problem, SPLIT if scheme == "w4a16" else kernels.default(problem, devices.live(), fused=False))
    qw = qw.to_cupy()
    x = dry.zeros((3, 512), np.float16)
    given = {qw.packed.data.ptr, qw.scales.data.ptr, x.data.ptr}
    stream, results, used = dry.cuda.Stream(), [], []
    with stream:
        for capture in (False, True, True):
            if capture:
                stream.begin_capture()
            before = len(dry.launches)
            results.append(cupyq.matmul(x, qw))
            used.append(pointers(dry.launches[before:]) - given)
            if capture:
                stream.end_capture()
    eager, *captured = (own - {y.data.ptr} for own, y in zip(used, results, strict=True))
    kept = {a.data.ptr for a in launch.scratch._captured if a is not None and not isinstance(a, np.generic)}
    for own in captured:
        assert own
        assert own <= kept
        assert not own & eager
    assert not captured[0] & captured[1]


@pytest.mark.parametrize("make", [weight, act_order])
def test_what_a_captured_launch_makes_on_the_way_is_kept(dry, make):
    qw = make()
    tune(Problem.of(3, qw), DequantConfig(), "dequant")
    qw, wide, bias = qw.to_cupy(), dry.zeros((6, 64), np.float16), dry.zeros((48,), np.float16)
    stream = dry.cuda.Stream()
    with stream:
        stream.begin_capture()
        cupyq.matmul(wide[::2], qw, bias[::2])
        stream.end_capture()
    [launched] = dry.launches  # of the kernel that stands in: CuPy cannot capture cuBLAS
    kept = [a for a in launch.scratch._captured if isinstance(a, dry.ndarray)]
    made = pointers([launched]) - {qw.packed.data.ptr, qw.scales.data.ptr}
    assert made
    assert made <= {a.data.ptr for a in kept}
    assert {(24,), (3, 24), (3, 64)} <= {a.shape for a in kept}


# --- plans and launchers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plan_is_matmul(cupy, rng, scheme, dtype):
    qw = weight(scheme).to_cupy()
    x, bias = rng.standard_normal((2, 3, 64)).astype(dtype), rng.standard_normal(24).astype(dtype)
    plan = cupyq.plan(qw, 6, dtype, bias=cupy.asarray(bias))
    want = cupyq.matmul(cupy.asarray(x), qw, cupy.asarray(bias)).get()
    assert np.array_equal(plan(cupy.asarray(x)).get(), want)
    assert np.array_equal(plan(cupy.asarray(x.reshape(6, 64))).get(), want.reshape(6, 24))
    out = cupy.empty((6, 24), dtype)
    assert plan(cupy.asarray(x.reshape(6, 64)), out=out) is out
    assert np.array_equal(out.get(), want.reshape(6, 24))
    turned = cupy.asarray(np.ascontiguousarray(x.reshape(6, 64).T)).T
    assert np.array_equal(plan(turned).get(), want.reshape(6, 24))


def test_plan_refuses_other_x(dry):
    plan = cupyq.plan(weight().to_cupy(), 4)
    with pytest.raises(ShapeError, match="x must have 4 rows"):
        plan(dry.zeros((5, 64), np.float16))
    with pytest.raises(ShapeError, match=r"x must have shape \(\.\.\., 64\)"):
        plan(dry.zeros((4, 63), np.float16))
    with pytest.raises(DTypeError, match="x must be float16, as the plan was made for, got bfloat16"):
        plan(dry.zeros((4, 64), BFLOAT16))
    with pytest.raises(DeviceMismatch):
        plan(np.zeros((4, 64), np.float16))
    with dry.cuda.Device(1):
        there = dry.zeros((4, 64), np.float16)
    with pytest.raises(DeviceMismatch):
        plan(there)
    assert dry.launches == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plan_allocates_nothing_but_the_result(dry, scheme):
    qw = weight(scheme, k=512)
    if scheme == "w4a16":
        tune(Problem.of(3, qw), SPLIT)
    plan = cupyq.plan(qw.to_cupy(), 3)
    x, out = dry.zeros((3, 512), np.float16), dry.zeros((3, 24), np.float16)
    plan(x)
    before = dry.allocations
    plan(x)
    assert dry.allocations == before + 1
    plan(x, out=out)
    assert dry.allocations == before + 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_call_looks_nothing_up(dry, monkeypatch, scheme):
    qw = weight(scheme).to_cupy()
    x = dry.zeros((3, 64), np.float16)
    cupyq.matmul(x, qw)

    def forbidden(*args, **kwargs):
        raise AssertionError("looked up again")

    for target in ("cupyq.dispatch.choose", "cupyq.kernels.call", "cupyq.compiler.load"):
        monkeypatch.setattr(target, forbidden)
    cupyq.matmul(x, qw)


def test_launchers_go_with_their_weight(dry):
    qw = weight().to_cupy()
    cupyq.matmul(dry.zeros((3, 64), np.float16), qw)
    key = id(qw)
    assert key in launch._launchers
    del qw
    gc.collect()
    assert key not in launch._launchers


def test_new_rows_count_after_reset(dry):
    qw = weight(k=512).to_cupy()
    x = dry.zeros((3, 512), np.float16)
    cupyq.matmul(x, qw)
    tune(Problem.of(3, qw), SPLIT)
    cupyq.matmul(x, qw)
    assert dry.launches[-1].grid[0] == SPLIT.launch(Problem.of(3, qw)).grid[0]
    assert cupyq.plan(qw, 3).choice.tuned


def test_untuned_warns_once_with_the_command(dry):
    qw = weight().to_cupy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in (1, 2, 300):
            cupyq.matmul(dry.zeros((m, 64), np.float16), qw)
    [only] = [w for w in caught if w.category is dispatch.UntunedWarning]
    assert str(only.message).endswith("python -m cupyq.tune --op w4a16 --k 64 --n 24 --group-sizes=128")


def test_explain_looks_where_the_weight_is(dry):
    qw = weight().to_cupy(1)
    text = str(cupyq.explain(3, qw))
    assert "CUDA device 1" in text
    assert cupyq.explain(3, qw).choice.device.live


def test_large_shared_memory_is_asked_for_on_each_device(dry):  # c6
    config = W4A16Config(block_m=64, strips=1, warps_n=2, warps_k=2, warp_k=64, stages=6)
    qw = weight(k=1024, n=256)
    problem = Problem.of(64, qw)
    assert kernels.check(config, problem, devices.live(0)) is None
    assert config.launch(problem).shared_bytes > 48 * 1024
    tune(problem, config)
    for device in (0, 1, 0):
        with dry.cuda.Device(device):
            cupyq.matmul(dry.zeros((64, 1024), np.float16), qw.to_cupy(device))
    assert [launched.device for launched in dry.launches] == [0, 1, 0]
    assert {launched.shared for launched in dry.launches} == {config.launch(problem).shared_bytes}


def test_huge_m_fits_the_grid(dry):  # b4
    qw = weight(k=32, n=8).to_cupy()
    for m in (65_537, 1_048_561):
        cupyq.matmul(dry.zeros((m, 32), np.float16), qw)
    assert all(launched.grid[1:] == (1, 1) for launched in dry.launches)


def test_the_fake_is_strict(dry):
    config, problem = SPLIT, Problem("w4a16", 3, 24, 512)
    kernel = compiler.load(config, problem)
    count, first_int = len(kernel.params), kernel.params.index(4)
    with pytest.raises(Misuse, match=f"takes {count} arguments, got 2"):
        kernel((1, 1, 1), (64, 1, 1), (np.int32(1), np.int32(2)))
    with pytest.raises(Misuse, match="neither a CuPy array nor a typed scalar"):
        kernel((1, 1, 1), (64, 1, 1), (1.0,) * count)
    with pytest.raises(Misuse, match=f"argument {first_int} has 8 bytes, the parameter 4"):
        kernel((1, 1, 1), (64, 1, 1), (np.uint64(0),) * count)
    with pytest.raises(Misuse, match="lives on device 1, the launch is on 0"):
        kernel((1, 1, 1), (64, 1, 1), (dry.wrap(np.zeros(4), 1),) * count)
    with pytest.raises(Misuse, match="grid"):
        kernel((0, 1, 1), (64, 1, 1), ())
    with dry.cuda.Device(1), pytest.raises(Misuse, match="loaded on device 0"):
        kernel((1, 1, 1), (64, 1, 1), ())
    with pytest.raises(Misuse, match="bytes of shared memory"):
        kernel((1, 1, 1), (64, 1, 1), (), shared_mem=2**18)
