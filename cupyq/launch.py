"""Launches on a GPU: kernels bound to one weight, M and device.

Everything that does not change from call to call is worked out once: the choice of kernel, its geometry, the order of
its arguments. A launch then puts x and y in their places and goes to the current stream of x's device.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from . import compiler, devices, dispatch, kernels, reference
from .activations import DYNAMIC, Activations
from .arrays import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array, float8_decode
from .errors import IllegalConfig
from .kernels import DequantConfig, Problem, dequant
from .kernels import quantize_activations as quantize_activations_kernel
from .kernels.call import kernel_block_scales, padded_k, pointer, scale_shape
from .scratch import scratch
from .weights import BLOCK, QuantizedWeight

_DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16}
_CACHED_LAUNCHERS = 512  # of one weight: M x dtype x device


Made = TypeVar("Made")


def for_every_stream(make: Callable[[], Made]) -> Made:
    """Return what `make` returns, finished: it is kept, and kernels on any stream read the arrays it holds.

    While the current stream is captured they are made beside it, since what is captured only runs when it is replayed.
    """
    cuda = sys.modules["cupy"].cuda
    stream = cuda.get_current_stream()
    if scratch.capturing():
        stream = cuda.Stream(non_blocking=True)
        with stream:
            made = make()
    else:
        made = make()
    stream.synchronize()
    return made


# --- one kernel, bound ------------------------------------------------------------------------------------------------


class _Step:
    """One kernel with its fixed arguments, and the places of those that change, found by their addresses."""

    def __init__(self, cfg: kernels.Config, problem: Problem, call: kernels.Call, changing: dict[str, Array]) -> None:
        self.kernel = compiler.load(cfg, problem)
        self.grid, self.block, self.shared = call.grid, call.block, call.shared_bytes
        self.args = list(call.args)
        addresses = {pointer(a): i for i, a in enumerate(call.args) if not isinstance(a, np.generic)}
        self.places = {name: addresses[pointer(array)] for name, array in changing.items()}
        for place in self.places.values():
            self.args[place] = None  # lets go of what only stood in for the real array

    def __call__(self, **arrays: Array) -> None:
        args = self.args.copy()
        for name, array in arrays.items():
            args[self.places[name]] = array
        self.kernel(self.grid, self.block, tuple(args), shared_mem=self.shared)


def _sketch(cupy: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array that has a shape, a dtype and an aligned address, over next to no memory: never launched on."""
    return cupy.ndarray(shape, dtype, memptr=cupy.empty(256, np.uint8).data)


def _seen_scales(scales: Array, problem: Problem) -> Array:
    """Return scales of activations as users see them: those of blocks transposed, at the same address."""
    return scales[:, : problem.m].T if problem.op == "w8a8-fp8-block" else scales


