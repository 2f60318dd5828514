"""16-bit activations to 8 bits: the config of `kernels_cu/quantize_activations.cu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from cupyq.activations import Activations

from .config import CPP_TYPES, SHORT_TYPES, Config, Launch, Target, ceil_div, choice, cpp_bool, needs_cc
from .problem import Problem

THREADS = (32, 64, 128, 256, 512)
PIECES = (2, 4, 8, 16)
SCALES = ("token", "tensor")

BLOCK_K = 128
"""k of a token that share a scale with "w8a8-fp8-block"."""

_TYPES = {"w8a8-int8": "Int8", "w8a8-fp8": "E4m3", "w8a8-fp8-block": "E4m3"}
_LEAST_CC = {"w8a8-int8": (7, 5), "w8a8-fp8": (8, 9), "w8a8-fp8-block": (8, 9)}


@dataclass(frozen=True)
class QuantizeActivationsConfig(Config):
    """Tunables of the kernel that quantizes activations, a CTA a token, and what it is to do.

    Parameters
    ----------
    threads : int
        Threads of a CTA: 32, 64, 128, 256, 512.
    pieces : int
        Pieces of 8 elements that a thread keeps in registers: 2, 4, 8, 16. Rows longer than
        ``8 * threads * pieces`` are read twice beyond that.
    scales : str
        "token": the kernel finds a scale for each token ("w8a8-fp8-block": for every 128 k of a token). "tensor": one
        scale, and zero point, found beforehand.
    zeros : bool
        int8: codes have a zero point, so that they cover a lopsided range.
    smooth : bool
        Columns of x are first multiplied by a factor each (SmoothQuant).
    """

    threads: int = 256
    pieces: int = 2
    scales: str = "token"
    zeros: bool = False
    smooth: bool = False

    family: ClassVar[str] = "quantize_activations"
    template: ClassVar[str] = "quantize_activations.cu"

    def shared_bytes(self, prob: Problem) -> int:
        """Dynamic shared memory of a CTA: none."""
        del prob
        return 0

    def reasons(self, prob: Problem, device: Target) -> Iterable[str]:
        """Yield a sentence for each reason why this config cannot run `prob` on `device`."""
        if prob.op not in _TYPES:
            yield f"{prob.op} takes activations as they are"
            return
        least = _LEAST_CC[prob.op]
        if device.cc < least:
            yield needs_cc(prob.op, least, device)
            return
        yield from choice("threads", self.threads, THREADS)
        yield from choice("pieces", self.pieces, PIECES)
        yield from choice("scales", self.scales, SCALES)
        if self.zeros and prob.op != "w8a8-int8":
            yield f"zeros=True: codes of {prob.op} have a sign and no zero points"
        if self.scales == "tensor" and prob.op == "w8a8-fp8-block":
            yield "scales='tensor': w8a8-fp8-block has a scale for every 128 k of a token"

    def _scales(self, prob: Problem) -> str:
        return "block" if prob.op == "w8a8-fp8-block" else self.scales

    def entry(self, prob: Problem) -> str:
        """Name of the kernel's entry function."""
        what = self._scales(prob) + ("_zeros" if self.zeros else "") + ("_smooth" if self.smooth else "")
        edges = "" if prob.k % 8 == 0 else "_ragged_k"
        return (
            f"cupyq_quantize_activations_{_TYPES[prob.op].lower()}_t{self.threads}_p{self.pieces}"
            f"_{what}_{SHORT_TYPES[prob.dtype]}{edges}"
        )

    def instance(self, prob: Problem) -> str:
        """C++ text that instantiates the template as one `extern "C"` entry."""
        arguments = (
            _TYPES[prob.op],
            CPP_TYPES[prob.dtype],
            self.threads,
            self.pieces,
            cpp_bool(prob.k % 8 == 0),
            f"Scales::k{self._scales(prob).capitalize()}",
            cpp_bool(self.zeros),
            cpp_bool(self.smooth),
        )
        return f"""
using Kernel = QuantizeActivations<{", ".join(map(str, arguments))}>;
extern "C" __global__ void __launch_bounds__({self.threads}) {self.entry(prob)}(
    const u16* x, const u16* factor, const float* tensor_scale, const int* tensor_zero, u8* codes, float* scales,
    int* zeros, int k, int row_stride, int code_stride, int scale_stride) {{
    Kernel::run({{x, factor, tensor_scale, tensor_zero, codes, scales, zeros, k, row_stride, code_stride,
                 scale_stride}});
}}
"""

    def launch(self, prob: Problem) -> Launch:
        """Launch geometry for `prob`: a CTA a token."""
        return Launch((prob.m, 1, 1), (self.threads, 1, 1), 0)


def candidates(prob: Problem) -> Iterator[QuantizeActivationsConfig]:
    """Yield the configs whose registers hold a row without many idle threads, in a fixed order."""
    for threads, pieces in product(THREADS, PIECES):
        if pieces == PIECES[0] or 8 * threads * (pieces // 2) < prob.k:
            yield QuantizeActivationsConfig(threads, pieces)


def default(prob: Problem) -> QuantizeActivationsConfig:
    """Return the config used when nothing is tuned: the fewest registers that hold a row, then the fewest threads."""
    need = ceil_div(prob.k, 8)
    for pieces, threads in product(PIECES, THREADS):
        if threads * pieces >= need:
            return QuantizeActivationsConfig(threads, pieces)
    return QuantizeActivationsConfig(THREADS[-1], PIECES[-1])


def for_rule(prob: Problem, rule: Activations) -> QuantizeActivationsConfig:
    """Return the default config that quantizes by a weight's rule."""
    scales = "token" if rule.scale is None else "tensor"
    return replace(default(prob), scales=scales, zeros=not rule.symmetric, smooth=rule.factor is not None)
