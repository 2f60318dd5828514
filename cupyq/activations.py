"""How activations become 8-bit codes: `Activations`, the rule that goes with a w8a8 weight, and SmoothQuant's factor.

Without a rule each token (row of x) gets a scale of its own when it arrives. A rule fixes the scale beforehand, adds a
zero point for lopsided rows, or multiplies the columns of x by factors that even them out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .arrays import (
    ACTIVATION_DTYPES,
    BFLOAT16,
    FLOAT16,
    FP8_MAX,
    Array,
    device_of,
    first_position,
    namespace_of,
    on_its_device,
)
from .errors import ArgumentError, DTypeError, ShapeError

LARGEST_CODE = {"w8a8-int8": 127.0, "w8a8-fp8": FP8_MAX, "w8a8-fp8-block": FP8_MAX}
"""Schemes with quantized activations, and the code that the largest magnitude of a row maps to."""

SMALLEST_SCALE = 2.0**-126
"""Least scale of a row of activations: GPUs flush smaller float32 values to zero."""

LARGEST_STATIC_SCALE = 2.0**126
"""Largest scale fixed beforehand: the reciprocal of a larger one would be flushed to zero."""

_FACTOR_RANGE = (2.0**-14, 2.0**15)  # normal numbers of both 16-bit types


@dataclass(frozen=True, eq=False)
class Activations:
    """How the activations that meet a w8a8 weight are quantized.

    The default finds a scale for each token, ``max|row| / 127`` (int8) or ``/ 448`` (fp8). A weight gets another rule,
    but not another factor, by ``dataclasses.replace(qw, activations=rule)``.

    Parameters
    ----------
    scale : float, optional
        One scale for all tokens, fixed beforehand (static quantization): 2**-126 to 2**126, kept in float32. Codes
        saturate. Not for "w8a8-fp8-block", which has a scale for every 128 k of a token.
    zero : int, optional
        The zero point, -128..127, that goes with `scale`: int8 only. Implies ``symmetric=False``.
    symmetric : bool
        False: int8 codes with a zero point (one a token unless `zero` fixes it), so that all 256 codes serve a row that
        lies mostly on one side of zero. The product is corrected by the sums of the weight's columns.
    factor : (K,) float16 or bfloat16, optional
        Multiplies the columns of x, exactly, before they are quantized (SmoothQuant); the weight is divided by it:
        :func:`cupyq.quantize` does so, :func:`cupyq.pack` takes codes of a weight that was. Positive and finite. x of
        the other 16-bit type takes it too where its values are exact there, as those of :func:`smoothing_factor` are.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError
        A value is out of range, or does not fit the others.
    """

    scale: float | None = None
    zero: int | None = None
    symmetric: bool = True
    factor: Array | None = None
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", check_static_scale(self.scale))
        if self.zero is not None:
            object.__setattr__(self, "zero", check_zero(self.zero))
            object.__setattr__(self, "symmetric", False)
            if self.scale is None:
                raise ArgumentError("zero: it needs the scale that goes with it")
        elif self.scale is not None and not self.symmetric:
            raise ArgumentError("symmetric=False: a scale fixed beforehand needs its zero point, zero")
        object.__setattr__(self, "symmetric", bool(self.symmetric))
        if self.factor is not None:
            self._check_factor(self.factor)

    @staticmethod
    def _check_factor(factor: Array) -> None:
        xp = namespace_of(factor, "factor")
        if np.dtype(factor.dtype) not in ACTIVATION_DTYPES:
            raise DTypeError(f"factor must be float16 or bfloat16, got {np.dtype(factor.dtype).name}")
        if factor.ndim != 1:
            raise ShapeError(f"factor must have shape (K,), got {tuple(factor.shape)}")
        wide = factor.astype(np.float32)
        bad = ~(xp.isfinite(wide) & (wide >= np.float32(SMALLEST_SCALE)))
        if bool(bad.any()):
            at = first_position(bad)
            raise ArgumentError(f"factor must be positive and finite, got {float(wide[at])} at {at[0]}")

    @classmethod
    @on_its_device
    def covering(cls, x: Array, scheme: str, *, symmetric: bool = True, factor: Array | None = None) -> Activations:
        """Return the static rule whose codes just cover a sample of activations.

        Parameters
        ----------
        x : (..., K) float16, bfloat16 or float32
            What a layer saw on calibration data.
        scheme : str
            "w8a8-int8" or "w8a8-fp8".
        symmetric, factor
            As for the class.
        """
        if scheme not in ("w8a8-int8", "w8a8-fp8"):
            raise ArgumentError(f"scheme must be 'w8a8-int8' or 'w8a8-fp8', got {scheme!r}")
        xp = namespace_of(x, "x")
        wide = x.astype(np.float32)
        if factor is not None:
            wide = wide * factor.astype(np.float32)
        if wide.size == 0 or not bool(xp.isfinite(wide).all()):
            raise ArgumentError("x must hold finite activations, at least one")
        flat = wide.reshape(1, -1)
        if symmetric:
            scale, zero = safe_scale(xp.abs(flat).max(axis=-1) / np.float32(LARGEST_CODE[scheme]), xp), None
        else:
            scale, zero = lopsided(flat, xp)
        found = cls(float(scale[0]), None if zero is None else int(zero[0]), symmetric, factor)
        found.check(scheme, int(x.shape[-1]))
        return found

    @property
    def dynamic(self) -> bool:
        """Whether this is the default: a scale a token, and nothing else."""
        return self.scale is None and self.symmetric and self.factor is None

    def check(self, scheme: str, k: int) -> None:
        """Raise `ArgumentError` or `ShapeError` where this rule does not serve a weight of `scheme` and K."""
        if self.dynamic:
            return
        if scheme not in LARGEST_CODE:
            raise ArgumentError(f"activations: those of {scheme} stay in 16 bits, they take no rule")
        if self.scale is not None and scheme == "w8a8-fp8-block":
            raise ArgumentError("activations.scale: w8a8-fp8-block has a scale for every 128 k of a row")
        if not self.symmetric and scheme != "w8a8-int8":
            raise ArgumentError(f"activations.symmetric=False: codes of {scheme} have no zero points")
        if self.factor is not None and tuple(self.factor.shape) != (k,):
            raise ShapeError(f"activations.factor must have shape (K,) = ({k},), got {tuple(self.factor.shape)}")

    def __str__(self) -> str:
        parts = ["one scale a token"] if self.scale is None else [f"scale {self.scale:.4g}"]
        if not self.symmetric:
            parts.append("a zero point each" if self.zero is None else f"zero point {self.zero}")
        if self.factor is not None:
            parts.append("smoothed")
        return "activations with " + ", ".join(parts)

    def to_json(self) -> str:
        """Return everything but the factor's values as text, for a file's metadata."""
        dtype = None if self.factor is None else np.dtype(self.factor.dtype).name
        return json.dumps({"scale": self.scale, "zero": self.zero, "symmetric": self.symmetric, "factor": dtype})

    @classmethod
    def from_json(cls, text: str | None, factor_bits: np.ndarray | None) -> Activations:
        """Return what :meth:`to_json` wrote, with the factor's uint16 patterns; the default for None."""
        if text is None:
            return DYNAMIC
        fields = json.loads(text)
        factor = None
        if fields["factor"] is not None:
            if factor_bits is None or factor_bits.dtype != np.uint16:
                raise ArgumentError("factor is missing, or is not uint16")
            factor = factor_bits.view({"float16": FLOAT16, "bfloat16": BFLOAT16}[fields["factor"]])
        return cls(fields["scale"], fields["zero"], fields["symmetric"], factor)

    def factor_as(self, dtype: np.dtype) -> Array | None:
        """Return the factor in the dtype of x; `DTypeError` where it is not exact there. Made once."""
        if self.factor is None or np.dtype(self.factor.dtype) == dtype:
            return self.factor
        key = ("factor", np.dtype(dtype))
        if key not in self._made:
            narrow = self.factor.astype(dtype)
            if bool((narrow.astype(np.float32) != self.factor.astype(np.float32)).any()):
                raise DTypeError(
                    f"x is {np.dtype(dtype).name}, in which the weight's {np.dtype(self.factor.dtype).name} factors "
                    "are not exact; convert x, or round the factors (cupyq.smoothing_factor does) and quantize again"
                )
            self._made[key] = narrow
        return self._made[key]

    def static(self, like: Array) -> tuple[Array | None, Array | None]:
        """Return the fixed scale, (1,) float32, and zero point, (1,) int32, in the memory of `like`. Made once."""
        key = ("static", device_of(like))
        if key not in self._made:
            xp = namespace_of(like, "like")
            self._made[key] = (
                None if self.scale is None else xp.full((1,), self.scale, dtype=np.float32),
                None if self.zero is None else xp.full((1,), self.zero, dtype=np.int32),
            )
        return self._made[key]

    def with_factor(self, factor: Array | None) -> Activations:
        """Return the same rule with another (or a moved, or a permuted) factor."""
        return self if factor is self.factor else replace(self, factor=factor)


