"""Packing CuPy codes with the kernel of `kernels_cu/pack.cu`, for `cupyq.pack` and `cupyq.quantize`.

`cupyq.weights` lies below the kernels, so it has a place for a faster way of packing, which the package fills when it
is imported. Where the kernel cannot be used (no NVRTC, a card older than it supports), `cupyq.layout` does the same.
"""

from __future__ import annotations

from typing import Any

from . import compiler, devices, kernels
from .arrays import Array, device_of
from .errors import CompileError, NoDevice, NotInstalled
from .kernels import Problem
from .kernels import pack as pack_kernel


def pack_on_gpu(codes: Array, scheme: str, last_row: Array | None = None) -> Array | None:
    """Return packed words of CuPy codes, equal bit for bit to those of `cupyq.layout`; None where no kernel runs.

    Parameters
    ----------
    codes : (K, N) CuPy array of uint8, any strides
    scheme : str
    last_row : (N,) uint8, optional
        Zero points of the last group of a weight that has zero points: its padding along K.

    Returns
    -------
    (ceil(N/16), units, 32, 4) uint32 on the device of `codes`, in order of its current stream; or None
    """
    k, n = map(int, codes.shape)
    if n == 0:
        return None
    problem = _problem(scheme, k, n, last_row is None)
    ordinal = device_of(codes)
    assert ordinal is not None  # CuPy's
    cfg = pack_kernel.default(problem)
    try:
        if kernels.check(cfg, problem, devices.live(ordinal)) is not None:
            return None
        with _device(ordinal):
            call = kernels.call(cfg, problem, codes, last_row=last_row)
            compiler.load(cfg, problem)(call.grid, call.block, call.args, shared_mem=call.shared_bytes)
    except (CompileError, NoDevice, NotInstalled):
        return None
    return call.out


def _problem(scheme: str, k: int, n: int, symmetric: bool) -> Problem:
    group_size = 128 if scheme == "w8a8-fp8-block" else -1  # plays no part in packing
    return Problem(scheme, 1, n, k, group_size, symmetric)


def _device(ordinal: int) -> Any:
    import cupy

    return cupy.cuda.Device(ordinal)
