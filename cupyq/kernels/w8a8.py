"""W8A8 on mma.sync: the config of `kernels_cu/w8a8_mma.cu`, int8 and e4m3 alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import numpy as np

from cupyq.weights import LONGEST_INT8_K

from .config import (
    CPP_TYPES,
    MAX_GRID,
    REGISTER_BUDGET,
    SHORT_TYPES,
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
)
from .problem import Problem

BLOCK_M = (8, 16, 32, 64, 128, 256)
WARP_TOKENS = (8, 16, 32, 64)
STRIPS = (1, 2, 4)
WARPS = (1, 2, 4, 8)
WARP_K = (64, 128)
STAGES = (2, 3, 4, 5, 6)
SPLIT_K = (1, 2, 3, 4, 6, 8, 12, 16)

PROMOTE_K = (0, 64, 128, 256, 512)
FUSED_BLOCK_M = (8, 16)
FUSED_M = 16
"""Tokens up to which configs that quantize activations themselves are looked at: each CTA does so for all tokens of its
tile, one after the other, while a launch of its own does it once, side by side."""

SAFE_K = LONGEST_INT8_K
"""Longest K of int8: 131,072 products of -128..127 fit int32 (`weights.pack` refuses the one column that would not)."""

_OTHER_REGISTERS = 48

# Of a fused kernel's prologue: k of a run of a warp, instructions for a run, clocks that it waits for memory.
_FIND_RUN, _FIND_INSTRUCTIONS, _FIND_WAIT = 1024, 4 * 14 + 30, 300  # L2: every CTA reads all of its tokens
_ENCODE_RUN, _ENCODE_INSTRUCTIONS, _ENCODE_WAIT = 512, 2 * 75 + 40, 60  # L1
_WARP_IPC = 0.5

_COST_OF_CLOCK = 16.0  # in the units of `_cost`

_SEPARATE_CLOCKS = 4000
"""Clocks that a launch of its own to quantize activations costs: one in a CUDA graph, and its wait for memory."""

WIDENED = (9, 10, 11)
"""Major compute capabilities whose mma.sync has no 8-bit floats: ptxas widens fragments to 16 bits."""

_TYPES = {"w8a8-int8": "Int8", "w8a8-fp8": "E4m3", "w8a8-fp8-block": "E4m3"}
_LEAST_CC = {"w8a8-int8": (7, 5), "w8a8-fp8": (8, 9), "w8a8-fp8-block": (8, 9)}


@dataclass(frozen=True)
class W8A8Config(Config):
    """Tunables of the W8A8 kernel.

    Parameters
    ----------
    block_m : int
        Tokens of a CTA's tile: 8, 16, 32, 64, 128, 256.
    warp_tokens : int
        Tokens of a warp: 8, 16, 32, 64; ``block_m / warp_tokens`` warps share the tile's tokens.
    strips : int
        Strips (16 output features) of a warp: 1, 2, 4.
    warps_n, warps_k : int
        Warps along output features and along k: 1, 2, 4, 8 each.
    warp_k : int
        k that a warp takes in one stage: 64, 128.
    stages : int
        Stages of the copy pipeline: 2 to 6.
    split_k : int
        CTAs that share a tile's K; the last to arrive adds the partial sums in fixed order.
    promote_k : int
        "w8a8-fp8": k of a warp that the tensor core, which may keep fewer than 24 bits, sums by itself before an fp32
        addition: 64, 128, 256, 512, or 0 for all of them. Scales of blocks do the same after each stage.
    fused : bool
        x comes in 16 bits, and each CTA quantizes the tokens of its tile by the weight's rule: one launch less, for
        small M.
    """

    block_m: int = 64
    warp_tokens: int = 32
    strips: int = 4
    warps_n: int = 2
    warps_k: int = 1
    warp_k: int = 64
    stages: int = 4
    split_k: int = 1
    promote_k: int = 0
    fused: bool = False

    family: ClassVar[str] = "w8a8_mma"
    template: ClassVar[str] = "w8a8_mma.cu"

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
        return 32 * (self.block_m // self.warp_tokens) * self.warps_n * self.warps_k

    def _whole(self, prob: Problem) -> bool:
        return prob.k % self.block_k == 0

    def stage_bytes(self) -> int:
        """Shared memory of a stage: activations (unless fused) and weights, a byte each."""
        rows = self.block_n + (0 if self.fused else self.block_m)
        return ceil_div(rows * self.block_k, 128) * 128

    def shared_bytes(self, prob: Problem) -> int:
        """Dynamic shared memory of a CTA: scales, and the pipeline's or, if larger, the epilogue's."""
        fragments = self.strips * self.warp_tokens // 8
        epilogue = epilogue_bytes(self.block_m, self.block_n, self.threads // 32, self.warps_k, fragments)
        places = ceil_div(max(self.block_n // 4 - 8, 0), 32) * 32 + 8
        front = 0 if prob.op == "w8a8-fp8-block" else ceil_div(8 * (self.block_m + 4 * places), 128) * 128
        codes = 0
        if self.fused:
            codes = ceil_div(self.k_tiles(prob), self.split_k) * self.block_m * self.block_k
        return front + max(self.stages * self.stage_bytes() + codes, epilogue)

    def prologue(self, prob: Problem) -> tuple[float, float]:
        """Return (clocks, warp instructions) that a fused CTA quantizes its tokens in, before its main loop.

        Estimated from the counts of its two loops; (0, 0) for configs that take codes.
        """
        if not self.fused:
            return 0.0, 0.0
        rows = min(prob.m, self.block_m)
        # Where a warp has more than eight tokens, those past M are filled with zeros.
        filled = rows if self.warp_tokens == 8 else self.block_m
        share = ceil_div(self.k_tiles(prob), self.split_k) * self.block_k
        warps = self.threads // 32
        clocks = instructions = 0.0
        for runs, each, wait in (
            (rows * ceil_div(prob.k, _FIND_RUN), _FIND_INSTRUCTIONS, _FIND_WAIT),
            (filled * ceil_div(share, _ENCODE_RUN), _ENCODE_INSTRUCTIONS, _ENCODE_WAIT),
        ):
            clocks += ceil_div(runs, warps) * (wait + each / _WARP_IPC * max(1.0, warps / 8))
            instructions += runs * each
        return clocks, instructions

    def tiles(self, prob: Problem) -> int:
        """Output tiles."""
        return ceil_div(prob.m, self.block_m) * ceil_div(prob.n, self.block_n)

    def k_tiles(self, prob: Problem) -> int:
        """Stages that the whole K takes."""
        return ceil_div(prob.k, self.block_k)

    def registers(self, prob: Problem, device: Target) -> int:
        """Estimate of the registers of a thread, on the safe side, for legality before anything is compiled."""
        tokens = self.warp_tokens // 8
        fragments = (2 if tokens > 1 else 4) * tokens + 4 * self.strips
        if prob.op != "w8a8-int8" and device.cc[0] in WIDENED:
            fragments *= 3 * self.warp_k // 64
        staging = 0 if device.cc >= (8, 0) else 4 * ceil_div(self.stage_bytes() // 16, self.threads) + 4
        sums = self.strips * tokens * 4 * (2 if self._promotes(prob) else 1)
        scales = 2 * tokens if prob.op == "w8a8-fp8-block" else 0
        return sums + scales + fragments + staging + _OTHER_REGISTERS

    def tensor_k(self, prob: Problem, device: Target) -> int:
        """Return how many k of fp8 products the tensor core sums by itself, in what bits it keeps, at most."""
        if device.cc[0] in WIDENED:
            return 32  # ptxas widens an mma to 16 bits and adds its result in fp32
        if prob.op == "w8a8-fp8-block":
            return self.warp_k
        return self.promote_k or ceil_div(self.k_tiles(prob), self.split_k) * self.warp_k

    def _promotes(self, prob: Problem) -> bool:
        return self.promote_k > 0 or prob.op == "w8a8-fp8-block"

    def reasons(self, prob: Problem, device: Target) -> Iterable[str]:
        """Yield a sentence for each reason why this config cannot run `prob` on `device`."""
        if prob.op not in _TYPES:
            yield f"the W8A8 kernel does not compute {prob.op}"
            return
        least = _LEAST_CC[prob.op]
        if device.cc < least:
            yield needs_cc(prob.op, least, device)
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
        if self.block_m % self.warp_tokens:
            yield f"warp_tokens={self.warp_tokens} does not divide block_m={self.block_m}"
            return
        if device.cc < (8, 0) and self.stages > 2:
            yield f"stages={self.stages}: without cp.async a stage waits in registers, so two are all that helps"
        if self.threads // min(self.block_k // 16, 8) < 8:
            yield f"{self.threads} threads a block; activations of {self.block_k} k are copied by 64 or more"
        if self.threads > 512:
            yield f"{self.threads} threads a block; at most 512, so that each may have 128 registers"
        yield from self._promote_reasons(prob)
        if self.fused:
            if self.block_m not in FUSED_BLOCK_M:
                yield f"fused=True with block_m={self.block_m}: a CTA quantizes at most {FUSED_BLOCK_M[-1]} tokens"
            if prob.op == "w8a8-fp8-block":
                yield "fused=True: scales of blocks are found by the kernel that quantizes activations"
        if self.threads < 64:
            yield f"{self.threads} threads a block; at least 64, so that they copy whole rows"
        limit = min(REGISTER_BUDGET, 65536 // self.threads)
        registers = self.registers(prob, device)
        if registers > limit:
            yield f"needs about {registers} registers a thread; a block of {self.threads} threads leaves {limit}"
        yield from shared_reason(self.shared_bytes(prob), device)
        if prob.op == "w8a8-int8" and prob.k > SAFE_K:
            yield f"K={prob.k} may overflow the int32 sum of products; at most {SAFE_K}"
        if self.split_k > self.k_tiles(prob):
            yield idle_split(self.split_k, self.k_tiles(prob), self.block_k)
        if self.tiles(prob) * self.split_k > MAX_GRID:
            yield f"needs {self.tiles(prob) * self.split_k} blocks; a grid has at most {MAX_GRID}"

    def scalars(self, prob: Problem, row_stride: int, scale_stride: int) -> tuple[np.int32, ...]:
        """The kernel's arguments after its pointers."""
        share, extra = divmod(self.k_tiles(prob), self.split_k)
        values = (prob.m, prob.n, prob.k, row_stride, scale_stride, self.split_k, share, extra)
        return tuple(map(np.int32, values))

    def _promote_reasons(self, prob: Problem) -> Iterable[str]:
        if self.promote_k and prob.op != "w8a8-fp8":
            yield f"promote_k={self.promote_k}: {prob.op} sums exactly, or promotes with its scales; it must be 0"
        if self.promote_k > self.warp_k and self.promote_k > 4 * self.warp_k:
            yield f"promote_k={self.promote_k} unrolls more than four stages of {self.warp_k} k"

    def entry(self, prob: Problem) -> str:
        """Name of the kernel's entry function."""
        kind = _TYPES[prob.op].lower() + ("_block" if prob.op == "w8a8-fp8-block" else "")
        kind += ("_fused" if self.fused else "") + (f"_r{self.promote_k}" if self.promote_k else "")
        edges = ("" if self._whole(prob) else "_tail_k") + ("" if prob.n % 4 == 0 else "_ragged_n")
        edges += "_gather" if self.fused and prob.k % 8 else ""
        return (
            f"cupyq_w8a8_{kind}_m{self.block_m}x{self.warp_tokens}_s{self.strips}_n{self.warps_n}"
            f"_k{self.warps_k}x{self.warp_k}_p{self.stages}_{SHORT_TYPES[prob.dtype]}{edges}"
        )

    def instance(self, prob: Problem) -> str:
        """C++ text that instantiates the template as one `extern "C"` entry."""
        arguments = (
            _TYPES[prob.op],
            CPP_TYPES[prob.dtype],
            self.block_m,
            self.warp_tokens,
            self.strips,
            self.warps_n,
            self.warps_k,
            self.warp_k,
            self.stages,
            self.promote_k,
            cpp_bool(prob.op == "w8a8-fp8-block"),
            cpp_bool(self.fused),
            cpp_bool(prob.k % 8 == 0),
            cpp_bool(self._whole(prob)),
            4 if prob.n % 4 == 0 else 1,
        )
        return f"""
using Kernel = W8A8<{", ".join(map(str, arguments))}>;
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1) {self.entry(prob)}(
    const char* weights, const float* weight_scales, const void* x, const float* x_scales, const int* x_zeros,
    const int* column_sums, const u16* factor, u16* y, const u16* bias, u32* partials, u32* arrivals, int m, int n,
    int k, int row_stride, int scale_stride, int splits, int share, int extra) {{
    Kernel::run({{weights, weight_scales, x, x_scales, x_zeros, column_sums, factor, y, bias, partials, arrivals, m,
                 n, k, row_stride, scale_stride, {{splits, share, extra}}}});
}}
"""

    def launch(self, prob: Problem) -> Launch:
        """Launch geometry for `prob`."""
        tiles = self.tiles(prob)
        partial_words = tiles * self.split_k * self.block_m * self.block_n if self.split_k > 1 else 0
        return Launch((tiles * self.split_k, 1, 1), (self.threads, 1, 1), self.shared_bytes(prob), partial_words, tiles)


