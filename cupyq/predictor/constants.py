"""The predictor's constants, in one place: what each means, its unit, and where it comes from.

Fitted constants were found by ``benchmarks/prediction.py --fit`` on five published curves (one a GPU, the sizes spread
over them), each with a prior that keeps it physical; docs/prediction.md shows the errors on the curves held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cupyq.devices import DeviceSpec

ASYNCHRONOUS_MMA = (9, 10, 11)
"""Major compute capabilities whose full tensor rate only wgmma or tcgen05 reaches, not mma.sync."""


@dataclass(frozen=True)
class Constants:
    """Everything the formulas need that no data sheet gives.

    Attributes
    ----------
    stream : mapping of compute capability to float
        Share of the DRAM bandwidth that a kernel streaming packed weights reaches with enough bytes in flight. Fitted
        for 8.0, 8.6, 8.9 and 9.0; elsewhere their middle, not fitted.
    tensor : mapping of compute capability to float
        Share of the tensor rate that the largest dense products reach. Measured by others: A100 271 of 312 TFLOPS,
        H100 794 of 989, B200 1745 of 2250; cards of 8.6 and 8.9 hold their clock and are taken at 0.97.
    mma_sync : float
        Share of that which mma.sync reaches where the full rate needs wgmma (9.0, fitted) or tcgen05 (10.0, taken to be
        alike); 1 elsewhere.
    fused_tensor : float
        Share of ``tensor`` that a kernel reaches which dequantizes between its mma instructions. Fitted.
    sustained_clock : float
        GeForce cards run above the boost clock on their data sheet: sustained over rated clock. Fitted.
    dense_stream, dense_tensor : float
        Shares of DRAM bandwidth and of ``tensor`` that cuBLAS reaches. Fitted.
    overlap, dense_overlap : float
        Exponent p of the soft maximum ``(sum of t_i^p)^(1/p)`` over the parts that overlap, of fused kernels and of
        cuBLAS: infinite is perfect overlap, 1 is none. Fitted.
    event_launch_us : float
        Launch and drain of a kernel timed by events around each launch, in microseconds. Fitted.
    graph_launch_us : float
        The same inside a CUDA graph, where the next launch is ready when a kernel ends. Assumed.
    dram_latency_us : float
        DRAM latency under load, in microseconds: 13 KB an SM in flight saturate an A100, 25 KB an H200.
    reduce_step_us : float
        One hand-over of a partial sum from CTA to CTA through L2, in microseconds. Fitted.
    reduce_bytes_per_clock : float
        Bytes a clock at which one CTA moves partial sums through L2. Fitted.
    flush_share : float
        Share of the dirty L2 lines, left by a benchmark that flushes L2 by writing, that are written back at the
        kernel's expense. Only for published measurements made that way. Fitted.
    l2_bytes_per_clock_per_sm : mapping of compute capability to float
        L2 to SM bandwidth, in bytes a clock for each SM; 24 where not listed. Assumed: 4 to 6 TB/s on cards of every
        generation here.
    stage_clocks : float
        Clocks of a stage's own chain, barrier to barrier: shared memory, dequantizing, mma. Assumed.
    warp_ipc : float
        Instructions a clock that one warp sustains: eight warps keep four schedulers busy. Assumed.
    mma_in_flight : float
        Independent mma a tensor core needs to hide its latency. Assumed.
    """

    stream: Mapping[tuple[int, int], float] = field(
        default_factory=lambda: {(8, 0): 0.825, (8, 6): 0.945, (8, 9): 0.807, (9, 0): 0.726}
    )
    tensor: Mapping[tuple[int, int], float] = field(
        default_factory=lambda: {(8, 0): 0.87, (8, 6): 0.97, (8, 9): 0.97, (9, 0): 0.80, (10, 0): 0.776}
    )
    mma_sync: float = 0.603
    fused_tensor: float = 0.891
    sustained_clock: float = 1.15
    dense_stream: float = 0.9205
    dense_tensor: float = 0.993
    overlap: float = 6.32
    dense_overlap: float = 2.57
    event_launch_us: float = 3.68
    graph_launch_us: float = 2.0
    dram_latency_us: float = 0.69
    reduce_step_us: float = 0.495
    reduce_bytes_per_clock: float = 19.9
    flush_share: float = 0.267
    l2_bytes_per_clock_per_sm: Mapping[tuple[int, int], float] = field(default_factory=lambda: {(8, 9): 16.0})
    stage_clocks: float = 200.0
    warp_ipc: float = 0.5
    mma_in_flight: float = 4.0

    def stream_share(self, device: DeviceSpec) -> float:
        """Share of the DRAM bandwidth that a fused kernel reaches on ``device``."""
        return self.stream.get(device.cc, 0.83)

    def tensor_share(self, device: DeviceSpec) -> float:
        """Share of the data-sheet tensor rate that the largest dense products reach on ``device``."""
        share = self.tensor.get(device.cc, 0.90)
        return share * self.clock_factor(device)

    def mma_sync_share(self, device: DeviceSpec) -> float:
        """Share of the data-sheet tensor rate that a kernel of ours, on mma.sync, reaches on ``device``."""
        narrow = self.mma_sync if device.cc[0] in ASYNCHRONOUS_MMA else 1.0
        return self.tensor_share(device) * narrow * self.fused_tensor

    def l2_rate(self, device: DeviceSpec) -> float:
        """L2 to SM bandwidth of ``device``, bytes a clock for each SM."""
        return self.l2_bytes_per_clock_per_sm.get(device.cc, 24.0)

    def clock_factor(self, device: DeviceSpec) -> float:
        """Sustained over rated clock of ``device``."""
        return self.sustained_clock if self.is_geforce(device) else 1.0

    def is_geforce(self, device: DeviceSpec) -> bool:
        """Tell a GeForce card by its halved fp32 accumulation."""
        return device.tensor_fma_per_clock_per_sm < 0.75 * device.limits.tensor_fma


CONSTANTS = Constants()
