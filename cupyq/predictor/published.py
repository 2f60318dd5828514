"""Published W4A16 measurements, and the predictor fed with the kernel they are of.

Marlin's kernel is the one fused kernel whose speed is published per batch on several GPUs; its instruction counts are
in ``cupyq/data/marlin_profile.json``. So the formula can be fitted on some curves and judged on the others.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cupyq import devices
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError

from .constants import CONSTANTS, Constants
from .dense import dense
from .model import predict_profile
from .profile import Profile

GROUP_SIZE = 128
BITS = 4 + 16 / GROUP_SIZE


@dataclass(frozen=True)
class Curve:
    """One published curve of speed-ups over fp16 by batch.

    Attributes
    ----------
    device : DeviceSpec
        With its clock locked where the measurement did that.
    n, k : int
        Output and input features.
    kernel : str
        Whose kernel.
    flushed : bool
        Measured by events around each launch, with L2 flushed by writing between launches.
    batches : tuple of int
        M of each point.
    speedups : tuple of float
        Time of fp16 over time of the kernel.
    """

    device: DeviceSpec
    n: int
    k: int
    kernel: str
    flushed: bool
    batches: tuple[int, ...]
    speedups: tuple[float, ...]

    @property
    def label(self) -> str:
        """Short name for plots and tables."""
        shape = f"{self.n}²" if self.n == self.k else f"{self.k} x {self.n}"
        return f"{self.device.name} {shape}"

    def crossover(self, speedups: tuple[float, ...] | None = None) -> int | None:
        """Return the first batch of the curve (or of ``speedups``) at which fp16 is faster; None if none is."""
        values = self.speedups if speedups is None else speedups
        return next((m for m, value in zip(self.batches, values, strict=True) if value < 1), None)


def _load(name: str) -> Any:
    return json.loads((resources.files("cupyq") / "data" / name).read_text(encoding="utf-8"))


@functools.cache
def curves(kernel: str | None = "Marlin") -> tuple[Curve, ...]:
    """Return the published curves of one kernel, or all of them for None."""
    data = _load("published_w4a16.json")
    found = []
    for row in data["curves"]:
        if kernel is not None and row["kernel"] != kernel:
            continue
        device = devices.get(row["device"])
        if row["clock_ghz"]:
            device = device.with_clock(row["clock_ghz"])
        found.append(
            Curve(
                device=device,
                n=row["n"],
                k=row["k"],
                kernel=row["kernel"],
                flushed=row["flushed"],
                batches=tuple(data["batches"]),
                speedups=tuple(row["speedups"]),
            )
        )
    return tuple(found)


@functools.cache
def _marlin_rows() -> dict[int, dict[str, Any]]:
    return {row["m"]: row for row in _load("marlin_profile.json")["rows"]}


def marlin_profile(m: int, n: int, k: int, device: DeviceSpec) -> Profile:
    """Return the profile of Marlin's kernel for one product on one device, scaled from its counts at 4096 x 4096.

    Its grid is the number of SMs; each CTA takes as many consecutive k-tiles, in whole groups, running down the columns
    of tiles. CTAs that share a column hand their fp16 partial sums on, one after the other: the chain in
    ``reduce_steps``.

    Parameters
    ----------
    m, n, k : int
        Tokens (at most 128), output features, input features.
    device : DeviceSpec

    Raises
    ------
    ArgumentError
        M is above 128, where no counts exist.
    """
    rows = _marlin_rows()
    known = [batch for batch in rows if batch >= m]
    if not known:
        raise ArgumentError(f"m is {m}; Marlin's instruction counts are known up to {max(rows)}")
    row = rows[min(known)]
    tile_m, tile_n, tile_k = map(int, re.findall(r"[mnk](\d+)", row["tile"]))
    passes, k_tiles = _ceil_div(m, tile_m), _ceil_div(k, tile_k)
    tiles = passes * _ceil_div(n, tile_n) * k_tiles
    in_group = max(1, GROUP_SIZE // tile_k)
    of_cta = _round_up(_ceil_div(tiles, device.sms), in_group)
    chain = _hand_overs(k_tiles, of_cta)

    scale = n * k / 4096**2
    counts = {name: count * scale for name, count in row["warp_instructions"].items()}
    weights = n * k * BITS / 8
    # The passes over the tokens lie half a grid apart: the second finds in L2 what fits there.
    from_dram = weights * (passes if weights > device.l2_bytes / 2 else 1)
    x_reads = 2.0 * m * k * _ceil_div(n, tile_n)
    moved = counts["ld_shared"] + counts["ldmatrix"] + counts["cp_async_16B"] + counts["st_shared"]
    return Profile(
        grid=device.sms,
        block=row["block"],
        registers=row["registers"],
        shared_bytes=row["shared_bytes"],
        dram_bytes=from_dram + 2 * m * k + 2 * m * n,
        l2_bytes=weights * passes + x_reads + 2 * m * n,
        shared_traffic=512 * moved,
        warp_instructions=counts,
        mma={"m16n8k16:float16": counts["mma"]},
        stage_bytes=tile_n * tile_k * BITS / 8,
        stages=4,
        serial_stages=of_cta,
        busiest=of_cta / tiles,
        reduce_steps=chain,
        reduce_bytes=2 * 2 * tile_m * tile_n,  # an fp16 partial sum read and written
        independent_mma=8,
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b


def _hand_overs(k_tiles: int, of_cta: int) -> int:
    """Count the partial sums that one column of tiles waits for, one after the other."""
    if of_cta % k_tiles == 0:
        return 0  # every CTA does whole columns
    if k_tiles % of_cta == 0:
        return k_tiles // of_cta - 1
    return _ceil_div(k_tiles, of_cta)  # stripes do not start at column ends: one more CTA reaches into a column


def predicted_speedup(curve: Curve, m: int, constants: Constants = CONSTANTS) -> float:
    """Predict one point of a Marlin curve, as it was measured: predicted fp16 time over predicted kernel time."""
    device, n, k = curve.device, curve.n, curve.k
    launch = constants.event_launch_us
    fused = predict_profile(marlin_profile(m, n, k, device), device, launch_us=launch, constants=constants).time_us
    plain = dense(m, n, k, device, launch_us=launch, constants=constants).time_us
    if curve.flushed:
        fused += flush_us(n * k * BITS / 8, device, constants)
        plain += flush_us(2.0 * n * k, device, constants)
    return plain / fused


def predicted_curve(curve: Curve, constants: Constants = CONSTANTS) -> tuple[float, ...]:
    """Predict every point of a Marlin curve."""
    return tuple(predicted_speedup(curve, m, constants) for m in curve.batches)


def flush_us(read: float, device: DeviceSpec, constants: Constants = CONSTANTS) -> float:
    """Return what a flush by writing costs the next kernel, in microseconds.

    The flush leaves L2 full of dirty lines; every byte the kernel reads pushes one out, until all are gone.
    """
    return constants.flush_share * min(read, device.l2_bytes) / (device.dram_gbps * 1e3)