_FIELDS = {
    "block_m": BLOCK_M,
    "warp_tokens": WARP_TOKENS,
    "strips": STRIPS,
    "warps_n": WARPS,
    "warps_k": WARPS,
    "warp_k": WARP_K,
    "stages": STAGES,
    "split_k": SPLIT_K,
    "promote_k": PROMOTE_K,
    "fused": (False, True),
}


def candidates(prob: Problem) -> Iterator[W8A8Config]:
    """Yield the configs worth a look for `prob`, legal or not, in a fixed order.

    Those that quantize activations themselves only for few tokens, where a launch of its own is what that costs.
    """
    promote = (0, 128, 256) if prob.op == "w8a8-fp8" else (0,)
    few = prob.op != "w8a8-fp8-block" and prob.m <= FUSED_M
    for block_m, warp_tokens in product(BLOCK_M, WARP_TOKENS):
        if block_m % warp_tokens or block_m // warp_tokens > 4 or (block_m > 8 and block_m >= 2 * prob.m):
            continue
        for strips, warps_n, warps_k, warp_k, stages, split_k, promote_k in product(
            STRIPS, WARPS, WARPS, WARP_K, STAGES, SPLIT_K, promote
        ):
            if 2 <= block_m // warp_tokens * warps_n * warps_k <= 8:
                for fused in (False, True) if few and block_m in FUSED_BLOCK_M else (False,):
                    yield W8A8Config(
                        block_m, warp_tokens, strips, warps_n, warps_k, warp_k, stages, split_k, promote_k, fused
                    )


