"""`QuantizedWeight` and the way in and out of the packed layout: `pack`, `unpack`, `save`, `load`."""

from __future__ import annotations

import json
import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import layout
from .activations import DYNAMIC, Activations
from .arrays import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    Array,
    common_namespace,
    device_of,
    first_position,
    is_cupy,
    namespace_of,
    on_its_device,
    place_name,
)
from .errors import ArgumentError, CupyqError, DTypeError, FormatError, NotInstalled, ShapeError

WEIGHT_ONLY = {"w2a16": 2, "w4a16": 4, "w8a16": 8}
"""Schemes whose activations stay in 16 bits -> bits of a code."""
SCHEMES = (*WEIGHT_ONLY, "w8a8-int8", "w8a8-fp8", "w8a8-fp8-block")
FP8_SCHEMES = ("w8a8-fp8", "w8a8-fp8-block")
BLOCK = 128
"""k, and output features, that share a scale of a "w8a8-fp8-block" weight."""
GROUP_SIZES = (16, 32, 64, 128, 256)
LONGEST_INT8_K = 2**31 // 128**2
"""Longest K, 131,072, whose int32 sum of products of int8 codes fits. It is one too large for a column of nothing but
-128 that meets a row of nothing but -128, so such a column is refused there."""
LAYOUT_VERSION = 1
# Of files that hold a rule for activations, which older versions would not heed.
_ACTIVATIONS_VERSION = f"{LAYOUT_VERSION}+activations"
_FORMAT_NAME = "cupyq-weight"


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight:
    """A (K, N) weight in quantized, packed form: NumPy arrays, or CuPy arrays of one device.

    Made by :func:`cupyq.quantize`, :func:`cupyq.pack`, :meth:`load` or a reader of `cupyq.formats`. The constructor
    checks dtypes, shapes and places, not values.

    Attributes
    ----------
    scheme : str
        "w2a16", "w4a16", "w8a16", "w8a8-int8", "w8a8-fp8" or "w8a8-fp8-block".
    k, n : int
        Input features (the reduced axis) and output features.
    group_size : int
        Consecutive k that share a scale: 16, 32, 64, 128, 256, or -1 for the whole column. "w8a8-fp8-block": 128.
    symmetric : bool
        Whether the zero point is fixed: 2, 8, 128 for codes of 2, 4, 8 bits, and 0 for w8a8.
    packed : (ceil(N/16), ceil(K/unit), 32, 4) uint32
        Codes, in the layout of :mod:`cupyq.layout`; a unit is 128, 64 or 32 k for codes of 2, 4 or 8 bits.
    scales : (ceil(N/16), G, 16) float16 or bfloat16, or float32 (w8a8), G = 1 but for
        "w8a8-fp8-block", whose scales are the same in every 128 features
    zeros : (ceil(N/16), G, 16) uint8, or None when symmetric
    perm : (K,) int32, or None
        Act order: packed row i multiplies column ``perm[i]`` of x.
    activations : Activations
        w8a8: how activations are quantized; by default with a scale a token, found when they arrive.
    """

    scheme: str
    k: int
    n: int
    group_size: int
    symmetric: bool
    packed: Array
    scales: Array
    zeros: Array | None = None
    perm: Array | None = None
    activations: Activations = DYNAMIC

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        for name in ("k", "n"):
            object.__setattr__(self, name, _whole(getattr(self, name), name, at_least=1 if name == "k" else 0))
        object.__setattr__(self, "group_size", check_group_size(self.group_size, self.scheme))
        _check_activations(self.activations, self.scheme, self.k)
        common_namespace(
            packed=self.packed, scales=self.scales, zeros=self.zeros, perm=self.perm, factor=self.activations.factor
        )
        _expect(self.packed, "packed", layout.packed_shape(self.k, self.n, self.bits), (np.dtype(np.uint32),))
        strip_groups = (layout.strips(self.n), self.groups, layout.STRIP)
        _expect(self.scales, "scales", strip_groups, scale_dtypes(self.scheme))
        if not self.symmetric and not self.weight_only:
            raise ArgumentError(f"symmetric must be True for {self.scheme}: its codes have no zero points")
        if self.symmetric != (self.zeros is None):
            raise ArgumentError(
                f"symmetric={self.symmetric} does not fit zeros={'None' if self.zeros is None else 'an array'}: "
                "zeros are None exactly when the weight is symmetric"
            )
        object.__setattr__(self, "symmetric", bool(self.symmetric))
        if self.zeros is not None:
            _expect(self.zeros, "zeros", strip_groups, (np.dtype(np.uint8),))
        if self.perm is not None:
            _expect(self.perm, "perm", (self.k,), (np.dtype(np.int32),))
            if self.scheme == "w8a8-fp8-block":
                raise ArgumentError(f"perm must be None for {self.scheme}: blocks of activations are in x's own order")

    @property
    def bits(self) -> int:
        """Bits of a code: 2, 4 or 8."""
        return WEIGHT_ONLY.get(self.scheme, 8)

    @property
    def weight_only(self) -> bool:
        """Whether activations stay in 16 bits."""
        return self.scheme in WEIGHT_ONLY

    @property
    def groups(self) -> int:
        """Groups along K: ceil(K / group_size), or 1."""
        return group_count(self.k, self.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.k, self.n

    @property
    def scale_dtype(self) -> np.dtype:
        """Dtype of the stored scales."""
        return np.dtype(self.scales.dtype)

    @property
    def device(self) -> int | None:
        """CUDA ordinal that holds the arrays, or None for host memory."""
        return device_of(self.packed)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding included."""
        arrays = (self.packed, self.scales, self.zeros, self.perm, self.activations.factor)
        return sum(int(a.nbytes) for a in arrays if a is not None)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales, zeros and padding included, per weight."""
        return 8 * self.nbytes / max(self.k * self.n, 1)

    def __repr__(self) -> str:
        grid = "one group a column" if self.group_size == -1 else f"group_size={self.group_size}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        order = ", act order" if self.perm is not None else ""
        rule = "" if self.activations.dynamic else f", {self.activations}"
        return (
            f"QuantizedWeight({self.scheme}, K={self.k}, N={self.n}, {grid}, {kind}{order}{rule}, "
            f"{self.scale_dtype} scales, {self.nbytes / 1e6:.3g} MB, {self.bits_per_weight:.2f} bits a weight, "
            f"{place_name(self.device)})"
        )

    def to_numpy(self) -> QuantizedWeight:
        """Return the weight in host memory; itself if it is there."""
        if self.device is None:
            return self
        return self._mapped(lambda a: a.get())

    def to_cupy(self, device: int | None = None) -> QuantizedWeight:
        """Return the weight on a CUDA device.

        Parameters
        ----------
        device : int, optional
            CUDA ordinal; None is CuPy's current device. A weight that is there already is returned itself.

        Raises
        ------
        NotInstalled
            CuPy is missing.
        """
        try:
            import cupy
        except ImportError as error:
            raise NotInstalled(
                "moving a weight to a GPU needs CuPy: pip install 'cupyq[cuda12]' or 'cupyq[cuda13]'"
            ) from error
        with cupy.cuda.Device(device):
            if self.device == cupy.cuda.Device().id:
                return self
            return self._mapped(cupy.array)  # copies across devices too

    def _mapped(self, move: Any) -> QuantizedWeight:
        def moved(array: Array | None) -> Array | None:
            return None if array is None else move(array)

        return replace(
            self,
            packed=moved(self.packed),
            scales=moved(self.scales),
            zeros=moved(self.zeros),
            perm=moved(self.perm),
            activations=self.activations.with_factor(moved(self.activations.factor)),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weight as a safetensors file, whole or not at all.

        The bytes go to a temporary file in the same folder, which then takes the name `path`: a crash leaves the old
        file as it was. bfloat16 scales are stored as uint16 patterns; the metadata says so.
        """
        from safetensors.numpy import save_file

        host = self.to_numpy()
        tensors = {name: getattr(host, name) for name in ("packed", "scales", "zeros", "perm")}
        tensors = {name: np.ascontiguousarray(a) for name, a in tensors.items() if a is not None}
        if host.scale_dtype == BFLOAT16:
            tensors["scales"] = tensors["scales"].view(np.uint16)
        metadata = {
            "format": _FORMAT_NAME,
            "layout": str(LAYOUT_VERSION),
            "scheme": self.scheme,
            "k": str(self.k),
            "n": str(self.n),
            "group_size": str(self.group_size),
            "symmetric": json.dumps(self.symmetric),
            "scale_dtype": self.scale_dtype.name,
        }
        if not self.activations.dynamic:
            metadata["layout"] = _ACTIVATIONS_VERSION
            metadata["activations"] = host.activations.to_json()
            if host.activations.factor is not None:
                tensors["factor"] = np.ascontiguousarray(host.activations.factor).view(np.uint16)
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")
        try:
            save_file(tensors, partial, metadata=metadata)
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizedWeight:
        """Read a file that :meth:`save` wrote, into host memory.

        Raises
        ------
        FormatError
            The file is cut short, is no safetensors file, was not written by cupyq, by a newer cupyq, or holds
            arrays or values that do not fit each other.
        OSError
            The file cannot be read.
        """
        metadata, tensors = _read(path)
        if metadata.get("format") != _FORMAT_NAME:
            raise FormatError(
                f"{os.fspath(path)} was not written by QuantizedWeight.save; cupyq.formats reads checkpoints of others"
            )
        if metadata.get("layout") not in (str(LAYOUT_VERSION), _ACTIVATIONS_VERSION):
            raise FormatError(
                f"{os.fspath(path)} has packed layout {metadata.get('layout')}; this cupyq reads {LAYOUT_VERSION}"
            )
        try:
            scale_dtype = metadata["scale_dtype"]
            if scale_dtype == BFLOAT16.name:
                _expect_dtype(tensors["scales"], "scales", (np.dtype(np.uint16),))
                tensors["scales"] = tensors["scales"].view(BFLOAT16)
            weight = cls(
                scheme=metadata["scheme"],
                k=int(metadata["k"]),
                n=int(metadata["n"]),
                group_size=int(metadata["group_size"]),
                symmetric=json.loads(metadata["symmetric"]),
                activations=Activations.from_json(metadata.get("activations"), tensors.get("factor")),
                **{name: tensors.get(name) for name in ("packed", "scales", "zeros", "perm")},
            )
            if weight.scale_dtype.name != scale_dtype:
                raise FormatError(f"scales are {weight.scale_dtype.name} but the metadata says {scale_dtype}")
            _check_values(weight.scales, weight.zeros, weight.perm, weight.scheme)
        except (CupyqError, KeyError, ValueError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise FormatError(f"{os.fspath(path)} is damaged: {what}") from error
        return weight


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return (metadata, tensors) of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="np") as file:
            metadata = file.metadata() or {}
            tensors = {}
            if metadata.get("format") == _FORMAT_NAME:  # a foreign file may hold dtypes that NumPy lacks
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise FormatError(f"{os.fspath(path)} is no complete safetensors file: {error}") from error
    return metadata, tensors


# --- checks ---------------------------------------------------------------------------------------------------------


def check_scheme(scheme: str) -> str:
    """Return `scheme` if cupyq knows it, else raise `ArgumentError`."""
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme must be one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    return scheme


def _check_activations(rule: Any, scheme: str, k: int) -> None:
    if not isinstance(rule, Activations):
        raise ArgumentError(f"activations must be a cupyq.Activations, got {type(rule).__name__}")
    rule.check(scheme, k)


def check_group_size(group_size: int | None, scheme: str) -> int:
    """Return a legal group size for `scheme`; None means its default (128, or -1 for w8a8).

    w8a8 has one group size; 128, the default of functions that serve every scheme, stands for it there.
    """
    if scheme == "w8a8-fp8-block":
        if isinstance(group_size, bool) or group_size not in (None, BLOCK):
            raise ArgumentError(f"group_size must be {BLOCK} for {scheme}, got {group_size!r}")
        return BLOCK
    if scheme not in WEIGHT_ONLY:
        if isinstance(group_size, bool) or group_size not in (None, -1, 128):
            raise ArgumentError(f"group_size must be -1 for {scheme} (one scale an output feature), got {group_size!r}")
        return -1
    if group_size is None:
        return 128
    group_size = _whole(group_size, "group_size", at_least=-1)
    if group_size != -1 and group_size not in GROUP_SIZES:
        raise ArgumentError(
            f"group_size must be one of {', '.join(map(str, GROUP_SIZES))} or -1 (the whole column), got {group_size}"
        )
    return group_size


def group_count(k: int, group_size: int) -> int:
    """Return the number of groups along K: ceil(K / group_size), or 1 for -1."""
    return 1 if group_size == -1 else -(-k // group_size)


def scale_dtypes(scheme: str) -> tuple[np.dtype, ...]:
    """Return the dtypes that scales of `scheme` may be stored in."""
    return (FLOAT16, BFLOAT16) if scheme in WEIGHT_ONLY else (FLOAT32,)


def symmetric_zero(scheme: str) -> int:
    """Return the zero point of symmetric codes: the middle of their range, or 0 for w8a8's signed codes."""
    return 1 << WEIGHT_ONLY[scheme] - 1 if scheme in WEIGHT_ONLY else 0


def _whole(value: Any, name: str, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(f"{name} must be an integer, got {value!r}")
    if value < at_least:
        raise ArgumentError(f"{name} must be at least {at_least}, got {value}")
    return int(value)


def _expect_dtype(array: Array, name: str, dtypes: tuple[np.dtype, ...]) -> None:
    namespace_of(array, name)
    if np.dtype(array.dtype) not in dtypes:
        raise DTypeError(f"{name} must be {' or '.join(d.name for d in dtypes)}, got {np.dtype(array.dtype).name}")


def _expect(array: Array, name: str, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]) -> None:
    """Check dtype, shape and C order of one stored array."""
    _expect_dtype(array, name, dtypes)
    if tuple(array.shape) != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{name} must be C-contiguous, got strides {array.strides}")


def _check_values(scales: Array, zeros: Array | None, perm: Array | None, scheme: str) -> None:
    """Raise `ArgumentError` for a non-finite or negative scale, a zero point out of range, a perm that is none."""
    xp = namespace_of(scales, "scales")
    wide = scales.astype(np.float32)  # bfloat16 has few ufuncs of its own
    bad = ~(xp.isfinite(wide) & (wide >= 0))
    if bad.any():
        at = first_position(bad)
        raise ArgumentError(f"scales must be finite and not negative, got {float(wide[at])} at {at}")
    high = (1 << WEIGHT_ONLY.get(scheme, 0)) - 1
    if zeros is not None and zeros.size and (int(zeros.min()) < 0 or int(zeros.max()) > high):
        at = first_position((zeros < 0) | (zeros > high))
        raise ArgumentError(f"zeros must lie in 0..{high} for {scheme}, got {int(zeros[at])} at {at}")
    if perm is not None:
        xp = namespace_of(perm, "perm")
        if not bool((xp.sort(perm) == xp.arange(perm.shape[0])).all()):
            raise ArgumentError(f"perm must hold each of 0..{perm.shape[0] - 1} once")


def _code_bytes(codes: Array, scheme: str) -> Array:
    """Return codes as uint8 values, or bit patterns (w8a8), each checked."""
    xp = namespace_of(codes, "codes")
    dtype = np.dtype(codes.dtype)
    if scheme in FP8_SCHEMES:
        _expect_dtype(codes, "codes", (FLOAT8, np.dtype(np.uint8)))
        bits = codes.view(np.uint8) if dtype == FLOAT8 else codes
        nan = (bits & np.uint8(0x7F)) == np.uint8(0x7F)
        if nan.any():
            raise ArgumentError(f"codes must be finite, got NaN at {first_position(nan)}")
        return bits
    if dtype.kind not in "iu":
        raise DTypeError(f"codes must have an integer dtype for {scheme}, got {dtype.name}")
    low, high = (0, (1 << WEIGHT_ONLY[scheme]) - 1) if scheme in WEIGHT_ONLY else (-128, 127)
    if codes.size and (int(codes.min()) < low or int(codes.max()) > high):
        at = first_position((codes < low) | (codes > high))
        raise ArgumentError(f"codes must lie in {low}..{high} for {scheme}, got {int(codes[at])} at {at}")
    if scheme in WEIGHT_ONLY:
        return codes.astype(np.uint8, copy=False)
    return xp.asarray(codes.astype(np.int8, copy=False)).view(np.uint8)


# --- pack and unpack ------------------------------------------------------------------------------------------------


@on_its_device
def pack(
    codes: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    scheme: str,
    group_size: int | None = 128,
    perm: Array | None = None,
    activations: Activations = DYNAMIC,
) -> QuantizedWeight:
    """Pack codes made elsewhere. The inverse of :func:`unpack`, bit for bit.

    The weight meant is ``w[k, n] = (codes[k, n] - zeros[k // g, n]) * scales[k // g, n]``, where `zeros` None stands
    for 2, 8 or 128 (w2a16, w4a16, w8a16) or 0 (w8a8).

    Parameters
    ----------
    codes : (K, N), NumPy or CuPy, any strides
        w4a16: an integer dtype, values 0..15 (w2a16: 0..3, w8a16: 0..255). w8a8-int8: an integer dtype, -128..127.
        w8a8-fp8: float8_e4m3fn, or its bit patterns as uint8 (CuPy has no 8-bit floats); NaN is refused.
    scales : (G, N)
        float16 or bfloat16, or float32 (1, N) for w8a8; finite and >= 0. G = ceil(K / group_size), or 1.
        w8a8-fp8-block: float32 (G, ceil(N/128)), one a block, or (G, N) with equal values in each.
    zeros : (G, N) of an integer dtype, optional
        Zero points of an asymmetric weight, in the range of its codes; None makes it symmetric. Not for w8a8.
    scheme : str
        "w2a16", "w4a16", "w8a16", "w8a8-int8", "w8a8-fp8" or "w8a8-fp8-block".
    group_size : int, optional
        16, 32, 64, 128 (default) or 256, or -1 for the whole column. w8a8 always has -1.
    perm : (K,) of an integer dtype, optional
        Act order: row i of `codes` belongs to input feature ``perm[i]``. Groups run over rows of `codes`.
    activations : Activations
        w8a8: how activations are quantized. With a factor, `codes` are those of a weight that was divided by it.

    Returns
    -------
    QuantizedWeight
        In the same memory (host or device) as `codes`.

    Raises
    ------
    ArgumentError, DTypeError, ShapeError, DeviceMismatch
        An argument is out of range, of a wrong dtype or shape, or lives elsewhere than `codes`.
    """
    check_scheme(scheme)
    group_size = check_group_size(group_size, scheme)
    _check_activations(activations, scheme, int(codes.shape[0]) if getattr(codes, "ndim", 0) else 0)
    xp, _ = common_namespace(codes=codes, scales=scales, zeros=zeros, perm=perm, factor=activations.factor)
    if codes.ndim != 2 or codes.shape[0] == 0:
        raise ShapeError(f"codes must have shape (K, N) with K >= 1, got {tuple(codes.shape)}")
    k, n = map(int, codes.shape)
    grid = (group_count(k, group_size), n)
    _expect_dtype(scales, "scales", scale_dtypes(scheme))
    if scheme == "w8a8-fp8-block":
        scales = _block_scales(scales, grid, xp)
    if tuple(scales.shape) != grid:
        raise ShapeError(f"scales must have shape (groups, N) = {grid}, got {tuple(scales.shape)}")
    if zeros is not None:
        if scheme not in WEIGHT_ONLY:
            raise ArgumentError(f"zeros must be None for {scheme}: its codes have no zero points")
        _expect_integer(zeros, "zeros", grid)
    if perm is not None:
        _expect_integer(perm, "perm", (k,))
    _check_values(scales, zeros, perm, scheme)
    data = _code_bytes(codes, scheme)
    if scheme == "w8a8-int8" and k == LONGEST_INT8_K:
        full = (data == np.uint8(128)).all(axis=0)
        if bool(full.any()):
            raise ArgumentError(
                f"codes must not all be -128 in column {first_position(full)[0]}: with activations of -128 their sum "
                f"of products leaves int32 at K={k}"
            )
    if zeros is not None:
        zeros = zeros.astype(np.uint8, copy=False)
    last_row = None if zeros is None else zeros[-1]
    packed = gpu_packer(data, scheme, last_row) if gpu_packer is not None and is_cupy(data) else None
    if packed is None:
        packed = _pack_codes(data, scheme, last_row)
    return QuantizedWeight(
        scheme=scheme,
        k=k,
        n=n,
        group_size=group_size,
        symmetric=zeros is None,
        packed=packed,
        scales=layout.interleave(scales),
        zeros=None if zeros is None else layout.interleave(zeros),
        perm=None if perm is None else xp.ascontiguousarray(perm.astype(np.int32)),
        activations=activations,
    )


gpu_packer: Callable[[Array, str, Array | None], Array | None] | None = None
"""Packs CuPy codes with a kernel, or returns None where it cannot; `cupyq` puts that of `cupyq.packing` here."""


def _pack_codes(data: Array, scheme: str, last_row: Array | None) -> Array:
    if scheme not in WEIGHT_ONLY:
        return layout.pack8(data)
    return layout.pack16(data, WEIGHT_ONLY[scheme], symmetric_zero(scheme) if last_row is None else 0, last_row)


def _block_scales(scales: Array, grid: tuple[int, int], xp: Any) -> Array:
    """Return scales of 128 x 128 blocks, one a block or one a feature, as (G, N)."""
    blocks = (grid[0], -(-grid[1] // BLOCK))
    if tuple(scales.shape) == blocks:
        return xp.repeat(scales, BLOCK, axis=1)[:, : grid[1]]
    if tuple(scales.shape) == grid:
        first = xp.repeat(scales[:, ::BLOCK], BLOCK, axis=1)[:, : grid[1]]
        if bool((first != scales).any()):
            at = first_position(first != scales)
            raise ArgumentError(f"scales must be equal in each block of {BLOCK} features, got two values at {at}")
        return scales
    raise ShapeError(f"scales must have shape (groups, ceil(N/{BLOCK})) = {blocks}, got {tuple(scales.shape)}")


def _expect_integer(array: Array, name: str, shape: tuple[int, ...]) -> None:
    if np.dtype(array.dtype).kind not in "iu":
        raise DTypeError(f"{name} must have an integer dtype, got {np.dtype(array.dtype).name}")
    if tuple(array.shape) != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {tuple(array.shape)}")


@on_its_device
def unpack(qw: QuantizedWeight) -> tuple[Array, Array, Array | None]:
    """Return the logical (codes, scales, zeros) of a weight. The inverse of :func:`pack`, bit for bit.

    Returns
    -------
    codes : (K, N)
        uint8 (w2a16, w4a16, w8a16), int8 (w8a8-int8), float8_e4m3fn (fp8; on CuPy its bit patterns
        as uint8). With act order, rows are in packed order: row i belongs to input feature ``qw.perm[i]``.
    scales : (G, N)
        In the stored dtype.
    zeros : (G, N) uint8, or None when symmetric
    """
    expect_weight(qw)
    return (
        codes_of(qw),
        layout.deinterleave(qw.scales, qw.n),
        None if qw.zeros is None else layout.deinterleave(qw.zeros, qw.n),
    )


def codes_of(qw: QuantizedWeight, first: int = 0, last: int | None = None) -> Array:
    """Return the codes of strips `first` to `last` (all by default), as :func:`unpack` does."""
    if qw.weight_only:
        return layout.unpack16(qw.packed, qw.bits, qw.k, qw.n, first, last)
    data = layout.unpack8(qw.packed, qw.k, qw.n, first, last)
    if qw.scheme == "w8a8-int8":
        return data.view(np.int8)
    return data if is_cupy(data) else data.view(FLOAT8)


@on_its_device
def column_sums(qw: QuantizedWeight) -> Array:
    """Return the sum of the codes of each output feature: (N,) int32, made once for a weight.

    A zero point z of activations adds ``z * column_sum`` to a sum of products; a kernel takes that off.
    """
    found = _column_sums.get(id(qw))
    if found is None:
        xp = namespace_of(qw.packed, "packed")
        found = xp.concatenate(
            [codes_of(qw, first, last).sum(axis=0, dtype=np.int32) for first, last in layout.strip_blocks(qw.k, qw.n)]
        )
        _column_sums[id(qw)] = found
        weakref.finalize(qw, _column_sums.pop, id(qw), None)
    return found


_column_sums: dict[int, Array] = {}


def expect_weight(qw: Any) -> None:
    if not isinstance(qw, QuantizedWeight):
        raise ArgumentError(
            f"qw must be a QuantizedWeight (from cupyq.quantize or cupyq.pack), got {type(qw).__name__}"
        )
