"""Packed weights from codes, a byte each: the config of `kernels_cu/pack.cu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from .config import MAX_GRID, Config, Launch, Target, ceil_div, choice, cpp_bool, needs_cc, shared_reason
from .problem import Problem

WARPS = (1, 2, 4, 8)
BLOCK_N = 128
"""Output features of a CTA: eight strips."""


@dataclass(frozen=True)
class PackConfig(Config):
    """Tunables of the packing kernel.

    Parameters
    ----------
    warps : int
        Warps of a CTA: 1, 2, 4, 8; each packs one unit's k (128, 64 or 32 for 2, 4 and 8 bits) of 128 output features.
    """

    warps: int = 4

    family: ClassVar[str] = "pack"
    template: ClassVar[str] = "pack.cu"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    def shared_bytes(self, prob: Problem) -> int:
        """Dynamic shared memory of a CTA: a unit's rows of 128 codes and padding, for each warp."""
        return self.warps * unit_k(prob) * (BLOCK_N + (32 if prob.weight_only else 16))

    def _blocks(self, prob: Problem) -> int:
        return ceil_div(prob.n, BLOCK_N) * ceil_div(ceil_div(prob.k, unit_k(prob)), self.warps)

    def reasons(self, prob: Problem, device: Target) -> Iterable[str]:
        """Yield a sentence for each reason why this config cannot run `prob` on `device`."""
        if device.cc < (7, 5):
            yield needs_cc("the kernels that read packed weights", (7, 5), device)
            return
        yield from choice("warps", self.warps, WARPS)
        yield from shared_reason(self.shared_bytes(prob), device)
        if self._blocks(prob) > MAX_GRID:
            yield f"needs {self._blocks(prob)} blocks; a grid has at most {MAX_GRID}"

    def entry(self, prob: Problem) -> str:
        """Name of the kernel's entry function."""
        layout = f"{prob.bits}" if prob.weight_only else "8_wide"
        return f"cupyq_pack{layout}_w{self.warps}_v{vector(prob)}"

    def instance(self, prob: Problem) -> str:
        """C++ text that instantiates the template as one `extern "C"` entry."""
        return f"""
using Kernel = Pack<{prob.bits}, {cpp_bool(not prob.weight_only)}, {self.warps}, {vector(prob)}>;
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1) {self.entry(prob)}(
    const u8* codes, const int* perm, const u8* last_row, uint4* packed, int n, int k, int row_stride, u32 pad) {{
    Kernel::run({{codes, perm, last_row, packed, n, k, row_stride, pad}});
}}
"""

    def launch(self, prob: Problem) -> Launch:
        """Launch geometry for `prob`; M plays no part."""
        return Launch((self._blocks(prob), 1, 1), (self.threads, 1, 1), self.shared_bytes(prob))


def unit_k(prob: Problem) -> int:
    """Return the k of a unit: what 512 packed bytes of a strip cover."""
    return 256 // prob.bits


def vector(prob: Problem) -> int:
    """Return how many codes of a row are loaded at once: 16, 4 or 1, as N allows."""
    return 16 if prob.n % 16 == 0 else 4 if prob.n % 4 == 0 else 1


def candidates(prob: Problem) -> Iterator[PackConfig]:
    """Yield every config, legal or not, in a fixed order."""
    del prob
    for warps in WARPS:
        yield PackConfig(warps)


def default(prob: Problem) -> PackConfig:
    """Return the config used when nothing is tuned: warps that share at most 40 KiB, so that several CTAs fit an SM."""
    return PackConfig(2 if prob.bits == 2 else 4)
