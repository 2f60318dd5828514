"""The formula: from a kernel's profile and a device to a predicted time.

``t = launch + fill + prologue + soft_max(DRAM, L2, shared, tensor, ALU pipes, issue) + reduce``. The soft maximum
``(sum of t_i^p)^(1/p)`` stands for the imperfect overlap of real kernels. Work on the SMs is that of the busiest SM, so
waves and tails show; DRAM goes by all SMs together and by the bytes they have in flight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError

from .constants import CONSTANTS, Constants
from .profile import Prediction, Profile

# PTX instructions that ptxas renames away.
FREE = frozenset({"move", "createpolicy"})

# Class of instruction -> pipe whose lanes it takes.
PIPES: Mapping[str, str] = {
    "lop3": "int_lanes",
    "logic": "int_lanes",
    "integer": "int_lanes",
    "int_math": "int_lanes",
    "predicate": "int_lanes",
    "half2_math": "half2_lanes",
    "fp32_math": "fp32_lanes",
    "float": "fp32_lanes",
    "convert": "convert",
}
CONVERT_LANES = 64  # F2FP and its kin, of the half-rate unit

OVERLAPPING = ("dram", "l2", "shared", "tensor", "alu", "issue", "chain")
SHARED_BYTES_PER_CLOCK = 128
SCHEDULERS = 4
_REGISTER_UNIT = 256  # registers are handed to warps in units of this many


def occupancy(device: DeviceSpec, block: int, registers: int, shared_bytes: int) -> int:
    """Return how many CTAs an SM holds at once.

    Parameters
    ----------
    device : DeviceSpec
    block : int
        Threads of a CTA.
    registers : int
        Registers of a thread.
    shared_bytes : int
        Shared memory of a CTA in bytes; the driver's own share is added.

    Returns
    -------
    int
        0 where not even one fits.
    """
    warps = -(-block // 32)
    of_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    limits = [
        device.threads_per_sm // (warps * 32),
        device.blocks_per_sm,
        device.registers_per_sm // (of_warp * warps),
        device.shared_per_sm // max(1, shared_bytes + device.shared_reserved),
    ]
    if shared_bytes > device.shared_per_block:
        return 0
    return max(0, min(limits))


def mma_operations(shape: str) -> int:
    """Return the operations (a multiply-add is two) of a warp-level mma, "m16n8k16" -> 4096."""
    found = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape)
    if not found:
        raise ArgumentError(f"mma shape is {shape!r}; one like 'm16n8k16' is needed")
    m, n, k = map(int, found.groups())
    return 2 * m * n * k


def soft_max(times: Iterable[float], exponent: float) -> float:
    """Return ``(sum of t^p)^(1/p)``: the largest of ``times`` and something for the others."""
    positive = [time for time in times if time > 0]
    top = max(positive, default=0.0)
    return top * sum((time / top) ** exponent for time in positive) ** (1 / exponent) if top else 0.0


def predict_profile(
    profile: Profile, device: DeviceSpec, *, launch_us: float | None = None, constants: Constants = CONSTANTS
) -> Prediction:
    """Predict the time of one launch of any kernel from its profile.

    Parameters
    ----------
    profile : Profile
        Of cupyq's kernels or of anyone else's.
    device : DeviceSpec
        A device that can run kernels.
    launch_us : float, optional
        Cost of a launch in microseconds; by default that inside a CUDA graph.
    constants : Constants
        Fitted constants.

    Returns
    -------
    Prediction
        With parts "launch", "fill", "prologue", "dram", "l2", "shared", "tensor", "alu", "issue", "chain", "reduce".

    Raises
    ------
    IllegalConfig
        The device is in the catalogue for rooflines only.
    ArgumentError
        Not even one CTA fits on an SM.
    """
    device.require_kernels()
    resident = occupancy(device, profile.block, profile.registers, profile.shared_bytes)
    if resident == 0:
        raise ArgumentError(
            f"a CTA of {profile.block} threads, {profile.registers} registers and {profile.shared_bytes} bytes of "
            f"shared memory does not fit on an SM of {device.name}"
        )
    per_sm = -(-profile.grid // device.sms)  # CTAs that the busiest SM runs, one after the other or together
    share = per_sm * (profile.busiest if profile.busiest is not None else 1 / profile.grid)
    together = min(resident, per_sm)
    clock = device.clock_ghz * constants.clock_factor(device) * 1e3  # clocks a microsecond

    warps = together * -(-profile.block // 32)
    rounds = -(-per_sm // resident)
    fill = constants.dram_latency_us * (1 + (rounds - 1) / resident)
    parts = {
        "launch": constants.graph_launch_us if launch_us is None else launch_us,
        "fill": fill,
        # The first stages are on their way meanwhile.
        "prologue": max(0.0, rounds * profile.prologue_clocks / clock - fill),
        "dram": _dram_us(profile, device, resident, constants),
        "l2": profile.l2_bytes * share / (constants.l2_rate(device) * clock),
        "shared": profile.shared_traffic * share / (SHARED_BYTES_PER_CLOCK * clock),
        "tensor": _tensor_us(profile, device, share, warps, constants),
        "alu": _alu_us(profile, device, share, clock),
        "issue": _issued(profile) * share / (min(SCHEDULERS, warps * constants.warp_ipc) * clock),
        "chain": rounds * profile.serial_stages * constants.stage_clocks / clock,
        "reduce": profile.reduce_steps
        * (constants.reduce_step_us + profile.reduce_bytes / (constants.reduce_bytes_per_clock * clock)),
    }
    overlapping = soft_max((parts[name] for name in OVERLAPPING), constants.overlap)
    alone = sum(parts[name] for name in ("launch", "fill", "prologue", "reduce"))
    return Prediction(alone + overlapping, parts)


def _dram_us(profile: Profile, device: DeviceSpec, resident: int, constants: Constants) -> float:
    """DRAM time, wave by wave: bandwidth, or what the bytes in flight of the CTAs that run allow (Little's law)."""
    slots = device.sms * resident
    peak = constants.stream_share(device) * device.dram_gbps * 1e3  # bytes a microsecond
    flying = (profile.stages - 1) * profile.stage_bytes / constants.dram_latency_us
    full, tail = divmod(profile.grid, slots)
    time = 0.0
    for ctas, waves in ((slots, full), (tail, 1)):
        if ctas and waves:
            moved = profile.dram_bytes * ctas * waves / profile.grid
            time += soft_max((moved / peak, moved / (flying * ctas)), constants.overlap)
    return time


def _tensor_us(profile: Profile, device: DeviceSpec, share: float, warps: int, constants: Constants) -> float:
    reach = constants.mma_sync_share(device)
    # Few warps with few independent accumulators leave a tensor core waiting for its own results.
    busy = min(1.0, warps / SCHEDULERS * profile.independent_mma / constants.mma_in_flight)
    time = 0.0
    for key, count in profile.mma.items():
        shape, _, dtype = key.partition(":")
        per_sm = device.tensor_tops(dtype or "float16") * 1e6 / device.sms  # operations a microsecond
        time += count * mma_operations(shape) * share / (per_sm * reach * busy)
    return time


def _alu_us(profile: Profile, device: DeviceSpec, share: float, clock: float) -> float:
    limits = device.limits
    lanes: dict[str, float] = {}
    for name, count in profile.warp_instructions.items():
        if name in PIPES:
            lanes[PIPES[name]] = lanes.get(PIPES[name], 0.0) + 32 * count
    rates = {
        "int_lanes": limits.int_lanes,
        "half2_lanes": limits.half2_lanes,
        "fp32_lanes": limits.fp32_lanes,
        "convert": CONVERT_LANES,
    }
    return max((total / rates[pipe] for pipe, total in lanes.items()), default=0.0) * share / clock


def _issued(profile: Profile) -> float:
    return sum(count for name, count in profile.warp_instructions.items() if name not in FREE)
