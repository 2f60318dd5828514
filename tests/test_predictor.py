"""The predictor: its formula against cases worked out by hand, its constants against published curves."""

import dataclasses
import importlib
import importlib.util
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyq import devices, kernels, predictor
from cupyq.errors import ArgumentError, IllegalConfig
from cupyq.kernels import Problem, W4A16Config, W8A8Config
from cupyq.predictor import Profile, dense, occupancy, predict, predict_profile
from cupyq.predictor.constants import CONSTANTS
from cupyq.predictor.model import mma_operations, soft_max
from cupyq.predictor.published import curves, flush_us, marlin_profile, predicted_curve

ROOT = Path(__file__).resolve().parents[1]
A100, H100, L4 = devices.get("a100-sxm"), devices.get("h100-sxm"), devices.get("l4")
KERNEL_DEVICES = [devices.get(name) for name in devices.names() if devices.get(name).cc >= (8, 0)]


@pytest.fixture(scope="module")
def benchmark_script():
    spec = importlib.util.spec_from_file_location("prediction_benchmark", ROOT / "benchmarks" / "prediction.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- occupancy, after the occupancy calculator's rules ---


@pytest.mark.parametrize(
    ("device", "block", "registers", "shared", "ctas"),
    [
        ("a100-sxm", 256, 32, 0, 8),  # threads: 2048 / 256
        ("a100-sxm", 256, 128, 0, 2),  # registers: 65536 / (128 * 256)
        ("a100-sxm", 256, 129, 0, 1),  # 129 are handed out as 136 a thread
        ("a100-sxm", 128, 32, 96 * 1024, 1),  # shared: 164 KiB / 97 KiB
        ("a100-sxm", 128, 32, 81 * 1024, 2),  # 2 x 82 KiB fit exactly
        ("a100-sxm", 32, 16, 0, 32),  # resident blocks
        ("a10", 32, 16, 0, 16),
        ("a10", 128, 40, 0, 12),  # threads: 1536 / 128
        ("a10", 128, 32, 100 * 1024, 0),  # more than one block may have
        ("h100-sxm", 128, 255, 227 * 1024, 1),
    ],
)
def test_occupancy(device, block, registers, shared, ctas):
    assert occupancy(devices.get(device), block, registers, shared) == ctas


# --- the formula ---

STREAMING = Profile(grid=108, block=256, registers=96, shared_bytes=98304, dram_bytes=1e9, stage_bytes=24576, stages=4)


def test_a_kernel_that_only_streams_takes_the_time_of_its_bytes():
    found = predict_profile(STREAMING, A100)
    ideal = 1e9 / 2039e3
    assert found.bound == "dram"
    assert ideal / CONSTANTS.stream_share(A100) <= found.parts["dram"] < 1.02 * ideal / CONSTANTS.stream_share(A100)
    assert found.time_us == pytest.approx(found.parts["launch"] + found.parts["fill"] + found.parts["dram"])


def test_littles_law_bounds_bandwidth_by_the_bytes_in_flight():
    starved = dataclasses.replace(STREAMING, stage_bytes=1024.0, stages=2)
    in_flight = 108 * 1024 / CONSTANTS.dram_latency_us  # bytes a microsecond
    assert predict_profile(starved, A100).parts["dram"] == pytest.approx(1e9 / in_flight, rel=0.01)


def test_a_wave_with_one_cta_more_doubles_the_work_of_the_busiest_sm():
    work = {"mma": {"m16n8k16:float16": 1e6}, "shared_bytes": 98304, "dram_bytes": 1.0}
    full = predict_profile(dataclasses.replace(STREAMING, grid=108, **work), A100)
    spilled = predict_profile(dataclasses.replace(STREAMING, grid=109, **work), A100)
    assert spilled.parts["tensor"] / full.parts["tensor"] == pytest.approx(2 * 108 / 109)


def test_tensor_time_is_operations_over_the_reachable_rate():
    profile = dataclasses.replace(STREAMING, mma={"m16n8k16:float16": 1e6}, dram_bytes=1.0)
    ideal = 1e6 * 4096 / 312e6
    assert predict_profile(profile, A100).parts["tensor"] == pytest.approx(ideal / (0.87 * CONSTANTS.fused_tensor))
    int8 = dataclasses.replace(profile, mma={"m16n8k32:int8": 1e6})
    assert predict_profile(int8, A100).parts["tensor"] == pytest.approx(ideal / (0.87 * CONSTANTS.fused_tensor))


def test_pipes_and_issue_slots():
    counts = {"lop3": 64.0, "int_math": 64.0, "half2_math": 128.0, "fp32_math": 32.0, "move": 1e9}
    scaled = {name: 108e4 * count for name, count in counts.items()}
    found = predict_profile(dataclasses.replace(STREAMING, warp_instructions=scaled, dram_bytes=1.0), A100)
    clocks = {name: found.parts[name] * A100.clock_ghz * 1e3 for name in ("alu", "issue")}
    # an SM's share is 1e4 times the counts: 128 integer instructions on 64 lanes; 288 issued 4 a clock, moves none
    assert clocks == pytest.approx({"alu": 1e4 * 128 * 32 / 64, "issue": 1e4 * 288 / 4})


def test_two_warps_cannot_keep_four_schedulers_busy():
    counts = {"other": 1e8}
    few, many = (
        predict_profile(dataclasses.replace(STREAMING, block=block, warp_instructions=counts), A100).parts["issue"]
        for block in (64, 256)
    )
    assert few / many == pytest.approx(4)


def test_the_busiest_cta_may_be_given():
    even = predict_profile(dataclasses.replace(STREAMING, shared_traffic=1e9), A100).parts["shared"]
    uneven = dataclasses.replace(STREAMING, shared_traffic=1e9, busiest=2 / 108)
    assert predict_profile(uneven, A100).parts["shared"] == pytest.approx(2 * even)


def test_a_chain_of_reductions_adds_up():
    chained = dataclasses.replace(STREAMING, reduce_steps=4, reduce_bytes=65536.0)
    added = predict_profile(chained, A100).time_us - predict_profile(STREAMING, A100).time_us
    step = CONSTANTS.reduce_step_us + 65536 / (CONSTANTS.reduce_bytes_per_clock * 1410)
    assert added == pytest.approx(4 * step)


def test_soft_max_lies_between_the_maximum_and_the_sum():
    assert soft_max([3.0, 4.0], 2) == pytest.approx(5)
    assert soft_max([], 2) == soft_max([0.0], 2) == 0
    assert soft_max([1e300, 1e300], 4) == pytest.approx(2**0.25 * 1e300)


def test_operations_of_an_mma():
    assert (mma_operations("m16n8k16"), mma_operations("m64n256k16")) == (4096, 524288)
    with pytest.raises(ArgumentError, match="16x8x16"):
        mma_operations("16x8x16")


def test_what_cannot_run_is_an_error():
    with pytest.raises(IllegalConfig, match="rooflines only"):
        predict_profile(STREAMING, devices.get("tpu-v5e"))
    with pytest.raises(ArgumentError, match="does not fit on an SM of a10"):
        predict_profile(dataclasses.replace(STREAMING, shared_bytes=120_000), devices.get("a10"))


# --- published curves ---


def test_thirteen_curves_are_published_of_marlin():
    assert len(curves()) == 13
    assert len(curves(None)) == 17
    assert {curve.device.name for curve in curves() if not curve.flushed} == {"a10", "a10@0.885GHz"}


def test_held_out_curves_are_predicted_within_the_target(benchmark_script):
    _, held = benchmark_script.split(benchmark_script.FITTED)
    assert len(held) == 8
    median, nine_in_ten, _ = benchmark_script.summary(held, CONSTANTS)
    assert median <= 0.10
    assert nine_in_ten <= 0.22


def test_crossover_is_predicted_within_one_band():
    for curve in curves():
        real, guess = curve.crossover(), curve.crossover(predicted_curve(curve))
        # a curve that never falls below 1 crosses in the band behind its last batch, or later
        bands = [math.log2(batch or 2 * curve.batches[-1]) for batch in (real, guess)]
        assert abs(bands[0] - bands[1]) <= 1, curve.label


def test_choosing_by_the_prediction_costs_little(benchmark_script):
    mean, most = benchmark_script.path_regret(curves(), CONSTANTS)
    assert mean < 0.005
    assert most < 0.06


@pytest.mark.parametrize("device", ["a100-sxm", "h100-sxm"])
def test_marlins_reduction_chain_makes_64_tokens_its_worst_batch_on_small_products(device):
    """The published dip at M = 64, and the recovery at 128, come from how many CTAs share a column of tiles."""
    spec = devices.get(device)
    chains = {m: marlin_profile(m, 4096, 4096, spec).reduce_steps for m in (16, 64, 128)}
    assert chains[64] > chains[128] > 0
    assert chains[64] > chains[16]
    [curve] = [c for c in curves() if c.device.name == device and c.n == 4096]
    guess = dict(zip(curve.batches, predicted_curve(curve), strict=True))
    assert min(guess, key=guess.get) == 64


def test_marlins_work_scales_with_the_weights():
    small, large = (marlin_profile(16, n, n, A100) for n in (4096, 16384))
    assert large.mma["m16n8k16:float16"] == 16 * small.mma["m16n8k16:float16"] == 16 * 131072
    assert large.dram_bytes == pytest.approx(16 * small.dram_bytes, rel=0.1)
    with pytest.raises(ArgumentError, match="up to 128"):
        marlin_profile(129, 4096, 4096, A100)


def test_a_flush_costs_no_more_than_the_dirty_lines_it_left():
    assert flush_us(1e12, A100) == pytest.approx(CONSTANTS.flush_share * A100.l2_bytes / 2039e3)
    assert flush_us(1e6, A100) == pytest.approx(CONSTANTS.flush_share * 1e6 / 2039e3)


@pytest.mark.slow
def test_the_constants_are_what_the_fit_gives(benchmark_script):
    fitted, _ = benchmark_script.split(benchmark_script.FITTED)
    refitted = benchmark_script.with_values(benchmark_script.fit(fitted))
    for field in dataclasses.fields(CONSTANTS):
        committed, found = getattr(CONSTANTS, field.name), getattr(refitted, field.name)
        if isinstance(committed, float):
            assert found == pytest.approx(committed, rel=0.02), field.name
        else:
            assert dict(found) == pytest.approx(dict(committed), rel=0.02), field.name


def test_the_page_shows_what_the_benchmark_prints(benchmark_script):
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    assert benchmark_script.table(CONSTANTS) in page
    for curve in curves():
        assert f"](img/{benchmark_script.image_name(curve)})" in page


# --- our own kernels ---


@st.composite
def launches(draw):
    device = draw(st.sampled_from(KERNEL_DEVICES))
    problem = Problem(
        "w4a16",
        draw(st.integers(1, 600)),
        16 * draw(st.integers(1, 1024)),
        64 * draw(st.integers(1, 256)),
        draw(st.sampled_from(kernels.problem.GROUP_SIZES)),
        draw(st.booleans()),
        draw(st.sampled_from(["float16", "bfloat16"])),
    )
    strips, warps, warp_k, stages, split, scale = draw(
        st.tuples(
            st.sampled_from([1, 2, 4]),
            st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (8, 1)]),
            st.sampled_from([64, 128]),
            st.sampled_from([2, 3, 4]),
            st.sampled_from([1, 2, 4]),
            st.sampled_from(["sums", "weights"]),
        )
    )
    config = W4A16Config(draw(st.sampled_from([8, 16, 32, 64])), strips, *warps, warp_k, stages, split, scale)
    legal = kernels.check(config, problem, device) is None
    return config if legal else kernels.default(problem, device), problem, device