class _Fused:
    """The weight-only or the W8A8 kernel: x (or its codes and their scales), y and bias change from call to call.

    `codes` says what becomes of W8A8 activations: "token" codes come with a scale each, "zeros" with a zero point too,
    and "tensor" codes have those that the weight's rule fixes. Scales of blocks come as the kernel reads them
    (`scale_shape`), here and in `_Quantize`.
    """

    def __init__(
        self, cfg: kernels.Config, problem: Problem, qw: QuantizedWeight, has_bias: bool, codes: str = "token"
    ) -> None:
        import cupy

        self.problem, self.cfg, self.qw, self.codes = problem, cfg, qw, codes
        self.launch = cfg.launch(problem)
        dtype = _DTYPES[problem.dtype]
        eight = not problem.weight_only and not getattr(cfg, "fused", False)  # takes codes and their scales
        self.align = 16 if eight or problem.k % 8 == 0 else 2
        x_dtype = dtype if not eight else np.int8 if problem.op == "w8a8-int8" else np.uint8
        self.takes_codes = eight
        self.width = padded_k(problem.k) if eight else problem.k
        changing = {"x": _sketch(cupy, (problem.m, self.width), x_dtype)}
        changing["y"] = _sketch(cupy, (problem.m, problem.n), dtype)
        if has_bias:
            changing["bias"] = _sketch(cupy, (problem.n,), dtype)
        self._fixed: tuple[Array | None, Array | None] = (None, None)
        if eight and codes == "tensor":
            self._fixed = qw.activations.static(qw.packed)
        elif eight:
            changing["x_scale"] = _seen_scales(_sketch(cupy, scale_shape(problem), FLOAT32), problem)
            if codes == "zeros":
                changing["x_zero"] = _sketch(cupy, (problem.m,), np.int32)
        workspace = None
        if self.launch.partial_words:
            changing["partials"] = _sketch(cupy, (self.launch.partial_words,), np.uint32)
            changing["arrivals"] = _sketch(cupy, (self.launch.tiles,), np.uint32)
            workspace = (changing["partials"], changing["arrivals"])
        call = kernels.call(
            cfg,
            problem,
            changing["x"],
            qw,
            changing.get("bias"),
            x_scale=changing.get("x_scale", self._fixed[0]),
            x_zero=changing.get("x_zero", self._fixed[1]),
            out=changing["y"],
            workspace=workspace,
        )
        self.step = _Step(cfg, problem, call, changing)
        place = self.step.places.get
        self._x, self._y, self._bias, self._x_scale = place("x", 0), place("y", 0), place("bias"), place("x_scale")
        self._x_zero = place("x_zero")
        self._partials, self._arrivals = place("partials", 0), place("arrivals", 0)

    def __call__(
        self, x: Array, y: Array, bias: Array | None, x_scale: Array | None = None, x_zero: Array | None = None
    ) -> None:
        # Spelled out, because every microsecond here is one of the user's: decode kernels take about five.
        step, words = self.step, self.launch.partial_words
        workspace = scratch.workspace(words, self.launch.tiles) if words else None
        if x.shape[1] == self.width and x.flags.c_contiguous and x.data.ptr % self.align == 0:
            args = step.args.copy()
            args[self._x] = x
            args[self._y] = y
            if workspace is not None:
                args[self._partials], args[self._arrivals] = workspace
            if self._bias is not None:
                args[self._bias] = bias
            if self._x_scale is not None:
                args[self._x_scale] = x_scale
                if self._x_zero is not None:
                    args[self._x_zero] = x_zero
            step.kernel(step.grid, step.block, tuple(args), shared_mem=step.shared)
            return
        # Rows apart, or codes without padding: the launch is worked out for this x.
        scale, zero = self._fixed if self.codes == "tensor" else (x_scale, x_zero)
        if scale is not None and self.codes != "tensor":
            scale = _seen_scales(scale, self.problem)
        call = kernels.call(
            self.cfg, self.problem, x, self.qw, bias, x_scale=scale, x_zero=zero, out=y, workspace=workspace
        )
        scratch.keep(*call.args)
        step.kernel(call.grid, call.block, call.args, shared_mem=call.shared_bytes)


class _Quantize:
    """The kernel that quantizes activations by a rule: x in; codes with padded rows, and what goes with them, out.

    Attributes
    ----------
    codes : str
        What the codes come with, in the words of `_Fused`.
    """

    def __init__(self, problem: Problem, rule: Activations, like: Array) -> None:
        import cupy

        self.problem = problem
        self.cfg = quantize_activations_kernel.for_rule(problem, rule)
        self.codes = "tensor" if rule.scale is not None else "token" if rule.symmetric else "zeros"
        self._factor = rule.factor_as(_DTYPES[problem.dtype])
        self._fixed = rule.static(like)
        self.align = 16 if problem.k % 8 == 0 else 2
        self.shape = (problem.m, padded_k(problem.k))
        self.dtype = np.dtype(np.int8 if problem.op == "w8a8-int8" else np.uint8)
        x, codes = (
            _sketch(cupy, s, d) for s, d in (((problem.m, problem.k), _DTYPES[problem.dtype]), (self.shape, self.dtype))
        )
        scale, zero = self._fixed
        call = kernels.call(self.cfg, problem, x, x_scale=scale, x_zero=zero, factor=self._factor, out=codes)
        changing = {"x": x, "codes": codes, "x_scale": call.x_scale, "x_zero": call.x_zero}
        self.step = _Step(self.cfg, problem, call, {name: a for name, a in changing.items() if a is not None})
        place = self.step.places.get
        self._x, self._codes, self._x_scale, self._x_zero = (
            place(name, 0) for name in ("x", "codes", "x_scale", "x_zero")
        )

    def __call__(self, x: Array, codes: Array, x_scale: Array | None = None, x_zero: Array | None = None) -> None:
        if not (x.flags.c_contiguous and x.data.ptr % self.align == 0):
            x = x.copy(order="C")
            scratch.keep(x)
        step = self.step
        args = step.args.copy()
        args[self._x] = x
        args[self._codes] = codes
        if self.codes != "tensor":
            args[self._x_scale] = x_scale
            if self.codes == "zeros":
                args[self._x_zero] = x_zero
        step.kernel(step.grid, step.block, tuple(args), shared_mem=step.shared)


