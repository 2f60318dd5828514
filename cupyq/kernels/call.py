"""Arguments of one launch, in the order of the kernel's parameters: arrays for pointers, typed scalars for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyq.arrays import Array, common_namespace
from cupyq.errors import ArgumentError, DTypeError, IllegalConfig, ShapeError
from cupyq.layout import packed_shape
from cupyq.weights import column_sums, symmetric_zero

from .config import Config, Launch
from .dequant import DequantConfig
from .pack import PackConfig, vector
from .problem import NUMPY_DTYPES, Problem
from .quantize_activations import BLOCK_K, QuantizeActivationsConfig
from .w4a16 import W4A16Config
from .w8a8 import W8A8Config

NULL = np.uint64(0)
"""A null pointer: an argument that this launch does not have."""


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes
    ----------
    entry : str
        Name of the kernel's entry function.
    args : tuple
        One per kernel parameter: NumPy or CuPy arrays for pointers (`numpy.uint64(0)` for a null one), NumPy scalars.
    out : array
        The array among `args` that receives the result.
    grid, block : tuple of int
        Launch geometry.
    shared_bytes : int
        Dynamic shared memory of a block.
    x_scale, x_zero : array or None
        Quantizing activations: the arrays that receive the float32 scale and the int32 zero point of each token;
        (M, ceil(K/128)) scales for "w8a8-fp8-block", see :func:`scale_shape`.
    """

    entry: str
    args: tuple[Any, ...]
    out: Array
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    x_scale: Array | None = None
    x_zero: Array | None = None


def call(
    cfg: Config,
    prob: Problem,
    x: Array | None,
    qw: Any = None,
    bias: Array | None = None,
    *,
    x_scale: Array | None = None,
    x_zero: Array | None = None,
    factor: Array | None = None,
    perm: Array | None = None,
    last_row: Array | None = None,
    out: Array | None = None,
    workspace: tuple[Array, Array] | None = None,
) -> Call:
    """Return the arguments and geometry of one launch of `cfg` for `prob`.

    Parameters
    ----------
    cfg : Config
        What to launch: a fused kernel's config, `DequantConfig` (x is not used, `out` is the dense (K, N) weight),
        `QuantizeActivationsConfig` (qw is not used, `out` is codes, `x_scale` of the result holds the scales) or
        `PackConfig` (qw is not used, x is the (K, N) uint8 codes or their bits, `out` is packed words).
    prob : Problem
        M >= 1: an empty batch launches nothing.
    x : (M, K) array
        Activations of `prob.dtype`; for the W8A8 kernel their codes, int8 or float8_e4m3fn (or its bits as uint8),
        (M, K) or padded with zeros to (M, ceil(K/16)*16). Copied where its rows are not laid out as the kernel reads
        them.
    qw : QuantizedWeight
        On the same device as x.
    bias : (N,) array of `prob.dtype`, optional
    x_scale : (M,), (M, 1) or (1,) float32 array
        W8A8: scale of each token, or of all; "w8a8-fp8-block": (M, ceil(K/128)). Not with a fused config. Quantizing
        with scales="tensor": the (1,) scale.
    x_zero : (M,) or (1,) int32 array, optional
        W8A8-int8: zero points, as many as scales. Quantizing with scales="tensor" and zeros: the (1,) zero point.
    factor : (K,) array of `prob.dtype`, optional
        Quantizing with smooth: what columns of x are multiplied by.
    perm : (K,) int32 array, optional
        Packing: the row of codes that each packed row takes. Each must lie in 0..K-1, which is not checked.
    last_row : (N,) uint8 array, optional
        Packing: codes that fill the last unit from K on; the code of zero if not given. Weights with zero points have
        the zero points of their last group there.
    out : array, optional
        Where the result goes: C order, of the result's shape and dtype. New if not given.
    workspace : (partials, arrivals), optional
        uint32 arrays for split-K, of at least `launch.partial_words` and `launch.tiles` words, arrivals zero. New if
        not given.

    Raises
    ------
    ShapeError, DTypeError, DeviceMismatch, IllegalConfig
        An argument does not fit; the message names it.
    """
    if isinstance(cfg, PackConfig):
        return _pack(cfg, prob, x, perm, last_row, out)
    if prob.m == 0 and not isinstance(cfg, DequantConfig):
        raise ShapeError("m=0: an empty batch launches nothing")
    if isinstance(cfg, QuantizeActivationsConfig):
        return _quantize_activations(cfg, prob, x, x_scale, x_zero, factor, out)
    _check_weight(prob, qw)
    if isinstance(cfg, DequantConfig):
        return _dequant(cfg, prob, qw, out)
    if not isinstance(cfg, W4A16Config if prob.weight_only else W8A8Config):
        raise IllegalConfig(f"cfg: the {cfg.family} kernel does not compute {prob.op}")
    xp, _ = common_namespace(x=x, packed=qw.packed, bias=bias, x_scale=x_scale, out=out)
    launch = cfg.launch(prob)
    y = _result(xp, out, (prob.m, prob.n), NUMPY_DTYPES[prob.dtype], "out")
    if bias is not None:
        _expect("bias", bias, (prob.n,), NUMPY_DTYPES[prob.dtype])
        bias = xp.ascontiguousarray(bias)
    partials, arrivals = _workspace(xp, launch, workspace)
    results = (y, NULL if bias is None else bias, partials, arrivals)
    if isinstance(cfg, W4A16Config):
        _expect("x", x, (prob.m, prob.k), NUMPY_DTYPES[prob.dtype])
        if qw.perm is not None:
            x = xp.take(x, qw.perm, axis=1)
        x, stride = _rows(xp, x, 16 if prob.k % 8 == 0 else 2)
        zeros = NULL if qw.zeros is None else qw.zeros
        args = (qw.packed, qw.scales, zeros, x, *results, *cfg.scalars(prob, stride))
    else:
        args = (qw.packed, qw.scales, *_activations(xp, cfg, prob, x, qw, x_scale, x_zero, results))
    return Call(cfg.entry(prob), args, y, launch.grid, launch.block, launch.shared_bytes)


