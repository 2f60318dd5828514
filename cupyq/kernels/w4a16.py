"""Weight-only kernels (W4A16, and 2 and 8 bits) on mma.sync: the config of `kernels_cu/w4a16_mma.cu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import numpy as np

from .config import (
    CPP_TYPES,
    MAX_GRID,
    Config,
    Launch,
    Target,
    ceil_div,
    choice,
    cpp_bool,
    epilogue_bytes,
    idle_split,
    needs_cc,
    shared_reason,
    short_types,
)
from .problem import Problem

UNIT_K = {2: 128, 4: 64, 8: 32}
"""k of a unit of packed weights, by bits of a code: what a lane's 16 bytes cover."""

BLOCK_M = (8, 16, 32, 64, 128)
STRIPS = (1, 2, 4)
WARPS = (1, 2, 4, 8)
WARP_K = (64, 128)
STAGES = (2, 3, 4, 5, 6, 8)
SPLIT_K = (1, 2, 3, 4, 6, 8, 12, 16)
SCALE = ("sums", "weights")
MAX_STRIPES = 65535

# What a lane holds beside accumulators, fragments, scales and pointers: loop state, values in flight.
_OTHER_REGISTERS = 42

# Of 260 configs compiled for seven archs, most of them near the limit, every one that spilled was estimated above this.
_REGISTER_BUDGET = 232


