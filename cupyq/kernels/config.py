"""What every kernel's configuration shares: a family name, a dict form, device limits, checks that give reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from cupyq import devices
from cupyq.errors import IllegalConfig

from .problem import Problem

MAX_GRID = 2**31 - 1
"""Most blocks along x. Kernels use no other axis: y and z end at 65535."""

REGISTER_BUDGET = 255
"""Registers of a thread, at most."""


class Target(Protocol):
    """What legality needs of a device; `devices.DeviceSpec` has it."""

    @property
    def cc(self) -> tuple[int, int]:
        """Compute capability."""

    @property
    def shared_per_block(self) -> int:
        """Most shared memory of a block, in bytes."""


@dataclass(frozen=True)
class Launch:
    """Grid, block and shared memory of one launch, and the words of workspace it needs."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    partial_words: int = 0
    tiles: int = 0


class Config:
    """Base of the frozen dataclasses that hold a kernel's tunables."""

    family: ClassVar[str]
    template: ClassVar[str]

    def reasons(self, prob: Problem, device: Target) -> Iterable[str]:
        """Yield a sentence for each reason why this config cannot run `prob` on `device`."""
        raise NotImplementedError

    def entry(self, prob: Problem) -> str:
        """Name of the kernel's entry function: states the family and every template argument."""
        raise NotImplementedError

    def instance(self, prob: Problem) -> str:
        """C++ text that instantiates the template as one `extern "C"` entry."""
        raise NotImplementedError

    def launch(self, prob: Problem) -> Launch:
        """Launch geometry for `prob`."""
        raise NotImplementedError


def to_dict(cfg: Config) -> dict[str, Any]:
    """Return the config's tunables with its family, ready for JSON."""
    return {"family": cfg.family, **dataclasses.asdict(cfg)}  # type: ignore[call-overload]


def choice(name: str, value: Any, accepted: Iterable[Any]) -> Iterable[str]:
    """Yield a reason when `value` is none of `accepted`."""
    accepted = tuple(accepted)
    if isinstance(value, bool) != isinstance(accepted[0], bool) or value not in accepted:
        yield f"{name}={value!r} is not one of {', '.join(map(repr, accepted))}"


def shared_reason(shared_bytes: int, device: Target) -> Iterable[str]:
    """Yield a reason when a block needs more shared memory than the device gives one."""
    if shared_bytes > device.shared_per_block:
        yield (
            f"needs {shared_bytes / 1024:.1f} KiB of shared memory a block; "
            f"this device gives {device.shared_per_block / 1024:.0f} KiB"
        )


def epilogue_bytes(block_m: int, block_n: int, warps: int, warps_k: int, fragments: int) -> int:
    """Return the shared memory of `kernels_cu/epilogue.cuh`: what the warps along k exchange, the tile, a flag.

    `fragments` (16 features x 8 tokens) are those of one of the block's `warps`.
    """
    exchanged = 0
    while warps_k > 1:
        fragments, warps_k = max(1, fragments // 2), warps_k // 2
        exchanged += fragments
    return warps * exchanged * 512 + block_m * (block_n + 4) * 4 + 16


def needs_cc(what: str, least: tuple[int, int], device: Target) -> str:
    """Return the reason that a compute capability is too low."""
    return f"{what} needs compute capability {least[0]}.{least[1]}; this device has {device.cc[0]}.{device.cc[1]}"


def idle_split(split_k: int, k_tiles: int, block_k: int) -> str:
    """Return the reason that a split of K has no work."""
    return f"split_k={split_k} leaves a split without work: K has {k_tiles} stages of {block_k}"


def resolve(device: Any) -> Target:
    """Return the `Target` that a DeviceSpec, a catalogue name or an arch ("sm_80") means."""
    if isinstance(device, str) and device.startswith("sm_"):
        digits = device[3:].rstrip("af")
        if not digits.isdigit() or len(digits) < 2:
            raise IllegalConfig(f"device={device!r} is no arch; an arch looks like sm_80 or sm_90a")
        return _arch_target((int(digits[:-1]), int(digits[-1])))
    return devices.resolve(device)


@dataclass(frozen=True)
class _Arch:
    cc: tuple[int, int]
    shared_per_block: int


def _arch_target(cc: tuple[int, int]) -> Target:
    # A GPU newer than the catalogue is taken to have at least what the newest older one has.
    known = max((key for key in devices.LIMITS if key <= cc), default=min(devices.LIMITS))
    return _Arch(cc, devices.LIMITS[known].shared_per_block)


def cpp_bool(value: bool) -> str:
    """Spell a bool for C++."""
    return "true" if value else "false"


CPP_TYPES = {"float16": "Half", "bfloat16": "Bfloat16"}
SHORT_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def short_types(prob: Problem) -> str:
    """Return the types of a 4-bit problem for an entry's name: "f16", or "bf16_f16" with float16 scales."""
    same = prob.dtype == prob.scale_dtype
    return SHORT_TYPES[prob.dtype] + ("" if same else "_" + SHORT_TYPES[prob.scale_dtype])


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)