# --- what multiplies --------------------------------------------------------------------------------------------------


class Launcher:
    """x -> y for one weight, M, dtype and device. Made by :func:`launcher`; called with that device current.

    Attributes
    ----------
    choice : dispatch.Choice
    """

    def __init__(self, choice: dispatch.Choice, qw: QuantizedWeight, has_bias: bool) -> None:
        self.choice = choice
        self.problem = choice.problem
        self.perm = qw.perm
        self.qw = qw = _gathered(qw)
        self._has_bias = has_bias
        self._codes_kernels: dict[str, _Fused] = {}
        self._captured: _Fused | None = None
        self._quantize: _Quantize | None = None
        self._multiply: Callable[[Array, Array, Array | None, Array | None, Array | None], None]
        if choice.path == "fused":
            assert choice.config is not None
            if self.problem.weight_only:
                self._multiply = self._fused = _Fused(choice.config, self.problem, qw, has_bias)
            else:
                self._multiply = self._bind8(choice.config)
        elif choice.path == "dequant":
            self._dequantize = dequantizer(choice.config, self.problem, qw)
            self._multiply = self._by_dequant
        else:
            self._multiply = self._by_dense

    def __call__(
        self,
        x: Array,
        y: Array,
        bias: Array | None = None,
        x_scale: Array | None = None,
        x_zero: Array | None = None,
    ) -> None:
        """Write ``x @ w + bias`` into y.

        Parameters
        ----------
        x : (M, K) of the problem's dtype, any strides; or, with `x_scale`, codes
        y : (M, N), C order, starting at a multiple of 16 bytes, not overlapping x
        bias : (N,) of the problem's dtype, C order; given exactly if the launcher was made for it
        x_scale : (M,) float32, optional
        x_zero : (M,) int32, optional
        """
        if self.perm is None:
            self._multiply(x, y, bias, x_scale, x_zero)
            return
        import cupy

        with scratch.order:
            gathered = scratch.get("gathered", x.shape, x.dtype)
            cupy.take(x, self.perm, axis=1, out=gathered)
            self._multiply(gathered, y, bias, x_scale, x_zero)

    def _bind8(self, cfg: Any) -> Callable[[Array, Array, Array | None, Array | None, Array | None], None]:
        """Return what multiplies with the W8A8 kernel."""
        problem, rule = self.problem, self.qw.activations
        if cfg.fused:
            self._fused = _Fused(cfg, problem, self.qw, self._has_bias)
            return self._by_one_kernel
        self._quantize = _Quantize(problem, rule, self.qw.packed)
        self._fused = self._of_codes(self._quantize.codes)
        return self._by_two_kernels

    def _by_one_kernel(
        self, x: Array, y: Array, bias: Array | None, x_scale: Array | None, x_zero: Array | None
    ) -> None:
        if x_scale is None:
            self._fused(x, y, bias)
        else:
            self._by_codes(x, y, bias, x_scale, x_zero)

    def _by_two_kernels(
        self, x: Array, y: Array, bias: Array | None, x_scale: Array | None, x_zero: Array | None
    ) -> None:
        if x_scale is not None:
            self._by_codes(x, y, bias, x_scale, x_zero)
            return
        quantize, problem = self._quantize, self.problem
        assert quantize is not None
        with scratch.order:
            codes = scratch.get("codes", quantize.shape, quantize.dtype)
            if quantize.codes != "tensor":
                x_scale = scratch.get("x_scale", scale_shape(problem), FLOAT32)
                if quantize.codes == "zeros":
                    x_zero = scratch.get("x_zero", (problem.m,), np.int32)
            quantize(x, codes, x_scale, x_zero)
            self._fused(codes, y, bias, x_scale, x_zero)

    def _by_codes(self, x: Array, y: Array, bias: Array | None, x_scale: Array, x_zero: Array | None) -> None:
        """Multiply codes that the caller made."""
        if self.problem.op == "w8a8-fp8-block":
            x_scale = kernel_block_scales(self.problem, x_scale)
            scratch.keep(x_scale)
        self._of_codes("token" if x_zero is None else "zeros")(x, y, bias, x_scale, x_zero)

    def _of_codes(self, codes: str) -> _Fused:
        """Return the kernel for codes quantized beforehand, also where the chosen one would quantize x itself."""
        if codes not in self._codes_kernels:
            cfg: Any = self.choice.config
            if cfg.fused:
                cfg = dataclasses.replace(cfg, fused=False)
                if kernels.check(cfg, self.problem, self.choice.device) is not None:
                    cfg = kernels.default(self.problem, self.choice.device, fused=False)
            made = for_every_stream(lambda: _Fused(cfg, self.problem, self.qw, self._has_bias, codes))
            self._codes_kernels[codes] = made
        return self._codes_kernels[codes]

    def _by_dequant(self, x: Array, y: Array, bias: Array | None, x_scale: Array | None, x_zero: Array | None) -> None:
        import cupy

        if scratch.capturing():
            self._while_captured()(x, y, bias)
            return
        # Dense weights are large: they come from CuPy's pool and go back to it, rather than stay as scratch.
        w = cupy.empty((self.problem.k, self.problem.n), _DTYPES[self.problem.dtype])
        self._dequantize(w=w)
        cupy.matmul(x, w, out=y)
        if bias is not None:
            cupy.add(y, bias, out=y)

    def prepare_capture(self) -> None:
        """Compile and load what a CUDA graph needs beside what eager calls do: loading cannot be captured."""
        if self.choice.path == "dequant":
            self._while_captured()

    def _while_captured(self) -> _Fused:
        """Return the kernel that stands in for cuBLAS, which CuPy cannot capture."""
        if self._captured is None:
            cfg = kernels.default(self.problem, self.choice.device)
            self._captured = for_every_stream(lambda: _Fused(cfg, self.problem, self.qw, self._has_bias))
        return self._captured

    def _by_dense(self, x: Array, y: Array, bias: Array | None, x_scale: Array | None, x_zero: Array | None) -> None:
        """Multiply with CuPy's operations alone, on GPUs and shapes that no kernel of cupyq serves."""
        import cupy

        if scratch.capturing():
            raise IllegalConfig(
                f"no kernel of cupyq serves {self.problem} on {self.choice.device.title}, and cuBLAS, which multiplies "
                "instead, cannot be captured through CuPy: leave this product out of the CUDA graph"
            )
        if self.problem.weight_only:
            wide = cupy.matmul(x.astype(FLOAT32), reference.dequantize(self.qw))
        else:
            # float64 holds the sums of int8 products exactly, however long K is.
            kind = FLOAT64 if self.problem.op == "w8a8-int8" else FLOAT32
            if x_scale is None:
                x, x_scale, x_zero = reference.activation_codes(x, self.qw)
            values = x.astype(kind) if self.problem.op == "w8a8-int8" else float8_decode(x)
            if x_zero is not None:
                values -= x_zero.reshape(-1, 1).astype(kind)
            w = reference.dequantize(dataclasses.replace(self.qw, activations=DYNAMIC), kind)
            if self.problem.op == "w8a8-fp8-block":
                wide = cupy.matmul(values * cupy.repeat(x_scale, BLOCK, axis=-1)[:, : self.problem.k], w)
            else:
                wide = cupy.matmul(values, w) * x_scale.reshape(-1, 1)
        y[...] = wide if bias is None else wide + bias.astype(wide.dtype)


