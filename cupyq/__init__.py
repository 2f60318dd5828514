"""Quantized matrix multiplication on NVIDIA GPUs for NumPy and CuPy.

>>> import cupyq, numpy
>>> w = numpy.linspace(-1, 1, 128 * 32, dtype=numpy.float32).reshape(128, 32)
>>> qw = cupyq.quantize(w, "w4a16", group_size=32)
>>> x = numpy.ones((4, 128), numpy.float16)
>>> cupyq.matmul(x, qw).shape
(4, 32)

Importing cupyq needs no GPU, no driver and no CuPy; what needs them is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import weights as _weights
from .activations import Activations, smoothing_factor
from .errors import (
    ArgumentError,
    CompileError,
    CupyqError,
    DatabaseError,
    DeviceMismatch,
    DTypeError,
    EmulatorError,
    FormatError,
    IllegalConfig,
    NoDevice,
    NotInstalled,
    SchemaTooNew,
    ShapeError,
    TuningError,
    UnknownDevice,
    VerificationError,
)
from .quantize import quantize
from .weights import QuantizedWeight, pack, unpack

if TYPE_CHECKING:
    from .dispatch import explain
    from .ops import dequantize, matmul, plan, quantize_activations, warmup

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "ArgumentError",
    "CompileError",
    "CupyqError",
    "DTypeError",
    "DatabaseError",
    "DeviceMismatch",
    "EmulatorError",
    "FormatError",
    "IllegalConfig",
    "NoDevice",
    "NotInstalled",
    "QuantizedWeight",
    "SchemaTooNew",
    "ShapeError",
    "TuningError",
    "UnknownDevice",
    "VerificationError",
    "__version__",
    "dequantize",
    "explain",
    "matmul",
    "pack",
    "plan",
    "quantize",
    "quantize_activations",
    "smoothing_factor",
    "unpack",
    "warmup",
]

# Found on first use: name -> module that defines it.
_LAZY = {
    "dequantize": "ops",
    "matmul": "ops",
    "quantize_activations": "ops",
    "explain": "dispatch",
    "plan": "ops",
    "warmup": "ops",
}
_MODULES = {
    "activations", "bands", "compiler", "db", "devices", "dispatch", "emulator", "formats", "kernels", "launch",
    "layout", "ops", "predictor", "reference", "roofline", "tuner",
}  # fmt: skip


def _pack_on_gpu(codes: Any, scheme: str, last_row: Any) -> Any:
    from .packing import pack_on_gpu

    return pack_on_gpu(codes, scheme, last_row)


_weights.gpu_packer = _pack_on_gpu


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