@settings(max_examples=60, deadline=None)
@given(launches())
def test_no_prediction_beats_the_roofline(launch):
    config, problem, device = launch
    found = predict(config, problem, device)
    weights = problem.n * problem.k / 2
    compute = 2.0 * problem.m * problem.n * problem.k / (device.tensor_tops("float16") * 1e6)
    assert found.source == "predicted"
    assert found.time_us >= weights / (device.dram_gbps * 1e3)
    assert found.time_us >= compute / CONSTANTS.clock_factor(device)
    assert all(part >= 0 and math.isfinite(part) for part in found.parts.values())


@pytest.mark.parametrize("device", ["a100-sxm", "h200-sxm", "l4", "rtx-5090"])
def test_paths_rank_as_bytes_do_at_one_token_and_as_tensor_rates_do_at_many(device):
    problem = Problem("w4a16", 1, 8192, 8192)
    one = {path: predict(path, problem, device).time_us for path in predictor.PATHS}
    assert one["fused"] < one["fp16"] / 2 < one["fp16"] < one["dequant"]
    many = {path: predict(path, problem.with_m(8192), device).time_us for path in predictor.PATHS}
    assert many["fp16"] < many["dequant"] < 1.25 * many["fp16"]
    assert many["fp16"] < many["fused"]