DYNAMIC = Activations()
"""The default rule."""


@on_its_device
def smoothing_factor(x_largest: Array, w: Array, strength: float = 0.5) -> Array:
    """Return SmoothQuant's factor for the columns of x: ``max|w[k]|**(1 - strength) / max|x[:, k]|**strength``.

    A few input features of transformers are a hundred times as large as the others and cost them their precision.
    Multiplied by this factor they are not, and the weight, divided by it, carries what was taken off (Xiao et al.,
    SmoothQuant, ICML 2023; the factor there is the reciprocal of this one).

    Parameters
    ----------
    x_largest : (K,) float
        Largest magnitude of each input feature on calibration data.
    w : (K, N) float
    strength : float
        0 leaves x alone, 1 moves all of the difference into the weight.

    Returns
    -------
    (K,) float16
        Rounded to the bits of bfloat16, so that it is exact in both types; 2**-14 to 2**15. Features that are zero in x
        or in w get 1.
    """
    xp = namespace_of(w, "w")
    namespace_of(x_largest, "x_largest")
    if w.ndim != 2 or tuple(x_largest.shape) != (w.shape[0],):
        raise ShapeError(
            f"x_largest must have shape (K,) to go with w (K, N), got {tuple(x_largest.shape)} and {tuple(w.shape)}"
        )
    if not 0 <= strength <= 1:
        raise ArgumentError(f"strength must be 0 to 1, got {strength!r}")
    of_x = xp.abs(x_largest.astype(np.float64))
    of_w = xp.abs(w.astype(np.float64)).max(axis=1) if w.shape[1] else xp.zeros(w.shape[0])
    if not bool(xp.isfinite(of_x).all()) or not bool(xp.isfinite(of_w).all()):
        raise ArgumentError("x_largest and w must be finite")
    idle = (of_x == 0) | (of_w == 0)
    factor = xp.where(idle, 1.0, of_w) ** (1 - strength) / xp.where(idle, 1.0, of_x) ** strength
    factor = xp.clip(factor, *_FACTOR_RANGE).astype(np.float32)
    bits = factor.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(FLOAT16)


