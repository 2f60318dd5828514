"""Roofline arithmetic against figures worked out by hand or published."""

import pytest

from cupyq import devices, roofline
from cupyq.errors import ArgumentError, IllegalConfig


def test_ideal_speedup_of_int4_in_groups_of_128():
    assert roofline.ideal_speedup(4, 128) == 16 / (4 + 16 / 128)
    assert round(roofline.ideal_speedup(), 2) == 3.88
    assert roofline.ideal_speedup(4, -1) == 4.0
    assert roofline.ideal_speedup(4, 32, zero_bits=8) == 16 / (4 + 24 / 32)


def test_naive_dequantization_moves_four_and_a_half_bytes_per_weight():
    assert roofline.naive_bytes_per_weight() == roofline.NAIVE_BYTES_PER_WEIGHT == 4.5


@pytest.mark.parametrize(
    ("name", "bits", "batch"),
    [
        ("h100-sxm", 16, 295.4),
        ("h100-sxm", 8, 147.7),
        ("h100-sxm", 4, 73.8),
        ("h100-sxm", 2, 36.9),
        ("mi300x", 16, 246.7),
        ("mi300x", 4, 61.7),
        ("rtx-4090", 16, 163.9),
        ("rtx-4090", 4, 41.0),
        ("tpu-v5e", 16, 240.5),
        ("tpu-v5e", 4, 60.1),
    ],
)
def test_ridge_batch(name, bits, batch):
    assert round(roofline.ridge_batch(devices.get(name), bits), 1) == batch


def test_share_of_the_traffic_that_scales_take():
    assert roofline.scale_overhead(16) == 0.20
    assert roofline.scale_overhead(128) == 16 / 528
    assert round(100 * roofline.scale_overhead(128), 1) == 3.0
    assert roofline.scale_overhead(-1) == 0.0


# hardware.md's "ideal" row for an A10 at boost, K x N = 18432 x 73728
@pytest.mark.parametrize(
    ("m", "speedup"), [(1, 3.88), (2, 3.88), (4, 3.87), (8, 3.87), (16, 3.86), (32, 3.85), (64, 3.27), (128, 1.65)]
)
def test_published_ideal_line_of_the_a10(m, speedup):
    assert roofline.ideal_speedup_at(devices.get("a10"), m, 73728, 18432) == pytest.approx(speedup, rel=0.01)


def test_speedup_is_one_beyond_the_fp16_ridge():
    assert roofline.ideal_speedup_at(devices.get("a10"), 1024, 73728, 18432) == 1.0


def test_intensity_counts_every_operand_once():
    # 2*64*4096*8192 operations over 4-bit weights, fp16 x and fp16 y
    moved = 4096 * 8192 // 2 + 64 * 8192 * 2 + 64 * 4096 * 2
    assert roofline.arithmetic_intensity(64, 4096, 8192, 4) == 2 * 64 * 4096 * 8192 / moved
    # at M = 1 the matrix is everything: 2 operations per 2 bytes
    assert roofline.arithmetic_intensity(1, 8192, 8192, 16) == pytest.approx(1.0, rel=1e-3)


def test_intensity_at_the_ridge_batch_is_the_ridge():
    device = devices.get("h100-sxm")
    batch = roofline.ridge_batch(device)
    weights_only = roofline.operations(batch, 1, 1) / roofline.weight_bytes(1, 1, 16)
    assert weights_only == pytest.approx(roofline.ridge_intensity(device))


def test_int8_ridge_uses_the_int8_rate():
    device = devices.get("a100-sxm")
    assert roofline.ridge_batch(device, 8, "int8") == pytest.approx(624e12 / 2039e9 / 2)


def test_crossover_of_a_kernel_that_reaches_half_the_tensor_rate():
    device = devices.get("rtx-4090")
    half = roofline.crossover_batch(device, 0.5)
    assert half == roofline.ridge_batch(device) / 2
    fused_compute_us = roofline.operations(half, 4096, 4096) / (0.5 * 165.2e6)
    fp16_memory_us = roofline.weight_bytes(4096, 4096, 16) / 1008e3
    assert fused_compute_us == pytest.approx(fp16_memory_us)


def test_instruction_budgets():
    got = [round(roofline.instruction_budget(devices.get(name))) for name in ("a100-sxm", "b200")]
    assert got == [38, 18]


def test_littles_law_on_the_h200():
    assert roofline.bytes_in_flight(devices.get("h200-sxm"), 690) == pytest.approx(25.1e3, rel=0.01)


def test_kernel_quantities_are_refused_where_no_kernel_runs():
    with pytest.raises(IllegalConfig, match="rooflines only"):
        roofline.instruction_budget(devices.get("tpu-v5e"))
    with pytest.raises(IllegalConfig, match="rooflines only"):
        roofline.bytes_in_flight(devices.get("mi300x"), 500)


@pytest.mark.parametrize(
    "call",
    [
        lambda: roofline.effective_bits(0),
        lambda: roofline.effective_bits(4, 0),
        lambda: roofline.scale_overhead(-2),
        lambda: roofline.arithmetic_intensity(0, 8, 8, 4),
        lambda: roofline.ridge_batch(devices.get("t4"), -4),
        lambda: roofline.ridge_batch(devices.get("t4"), 8, "fp8"),
        lambda: roofline.crossover_batch(devices.get("t4"), 1.5),
        lambda: roofline.naive_bytes_per_weight(-1),
    ],
)
def test_senseless_arguments_are_errors(call):
    with pytest.raises(ArgumentError):
        call()