def test_dequantizing_first_moves_four_and_a_half_bytes_a_weight():
    problem = Problem("w4a16", 1, 16384, 16384, -1)
    extra = predict("dequant", problem, A100).time_us - predict("fp16", problem, A100).time_us
    weights = 16384.0**2
    moved = weights * 2.5 / (2039e3 * CONSTANTS.dense_stream)
    assert extra == pytest.approx(moved + CONSTANTS.graph_launch_us + CONSTANTS.dram_latency_us, rel=0.01)


def test_w8a8_counts_the_pass_over_the_activations():
    problem = Problem("w8a8-int8", 512, 4096, 4096)
    config = kernels.default(problem, A100)
    both = predict(config, problem, A100)
    assert both.parts["quantize"] == pytest.approx(predict(kernels.QuantizeActivationsConfig(), problem, A100).time_us)
    alone = predict_profile(predictor.profile(config, problem, A100), A100)
    assert both.time_us == pytest.approx(alone.time_us + both.parts["quantize"])


@pytest.mark.parametrize("op", ["w8a8-int8", "w8a8-fp8"])
def test_few_tokens_are_quantized_by_the_kernel_itself(op):
    def faster(m):
        problem = Problem(op, m, 4096, 4096)
        one, two = (predict(kernels.default(problem, H100, fused=fused), problem, H100) for fused in (True, False))
        assert "quantize" in two.parts
        assert "quantize" not in one.parts
        return one.time_us < two.time_us

    assert faster(1)
    assert faster(2)
    assert not faster(16)