def default(prob: Problem, device: Target, sms: int, fused: bool | None = None) -> W8A8Config:
    """Return the config used when nothing is tuned: the shape of tile by M, then the split that fills the SMs.

    Where the tensor cores sum 8-bit floats themselves, 256 k at most go without an fp32 addition. On 9.x and 10.x
    mma.sync has none: ptxas widens them to 16 bits. `fused` None takes whichever is estimated to be faster: to quantize
    activations in the kernel or in a launch before it.
    """
    shapes = (*_BLOCK_SHAPES, *_SHAPES) if prob.op == "w8a8-fp8-block" else _SHAPES
    if device.cc < (8, 0):
        shapes = tuple((*shape[:6], 2) for shape in shapes)
    promote_k = 256 if prob.op == "w8a8-fp8" and device.cc[0] not in WIDENED else 0
    if promote_k:  # two stages of 128 k, and then a period has them both: their places in shared memory are constants
        shapes = tuple((*shape[:6], 2) if shape[5] == 128 else shape for shape in shapes)
    best, best_cost = None, float("inf")
    kinds = (False, True) if fused is None else (fused,)
    for shape, split_k, kind in product(shapes, SPLIT_K, kinds):
        cfg = W8A8Config(*shape, split_k, promote_k, kind)
        if (kind and prob.m > FUSED_M) or any(True for _ in cfg.reasons(prob, device)):
            continue
        cost = _cost(cfg, prob, device, sms)
        if cost < best_cost:
            best, best_cost = cfg, cost
    return best or W8A8Config(8, 8, 1, 2, 1, 64, 2, 1, promote_k, bool(fused))


