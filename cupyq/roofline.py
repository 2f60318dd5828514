"""Roofline arithmetic of quantized matrix products: plain functions, each with its formula and source.

``y[M, N] = x[M, K] @ w[K, N]``: M tokens, K input features, N output features; a multiply-add counts as two operations.
Weights of ``bits`` bits with one scale of ``scale_bits`` bits per ``group_size`` of them along K take
``bits + scale_bits / group_size`` bits each (asymmetric schemes add a zero point: ``zero_bits / group_size``).

Source of the ridge: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 2009).
"""

from __future__ import annotations

from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError

# Reading a packed int4 weight (0.5 byte), writing it as fp16 (2) and reading that again in the product (2).
NAIVE_BYTES_PER_WEIGHT = 4.5


def effective_bits(bits: float, group_size: int = -1, scale_bits: int = 16, zero_bits: int = 0) -> float:
    """Return the stored bits per weight, scales and zero points included.

    ``bits + (scale_bits + zero_bits) / group_size``; a group size of -1 (one scale per column) adds nothing, since K is
    large: 4 bits in groups of 128 with fp16 scales take 4.125.
    """
    _positive("bits", bits)
    if group_size == -1:
        return float(bits)
    _positive("group_size", group_size)
    return bits + (scale_bits + zero_bits) / group_size


def weight_bytes(n: int, k: int, bits: float, group_size: int = -1, scale_bits: int = 16, zero_bits: int = 0) -> float:
    """Return the bytes of a (K, N) weight matrix with its scales: ``N x K x effective_bits / 8``."""
    return n * k * effective_bits(bits, group_size, scale_bits, zero_bits) / 8


def naive_bytes_per_weight(bits: float = 4, compute_bits: float = 16) -> float:
    """Return the DRAM bytes per weight of dequantizing to memory first and then multiplying.

    Read the code, write it at compute precision, read that again: ``(bits + 2 x compute_bits) / 8``, 4.5 for int4 and
    fp16 (:data:`NAIVE_BYTES_PER_WEIGHT`), so a batch of 1 is slower than plain fp16 (2 bytes).
    """
    _positive("bits", bits)
    return (bits + 2 * compute_bits) / 8


def operations(m: int, n: int, k: int) -> float:
    """Return the operations of the product, ``2 M N K``."""
    return 2.0 * m * n * k


def arithmetic_intensity(
    m: int, n: int, k: int, bits: float, group_size: int = -1, *, activation_bits: float = 16, output_bits: float = 16
) -> float:
    """Return operations per byte of DRAM traffic, each operand moved once.

    ``2MNK / (weights + M K activation_bits / 8 + M N output_bits / 8)`` in operations per byte.
    """
    for name, value in (("m", m), ("n", n), ("k", k)):
        _positive(name, value)
    moved = weight_bytes(n, k, bits, group_size) + m * k * activation_bits / 8 + m * n * output_bits / 8
    return operations(m, n, k) / moved


def ridge_intensity(device: DeviceSpec, dtype: str = "float16") -> float:
    """Return the operations per byte at which tensor rate and DRAM bandwidth bind equally: ``peak / bandwidth``."""
    return device.tensor_tops(dtype) * 1e12 / (device.dram_gbps * 1e9)


def ridge_batch(device: DeviceSpec, bits: float = 16, dtype: str = "float16") -> float:
    """Return the batch M from which a product is bound by tensor cores, counting weight traffic only.

    A weight of ``bits`` bits brings ``bits / 8`` bytes and 2M operations, so ``M = peak x bits / 16 / bandwidth``:
    295.4, 147.7, 73.8 and 36.9 on an H100 SXM for 16, 8, 4 and 2 bits, computing in fp16.

    Parameters
    ----------
    device : DeviceSpec
        Any entry of the catalogue.
    bits : float
        Stored bits per weight; pass :func:`effective_bits` to count scales.
    dtype : str
        What the tensor cores compute in (weights are widened to it in registers).
    """
    _positive("bits", bits)
    return ridge_intensity(device, dtype) * bits / 16


