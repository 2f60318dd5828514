"""What is to be computed: the shapes and types of one product, apart from how a kernel does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cupyq.arrays import BFLOAT16, FLOAT16
from cupyq.errors import ArgumentError, DTypeError, ShapeError

WEIGHT_ONLY = {"w2a16": 2, "w4a16": 4, "w8a16": 8}
"""Ops with 16-bit activations -> bits of a weight."""

OPS = (*WEIGHT_ONLY, "w8a8-int8", "w8a8-fp8", "w8a8-fp8-block")
DTYPES = ("float16", "bfloat16")
GROUP_SIZES = (-1, 16, 32, 64, 128, 256)

NUMPY_DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Problem:
    """One product ``y[M, N] = x[M, K] @ w[K, N]`` with quantized weights.

    Parameters
    ----------
    op : str
        "w2a16", "w4a16", "w8a16", "w8a8-int8", "w8a8-fp8" or "w8a8-fp8-block": the scheme of the weights.
    m, n, k : int
        Tokens (0 or more), output features, input features (1 or more).
    group_size : int
        k of a quantization group: 16, 32, 64, 128, 256, or -1 for one group a column. W8A8 has -1;
        "w8a8-fp8-block" has 128.
    symmetric : bool
        No zero points: a code's zero is 2, 8 or 128 (2, 4 and 8 bits), or 0 (W8A8).
    dtype : str
        "float16" or "bfloat16": of y and, but for W8A8, of x.
    scale_dtype : str
        "float16" or "bfloat16": of the scales. Those of W8A8 are float32.

    Raises
    ------
    ArgumentError
        A field has a value that is not listed above; the message names it.
    """

    op: str
    m: int
    n: int
    k: int
    group_size: int = 128
    symmetric: bool = True
    dtype: str = "float16"
    scale_dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ArgumentError(f"op={self.op!r} is unknown; accepted: {', '.join(OPS)}")
        for field, least in (("m", 0), ("n", 1), ("k", 1)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                try:
                    object.__setattr__(self, field, value := value.__index__())
                except AttributeError:
                    raise ShapeError(f"{field}={value!r} is no integer") from None
            if not least <= value < 2**31:
                raise ShapeError(f"{field}={value} is out of range; accepted: {least} to 2**31 - 1")
        for field in ("dtype", "scale_dtype"):
            if getattr(self, field) not in DTYPES:
                raise DTypeError(f"{field}={getattr(self, field)!r} is not accepted; accepted: {', '.join(DTYPES)}")
        if self.op == "w8a8-fp8-block":
            if self.group_size != 128 or not self.symmetric:
                raise ArgumentError(
                    f"{self.op} takes group_size=128, symmetric=True; got {self.group_size}, {self.symmetric}"
                )
        elif self.op.startswith("w8a8"):
            # 8-bit weights have one float32 scale a column; the fields take their only values, whatever the default.
            if self.group_size not in (-1, 128):
                raise ArgumentError(f"group_size={self.group_size}; {self.op} has one scale a column, -1")
            if not self.symmetric:
                raise ArgumentError(f"symmetric=False with op={self.op!r}; 8-bit weights have no zero points")
            object.__setattr__(self, "group_size", -1)
        if self.group_size not in GROUP_SIZES:
            accepted = ", ".join(map(str, GROUP_SIZES))
            raise ArgumentError(f"group_size={self.group_size!r} is not supported; accepted: {accepted}")

    @property
    def groups(self) -> int:
        """Groups along K; the last may be partly filled."""
        return 1 if self.group_size == -1 else -(-self.k // self.group_size)

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return WEIGHT_ONLY.get(self.op, 8)

    @property
    def weight_only(self) -> bool:
        """Whether activations stay in 16 bits."""
        return self.op in WEIGHT_ONLY

    def with_m(self, m: int) -> Problem:
        """Return the same product with M = `m` tokens."""
        return replace(self, m=m)

    @classmethod
    def of(cls, m: int, qw: Any, dtype: str = "float16") -> Problem:
        """Return the problem that `qw` (a QuantizedWeight) and M = `m` tokens pose, with y of `dtype`."""
        scale_dtype = qw.scales.dtype.name if qw.scheme in WEIGHT_ONLY else "float16"
        return cls(qw.scheme, m, qw.n, qw.k, qw.group_size, qw.symmetric, dtype, scale_dtype)