def _activations(
    xp: Any,
    cfg: W8A8Config,
    prob: Problem,
    x: Array | None,
    qw: Any,
    x_scale: Array | None,
    x_zero: Array | None,
    results: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return the W8A8 kernel's arguments from x on."""
    if cfg.fused:
        if x_scale is not None or x_zero is not None:
            raise ArgumentError("x_scale is given: a fused config quantizes x itself, by the rule of its weight")
        _expect("x", x, (prob.m, prob.k), NUMPY_DTYPES[prob.dtype])
        x, stride = _rows(xp, x, 16 if prob.k % 8 == 0 else 2)
        rule = qw.activations
        given = (*rule.static(x), None if rule.symmetric else column_sums(qw), rule.factor_as(NUMPY_DTYPES[prob.dtype]))
        return (x, *(NULL if a is None else a for a in given), *results, *cfg.scalars(prob, stride, 1))
    if x_scale is None:
        raise ShapeError("x_scale is missing: the W8A8 kernel takes quantized activations and the scale of each token")
    codes = _codes(xp, prob, x)
    if prob.op == "w8a8-fp8-block":
        scales = kernel_block_scales(prob, x_scale)
        return (codes, scales, NULL, NULL, NULL, *results, *cfg.scalars(prob, codes.shape[1], scales.shape[1]))
    scales = xp.ascontiguousarray(x_scale, dtype=np.float32).reshape(-1)
    one = scales.size == 1 and prob.m > 1
    shape = (1,) if one else (prob.m,)
    _expect("x_scale", scales, shape, np.dtype(np.float32))
    zeros = sums = NULL
    if x_zero is not None:
        if prob.op != "w8a8-int8":
            raise ArgumentError(f"x_zero is given: codes of {prob.op} have no zero points")
        zeros = xp.ascontiguousarray(x_zero).reshape(-1)
        _expect("x_zero", zeros, shape, np.dtype(np.int32))
        sums = column_sums(qw)
    return (codes, scales, zeros, sums, NULL, *results, *cfg.scalars(prob, codes.shape[1], 0 if one else 1))


def scale_shape(prob: Problem) -> tuple[int, ...]:
    """Return the shape of the scales of activations as kernels read them.

    (M,); for "w8a8-fp8-block" (ceil(K/128), M rounded up to 256), tokens the fast axis, so that a warp reads those of
    neighbouring tokens at once; the padding belongs to rows of a tile past M. What users see is the transpose, cut to
    (M, ceil(K/128)).
    """
    return (-(-prob.k // BLOCK_K), -(-prob.m // 256) * 256) if prob.op == "w8a8-fp8-block" else (prob.m,)


def kernel_block_scales(prob: Problem, x_scale: Array) -> Array:
    """Return (M, ceil(K/128)) scales as the kernel reads them; not copied where they are a view of such an array."""
    shape = scale_shape(prob)
    if tuple(x_scale.shape) != shape or shape == (prob.m, shape[0]):
        _expect("x_scale", x_scale, (prob.m, shape[0]), np.dtype(np.float32))
        base = x_scale.base
        if (
            base is not None
            and base.dtype == x_scale.dtype
            and base.flags.c_contiguous
            and base.size >= math.prod(shape)
            and pointer(base) == pointer(x_scale)
            and x_scale.strides == (4, 4 * shape[1])
        ):
            return base.reshape(-1)[: math.prod(shape)].reshape(shape)
        xp, _ = common_namespace(x_scale=x_scale)
        scales = xp.zeros(shape, np.float32)
        scales[:, : prob.m] = x_scale.T
        return scales
    if x_scale.dtype != np.float32:
        raise DTypeError(f"x_scale has dtype {x_scale.dtype.name}; expected float32")
    return x_scale


def _dequant(cfg: DequantConfig, prob: Problem, qw: Any, out: Array | None) -> Call:
    xp, _ = common_namespace(packed=qw.packed, out=out)
    if qw.perm is not None:
        raise IllegalConfig("qw has a permutation of its inputs: the dense rows would come in packed order")
    launch = cfg.launch(prob)
    w = _result(xp, out, (prob.k, prob.n), NUMPY_DTYPES[prob.dtype], "out")
    zeros = NULL if qw.zeros is None else qw.zeros
    args = (qw.packed, qw.scales, zeros, w, np.int32(prob.n), np.int32(prob.k))
    return Call(cfg.entry(prob), args, w, launch.grid, launch.block, launch.shared_bytes)


def _pack(
    cfg: PackConfig, prob: Problem, codes: Array | None, perm: Array | None, last_row: Array | None, out: Array | None
) -> Call:
    xp, _ = common_namespace(x=codes, perm=perm, last_row=last_row, out=out)
    _expect("x", codes, (prob.k, prob.n), np.dtype(np.uint8))
    assert codes is not None  # else _expect would have raised
    codes, stride = _rows(xp, codes, vector(prob))
    if perm is not None:
        _expect("perm", perm, (prob.k,), np.dtype(np.int32))
        perm = xp.ascontiguousarray(perm)
    if last_row is not None:
        _expect("last_row", last_row, (prob.n,), np.dtype(np.uint8))
        last_row, _ = _rows(xp, last_row[None], vector(prob))
    launch = cfg.launch(prob)
    packed = _result(xp, out, packed_shape(prob.k, prob.n, prob.bits), np.dtype(np.uint32), "out")
    pad = symmetric_zero(prob.op) if prob.symmetric else 0
    pointers = tuple(NULL if p is None else p for p in (perm, last_row))
    args = (codes, *pointers, packed, np.int32(prob.n), np.int32(prob.k), np.int32(stride), np.uint32(pad * 0x01010101))
    return Call(cfg.entry(prob), args, packed, launch.grid, launch.block, launch.shared_bytes)


def _quantize_activations(
    cfg: QuantizeActivationsConfig,
    prob: Problem,
    x: Array | None,
    x_scale: Array | None,
    x_zero: Array | None,
    factor: Array | None,
    out: Array | None,
) -> Call:
    xp, _ = common_namespace(x=x, x_scale=x_scale, x_zero=x_zero, factor=factor, out=out)
    dtype = NUMPY_DTYPES[prob.dtype]
    _expect("x", x, (prob.m, prob.k), dtype)
    for name, array, wanted in (
        ("factor", factor, cfg.smooth),
        ("x_scale", x_scale, cfg.scales == "tensor"),
        ("x_zero", x_zero, cfg.scales == "tensor" and cfg.zeros),
    ):
        if (array is not None) != wanted:
            state, reason = ("missing", "takes it") if wanted else ("given", "has no use for it")
            raise ArgumentError(f"{name} is {state}: {cfg} {reason}")
    launch = cfg.launch(prob)
    stride = padded_k(prob.k)
    codes = _result(xp, out, (prob.m, stride), np.dtype(np.int8 if prob.op == "w8a8-int8" else np.uint8), "out")
    x, x_stride = _rows(xp, x, 16 if prob.k % 8 == 0 else 2)
    scale_stride, made_scale, made_zero = 0, None, None
    if cfg.smooth:
        _expect("factor", factor, (prob.k,), dtype)
        factor = xp.ascontiguousarray(factor)
    if cfg.scales == "tensor":
        _expect("x_scale", x_scale, (1,), np.dtype(np.float32))
        if cfg.zeros:
            _expect("x_zero", x_zero, (1,), np.dtype(np.int32))
    elif prob.op == "w8a8-fp8-block":
        blocks = scale_shape(prob)
        made_scale, scale_stride = xp.empty(blocks, np.float32), blocks[1]
    else:
        made_scale = xp.empty((prob.m,), np.float32)
        made_zero = xp.empty((prob.m,), np.int32) if cfg.zeros else None
    pointers = (x, factor, x_scale, x_zero, codes, made_scale, made_zero)
    args = tuple(NULL if p is None else p for p in pointers)
    args += tuple(map(np.int32, (prob.k, x_stride, stride, scale_stride)))
    seen = made_scale
    if made_scale is not None and scale_stride:
        seen = made_scale[:, : prob.m].T
    return Call(cfg.entry(prob), args, codes, launch.grid, launch.block, launch.shared_bytes, seen, made_zero)


def padded_k(k: int) -> int:
    """Columns of an array of activation codes: K rounded up to whole 16-byte pieces."""
    return -(-k // 16) * 16


def _check_weight(prob: Problem, qw: Any) -> None:
    for field, have, want in (
        ("scheme", qw.scheme, prob.op),
        ("k", qw.k, prob.k),
        ("n", qw.n, prob.n),
        ("group_size", qw.group_size, prob.group_size),
        ("symmetric", qw.symmetric, prob.symmetric),
    ):
        if have != want:
            raise ShapeError(f"qw.{field}={have!r} does not fit the problem's {want!r}")
    if prob.weight_only and qw.scales.dtype != NUMPY_DTYPES[prob.scale_dtype]:
        raise DTypeError(
            f"qw.scales are {qw.scales.dtype.name}, the problem says scale_dtype={prob.scale_dtype!r}; "
            "Problem.of(m, qw, dtype) states what qw has"
        )


def _expect(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array is None:
        raise ShapeError(f"{name} is missing; an array of shape {shape} and dtype {dtype.name} is expected")
    if tuple(array.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(array.shape)}; expected {shape}")
    if array.dtype != dtype:
        raise DTypeError(f"{name} has dtype {array.dtype.name}; expected {dtype.name}")


def _result(xp: Any, out: Array | None, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Array:
    if out is None:
        return xp.empty(shape, dtype)
    _expect(name, out, shape, dtype)
    if not out.flags.c_contiguous or pointer(out) % 16:
        raise ShapeError(f"{name} must be in C order and start at a multiple of 16 bytes")
    return out


def _rows(xp: Any, x: Array, align: int) -> tuple[Array, int]:
    """Return x, copied if its rows are not contiguous and aligned, and the elements between two rows."""
    size = x.dtype.itemsize
    ready = (
        x.strides[1] == size
        and x.strides[0] >= x.shape[1] * size
        and x.strides[0] % align == 0
        and pointer(x) % align == 0
    )
    if x.shape[0] == 1 and x.strides[1] == size and pointer(x) % align == 0:
        return x, x.shape[1]
    if not ready:
        x = xp.array(x, order="C", copy=True)
    return x, x.strides[0] // size


def _codes(xp: Any, prob: Problem, x: Array | None) -> Array:
    """Return activation codes as (M, padded K), zeros beyond K."""
    if x is None:
        raise ShapeError("x is missing: the W8A8 kernel takes the codes of the activations")
    names = ("int8",) if prob.op == "w8a8-int8" else ("float8_e4m3fn", "uint8")
    if x.dtype.name not in names:
        raise DTypeError(f"x has dtype {x.dtype.name}; {prob.op} takes codes of dtype {' or '.join(names)}")
    wide = padded_k(prob.k)
    if tuple(x.shape) not in ((prob.m, prob.k), (prob.m, wide)):
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected {(prob.m, prob.k)}, or {(prob.m, wide)} with padding")
    if x.dtype.name == "float8_e4m3fn":
        x = x.view(np.uint8)
    if x.shape[1] == wide and x.flags.c_contiguous and pointer(x) % 16 == 0:
        return x
    padded = xp.zeros((prob.m, wide), x.dtype)
    padded[:, : x.shape[1]] = x
    return padded


def _workspace(xp: Any, launch: Launch, given: tuple[Array, Array] | None) -> tuple[Any, Any]:
    if not launch.partial_words:
        return NULL, NULL
    if given is None:
        return xp.empty(launch.partial_words, np.uint32), xp.zeros(launch.tiles, np.uint32)
    partials, arrivals = given
    if partials.size < launch.partial_words or arrivals.size < launch.tiles:
        raise ShapeError(
            f"workspace has {partials.size} and {arrivals.size} words; "
            f"this launch needs {launch.partial_words} and {launch.tiles}"
        )
    return partials, arrivals


def pointer(array: Array) -> int:
    """Return the address of an array's first element, in host or device memory."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)