def test_what_a_fused_prologue_costs_is_counted():
    config = W8A8Config(8, 8, 4, 1, 4, 64, 4, fused=True)
    few, many = (Problem("w8a8-int8", m, 4096, 4096) for m in (1, 8))
    assert config.prologue(few)[0] < config.prologue(many)[0]
    parts = predict(config, many, A100).parts
    assert parts["prologue"] > 0
    plain = predict(dataclasses.replace(config, fused=False), many, A100)
    assert plain.parts["prologue"] == 0
    kernel = plain.time_us - plain.parts["quantize"]
    assert predict(config, many, A100).time_us > kernel + parts["prologue"] - 0.1


def test_promotions_cost_an_addition_a_sum():
    problem, config = Problem("w8a8-fp8", 512, 4096, 4096), W8A8Config(128, 64, 2, 4, 1, 128, 2)
    counts = {
        k: predictor.profile(dataclasses.replace(config, promote_k=k), problem, L4).warp_instructions["fp32_math"]
        for k in (0, 128, 256)
    }
    assert counts[0] == 0
    assert counts[128] == 2 * counts[256]
    assert counts[128] == 512 * 4096 * 32 / 32  # an addition for each sum and 128 k
    blocks = predictor.profile(config, Problem("w8a8-fp8-block", 512, 4096, 4096), L4)
    assert blocks.warp_instructions["fp32_math"] > counts[128]
    hopper = predictor.profile(config, Problem("w8a8-fp8-block", 512, 4096, 4096), H100)
    assert set(hopper.mma) == {"m16n8k16:float16"}


def test_fp8_runs_at_the_fp16_rate_where_mma_sync_has_no_fp8():
    config = W8A8Config(block_m=64, warp_tokens=32)
    hopper, ada = (predictor.profile(config, Problem("w8a8-fp8", 512, 4096, 4096), device).mma for device in (H100, L4))
    assert set(hopper) == {"m16n8k16:float16"}
    assert set(ada) == {"m16n8k32:fp8"}
    assert hopper["m16n8k16:float16"] == 2 * ada["m16n8k32:fp8"]


def test_mma_counts_follow_from_the_padded_product():
    problem = Problem("w4a16", 17, 4096, 4096)
    config = W4A16Config(block_m=32)
    padded = 2.0 * 32 * 4096 * 4096
    assert predictor.profile(config, problem, A100).mma == {"m16n8k16:float16": padded / 4096}


