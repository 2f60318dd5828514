"""A winner is used only after its kernel's output matched the float64 reference, here on adversarial inputs.

Without a GPU the kernel, compiled for the device's architecture, runs in the emulator with every check on; with one it
runs there. One launch covers a whole tile and a ragged one, so it takes about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from cupyq import compiler, devices, kernels, reference
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CupyqError, NotInstalled, VerificationError
from cupyq.kernels.call import pointer

from .candidate import Candidate, from_row, source_hash
from .inputs import GUARD, Inputs, adversarial, guarded, small_launch

ACCUMULATOR_BITS = {(8, 9): 14, (9, 0): 14}
"""Significant bits that fp8 tensor cores keep on these GPUs; the emulator, and newer GPUs, keep all 24."""

Launch = Callable[["kernels.Config", "kernels.Problem", "kernels.Call", str], None]


@dataclass(frozen=True)
class Verification:
    """What came of verifying one kernel.

    Attributes
    ----------
    ok : bool
    error : float or None
        Largest difference from the reference, as a share of the largest output of its token (row); None when the
        kernel did not get so far.
    reason : str or None
        What was wrong.
    how : str
        "emulator", "gpu", or "not needed" where no kernel of ours runs.
    """

    ok: bool
    error: float | None
    reason: str | None
    how: str


class Verifies(Protocol):
    """Whatever can verify a candidate."""

    def verify(self, candidate: Candidate, problem: kernels.Problem) -> Verification:
        """Return whether the candidate computes `problem` rightly. Never raises for a fault of the candidate."""
        ...


class Verifier:
    """Verifies candidates for one device, equal kernels once.

    Parameters
    ----------
    device : DeviceSpec
        A live one runs the kernels itself; for one of the catalogue the emulator does.
    seed : int
        Of the inputs.
    launch : callable, optional
        Runs one `Call` in place: the emulator or the GPU by default.
    """

    def __init__(self, device: DeviceSpec, seed: int = 0, launch: Launch | None = None) -> None:
        self.device = device
        self.seed = seed
        self.how = "gpu" if device.live else "emulator"
        self._launch = launch or (_on_gpu if device.live else _in_emulator)
        self._known: dict[tuple[Any, ...], Verification] = {}
        self.launches = 0

    def verify(self, candidate: Candidate, problem: kernels.Problem) -> Verification:
        """Return whether the candidate computes `problem` rightly.

        M and N are reduced, K too where it is long (`inputs.small_launch`), so problems share verifications:
        the key is the kernel's source and the small launch.

        Raises
        ------
        NotInstalled
            What verifying needs is missing, which is no fault of the candidate.
        """
        cfg = candidate.config
        if cfg is None:
            return Verification(True, None, None, "not needed")
        small = small_launch(cfg, problem)
        key = (source_hash(candidate, problem), *small, self.device.arch)
        if key not in self._known:
            self._known[key] = self.verify_as_is(*small)
        return self._known[key]

    def verify_as_is(self, cfg: kernels.Config, problem: kernels.Problem) -> Verification:
        """Return whether a kernel computes `problem` rightly, at the M, N and K that it has; raises as `verify`."""
        reason = kernels.check(cfg, problem, self.device)
        if reason is not None:
            return Verification(False, None, f"the reduced problem is illegal: {reason}", self.how)
        self.launches += 1
        try:
            inputs = adversarial(problem, self.seed, quantized=not getattr(cfg, "fused", False))
            if isinstance(cfg, kernels.DequantConfig):
                return self._check_dequant(cfg, inputs)
            return self._check_fused(cfg, inputs)
        except NotInstalled:
            raise
        except (CupyqError, RuntimeError, MemoryError) as error:
            return Verification(False, None, f"{type(error).__name__}: {error}".splitlines()[0], self.how)

    def _check_fused(self, cfg: kernels.Config, inputs: Inputs) -> Verification:
        problem = inputs.problem
        whole, out = guarded((problem.m, problem.n), inputs.x.dtype)
        launch = cfg.launch(problem)
        workspace = None
        if launch.partial_words:
            # Old partial sums are garbage in practice: NaN, so that a split that reads before it was written shows.
            workspace = (np.full(launch.partial_words, 0x7FC00000, np.uint32), np.zeros(launch.tiles, np.uint32))
        before = [np.array(a) for a in (inputs.kernel_x, inputs.qw.packed, inputs.qw.scales, inputs.bias)]
        call = kernels.call(
            cfg, problem, inputs.kernel_x, inputs.qw, inputs.bias, x_scale=inputs.x_scale, out=out, workspace=workspace
        )
        self._launch(cfg, problem, call, self.device.arch)
        after = (inputs.kernel_x, inputs.qw.packed, inputs.qw.scales, inputs.bias)
        fault = _trespass(whole, before, after)
        if fault is None and workspace is not None and workspace[1].any():
            fault = "the arrival counters of split-K are not zero afterwards, so the next launch would go wrong"
        if fault is not None:
            return Verification(False, None, fault, self.how)
        x, scale = (inputs.x, None) if inputs.codes is None else (inputs.codes, inputs.x_scale)
        want = reference.matmul(x, inputs.qw, inputs.bias, x_scale=scale)
        bits = ACCUMULATOR_BITS.get(self.device.cc, 24) if self.how == "gpu" else 24
        tensor_k = cfg.tensor_k(problem, self.device) if isinstance(cfg, kernels.W8A8Config) else 0
        limit = reference.bound(
            x, inputs.qw, inputs.x.dtype, inputs.bias, x_scale=scale, accumulator_bits=bits, promote_k=tensor_k,
            scaled_weights=getattr(cfg, "scale", "") == "weights" and problem.group_size != -1,
        )  # fmt: skip
        return self._judge(out, want, limit)

    def _check_dequant(self, cfg: kernels.DequantConfig, inputs: Inputs) -> Verification:
        problem, qw = inputs.problem, inputs.qw
        whole, out = guarded((problem.k, problem.n), inputs.x.dtype)
        before = [np.array(a) for a in (qw.packed, qw.scales)]
        call = kernels.call(cfg, problem, None, qw, out=out)
        self._launch(cfg, problem, call, self.device.arch)
        fault = _trespass(whole, before, (qw.packed, qw.scales))
        if fault is not None:
            return Verification(False, None, fault, self.how)
        want = reference.dequantize(qw, "float64")
        # One rounding of the product, and one of the scale where its dtype is another.
        roundings = 1 if problem.dtype == problem.scale_dtype else 2
        unit, step = (2.0**-11, 2.0**-24) if problem.dtype == "float16" else (2.0**-8, 2.0**-126)
        return self._judge(out, want, roundings * 1.01 * np.maximum(unit * np.abs(want), step / 2) + 1e-300)

    def _judge(self, got: np.ndarray, want: np.ndarray, limit: np.ndarray) -> Verification:
        found = reference.compare(got, want, limit)
        largest = np.maximum(np.abs(want).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        with np.errstate(invalid="ignore"):
            shares = np.abs(got.astype(np.float64) - want) / largest
        finite = shares[np.isfinite(shares)]  # an infinity that the reference rounds to as well has no difference
        error = float(finite.max()) if finite.size else None
        return Verification(found.ok, error, None if found.ok else str(found), self.how)


def _trespass(whole: np.ndarray, before: list[np.ndarray], after: tuple[np.ndarray, ...]) -> str | None:
    """Say what a launch touched that it must not: guard rows, or the caller's arrays."""
    guards = np.concatenate([whole[:GUARD], whole[-GUARD:]]).astype(np.float32)
    if not np.isnan(guards).all():
        return "rows before or after the output were written"
    for name, old, new in zip(("x", "packed", "scales", "bias")[-len(before) :], before, after, strict=True):
        if not np.array_equal(old.view(np.uint8), new.view(np.uint8)):
            return f"the caller's {name} were changed"
    return None


