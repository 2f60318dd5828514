"""Dense weights from packed ones: the config of `kernels_cu/dequant.cu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from .config import (
    CPP_TYPES,
    MAX_GRID,
    Config,
    Launch,
    Target,
    ceil_div,
    choice,
    cpp_bool,
    needs_cc,
    shared_reason,
    short_types,
)
from .problem import Problem
from .w4a16 import UNIT_K

WARPS = (4, 8, 16)
UNITS = (1, 2, 4)


@dataclass(frozen=True)
class DequantConfig(Config):
    """Tunables of the dequantizing kernel, whose result feeds a dense product.

    Parameters
    ----------
    warps : int
        Warps of a CTA: 4, 8, 16; one strip (16 output features) each.
    units : int
        Units (128, 64 or 32 k for 2, 4 and 8 bits) of a CTA, one after the other: 1, 2, 4.
    """

    warps: int = 8
    units: int = 1

    family: ClassVar[str] = "dequant"
    template: ClassVar[str] = "dequant.cu"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    def shared_bytes(self, prob: Problem) -> int:
        """Dynamic shared memory of a CTA: one unit's rows."""
        return UNIT_K[prob.bits] * (16 * self.warps + 8) * 2

    def _blocks(self, prob: Problem) -> int:
        return ceil_div(prob.n, 16 * self.warps) * ceil_div(prob.k, UNIT_K[prob.bits] * self.units)

    def reasons(self, prob: Problem, device: Target) -> Iterable[str]:
        """Yield a sentence for each reason why this config cannot run `prob` on `device`."""
        if not prob.weight_only:
            yield f"the dequantizing kernel does not read {prob.op} weights"
            return
        if device.cc < (8, 0) and prob.dtype == "bfloat16":
            yield needs_cc("bfloat16", (8, 0), device) + "; float16 runs here"
            return
        yield from choice("warps", self.warps, WARPS)
        yield from choice("units", self.units, UNITS)
        yield from shared_reason(self.shared_bytes(prob), device)
        if self._blocks(prob) > MAX_GRID:
            yield f"needs {self._blocks(prob)} blocks; a grid has at most {MAX_GRID}"

    def entry(self, prob: Problem) -> str:
        """Name of the kernel's entry function."""
        group = "col" if prob.group_size == -1 else str(prob.group_size)
        types = short_types(prob)
        edges = "" if prob.n % 8 == 0 else "_ragged_n"
        zeros = "sym" if prob.symmetric else "asym"
        return f"cupyq_dequant{prob.bits}_w{self.warps}_u{self.units}_g{group}_{zeros}_{types}{edges}"

    def instance(self, prob: Problem) -> str:
        """C++ text that instantiates the template as one `extern "C"` entry."""
        arguments = (
            CPP_TYPES[prob.dtype],
            CPP_TYPES[prob.scale_dtype],
            cpp_bool(prob.dtype == prob.scale_dtype),
            prob.bits,
            self.warps,
            self.units,
            0 if prob.group_size == -1 else prob.group_size,
            cpp_bool(not prob.symmetric),
            8 if prob.n % 8 == 0 else 1,
        )
        return f"""
using Kernel = Dequant<{", ".join(map(str, arguments))}>;
extern "C" __global__ void __launch_bounds__(Kernel::kThreads) {self.entry(prob)}(
    const uint4* weights, const u32* scales, const u16* zeros, u16* w, int n, int k) {{
    Kernel::run(weights, scales, zeros, w, n, k);
}}
"""

    def launch(self, prob: Problem) -> Launch:
        """Launch geometry for `prob`; M plays no part."""
        return Launch((self._blocks(prob), 1, 1), (self.threads, 1, 1), self.shared_bytes(prob))


def candidates(prob: Problem) -> Iterator[DequantConfig]:
    """Yield every config, legal or not, in a fixed order."""
    del prob
    for warps, units in product(WARPS, UNITS):
        yield DequantConfig(warps, units)


def default(prob: Problem) -> DequantConfig:
    """Return the config used when nothing is tuned."""
    return DequantConfig(4 if prob.n <= 64 else 8, 1)
