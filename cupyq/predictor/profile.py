"""What the predictor takes and gives: a kernel's profile, and a prediction in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profile:
    """Everything about one launch that decides its time. Totals are over the whole launch.

    Attributes
    ----------
    grid, block : int
        CTAs of the launch, threads of a CTA.
    registers, shared_bytes : int
        Registers of a thread, shared memory of a CTA (static and dynamic).
    dram_bytes, l2_bytes, shared_traffic : float
        Bytes that DRAM moves, that L2 hands to or takes from the SMs, that shared memory reads and writes.
    warp_instructions : mapping of str to float
        Warp instructions by class, in the emulator's words: "lop3", "int_math", "half2_math", "fp32_math", "convert",
        "ld_shared", "ldmatrix", "mma", ... Unknown classes count as issue slots.
    mma : mapping of str to float
        Warp-level mma instructions by "m16n8k16:float16", shape and input dtype.
    stage_bytes : float
        DRAM bytes a CTA asks for in a pipeline stage.
    stages : int
        Stages of the pipeline; all but one are in flight.
    serial_stages : float
        Stages that a CTA works through one after the other.
    busiest : float or None
        Share of all the work that the busiest CTA has; None means that all CTAs do the same.
    reduce_steps : float
        Hand-overs of partial sums that follow each other (0 without a split along K).
    reduce_bytes : float
        Bytes that one CTA moves in each of these.
    prologue_clocks : float
        Clocks that a CTA works before its main loop can start, beyond filling its pipeline.
    independent_mma : int
        mma instructions of a warp that do not wait for each other.
    """

    grid: int
    block: int
    registers: int
    shared_bytes: int
    dram_bytes: float
    l2_bytes: float = 0.0
    shared_traffic: float = 0.0
    warp_instructions: Mapping[str, float] = field(default_factory=dict)
    mma: Mapping[str, float] = field(default_factory=dict)
    stage_bytes: float = 16384.0
    stages: int = 2
    serial_stages: float = 1.0
    busiest: float | None = None
    reduce_steps: float = 0.0
    reduce_bytes: float = 0.0
    prologue_clocks: float = 0.0
    independent_mma: int = 8


@dataclass(frozen=True)
class Prediction:
    """A predicted time; never to be mixed up with a measured one.

    Attributes
    ----------
    time_us : float
        Predicted microseconds of one call.
    parts : dict of str to float
        Microseconds of each part. Those that overlap ("dram", "l2", "shared", "tensor", "alu", "issue", "chain") do not
        add up to the time; "launch", "fill", "reduce" and what other passes take do.
    """

    time_us: float
    parts: dict[str, float]
    source: str = "predicted"

    @property
    def bound(self) -> str:
        """The largest part: what one would have to mend to be faster."""
        return max(self.parts, key=lambda name: self.parts[name])

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in self.parts.items() if value >= 0.05)
        return f"predicted {self.time_us:.1f} us (bound by {self.bound}; {parts})"
