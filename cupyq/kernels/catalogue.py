"""The catalogue: every family of kernels, its configs, which are legal, and which is the default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyq.errors import ArgumentError

from . import dequant, pack, quantize_activations, w4a16, w8a8
from .config import Config, resolve
from .dequant import DequantConfig
from .pack import PackConfig
from .problem import Problem
from .quantize_activations import QuantizeActivationsConfig
from .w4a16 import W4A16Config
from .w8a8 import W8A8Config

FAMILIES: dict[str, type[Config]] = {
    cls.family: cls for cls in (W4A16Config, W8A8Config, DequantConfig, QuantizeActivationsConfig, PackConfig)
}
"""Family name -> config class. Templates of kernels_cu carry the same names."""

FALLBACK_SMS = 108
"""SMs assumed when only an arch is known."""


def check(cfg: Config, prob: Problem, device: Any) -> str | None:
    """Say why `cfg` cannot run `prob` on `device`, or return None if it can.

    Parameters
    ----------
    cfg : Config
        One of the config dataclasses.
    prob : Problem
    device : DeviceSpec or str
        A device, its catalogue name, or an arch such as "sm_80".

    Returns
    -------
    str or None
        The first reason, a sentence.
    """
    return next(iter(cfg.reasons(prob, resolve(device))), None)


def default(prob: Problem, device: Any, *, fused: bool | None = None) -> Config:
    """Return the config used for `prob` on `device` when nothing is tuned: that of the kernel on packed weights.

    Parameters
    ----------
    prob : Problem
    device : DeviceSpec or str
        As for :func:`check`.
    fused : bool, optional
        W8A8: whether the kernel quantizes the activations itself; None leaves that to what is faster.
    """
    target = resolve(device)
    sms = getattr(target, "sms", FALLBACK_SMS)
    if prob.weight_only:
        return w4a16.default(prob, target, sms)
    return w8a8.default(prob, target, sms, fused)


def configs(prob: Problem, device: Any) -> Iterator[Config]:
    """Yield every legal config of the fused kernel of `prob` on `device`, in a fixed order."""
    target = resolve(device)
    found: Iterator[Config]
    if prob.weight_only:
        found = w4a16.candidates(prob, getattr(target, "sms", 0))
    else:
        found = w8a8.candidates(prob)
    return (cfg for cfg in found if next(iter(cfg.reasons(prob, target)), None) is None)


def helper_configs(family: str, prob: Problem, device: Any) -> Iterator[Config]:
    """Yield every legal config of "dequant", "quantize_activations" or "pack" for `prob` on `device`."""
    target = resolve(device)
    modules = {"dequant": dequant, "quantize_activations": quantize_activations, "pack": pack}
    if family not in modules:
        raise ArgumentError(f"family={family!r} is no helper kernel; accepted: {', '.join(modules)}")
    found: Iterator[Config] = modules[family].candidates(prob)
    return (cfg for cfg in found if next(iter(cfg.reasons(prob, target)), None) is None)


def from_dict(fields: dict[str, Any]) -> Config:
    """Return the config that `to_dict` made `fields` from.

    Raises
    ------
    ArgumentError
        The family is unknown, or a field is unknown to it (a row of another version, say).
    """
    rest = dict(fields)
    family = rest.pop("family", None)
    if family not in FAMILIES:
        raise ArgumentError(f"family={family!r} is unknown; accepted: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](**rest)
    except TypeError as error:
        raise ArgumentError(f"fields of a {family} config do not fit: {error}") from None
