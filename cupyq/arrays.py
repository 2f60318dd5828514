"""NumPy and CuPy arrays under one roof: which module an array belongs to, where it lives, 16- and 8-bit floats.

CuPy is never imported here: an array of it can only arrive after somebody else has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar, cast

import ml_dtypes
import numpy as np

from .errors import ArgumentError, DeviceMismatch, DTypeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

FLOAT_DTYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
ACTIVATION_DTYPES = (FLOAT16, BFLOAT16)

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""

Array = Any
"""A NumPy or a CuPy array."""


def namespace_of(array: Array, name: str = "array") -> ModuleType:
    """Return the module (`numpy` or `cupy`) that `array` belongs to; `DTypeError` for anything else."""
    if isinstance(array, np.ndarray):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy
    raise DTypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__module__}.{type(array).__qualname__}")


def is_cupy(array: Array) -> bool:
    """Whether `array` is a CuPy array. Does not import CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def device_of(array: Array) -> int | None:
    """Return the CUDA ordinal an array lives on, or None for NumPy."""
    return int(array.device.id) if is_cupy(array) else None


@contextlib.contextmanager
def on_device(ordinal: int) -> Iterator[ModuleType]:
    """Make a CUDA device current for the block, and with it that device's own current stream; yields `cupy`."""
    cupy: Any = sys.modules["cupy"]
    if cupy.cuda.runtime.getDevice() == ordinal:
        yield cupy
    else:
        with cupy.cuda.Device(ordinal):
            yield cupy


_Function = TypeVar("_Function", bound=Callable[..., Any])


def on_its_device(function: _Function) -> _Function:
    """Wrap a function so that it runs with the device current on which its first CuPy array, or weight, lives."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            for value in (*args, *kwargs.values()):
                array = getattr(value, "packed", value)
                if isinstance(array, cupy.ndarray):
                    with on_device(array.device.id):
                        return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Function, wrapped)


def place_name(ordinal: int | None) -> str:
    """Say where arrays of this ordinal live, for messages."""
    return "in host memory (NumPy)" if ordinal is None else f"on CUDA device {ordinal}"


def common_namespace(**arrays: Array) -> tuple[ModuleType, int | None]:
    """Return (module, CUDA ordinal or None) shared by all named arrays; None values are skipped.

    Raises
    ------
    DTypeError
        Something is no array.
    DeviceMismatch
        Two arrays live in different places; the message names both.
    """
    first: tuple[str, ModuleType, int | None] | None = None
    for name, array in arrays.items():
        if array is None:
            continue
        xp, place = namespace_of(array, name), device_of(array)
        if first is None:
            first = (name, xp, place)
        elif place != first[2]:
            raise DeviceMismatch(
                f"{name} lives {place_name(place)} but {first[0]} lives {place_name(first[2])}; move one of them"
            )
    if first is None:
        raise ArgumentError("no array was given")
    return first[1], first[2]


def first_position(mask: Array) -> tuple[int, ...]:
    """Return the index of the first True of a boolean array (C order)."""
    flat = int(mask.ravel().argmax())
    return tuple(int(i) for i in np.unravel_index(flat, mask.shape))


def float8_encode(values: Array) -> Array:
    """Round float32 values to float8_e4m3fn bit patterns, half to even, saturating at +-448.

    Infinities saturate too; only NaN becomes 0x7F. The same few operations serve NumPy and CuPy (which has no 8-bit
    floats), and equal `ml_dtypes` for every value within +-448.

    Parameters
    ----------
    values : array of float32, any shape

    Returns
    -------
    array of uint8, same shape
    """
    xp = namespace_of(values, "values")
    bits = xp.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    nan = magnitude > np.uint32(0x7F800000)
    size = xp.minimum(magnitude, np.uint32(0x43E00000))  # 448.0f
    # Normal: drop 20 of float32's 23 mantissa bits, half to even, and move the exponent bias from 127 to 7.
    rounded = (size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = (rounded - np.uint32(120 << 3)).astype(np.uint8)
    # Below 2**-6 codes count steps of 2**-9; code 8 is 2**-6 itself, so rounding up out of this range is right too.
    subnormal = xp.rint(xp.abs(size.view(np.float32)) * np.float32(512)).astype(np.int32).astype(np.uint8)
    code = xp.where(size < np.uint32(0x3C800000), subnormal, normal)
    return xp.where(nan, np.uint8(0x7F), code | sign).astype(np.uint8).reshape(values.shape)


FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
"""float32 value of each float8_e4m3fn bit pattern."""


def float8_decode(codes: Array) -> Array:
    """Return the float32 values of float8_e4m3fn codes (uint8 bit patterns, or the `ml_dtypes` dtype)."""
    xp = namespace_of(codes, "codes")
    return xp.asarray(FLOAT8_VALUES)[codes.view(np.uint8)]