def test_the_compiled_kernel_decides_registers_and_spills():
    class Compiled:
        registers, spill_bytes = 255, 0

    class Spilling(Compiled):
        spill_bytes = 512

    problem = Problem("w4a16", 8, 4096, 8192)
    config = W4A16Config(block_m=8, strips=1, warps_k=2, stages=2, split_k=8)
    plain, fat, spilling = (predict(config, problem, A100, compiled=c) for c in (None, Compiled(), Spilling()))
    assert predictor.profile(config, problem, A100, Compiled()).registers == 255
    assert plain.time_us < fat.time_us < spilling.time_us


def test_splitting_k_helps_when_sms_idle_and_not_when_they_do_not():
    narrow, wide = Problem("w4a16", 1, 1024, 8192), Problem("w4a16", 1, 32768, 8192)
    config = W4A16Config(block_m=8)
    split = dataclasses.replace(config, split_k=4)
    assert predict(split, narrow, A100).time_us < predict(config, narrow, A100).time_us
    assert predict(split, wide, A100).time_us > predict(config, wide, A100).time_us


def test_stripes_share_the_work_evenly():
    problem = Problem("w4a16", 16, 4096, 4096)
    tiles = W4A16Config(block_m=16)
    striped = dataclasses.replace(tiles, ctas=108)
    whole, equal = (predictor.profile(config, problem, A100) for config in (tiles, striped))
    assert (whole.grid, equal.grid) == (64, 108)
    assert equal.serial_stages == math.ceil(64 * 16 / 108)
    assert equal.mma == whole.mma
    assert equal.busiest == pytest.approx(10 / 1024)
    assert predict(striped, problem, A100).time_us < predict(tiles, problem, A100).time_us


@pytest.mark.parametrize(("op", "bits"), [("w2a16", 2), ("w4a16", 4), ("w8a16", 8)])
def test_weight_traffic_follows_the_bits(op, bits):
    if op not in kernels.problem.OPS:
        pytest.skip(f"{op} is no op of this version")
    problem = Problem(op, 1, 8192, 8192)
    moved = predictor.profile(W4A16Config(block_m=8, warp_k=128), problem, A100).dram_bytes
    assert moved == 8192 * 8192 * (bits + 16 / 128) / 8 + 2 * 8192 + 2 * 8192


def test_no_tokens_take_no_time():
    empty = Problem("w4a16", 0, 4096, 4096)
    assert [predict(what, empty, A100).time_us for what in ("fused", "dequant", "fp16", W4A16Config())] == [0] * 4


def test_a_prediction_says_so():
    text = str(predict("fp16", Problem("w4a16", 1, 4096, 4096), "a10"))
    assert text.startswith("predicted ")
    assert "bound by dram" in text


def test_errors_of_predict():
    problem = Problem("w4a16", 1, 4096, 4096)
    with pytest.raises(ArgumentError, match=r"'cublas'.*fused, dequant, fp16"):
        predict("cublas", problem, A100)
    with pytest.raises(IllegalConfig, match=r"cannot run .* on a10: block_m=7"):
        predict(W4A16Config(block_m=7), problem, "a10")
    with pytest.raises(IllegalConfig, match="rooflines only"):
        predict("fp16", problem, "mi300x")
    with pytest.raises(ArgumentError, match="DequantConfig"):
        predictor.profile(kernels.DequantConfig(), problem, A100)


def test_a_thousand_configs_are_told_apart():
    problem = Problem("w4a16", 16, 4096, 14336)
    some = list(kernels.configs(problem, H100))[:1000]
    assert len(some) == 1000
    assert len({predict(config, problem, H100).time_us for config in some}) > 500


def test_cublas_shows_wave_quantization():
    one_wave, two_waves = (dense(4096, n, 4096, A100).parts["tensor"] for n in (108 * 4 * 4, 108 * 4 * 4 + 64))
    assert two_waves > one_wave
    assert dense(1, 8192, 8192, A100).time_us == pytest.approx(dense(16, 8192, 8192, A100).time_us, rel=0.01)


# --- instruction counts against compiled kernels ---


