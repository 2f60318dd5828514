"""Profiles of cupyq's own fused kernels in closed form: from a config's tunables, nothing compiled.

Counts are SASS instructions of the main loop as its parts cost them, held against compiled kernels by a test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupyq.kernels import Problem, W4A16Config, W8A8Config
from cupyq.kernels.w8a8 import WIDENED

from .profile import Profile

# Per stage and warp: barrier, wait, slots, pointers, loop, and predicates of the copies.
_STAGE_OVERHEAD = 36
# Per CTA and warp, once for each part of a tile: addresses at the start, and those of its results.
_PROLOGUE = 190


def w4a16_profile(cfg: W4A16Config, prob: Problem, compiled: Any = None) -> Profile:
    """Return the profile of the weight-only kernel, whatever the bits of a weight.

    Parameters
    ----------
    cfg : W4A16Config
    prob : Problem
    compiled : CompiledKernel, optional
        Gives the true number of registers; else they are estimated.
    """
    tokens = cfg.block_m // 8
    steps = cfg.warp_k // 16
    words = cfg.strips * steps  # a lane's weights of a 16 x 16 tile: one 32-bit word with 4 bits
    spans = cfg.spans(prob)
    sums = cfg.scale == "sums" and spans > 0
    units = -(-cfg.strips * cfg.warp_k * prob.bits // 256)  # 16 bytes a lane
    pieces = cfg.strips * spans * (2 if prob.symmetric else 3)

    half2 = 4 * words + (0 if sums or not spans else 4 * words)
    shifts = 1 if prob.dtype == "float16" else 3  # bf16's magic number holds only the low nibble
    x_copies = -(-cfg.block_m * cfg.block_k // 8 // cfg.threads)
    matrices = -(-tokens * steps // 2)  # ldmatrix.x4: 8 tokens x 32 k or 16 x 16
    zeros = 0 if prob.symmetric else 5 * cfg.strips * spans  # widen both rows' zero points to magic pairs
    stage: dict[str, float] = {
        "lop3": 4 * words,
        "int_math": (shifts * words + (0 if sums else 2 * cfg.strips * spans) + zeros),
        "half2_math": half2,
        "fp32_math": (2 + 4 * tokens) * cfg.strips * spans if sums else 0,
        "mma": words * tokens,
        "ldmatrix": matrices,
        "ld_shared": units + cfg.strips * spans * (1 if prob.symmetric else 2),
        "cp_async_16B": units + x_copies + -(-pieces // 32),
        "other": _STAGE_OVERHEAD,
    }
    weights, stage_weights = _weight_bytes(cfg, prob)
    moved: dict[str, float] = {
        "in": cfg.stage_bytes(prob),
        "out": cfg.stage_bytes(prob) + (cfg.warps_n - 1) * cfg.block_m * cfg.block_k * 2,
    }
    # Several groups in a stage keep their scales and sums alive beside each other.
    estimate = cfg.accumulators(prob) + 46 + 6 * tokens + 6 * max(0, spans - 1)
    if tokens == 1:  # where sums are few, addresses decide
        estimate = max(estimate, 100 if cfg.ctas else 84)
    registers = compiled.registers if compiled is not None else _capped(estimate, cfg)
    return _tiled(
        cfg,
        prob,
        stage,
        registers,
        weights,
        stage_weights,
        moved,
        fragments=cfg.strips * tokens,
        x_bytes=2,
        step_k=16,
        mma="m16n8k16:float16",
    )


def w8a8_profile(cfg: W8A8Config, prob: Problem, device: Any, compiled: Any = None) -> Profile:
    """Return the profile of the W8A8 kernel, without the pass that quantizes activations (unless the kernel does).

    On 9.0 and 10.0 mma.sync has no 8-bit floats: ptxas widens both fragments and multiplies in fp16, which is what is
    counted there.
    """
    tokens = cfg.warp_tokens // 8
    steps = cfg.warp_k // 32
    words = cfg.strips * steps
    sums = 4 * cfg.strips * tokens
    blocks = prob.op == "w8a8-fp8-block"
    widened = prob.op != "w8a8-int8" and device.cc[0] in WIDENED
    x_copies = 0 if cfg.fused else -(-cfg.block_m * cfg.block_k // 16 // cfg.threads)
    promotions = 1.0 if blocks else cfg.warp_k / cfg.promote_k if cfg.promote_k else 0.0  # in a stage
    stage: dict[str, float] = {
        "mma": words * tokens * (2 if widened else 1),
        "convert": (4 * words + 2 * tokens * steps) * 2 if widened else 0,
        # Tensor cores of 9.0 keep few bits: ptxas adds each widened product to the fp32 sums itself.
        "fp32_math": (4 * words * tokens if widened else 0) + sums * promotions + (2 * tokens if blocks else 0),
        "ld_shared": words,
        "ldmatrix": -(-tokens * steps // 2),
        "cp_async_16B": x_copies + -(-cfg.block_n * cfg.block_k // 16 // cfg.threads),
    }
    # Barrier, wait, slots, loop, and addresses, the more the more is loaded; with blocks the scales' loads too.
    stage["other"] = 5 + 1.3 * (stage["ld_shared"] + stage["ldmatrix"] + stage["cp_async_16B"]) + blocks * (tokens + 8)
    clocks, instructions = cfg.prologue(prob)
    strips = -(-prob.n // 16)
    # With scales of blocks a warp reads a sector for each of its 128 k.
    of_scales = 32.0 * prob.groups * -(-strips // cfg.strips) if blocks else 4.0 * prob.n
    weights = strips * -(-prob.k // 32) * 512.0 + of_scales
    shared = cfg.stage_bytes()
    weight_share = cfg.block_n * cfg.block_k
    moved: dict[str, float] = {
        "in": shared,
        "out": weight_share * (cfg.block_m // cfg.warp_tokens) + cfg.block_m * cfg.block_k * cfg.warps_n,
    }
    promotes = blocks or cfg.promote_k > 0
    estimate = 62 + sums * 4 // 3 + (sums + 2 * tokens * blocks if promotes else 0) + widened * cfg.warp_k // 2
    estimate = max(estimate, 86)  # where sums are few, addresses decide
    registers = compiled.registers if compiled is not None else _capped(estimate, cfg)
    kind = "int8" if prob.op == "w8a8-int8" else "fp8"
    mma = "m16n8k16:float16" if widened else f"m16n8k32:{kind}"
    found = _tiled(
        cfg, prob, stage, registers, weights, float(weight_share), moved,
        fragments=cfg.strips * tokens, once=instructions, x_bytes=2 if cfg.fused else 1, step_k=32, mma=mma,
    )  # fmt: skip
    if not cfg.fused:
        return found
    # Every CTA reads all of its tokens from L2, whatever its share of K.
    again = 2.0 * prob.m * prob.k * -(-prob.n // cfg.block_n) * (cfg.split_k - 1)
    return replace(found, l2_bytes=found.l2_bytes + again, prologue_clocks=clocks)


def _capped(registers: int, cfg: Any) -> int:
    # The configs' own estimates stay on the safe side; these are the middle of what ptxas gives.
    return min(registers, 255, 65536 // cfg.threads)


def _weight_bytes(cfg: W4A16Config, prob: Problem) -> tuple[float, float]:
    """Bytes of packed weights, scales and zero points: of the whole matrix, and of a CTA's stage."""
    unit_k = 256 // prob.bits  # of 512 bytes, 16 features high
    of_group = 32 if prob.symmetric else 48
    whole = -(-prob.n // 16) * (-(-prob.k // unit_k) * 512 + prob.groups * of_group)
    stage = cfg.strips * cfg.warps_n * (cfg.block_k * 2 * prob.bits + cfg.warps_k * cfg.spans(prob) * of_group)
    return float(whole), float(stage)


def epilogue_instructions(cfg: Any, fragments: int, parts: float = 1) -> float:
    """Return a CTA's warp instructions outside the main loop, for each part of a tile that it computes.

    Addresses; a warp's `fragments` added to those of the others along k, halved again and again; those that are left to
    it written, as results or, where a tile has several `parts`, for the CTA that arrives last, which reads them all.
    """
    own = fragments / min(fragments, cfg.warps_k)
    finished = own * (4 + 10) / parts  # put in shared memory, read as rows, stored
    divided = own * (1 + 5) + 60 if parts > 1 else 0
    return cfg.threads // 32 * (_PROLOGUE + 6 * fragments * (1 - 1 / cfg.warps_k) + finished + divided)


def _tiled(
    cfg: Any,
    prob: Problem,
    stage: dict[str, float],
    registers: int,
    weights: float,
    stage_weights: float,
    moved: dict[str, float],
    *,
    fragments: int,
    once: float = 0,
    x_bytes: int,
    step_k: int,
    mma: str,
) -> Profile:
    """Sum up a launch from one warp's stage: what both families share. `fragments` are
    those of a warp's accumulators, `once` instructions that a CTA issues beside its parts of tiles.
    """
    tiles, k_tiles = cfg.tiles(prob), cfg.k_tiles(prob)
    striped = getattr(cfg, "ctas", 0)  # CTAs walk equal shares of all tiles' stages, and may end inside a tile
    grid = striped or tiles * cfg.split_k
    serial = -(-tiles * k_tiles // grid) if striped else -(-k_tiles // cfg.split_k)
    parts = min(k_tiles, -(-k_tiles // serial) + 1) if striped and serial % k_tiles else cfg.split_k
    segments = tiles + grid if striped else grid  # parts of tiles
    m_tiles = -(-prob.m // cfg.block_m)
    n_tiles = -(-prob.n // cfg.block_n)
    times = tiles * k_tiles * cfg.threads // 32
    counts = {name: count * times for name, count in stage.items()}
    mma_count = counts["mma"]
    counts["other"] += segments * epilogue_instructions(cfg, fragments, segments / tiles) + grid * once
    x_whole = x_bytes * prob.m * prob.k
    y_whole = 2 * prob.m * prob.n
    # Rows past M are filled with zeros, not read; each column of tiles reads x again, from L2.
    l2 = weights * m_tiles + x_whole * n_tiles + y_whole
    tile_bytes = 4.0 * min(cfg.block_m, prob.m) * cfg.block_n
    if parts > 1:
        l2 += 2 * tile_bytes * segments
    return Profile(
        grid=grid,
        block=cfg.threads,
        registers=registers,
        shared_bytes=cfg.shared_bytes(prob),
        dram_bytes=weights + x_whole + y_whole,
        l2_bytes=l2,
        shared_traffic=tiles * k_tiles * (moved["in"] + moved["out"])
        + 8.0 * (segments * (cfg.warps_k - 1) + tiles) * cfg.block_m * cfg.block_n,
        warp_instructions=counts,
        mma={mma: mma_count},
        stage_bytes=stage_weights,
        stages=cfg.stages,
        serial_stages=serial,
        busiest=serial / (tiles * k_tiles),
        reduce_steps=1 if parts > 1 else 0,
        # The CTA that arrives last reads every partial sum of its tile.
        reduce_bytes=tile_bytes * parts if parts > 1 else 0,
        independent_mma=max(1, int(stage["mma"] // (cfg.warp_k // step_k))),
    )