# block_m, warp_tokens, strips, warps_n, warps_k, warp_k, stages
_SHAPES: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (128, 64, 4, 2, 1, 128, 3),
    (128, 64, 4, 2, 1, 64, 3),
    (128, 64, 2, 4, 1, 128, 3),
    (128, 32, 4, 2, 1, 128, 3),
    (128, 32, 4, 2, 1, 64, 3),
    (64, 32, 2, 2, 1, 128, 4),
    (64, 32, 4, 2, 1, 64, 4),
    (32, 32, 4, 2, 2, 64, 4),
    (16, 16, 4, 1, 4, 64, 4),
    (8, 8, 4, 1, 4, 64, 4),
    (8, 8, 2, 2, 2, 64, 3),
)


# With scales of blocks a warp promotes its sums after each stage, and a lane multiplies the scales of its tokens: whole
# blocks of k a stage, and fewer tokens of more features a warp.
_BLOCK_SHAPES: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (128, 32, 4, 2, 1, 128, 3),
    (64, 32, 4, 2, 1, 128, 3),
)


def _cost(cfg: W8A8Config, prob: Problem, device: Target, sms: int) -> float:
    """Return a figure that grows with the time of a product, to choose a default by."""
    waves = ceil_div(cfg.tiles(prob) * cfg.split_k, sms)
    work = cfg.block_m * cfg.block_n / 64 + (cfg.block_m + cfg.block_n) / 2 + 16  # a k step: tensor, loads, rest
    if prob.op == "w8a8-fp8-block":
        work += cfg.block_m * cfg.block_n / 128 * (128 / cfg.warp_k - 1)
    cost = waves * (work * ceil_div(cfg.k_tiles(prob), cfg.split_k) * cfg.block_k + 2 * cfg.block_m * cfg.block_n)
    if cfg.split_k > 1:  # a hand-over through L2, half a microsecond, and the parts that the last CTA reads
        cost += _COST_OF_CLOCK * (850 + 0.2 * cfg.block_m * cfg.block_n * cfg.split_k)
    together = min(4, max(1, device.shared_per_block // cfg.shared_bytes(prob)))  # CTAs of an SM quantize side by side
    clocks = ceil_div(waves, together) * cfg.prologue(prob)[0] if cfg.fused else _SEPARATE_CLOCKS
    return cost + _COST_OF_CLOCK * clocks