def main_loop(cubin: bytes, folder: Path) -> list[str]:
    """Return the SASS instructions of the innermost loop that has most tensor instructions."""
    tool = next(iter(folder_of_nvdisasm().rglob("nvdisasm")))
    (folder / "kernel.cubin").write_bytes(cubin)
    listing = subprocess.run([tool, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
    loops = []
    for end, text in enumerate(code):
        back = re.search(r"BRA.*?(\.L_x_\d+)", text)
        if back and labels.get(back[1], len(code)) <= end:
            body = code[labels[back[1]] : end + 1]
            loops.append((sum("MMA" in part for part in body), body))
    return max(loops, key=lambda loop: loop[0])[1]


def folder_of_nvdisasm() -> Path:
    nvidia = pytest.importorskip("nvidia", reason="the nvdisasm wheel is not installed")
    folder = Path(next(iter(nvidia.__path__)))
    if not any(folder.rglob("nvdisasm")):
        pytest.skip("the nvdisasm wheel is not installed")
    return folder


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize(
    "config",
    [
        W4A16Config(block_m=8),
        W4A16Config(block_m=16),
        W4A16Config(block_m=16, strips=2, warps_n=2, warps_k=2, warp_k=128),
        W4A16Config(block_m=64, strips=2, warps_n=4, warps_k=1, scale="weights"),
    ],
    ids=str,
)
def test_closed_form_counts_match_the_compiled_main_loop(config, group_size, tmp_path):
    compiler = pytest.importorskip("cupyq.compiler")
    folder_of_nvdisasm()
    problem = Problem("w4a16", 16, 4096, 4096, group_size)
    compiled = compiler.compile_kernel(config, problem, arch="sm_80")
    body = main_loop(compiled.cubin, tmp_path)
    profile = predictor.profile(config, problem, A100)
    of_stage = profile.grid * profile.serial_stages * profile.block / 32
    once = predictor.fused.epilogue_instructions(config, config.strips * config.block_m // 8) * profile.grid
    counted = (sum(profile.warp_instructions.values()) - once) / of_stage
    stages = sum("HMMA" in text for text in body) / (profile.mma["m16n8k16:float16"] / of_stage)  # unrolled?
    assert counted * stages == pytest.approx(len(body), rel=0.15)
    assert profile.registers == pytest.approx(compiled.registers, rel=0.25)


def test_arrays_are_not_needed():
    assert np.isfinite(predict("fused", Problem("w4a16", 1, 4096, 4096), A100).time_us)


@pytest.mark.parametrize(
    ("op", "name", "config"),
    [
        ("w8a8-int8", "a100-sxm", W8A8Config(128, 64, 4, 2, 1, 128, 3)),
        ("w8a8-int8", "a100-sxm", W8A8Config(64, 32, 2, 2, 1, 128, 4)),
        ("w8a8-int8", "a100-sxm", W8A8Config(8, 8, 4, 1, 4, 64, 4)),
        ("w8a8-int8", "a100-sxm", W8A8Config(8, 8, 4, 1, 4, 64, 4, fused=True)),
        ("w8a8-fp8", "l4", W8A8Config(128, 64, 2, 4, 1, 128, 2, promote_k=256)),
        ("w8a8-fp8", "l4", W8A8Config(128, 64, 2, 4, 1, 128, 2, promote_k=128)),
        ("w8a8-fp8-block", "l4", W8A8Config(128, 32, 4, 2, 1, 128, 3)),
        ("w8a8-fp8", "h100-sxm", W8A8Config(64, 32, 2, 2, 1, 128, 4)),
        ("w8a8-fp8-block", "h100-sxm", W8A8Config(64, 32, 2, 2, 1, 128, 4)),
    ],
    ids=str,
)
def test_closed_form_counts_match_the_compiled_w8a8_loop(op, name, config):
    compiler = pytest.importorskip("cupyq.compiler")
    folder_of_nvdisasm()
    device, problem = devices.get(name), Problem(op, 256, 4096, 4096)
    compiled = compiler.compile_kernel(config, problem, arch=device.arch)
    loop = importlib.import_module("cupyq.compiler.sass").main_loop(compiled.cubin)
    profile = predictor.profile(config, problem, device)
    fragments = config.strips * config.warp_tokens // 8
    once = predictor.fused.epilogue_instructions(config, fragments) + config.prologue(problem)[1]
    counted = sum(profile.warp_instructions.values()) - once * profile.grid
    assert counted / profile.warp_instructions["mma"] == pytest.approx(loop.instructions / loop.tensor, rel=0.15)
    assert profile.registers == pytest.approx(compiled.registers, rel=0.15)