def _gathered(qw: QuantizedWeight) -> QuantizedWeight:
    """Return the weight as its kernels see it: aligned; x's columns are gathered, so the factors come in that order."""
    rule = qw.activations
    if rule.factor is not None:
        rule = rule.with_factor(_aligned(rule.factor if qw.perm is None else rule.factor[qw.perm]))
    packed, scales, zeros = map(_aligned, (qw.packed, qw.scales, qw.zeros))
    return dataclasses.replace(qw, packed=packed, scales=scales, zeros=zeros, perm=None, activations=rule)


def _aligned(array: Array | None) -> Array | None:
    """Return the array, or a copy where it is a view that kernels cannot read 16 bytes at a time."""
    return array if array is None or pointer(array) % 16 == 0 else array.copy()


def dequantizer(cfg: kernels.Config | None, problem: Problem, qw: QuantizedWeight) -> _Step:
    """Return the dequantizing kernel, bound to a weight without act order; call it with ``w=``."""
    import cupy

    assert isinstance(cfg, DequantConfig)
    w = _sketch(cupy, (problem.k, problem.n), _DTYPES[problem.dtype])
    return _Step(cfg, problem, kernels.call(cfg, problem, None, qw, out=w), {"w": w})


# --- parts of a product -----------------------------------------------------------------------------------------------