def _in_emulator(cfg: kernels.Config, problem: kernels.Problem, call: kernels.Call, arch: str) -> None:
    from cupyq import emulator

    compiled = compiler.compile_kernel(cfg, problem, arch)
    emulator.launch(compiled.ptx, compiled.entry, call.grid, call.block, call.args, call.shared_bytes)


def _on_gpu(cfg: kernels.Config, problem: kernels.Problem, call: kernels.Call, arch: str) -> None:
    """Run the call on the current GPU: arrays go there and those that a launch writes come back."""
    del arch
    import cupy

    there: dict[int, tuple[np.ndarray, Any]] = {}
    args = []
    for arg in call.args:
        if not isinstance(arg, np.ndarray):
            args.append(arg)
            continue
        # The output is a view between guard rows: those go along, so that a trespass is seen.
        owner = arg.base if isinstance(arg.base, np.ndarray) and arg.base.flags.c_contiguous else arg
        if id(owner) not in there:
            # As bytes: CuPy has no bfloat16 or float8, and a kernel only wants the address.
            there[id(owner)] = owner, cupy.asarray(_bytes(owner))
        start = pointer(arg) - pointer(owner)
        args.append(there[id(owner)][1][start : start + arg.nbytes])
    compiler.load(cfg, problem)(call.grid, call.block, tuple(args), shared_mem=call.shared_bytes)
    cupy.cuda.runtime.deviceSynchronize()
    for owner, copy in there.values():
        _bytes(owner)[:] = cupy.asnumpy(copy)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def verify_row(row: Mapping[str, Any], device: DeviceSpec | None = None) -> float | None:
    """Verify one row of the database again: what `python -m cupyq.db verify` runs.

    Parameters
    ----------
    row : mapping
        Columns of a trial or of `best`: op, dtype, n, k, group_size, symmetric, band, path, config, device; optional
        scale_dtype, m, and the device's `spec`.
    device : DeviceSpec, optional
        Where to verify. By default the row's own device: itself where it is in this machine, else by the emulator.

    Returns
    -------
    float or None
        `Verification.error`; None for plain cuBLAS, where nothing of ours runs.

    Raises
    ------
    VerificationError
        The kernel's output is wrong.
    ArgumentError
        The row's config is of another version, or its device is of no known kind.
    """
    candidate = from_row(row)
    if candidate is None:
        raise ArgumentError(f"config={row['config']!r} cannot be read by this version of cupyq")
    problem = kernels.Problem(
        row["op"], int(row.get("m") or row["band"]), row["n"], row["k"], row["group_size"], bool(row["symmetric"]),
        row["dtype"], row.get("scale_dtype") or "float16",
    )  # fmt: skip
    found = Verifier(device or _device_of(row)).verify(candidate, problem)
    if not found.ok:
        raise VerificationError(found.reason or f"{candidate} differs from the reference")
    return found.error


def _device_of(row: Mapping[str, Any]) -> DeviceSpec:
    spec = _spec_of(row)
    for ordinal in range(devices.live_count()):
        here = devices.live(ordinal)
        if here.identity == spec.identity:
            return here
    return spec


def _spec_of(row: Mapping[str, Any]) -> DeviceSpec:
    if row.get("spec"):
        known = {field.name for field in fields(DeviceSpec)} - {"live", "ordinal", "unsure"}
        values = {name: value for name, value in row["spec"].items() if name in known}
        return DeviceSpec(**{**values, "cc": tuple(values["cc"])})
    name = str(row.get("device") or "")
    if name in devices.CATALOGUE:
        return devices.get(name)
    capability = row.get("compute_capability")
    for spec in devices.CATALOGUE.values():
        if capability and spec.compute_capability == capability:
            return replace(spec, name=name or spec.name)
    raise ArgumentError(f"device={name!r} with compute capability {capability} is of no known kind")