def ideal_time_us(device: DeviceSpec, m: int, n: int, k: int, bits: float, dtype: str = "float16") -> float:
    """Return the roofline time of ``y[M, N] = x[M, K] @ w[K, N]`` in microseconds.

    ``max((N K bits / 8 + 2 M K + 2 M N) / bandwidth, 2 M N K / peak)``: weights, fp16 x and fp16 y each moved once.
    """
    moved = n * k * bits / 8 + 2 * m * k + 2 * m * n
    return max(moved / (device.dram_gbps * 1e3), operations(m, n, k) / (device.tensor_tops(dtype) * 1e6))


def ideal_speedup(
    bits: float = 4, group_size: int = 128, *, base_bits: float = 16, scale_bits: int = 16, zero_bits: int = 0
) -> float:
    """Return the speed-up over unquantized weights while both are memory bound.

    ``base_bits / effective_bits``: 16 / (4 + 16/128) = 3.88.
    """
    return base_bits / effective_bits(bits, group_size, scale_bits, zero_bits)


def ideal_speedup_at(device: DeviceSpec, m: int, n: int, k: int, bits: float = 4, group_size: int = 128) -> float:
    """Return the roofline speed-up of W4A16 over fp16 at batch M: the ratio of two :func:`ideal_time_us`.

    Both compute on the fp16 tensor cores, so above the fp16 ridge the ratio is 1.
    """
    for name, value in (("m", m), ("n", n), ("k", k)):
        _positive(name, value)
    fused = ideal_time_us(device, m, n, k, effective_bits(bits, group_size))
    return ideal_time_us(device, m, n, k, 16) / fused


def crossover_batch(device: DeviceSpec, efficiency: float = 1.0) -> float:
    """Return the batch M above which plain fp16 is faster than a kernel with quantized weights, by the roofline.

    A fused kernel that reaches ``efficiency`` (0..1] of the tensor rate fp16 reaches takes ``2M / (efficiency x peak)``
    per weight once it is compute bound; fp16 takes ``2 bytes / bandwidth`` while memory bound. They meet at
    ``M = efficiency x ridge_batch(16)``; the bits of the weights do not matter, since the fused kernel is compute bound
    there. With an efficiency of 1 they meet at the fp16 ridge and stay equal beyond it.

    Raises
    ------
    ArgumentError
        The efficiency is not in (0, 1].
    """
    if not 0 < efficiency <= 1:
        raise ArgumentError(f"efficiency is {efficiency!r}; a share of the tensor rate in (0, 1] is needed")
    return efficiency * ridge_batch(device, 16)


def scale_overhead(group_size: int, bits: float = 4, scale_bits: int = 16, zero_bits: int = 0) -> float:
    """Return the share of the weight traffic that scales (and zero points) take, 0..1.

    ``(scale_bits + zero_bits) / (group_size x bits + scale_bits + zero_bits)``: 16/80 = 20 % at a group size of 16,
    16/528 = 3.0 % at 128.
    """
    if group_size == -1:
        return 0.0
    _positive("group_size", group_size)
    extra = scale_bits + zero_bits
    return extra / (group_size * bits + extra)


def instruction_budget(device: DeviceSpec) -> float:
    """Return the lane instructions per 32-bit packed word under which a kernel can stay memory bound.

    An SM issues 4 warp instructions, 128 lanes, a clock and receives :attr:`DeviceSpec.dram_bytes_per_clock_per_sm`:
    ``128 / (bytes per clock per SM / 4)`` lane instructions per 4 bytes, 38 on an A100 SXM.
    """
    return 128 / (device.dram_bytes_per_clock_per_sm / 4)


def bytes_in_flight(device: DeviceSpec, latency_ns: float) -> float:
    """Return the bytes an SM must have on the way to keep DRAM busy (Little's law): ``latency x bandwidth / SMs``."""
    device.require_kernels()
    return latency_ns * device.dram_gbps / device.sms


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ArgumentError(f"{name} is {value!r}; a positive number is needed")