def dequantize(qw: QuantizedWeight, dtype: str | np.dtype) -> Array | None:
    """Dequantize with the kernel, on the current device; None where it does not serve this weight and dtype."""
    import cupy

    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if not qw.weight_only or name not in _DTYPES or qw.n == 0:
        return None
    problem = Problem.of(1, qw, name)
    cfg = dequant.default(problem)
    if kernels.check(cfg, problem, devices.live(qw.device or 0)) is not None:
        return None
    rows = cupy.empty((qw.k, qw.n), _DTYPES[name])
    dequantizer(cfg, problem, _gathered(qw))(w=rows)
    if qw.perm is None:
        return rows
    w = cupy.empty_like(rows)
    w[qw.perm] = rows
    return w


def quantize_activations(
    x: Array,
    scheme: str,
    scale: float | None = None,
    *,
    zero: int | None = None,
    symmetric: bool = True,
    factor: Array | None = None,
) -> tuple[Array, ...] | None:
    """Quantize rows of x with the kernel, on the current device; None where it does not serve this x."""
    import cupy

    dtype = np.dtype(x.dtype).name
    if scheme not in reference.LARGEST_CODE or dtype not in _DTYPES or x.ndim == 0 or x.size == 0:
        return None
    k = x.shape[-1]
    if factor is not None and (tuple(factor.shape) != (k,) or factor.dtype != x.dtype):
        return None  # the reference says what is wrong
    rule = Activations(scale, zero, symmetric, factor)
    rule.check(scheme, k)
    rows = x.reshape(-1, k)
    problem = Problem(scheme, rows.shape[0], 1, k, dtype=dtype)
    if kernels.check(quantize_activations_kernel.for_rule(problem, rule), problem, devices.live(int(x.device.id))):
        return None
    step = _Quantize(problem, rule, x)
    codes = cupy.empty(step.shape, step.dtype)
    lead = x.shape[:-1]
    if step.codes == "tensor":
        x_scale = cupy.full((problem.m,), rule.scale, FLOAT32)
        x_zero = None if rule.zero is None else cupy.full((problem.m,), rule.zero, np.int32)
        step(rows, codes)
    else:
        x_scale = cupy.empty(scale_shape(problem), FLOAT32)
        x_zero = cupy.empty((problem.m,), np.int32) if step.codes == "zeros" else None
        step(rows, codes, x_scale, x_zero)
        x_scale = _seen_scales(x_scale, problem)
    if len(lead) != 1:  # a view of blocks' scales stays one for a matrix, and the product need not copy it
        x_scale = x_scale.reshape((*lead, *x_scale.shape[1:]))
    made = (codes[:, :k].reshape(x.shape), x_scale)
    return made if x_zero is None else (*made, x_zero.reshape(lead))


# --- launchers, remembered --------------------------------------------------------------------------------------------

_launchers: dict[int, dict[tuple[Any, ...], Launcher]] = {}
_lock = threading.Lock()


def launcher(
    qw: QuantizedWeight, m: int, dtype: np.dtype, ordinal: int, has_bias: bool, batch_invariant: bool = False
) -> Launcher:
    """Return the launcher for M tokens of `dtype` on a CUDA device, which is current; made on first use.

    Warns once where the problem is not tuned. Forgotten with the weight, or by :func:`reset`.
    """
    mine = _launchers.get(id(qw))
    key = (m, dtype, ordinal, has_bias, batch_invariant)
    if mine is not None:
        found = mine.get(key)
        if found is not None:
            return found
    choose = dispatch.choose_invariant if batch_invariant else dispatch.choose
    choice = choose(Problem.of(m, qw, dtype.name), devices.live(ordinal))
    dispatch.warn_untuned(choice)
    made = for_every_stream(lambda: Launcher(choice, qw, has_bias))
    with _lock:
        if id(qw) not in _launchers:
            _launchers[id(qw)] = {}
            weakref.finalize(qw, _launchers.pop, id(qw), None)
        mine = _launchers[id(qw)]
        if len(mine) >= _CACHED_LAUNCHERS:
            mine.clear()
        mine[key] = made
    return made


def reset() -> None:
    """Forget launchers and choices, so that rows tuned since count. Plans made before stay as they are."""
    with _lock:
        for mine in _launchers.values():
            mine.clear()
    dispatch.reset()
