"""Predicted times of what a user calls: a config of ours, or a whole path by its name."""

from __future__ import annotations

from typing import Any

from cupyq import kernels
from cupyq.devices import DeviceSpec
from cupyq.devices import resolve as resolve_device
from cupyq.errors import ArgumentError, IllegalConfig
from cupyq.kernels import Config, DequantConfig, Problem, QuantizeActivationsConfig, W4A16Config, W8A8Config

from .constants import CONSTANTS, Constants
from .dense import dense, streaming_us
from .fused import w4a16_profile, w8a8_profile
from .model import predict_profile
from .profile import Prediction, Profile

PATHS = ("fused", "dequant", "fp16")


def profile(cfg: Config, prob: Problem, device: DeviceSpec, compiled: Any = None) -> Profile:
    """Return the profile of a fused kernel's launch in closed form.

    Parameters
    ----------
    cfg : W4A16Config or W8A8Config
    prob : Problem
    device : DeviceSpec
    compiled : CompiledKernel, optional
        Its true number of registers is used.

    Raises
    ------
    ArgumentError
        The config is of no fused kernel.
    """
    if isinstance(cfg, W4A16Config):
        return w4a16_profile(cfg, prob, compiled)
    if isinstance(cfg, W8A8Config):
        return w8a8_profile(cfg, prob, device, compiled)
    raise ArgumentError(f"cfg is {cfg!r}; profiles are known of W4A16Config and W8A8Config")


def predict(
    cfg_or_path: Config | str,
    prob: Problem,
    device: DeviceSpec | str,
    compiled: Any = None,
    *,
    launch_us: float | None = None,
    constants: Constants = CONSTANTS,
) -> Prediction:
    """Predict the time of one product, cold in L2 and launched from a CUDA graph, as the tuner measures it.

    Parameters
    ----------
    cfg_or_path : Config or str
        A config: W4A16Config; W8A8Config, with the pass that quantizes activations unless it is fused; DequantConfig,
        with the cuBLAS product that follows; QuantizeActivationsConfig, that pass alone. Or a path: "fused" (the
        default config), "dequant", or "fp16" (cuBLAS on weights that were never quantized).
    prob : Problem
        M = 0 launches nothing and takes 0.
    device : DeviceSpec or str
        A spec, or a name of the catalogue.
    compiled : CompiledKernel, optional
        The compiled kernel of a config: its registers decide occupancy, its spills cost.
    launch_us : float, optional
        Cost of a launch in microseconds, where it is not a graph's.
    constants : Constants
        Fitted constants.

    Returns
    -------
    Prediction

    Raises
    ------
    IllegalConfig
        The config cannot run this problem on this device; the message says why.
    ArgumentError
        An unknown path.
    """
    device = resolve_device(device)
    device.require_kernels()
    if isinstance(cfg_or_path, str):
        if cfg_or_path not in PATHS:
            raise ArgumentError(f"path is {cfg_or_path!r}; accepted: {', '.join(PATHS)}, or a config")
        if prob.m == 0:
            return Prediction(0.0, {})
        if cfg_or_path == "fp16":
            return dense(prob.m, prob.n, prob.k, device, launch_us=launch_us, constants=constants)
        cfg_or_path = kernels.default(prob, device) if cfg_or_path == "fused" else DequantConfig()
    reason = kernels.check(cfg_or_path, prob, device)
    if reason is not None:
        raise IllegalConfig(f"{cfg_or_path} cannot run {prob} on {device.name}: {reason}")
    if prob.m == 0:
        return Prediction(0.0, {})
    if isinstance(cfg_or_path, DequantConfig):
        return _dequant(prob, device, launch_us, constants)
    if isinstance(cfg_or_path, QuantizeActivationsConfig):
        time = _quantize_us(prob, device, launch_us, constants)
        return Prediction(time, {"quantize": time})
    kernel = predict_profile(
        _with_spills(profile(cfg_or_path, prob, device, compiled), compiled),
        device,
        launch_us=launch_us,
        constants=constants,
    )
    if isinstance(cfg_or_path, W8A8Config) and not cfg_or_path.fused:
        quantize = _quantize_us(prob, device, launch_us, constants)
        return Prediction(kernel.time_us + quantize, {**kernel.parts, "quantize": quantize})
    return kernel


def _dequant(prob: Problem, device: DeviceSpec, launch_us: float | None, constants: Constants) -> Prediction:
    """Dequantize to 16 bits, then cuBLAS: 4.5 bytes a 4-bit weight, unless the second pass finds the first's in L2."""
    weights = float(prob.n * prob.k)
    of_group = 2 + (0 if prob.symmetric else 1)
    packed = weights * prob.bits / 8 + prob.groups * prob.n * of_group
    # Half of L2 keeps what was written last; the rest is evicted on the way.
    in_l2 = 2 * weights <= device.l2_bytes / 2
    first = streaming_us(packed, 0.0 if in_l2 else 2 * weights, device, launch_us=launch_us, constants=constants)
    then = dense(prob.m, prob.n, prob.k, device, launch_us=launch_us, in_l2=in_l2, constants=constants)
    return Prediction(first + then.time_us, {**then.parts, "dequantize": first})


def _quantize_us(prob: Problem, device: DeviceSpec, launch_us: float | None, constants: Constants) -> float:
    """The pass over activations: reads 2 bytes and writes 1 an element, with a scale a token or a block of it."""
    elements = float(prob.m * prob.k)
    scales = 4.0 * prob.m * (prob.groups if prob.op == "w8a8-fp8-block" else 1)
    return streaming_us(2 * elements, elements + scales, device, launch_us=launch_us, constants=constants)


def _with_spills(found: Profile, compiled: Any) -> Profile:
    """Add what spilled registers cost: local memory is written and read through L1 and L2 in every stage."""
    spills = getattr(compiled, "spill_bytes", 0) or 0
    if not spills:
        return found
    from dataclasses import replace

    moved = float(spills) * found.block * found.grid * found.serial_stages
    counts = dict(found.warp_instructions)
    counts["other"] = counts.get("other", 0.0) + moved / 4 / 32
    return replace(found, warp_instructions=counts, l2_bytes=found.l2_bytes + moved)