# --- numbers ----------------------------------------------------------------------------------------------------------


def check_static_scale(scale: float) -> float:
    """Return a scale fixed beforehand, rounded to float32, or raise `ArgumentError`."""
    try:
        number = float(scale)
    except (TypeError, ValueError):
        number = float("nan")
    if not (SMALLEST_SCALE <= number <= LARGEST_STATIC_SCALE):
        raise ArgumentError(f"scale must be a positive, finite float32 from 2**-126 to 2**126, got {scale!r}")
    return float(np.float32(number))


def check_zero(zero: int) -> int:
    """Return a zero point of int8 codes, or raise `ArgumentError`."""
    if isinstance(zero, bool) or int(zero) != zero or not -128 <= zero <= 127:
        raise ArgumentError(f"zero must be an integer from -128 to 127, got {zero!r}")
    return int(zero)


def safe_scale(wanted: Array, xp: Any) -> Array:
    """Zeros may have any scale, and 1 divides safely; a subnormal scale would be flushed to zero."""
    return xp.where(wanted == 0, np.float32(1), xp.maximum(wanted, np.float32(SMALLEST_SCALE))).astype(np.float32)


def lopsided(wide: Array, xp: Any) -> tuple[Array, Array]:
    """Return (scale, zero point) of rows whose codes -128..127 cover them and zero."""
    top, bottom = xp.maximum(wide.max(axis=-1), 0), xp.minimum(wide.min(axis=-1), 0)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = safe_scale(top / np.float32(255) - bottom / np.float32(255), xp)
        zero = xp.clip(xp.rint(np.float32(-128) - bottom / scale), -128, 127)
    return scale, xp.where(xp.isnan(zero), np.float32(-128), zero).astype(np.int32)