@dataclass(frozen=True)
class W4A16Config(Config):
    """Tunables of the W4A16 kernel.

    Parameters
    ----------
    block_m : int
        Tokens of a CTA's tile: 8, 16, 32, 64, 128.
    strips : int
        Strips (16 output features) of a warp: 1, 2, 4.
    warps_n, warps_k : int
        Warps along output features and along k: 1, 2, 4, 8 each. Warps along k add their sums in shared memory.
    warp_k : int
        k that a warp takes in one stage: 64, 128.
    stages : int
        Stages of the copy pipeline: 2, 3, 4, 5, 6, 8.
    split_k : int
        CTAs that share a tile's K; the last to arrive adds the partial sums in fixed order.
    scale : str
        "sums": scales multiply the fp32 sums of each group (more exact, more registers); "weights": they multiply the
        weights in 16 bits as these are dequantized.
    ctas : int
        0: each tile has `split_k` CTAs. Otherwise the size of the grid: stripes, each CTA walks an equal share of all
        tiles' stages, and parts of a tile are added as with split-K; `split_k` must be 1.
    """

    block_m: int = 16
    strips: int = 4
    warps_n: int = 1
    warps_k: int = 4
    warp_k: int = 64
    stages: int = 4
    split_k: int = 1
    scale: str = "sums"
    ctas: int = 0

    family: ClassVar[str] = "w4a16_mma"
    template: ClassVar[str] = "w4a16_mma.cu"

    @property
    def block_n(self) -> int:
        """Output features of a CTA's tile."""
        return 16 * self.strips * self.warps_n

    @property
    def block_k(self) -> int:
        """k of a stage."""
        return self.warps_k * self.warp_k

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_n * self.warps_k

    def _scales_weights(self, prob: Problem) -> bool:
        # With one scale a column the scale is applied once, at the end, whatever `scale` says.
        return self.scale == "weights" and prob.group_size != -1

    def _sums_apart(self, prob: Problem) -> bool:
        # The sums of a span wait for its scale beside those of all spans before it.
        return prob.group_size != -1 and not self._scales_weights(prob)

    def _whole(self, prob: Problem) -> bool:
        return prob.k % self.block_k == 0

    def spans(self, prob: Problem) -> int:
        """Scales a row of weights needs in a warp's share of a stage; 0 with one scale a column."""
        return 0 if prob.group_size == -1 else max(1, self.warp_k // prob.group_size)

    def stage_bytes(self, prob: Problem) -> int:
        """Shared memory of a stage: activations, weights, scales and zero points."""
        warps = self.warps_n * self.warps_k
        weights = self.strips * 2 * self.warp_k * prob.bits
        groups = self.strips * self.spans(prob) * (32 if prob.symmetric else 48)
        return ceil_div(self.block_m * self.block_k * 2 + warps * (weights + groups), 128) * 128

    def shared_bytes(self, prob: Problem) -> int:
        """Dynamic shared memory of a CTA: the pipeline's or, if larger, the epilogue's."""
        fragments = self.strips * self.block_m // 8
        epilogue = epilogue_bytes(self.block_m, self.block_n, self.threads // 32, self.warps_k, fragments)
        return max(self.stages * self.stage_bytes(prob), epilogue)

    def accumulators(self, prob: Problem) -> int:
        """Accumulator registers of a thread, with the sums of the current group if these are kept apart."""
        sums = self.strips * self.block_m // 8 * 4
        return sums * (2 if self._sums_apart(prob) else 1)

    def registers(self, prob: Problem) -> int:
        """Estimate of the registers of a thread, to refuse what may spill before anything is compiled."""
        columns = self.block_m // 8
        fragments = (2 if columns > 1 else 4) * columns + 4 * self.strips
        scaling = (2 if self._scales_weights(prob) else 1) * self.strips + (0 if prob.symmetric else self.strips)
        pieces = self.strips * self.spans(prob) * (2 if prob.symmetric else 3)
        pointers = 2 * (self.strips + ceil_div(self.block_m, self.threads // 8) + ceil_div(pieces, 32))
        # The compiler lets the sums of neighbouring spans overlap, and hoists more where the tile is high.
        overlap = 48 if self._sums_apart(prob) and self.spans(prob) > 1 and columns * self.strips > 8 else 0
        hoisted = 16 if self.block_m > 64 or prob.bits == 2 else 0
        return self.accumulators(prob) + fragments + scaling + pointers + overlap + hoisted + _OTHER_REGISTERS

    def staging_registers(self, prob: Problem) -> int:
        """Registers in which the next stage waits on GPUs without cp.async."""
        weights = self.strips * self.warp_k * prob.bits // 64
        activations = ceil_div(self.block_m * self.block_k // 8, self.threads) * 4
        return weights + activations + (64 if self.spans(prob) > 1 else 4)

    def tiles(self, prob: Problem) -> int:
        """Output tiles."""
        return ceil_div(prob.m, self.block_m) * ceil_div(prob.n, self.block_n)

    def k_tiles(self, prob: Problem) -> int:
        """Stages that the whole K takes."""
        return ceil_div(prob.k, self.block_k)

    def reasons(self, prob: Problem, device: Target) -> Iterable[str]:
        """Yield a sentence for each reason why this config cannot run `prob` on `device`."""
        if not prob.weight_only:
            yield f"the W4A16 kernel does not compute {prob.op}"
            return
        if device.cc < (7, 5):
            yield needs_cc("mma.m16n8k8", (7, 5), device)
            return
        if device.cc < (8, 0) and prob.dtype == "bfloat16":
            yield needs_cc("bfloat16", (8, 0), device) + "; float16 runs here"
            return
        illegal = [
            reason for field, accepted in _FIELDS.items() for reason in choice(field, getattr(self, field), accepted)
        ]
        if illegal:
            yield from illegal
            return
        if device.cc < (8, 0) and self.stages > 2:
            yield f"stages={self.stages}: without cp.async a stage waits in registers, so two are all that helps"
        if self.warp_k < UNIT_K[prob.bits]:
            yield f"warp_k={self.warp_k} is less than a unit of {prob.bits}-bit weights, {UNIT_K[prob.bits]}"
        if self.threads < 64:
            yield "one warp a block; activations are copied by two or more"
        if self.threads > 512:
            yield f"{self.threads} threads a block; at most 512, so that each may have 128 registers"
        if self.scale == "weights" and prob.scale_dtype != prob.dtype:
            yield f"scale='weights' multiplies in {prob.dtype}, but the scales are {prob.scale_dtype}"
        registers = self.registers(prob) + (0 if device.cc >= (8, 0) else self.staging_registers(prob))
        if device.cc >= (10, 0) and self.warp_k > 64:
            registers += 16 if self.block_m >= 64 else 8  # for these the compiler hoists more
        if self._tips_over(device):
            registers += 8
        limit = min(_REGISTER_BUDGET, 65536 // self.threads)
        if registers > limit:
            yield f"needs about {registers} registers a thread; {limit} are sure not to spill"
        yield from shared_reason(self.shared_bytes(prob), device)
        yield from self._grid_reasons(prob)

    def _tips_over(self, device: Target) -> bool:
        # Of all shapes of block, compiled for every arch, only some of these spilled within the budget: 8 or 12 bytes.
        if device.cc >= (12, 0):
            return self.warp_k == 64 and not self.ctas
        deep = self.warp_k == 128 and self.warps_k == 4 and self.stages == 2
        return device.cc == (9, 0) and deep and self.ctas > 0

    def _grid_reasons(self, prob: Problem) -> Iterable[str]:
        tiles, k_tiles = self.tiles(prob), self.k_tiles(prob)
        if self.split_k > k_tiles:
            yield idle_split(self.split_k, k_tiles, self.block_k)
        if isinstance(self.ctas, bool) or not isinstance(self.ctas, int) or not 0 <= self.ctas <= MAX_STRIPES:
            yield f"ctas={self.ctas!r} is no count from 0 to {MAX_STRIPES}"
        elif self.ctas and self.split_k > 1:
            yield f"ctas={self.ctas} shares all tiles' stages, so split_k={self.split_k} has no meaning; it must be 1"
        elif self.ctas > max(1, tiles * k_tiles):
            yield f"ctas={self.ctas} leaves CTAs without work: {tiles} tiles have {k_tiles} stages each"
        if tiles * max(self.split_k, k_tiles) > MAX_GRID:
            yield f"{tiles} tiles of {k_tiles} stages are more than a grid can count, {MAX_GRID}"

    def _stripes(self, prob: Problem) -> tuple[int, int, int]:
        """CTAs of a period, stages of each, and how many have one more (`kernels_cu/stripes.cuh`)."""
        ctas, stages = self.split_k, self.k_tiles(prob)
        if self.ctas:
            ctas, stages = self.ctas, stages * self.tiles(prob)
        return ctas, stages // ctas, stages % ctas

    def scalars(self, prob: Problem, row_stride: int) -> tuple[np.int32, ...]:
        """The kernel's arguments after its pointers."""
        return tuple(map(np.int32, (prob.m, prob.n, prob.k, row_stride, *self._stripes(prob))))

    def entry(self, prob: Problem) -> str:
        """Name of the kernel's entry function."""
        group = "col" if prob.group_size == -1 else str(prob.group_size)
        zeros = "sym" if prob.symmetric else "asym"
        types = short_types(prob)
        edges = "" if self._whole(prob) else "_tail_k" if _aligned(prob) else "_ragged_k"
        edges += "" if prob.n % 4 == 0 else "_ragged_n"
        scale = "weights" if self._scales_weights(prob) else "sums"
        grid = "_stripes" if self.ctas else ""
        return (
            f"cupyq_{prob.op}_m{self.block_m}_s{self.strips}_n{self.warps_n}_k{self.warps_k}x{self.warp_k}_p{self.stages}"
            f"{grid}_{scale}_g{group}_{zeros}_{types}{edges}"
        )

    def instance(self, prob: Problem) -> str:
        """C++ text that instantiates the template as one `extern "C"` entry."""
        arguments = (
            CPP_TYPES[prob.dtype],
            CPP_TYPES[prob.scale_dtype],
            prob.bits,
            self.block_m,
            self.strips,
            self.warps_n,
            self.warps_k,
            self.warp_k,
            self.stages,
            0 if prob.group_size == -1 else prob.group_size,
            cpp_bool(not prob.symmetric),
            cpp_bool(self._scales_weights(prob)),
            cpp_bool(_aligned(prob)),
            cpp_bool(self._whole(prob)),
            cpp_bool(self.ctas > 0),
            4 if prob.n % 4 == 0 else 1,
        )
        return f"""
using Kernel = W4A16<{", ".join(map(str, arguments))}>;
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1) {self.entry(prob)}(
    const char* weights, const char* scales, const char* zeros, const u16* x, u16* y, const u16* bias, u32* partials,
    u32* arrivals, int m, int n, int k, int row_stride, int period_ctas, int share, int extra) {{
    Kernel::run({{weights, scales, zeros, x, y, bias, partials, arrivals, m, n, k, row_stride,
                 {{period_ctas, share, extra}}}});
}}
"""

    def launch(self, prob: Problem) -> Launch:
        """Launch geometry for `prob`."""
        tiles = self.tiles(prob)
        ctas = self.ctas or tiles * self.split_k
        parts = 2 * ctas if self.ctas else ctas if self.split_k > 1 else 0  # a stripe may end in a second tile
        words = parts * self.block_m * self.block_n
        return Launch((ctas, 1, 1), (self.threads, 1, 1), self.shared_bytes(prob), words, tiles)


_FIELDS = {
    "block_m": BLOCK_M,
    "strips": STRIPS,
    "warps_n": WARPS,
    "warps_k": WARPS,
    "warp_k": WARP_K,
    "stages": STAGES,
    "split_k": SPLIT_K,
    "scale": SCALE,
}


def _aligned(prob: Problem) -> bool:
    # Rows of x can be copied 16 bytes at a time.
    return prob.k % 8 == 0


def candidates(prob: Problem, sms: int = 0) -> Iterator[W4A16Config]:
    """Yield the configs worth a look for `prob`, legal or not, in a fixed order; stripes where `sms` is known.

    Left out is what only wastes: tiles of tokens twice as high as M, blocks of fewer than two or more than eight warps.
    """
    grids = [(split_k, 0) for split_k in SPLIT_K] + [(1, sms * blocks) for blocks in (1, 2, 3) if sms]
    for block_m in BLOCK_M:
        if block_m > 8 and block_m >= 2 * prob.m:
            continue
        for strips, warps_n, warps_k, warp_k, stages, (split_k, ctas), scale in product(
            STRIPS, WARPS, WARPS, WARP_K, STAGES, grids, SCALE
        ):
            if not 2 <= warps_n * warps_k <= 8 or (scale == "weights" and prob.group_size == -1):
                continue
            yield W4A16Config(block_m, strips, warps_n, warps_k, warp_k, stages, split_k, scale, ctas)


def stages_of_busiest(cfg: W4A16Config, prob: Problem, sms: int) -> int:
    """Return how many stages the busiest SM computes when blocks are dealt out evenly."""
    k_tiles = cfg.k_tiles(prob)
    if cfg.ctas:
        return ceil_div(cfg.ctas, sms) * ceil_div(cfg.tiles(prob) * k_tiles, cfg.ctas)
    return ceil_div(cfg.tiles(prob) * cfg.split_k, sms) * ceil_div(k_tiles, cfg.split_k)


def wave_efficiency(cfg: W4A16Config, prob: Problem, sms: int) -> float:
    """Return the share of SM time that does work, were every stage to take as long: total over busiest times `sms`."""
    return cfg.tiles(prob) * cfg.k_tiles(prob) / (sms * stages_of_busiest(cfg, prob, sms))


def default(prob: Problem, device: Target, sms: int) -> W4A16Config:
    """Return the config used when nothing is tuned.

    A tile no higher than M needs (64 at most); of a few dozen shapes of block, each with split-K and with stripes, the
    one that `_clocks` takes to be the fastest among those that give every SM much the same work and keep DRAM busy.
    """
    block_m = next((size for size in BLOCK_M if size >= min(prob.m, 64)), 64)
    scale = "weights" if block_m >= 64 and prob.scale_dtype == prob.dtype and prob.group_size != -1 else "sums"
    needed = _latency(device) * _dram_bytes_per_clock(device, sms)
    best, best_rank = None, (True, True, float("inf"))
    for strips, (warps_n, warps_k), warp_k, stages in product((4, 2, 1), _DEFAULT_WARPS, (128, 64), (4, 3, 2, 6)):
        shape = W4A16Config(block_m, strips, warps_n, warps_k, warp_k, stages, 1, scale)
        if any(True for _ in shape.reasons(prob, device)):
            continue
        resident = _resident(shape, prob, device)
        grids = [(split, 0) for split in SPLIT_K] + [(1, sms * some) for some in range(1, min(resident, 3) + 1)]
        for split_k, ctas in grids:
            cfg = W4A16Config(block_m, strips, warps_n, warps_k, warp_k, stages, split_k, scale, ctas)
            uneven = wave_efficiency(cfg, prob, sms) < _EVEN
            starved = _bytes_in_flight(cfg, prob, sms, resident) < needed
            if (uneven, starved) > best_rank[:2]:
                continue
            rank = uneven, starved, _clocks(cfg, prob, device, sms, resident)
            if rank < best_rank and not any(True for _ in cfg._grid_reasons(prob)):
                best, best_rank = cfg, rank
    if best is None:  # smallest tiles of all; legal wherever the family is
        return W4A16Config(8, 1, 2, 1, max(64, UNIT_K[prob.bits]), 2, 1, "sums")
    return best


_EVEN = 0.90
"""Wave efficiency below which a config is the default only where no better one is legal."""

_L2_BYTES_PER_CLOCK = 32
"""Of one SM, as kernels reach it."""

_DEFAULT_WARPS = ((1, 4), (2, 4), (2, 2), (4, 2), (4, 1), (8, 1), (1, 2), (2, 1))


def _resident(cfg: W4A16Config, prob: Problem, device: Target) -> int:
    """Blocks that an SM holds at once, by shared memory and by registers as estimated."""
    shared = getattr(device, "shared_per_sm", device.shared_per_block) // (cfg.shared_bytes(prob) + 1024)
    registers = cfg.registers(prob)
    if device.cc >= (10, 0):  # what the compiler takes there
        registers = min(255, registers * 4 // 3)
    return max(1, min(shared, 65536 // (registers * cfg.threads)))


def _clocks(cfg: W4A16Config, prob: Problem, device: Target, sms: int, resident: int) -> float:
    """Estimate the clocks of the busiest SM: the longest of issuing, tensor cores, DRAM, L2; and latency.

    Counts of warp instructions are those of the compiled kernel, as benchmarks/bench_static.py prints them.
    """
    # A twentieth more on one SM than on the mean one is no difference: while others rest it has more of L2 and DRAM.
    stages = max(0.95 * stages_of_busiest(cfg, prob, sms), cfg.tiles(prob) * cfg.k_tiles(prob) / sms)
    blocks = ceil_div(cfg.ctas or cfg.tiles(prob) * cfg.split_k, sms)
    warps = cfg.warps_n * cfg.warps_k
    # A word takes 9 to dequantize and one mma for eight tokens; fragments of x serve all strips.
    tokens, steps = cfg.block_m // 8, cfg.warp_k // 16
    spans = 0 if prob.group_size == -1 else cfg.spans(prob)
    scaling = 4 * steps if cfg.scale == "weights" else spans * (4 + 4 * tokens)
    copies = ceil_div(cfg.block_m * cfg.block_k // 8, cfg.threads) + cfg.strips * cfg.warp_k * prob.bits // 256
    stage = cfg.strips * (steps * (9.3 + tokens) + scaling) + tokens * steps / 2 + copies + 30
    # Parts of tiles: addresses; sums of warps, halved again and again; results, or a part of them, written.
    fragments = cfg.strips * tokens
    own = fragments / min(fragments, cfg.warps_k)
    tiles = cfg.tiles(prob)
    segments = blocks if cfg.ctas == 0 else blocks + ceil_div(tiles, sms)
    parts = cfg.split_k if cfg.ctas == 0 else max(1.0, 1 + cfg.ctas / tiles)  # of a tile
    ends = ceil_div(tiles, sms) * own * (14 + (5 * parts if parts > 1 else 0))
    issued = warps * (stages * stage + segments * (170 + 6 * fragments * (1 - 1 / cfg.warps_k) + own) + ends)
    at_once = min(resident, blocks) * warps
    # A warp alone issues in a part of its clocks, a larger one the more strips it can turn to while one waits.
    alone = min(0.9, 0.2 + cfg.strips * (0.08 + 0.01 * tokens))
    issuing = issued / min(4.0, alone * at_once)
    fma = {7: 512, 8: 1024, 9: 1024}.get(device.cc[0], 1024)  # of mma.sync, dense, a clock
    tensor = warps * stages * cfg.strips * steps * tokens * 2048 / fma
    # Bytes: what is in flight must cover latency times bandwidth.
    stage_bytes = cfg.block_n * cfg.block_k * prob.bits / 8
    rate = _dram_bytes_per_clock(device, sms)
    in_flight = _bytes_in_flight(cfg, prob, sms, resident)
    memory = stages * stage_bytes / min(rate, in_flight / _latency(device))
    l2 = stages * (stage_bytes + cfg.block_m * cfg.block_k * 2) / _L2_BYTES_PER_CLOCK
    # The CTA that arrives last reads every part of its tile, when most others are done.
    tail = 1500 + parts * cfg.block_m * cfg.block_n * 4 / (2 * _L2_BYTES_PER_CLOCK) if parts > 1 else 0
    latency = _latency(device) * ceil_div(blocks, resident) + tail
    # Not all of what is issued hides behind the longest.
    return max(issuing, tensor, memory, l2) + 0.6 * issued / 4 + latency


def _bytes_in_flight(cfg: W4A16Config, prob: Problem, sms: int, resident: int) -> float:
    """Bytes of weights that the CTAs of an SM have under way."""
    blocks = min(resident, ceil_div(cfg.ctas or cfg.tiles(prob) * cfg.split_k, sms))
    return blocks * (cfg.stages - 1) * cfg.block_n * cfg.block_k * prob.bits / 8


def _latency(device: Target) -> float:
    """Clocks from asking DRAM to having: 0.7 us."""
    return 700 * getattr(device, "clock_ghz", 1.4)


def _dram_bytes_per_clock(device: Target, sms: int) -> float:
    """DRAM bandwidth of one SM in bytes a clock; a typical one where only an arch is known."""
    bandwidth, clock = getattr(device, "dram_gbps", None), getattr(device, "clock_ghz", None)
    return bandwidth / clock / sms if bandwidth and clock else 12.0
