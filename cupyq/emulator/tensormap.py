"""Tensor maps: what a CUtensorMap says, in 128 bytes of the emulator's own layout.

Hardware keeps the layout of a tensor map secret, so kernels only pass it on, or change it with tensormap.replace. The
fields here are those that replace can set.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyq.errors import ArgumentError

BYTES = 128
# Element codes of PTX (tensormap.replace); cuTensorMapEncode numbers f64 and bf16 otherwise.
ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
SPAN = (0, 32, 64, 128)
FIELDS = struct.Struct("<Q6I5I5I5I4x4Q")
assert FIELDS.size == BYTES
# Byte offset and count of what tensormap.replace sets.
OFFSET = {
    "global_address": 0, "rank": 8, "elemtype": 12, "swizzle_mode": 16, "interleave_layout": 20, "fill_mode": 24,
    "swizzle_atomicity": 28, "box_dim": 32, "element_stride": 52, "global_dim": 72, "global_stride": 96,
}  # fmt: skip


class TensorMap:
    """A tensor in global memory cut into boxes, as ``cuTensorMapEncodeTiled`` describes it.

    Parameters
    ----------
    array : ndarray
        The tensor: up to 5 dimensions, the last one contiguous.
    box : sequence of int
        Elements of a box along each dimension of `array`, in the same order.
    swizzle : str
        ``"none"``, ``"32B"``, ``"64B"`` or ``"128B"``.
    """

    def __init__(self, array: np.ndarray, box: Sequence[int], swizzle: str = "none") -> None:
        if not isinstance(array, np.ndarray) or not 1 <= array.ndim <= 5:
            raise ArgumentError("array must be a NumPy array of 1 to 5 dimensions")
        if len(box) != array.ndim or any(not 1 <= b <= 256 for b in box):
            raise ArgumentError(
                f"box must name 1 to 256 elements for each of {array.ndim} dimensions, got {tuple(box)}"
            )
        if swizzle not in SWIZZLES:
            raise ArgumentError(f"swizzle must be one of {', '.join(SWIZZLES)}, got {swizzle!r}")
        if array.strides[-1] != array.itemsize or any(s % 16 for s in array.strides[:-1]):
            raise ArgumentError(
                "the last dimension must be contiguous and other strides multiples of 16 bytes, "
                f"got strides {array.strides}"
            )
        inner = box[-1] * array.itemsize
        if inner % 16:
            raise ArgumentError(f"the box's last dimension has {inner} bytes, no multiple of 16")
        if swizzle != "none" and inner > SPAN[SWIZZLES[swizzle]]:
            raise ArgumentError(f"the box's last dimension has {inner} bytes, more than the swizzle of {swizzle}")
        self.array, self.box, self.swizzle = array, tuple(int(b) for b in box), swizzle

    def encode(self, address: int) -> bytes:
        """The 128 bytes, for an array that lies at `address`."""
        code = {1: 0, 2: 1, 4: 2, 8: 4}[self.array.itemsize]
        pad = [1] * (5 - self.array.ndim)
        dims = list(self.array.shape[::-1]) + pad
        box = list(self.box[::-1]) + pad
        strides = list(self.array.strides[-2::-1]) + [0] * 4
        return FIELDS.pack(
            address, self.array.ndim - 1, code, SWIZZLES[self.swizzle], 0, 0, 0, *box, *[1] * 5, *dims, *strides[:4]
        )


class Decoded:
    """A tensor map's fields, innermost dimension first."""

    __slots__ = ("address", "box", "dims", "element", "problem", "rank", "strides", "swizzle")

    def __init__(self, raw: bytes) -> None:
        values: Any = FIELDS.unpack(raw)
        self.address = values[0]
        self.rank = values[1] + 1
        self.problem = ""
        if self.rank > 5 or values[2] >= len(ELEMENT_BYTES) or values[3] > 3:
            self.problem = "these 128 bytes are no tensor map"
            return
        self.element = ELEMENT_BYTES[values[2]]
        self.swizzle = values[3]
        self.box, steps, self.dims = values[7:12][: self.rank], values[12:17], values[17:22][: self.rank]
        self.strides = (self.element, *values[22:26])[: self.rank]
        if values[4]:
            self.problem = "an interleaved tensor map is not modelled"
        elif any(s != 1 for s in steps[: self.rank]):
            self.problem = "a tensor map with element strides is not modelled"
        elif self.address % 16 or any(s % 16 for s in self.strides[1:]):
            self.problem = "a tensor map's address and strides must be multiples of 16 bytes"
        elif self.box[0] * self.element % 16 or not all(1 <= b <= 256 for b in self.box):
            self.problem = f"a box of {self.box} elements"
        elif self.swizzle and self.box[0] * self.element > SPAN[self.swizzle]:
            self.problem = f"a box of {self.box[0] * self.element} bytes inside a swizzle of {SPAN[self.swizzle]}"

    @property
    def bytes(self) -> int:
        """Bytes of a box, which count in full even where it sticks out of the tensor."""
        return int(np.prod(self.box)) * self.element


def swizzle(position: Any, mode: int) -> Any:
    """Exchange 16-byte columns: bits 4.. of the shared address are xored with bits 7..; see `SWIZZLES` for the mode."""
    if not mode:
        return position
    return position ^ ((position >> 7 & ((1 << mode) - 1)) << 4)
