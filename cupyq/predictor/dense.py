"""cuBLAS and the helper passes: predicted times of dense products and of kernels that only stream memory."""

from __future__ import annotations

from cupyq.devices import DeviceSpec

from .constants import CONSTANTS, Constants
from .model import soft_max
from .profile import Prediction

# Tiles that cuBLAS chooses from, tokens x features. A tile much higher than M wastes tensor work.
_TILES = tuple((bm, bn) for bm in (16, 32, 64, 128, 256) for bn in (64, 128, 256) if bm * bn <= 128 * 256)
_SPLITS = (1, 2, 3, 4, 6, 8)


def dense(
    m: int,
    n: int,
    k: int,
    device: DeviceSpec,
    *,
    launch_us: float | None = None,
    in_l2: bool = False,
    constants: Constants = CONSTANTS,
) -> Prediction:
    """Predict cuBLAS's fp16 or bf16 product ``y[M, N] = x[M, K] @ w[K, N]`` with fp32 accumulation.

    The fastest of cuBLAS's usual tiles, K split only while that fills idle SMs: DRAM against tensor time of the busiest
    SM, so wave quantization shows.

    Parameters
    ----------
    m, n, k : int
        Tokens, output features, input features.
    device : DeviceSpec
    launch_us : float, optional
        Cost of a launch; by default that inside a CUDA graph.
    in_l2 : bool
        The weights were just written and are still in L2.
    constants : Constants
    """
    device.require_kernels()
    weights = 0.0 if in_l2 else 2.0 * n * k
    dram = (weights + 2 * m * k + 2 * m * n) / (device.dram_gbps * 1e3 * constants.dense_stream)
    rate = device.tensor_tops("float16") * 1e6 * constants.tensor_share(device) * constants.dense_tensor / device.sms
    # No tile much lower than M; on GeForce, published curves show the time of 128 tokens from 33 on.
    least = 128 if m > 32 and constants.is_geforce(device) else min(m, 128)
    best: tuple[float, float, float] | None = None
    for bm, bn in _TILES:
        if bm < least:
            continue
        tiles = -(-m // bm) * -(-n // bn)
        for split in _SPLITS:
            if split > 1 and tiles * split > device.sms:
                break
            waves = -(-tiles * split // device.sms)
            tensor = waves * 2.0 * bm * bn * -(-k // split) / rate
            # Partial sums: a second, small kernel behind the first, and its traffic through L2.
            reduce = (
                0.0 if split == 1 else 0.3 * constants.event_launch_us + split * m * n * 8 / (device.dram_gbps * 3e3)
            )
            total = soft_max((dram, tensor), constants.dense_overlap) + reduce
            if best is None or total < best[0]:
                best = (total, tensor, reduce)
    assert best is not None  # the tile of 128 tokens takes any M
    launch = constants.graph_launch_us if launch_us is None else launch_us
    fill = constants.dram_latency_us
    parts = {"launch": launch, "fill": fill, "dram": dram, "tensor": best[1], "reduce": best[2]}
    return Prediction(launch + fill + best[0], parts)


def streaming_us(
    read: float, written: float, device: DeviceSpec, *, launch_us: float | None = None, constants: Constants = CONSTANTS
) -> float:
    """Predict a pass that only moves memory, in microseconds: launch, latency and bytes at the dense share of DRAM."""
    device.require_kernels()
    launch = constants.graph_launch_us if launch_us is None else launch_us
    moved = (read + written) / (device.dram_gbps * 1e3 * constants.dense_stream)
    return launch + constants.dram_latency_us + moved
