"""What a GPU can do: a catalogue of known cards, and the same facts read from a card that is here.

Rates are dense (never the sparse ones of product pages) and count a multiply-add as two operations.
Bandwidths are in 1e9 bytes a second, sizes in bytes, clocks in GHz.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cupyq.errors import ArgumentError, IllegalConfig, NoDevice, NotInstalled, UnknownDevice

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True)
class Limits:
    """Per-SM limits that all cards of one compute capability share.

    Attributes
    ----------
    shared_per_sm, shared_per_block : int
        Shared memory of an SM, and the most one block may ask for, in bytes.
    shared_reserved : int
        Shared memory the driver takes from every resident block, in bytes.
    blocks, threads : int
        Most resident blocks and threads of an SM.
    tensor_fma : int
        Dense fp16 multiply-adds an SM's tensor cores do in a clock (int8 and fp8: twice as many).
    fp32_lanes, half2_lanes, int_lanes : int
        Lanes per clock of the FP32 pipe, of packed fp16 (HFMA2) and of integer and logic work (IADD, LOP3, SHF, PRMT).
    """

    shared_per_sm: int
    shared_per_block: int
    shared_reserved: int
    blocks: int
    threads: int
    tensor_fma: int
    fp32_lanes: int
    half2_lanes: int
    int_lanes: int


def _limits(sm: int, block: int, blocks: int, threads: int, fma: int, fp32: int, half2: int, integer: int) -> Limits:
    reserved = KIB if sm > 64 else 0
    return Limits(sm * KIB, block * KIB, reserved, blocks, threads, fma, fp32, half2, integer)


# Sources: CUDA C++ programming guide (technical specifications per compute capability) and the vendor's architecture
# papers. half2 follows the papers' non-tensor fp16 rate: 4x fp32 on GA100, 2x on TU10x and GH100, 1x elsewhere.
LIMITS: Mapping[tuple[int, int], Limits] = {
    (7, 5): _limits(64, 64, 16, 1024, 512, 64, 64, 64),
    (8, 0): _limits(164, 163, 32, 2048, 1024, 64, 128, 64),
    (8, 6): _limits(100, 99, 16, 1536, 512, 128, 64, 64),
    (8, 7): _limits(164, 163, 16, 1536, 1024, 128, 64, 64),
    (8, 9): _limits(100, 99, 24, 1536, 512, 128, 64, 64),
    (9, 0): _limits(228, 227, 32, 2048, 2048, 128, 128, 64),
    (10, 0): _limits(228, 227, 32, 2048, 4096, 128, 128, 64),
    (12, 0): _limits(100, 99, 24, 1536, 512, 128, 64, 128),
}


_RATE_FIELDS = {
    "float16": "fp16_tflops",
    "bfloat16": "fp16_tflops",
    "int8": "int8_tops",
    "fp8": "fp8_tflops",
    "float8_e4m3fn": "fp8_tflops",
    "fp4": "fp4_tflops",
    "float4_e2m1fn": "fp4_tflops",
}


@dataclass(frozen=True)
class DeviceSpec:
    """A GPU as the kernels, the predictor and the database see it.

    Attributes
    ----------
    name : str
        Short name, as in the catalogue ("a100-sxm"). For people: the database goes by :attr:`identity`.
    title : str
        Full product name.
    cc : tuple of int
        Compute capability, (8, 0) for 8.0; (0, 0) where the entry is for rooflines only.
    sms : int
        Streaming multiprocessors.
    clock_ghz : float
        Boost clock.
    fp16_tflops, int8_tops, fp8_tflops, fp4_tflops : float or None
        Dense tensor rates, fp16/bf16 and fp8 with fp32 accumulation; None where the card has no such instruction.
    dram_gbps : float
        DRAM bandwidth, 1e9 bytes a second.
    l2_bytes, memory_bytes : int
        L2 cache and device memory.
    shared_per_sm, shared_per_block : int
        Shared memory of an SM, and the most that one block may have (opt-in), in bytes.
    threads_per_sm, blocks_per_sm, registers_per_sm : int
        Occupancy limits.
    live : bool
        Read from a card in this machine, not from the catalogue.
    ordinal : int or None
        CUDA ordinal of a live card.
    unsure : tuple of str
        Fields taken from a secondary source: check them before relying on a result that hangs on them.
    """

    name: str
    title: str
    cc: tuple[int, int]
    sms: int
    clock_ghz: float
    fp16_tflops: float
    int8_tops: float
    fp8_tflops: float | None
    fp4_tflops: float | None
    dram_gbps: float
    l2_bytes: int
    memory_bytes: int
    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    live: bool = False
    ordinal: int | None = None
    unsure: tuple[str, ...] = ()

    @property
    def runs_kernels(self) -> bool:
        """True where cupyq's kernels can be built for this device (not for roofline-only entries)."""
        return self.cc >= (7, 5)

    @property
    def refusal(self) -> str | None:
        """Why no kernel can run here, as a sentence; None where kernels can."""
        if self.runs_kernels:
            return None
        if self.cc == (0, 0):
            return f"{self.title} ({self.name}) is in the catalogue for rooflines only: cupyq has no kernels for it"
        return f"{self.title} has compute capability {self.compute_capability}: cupyq's kernels need 7.5 or newer"

    def require_kernels(self) -> None:
        """Raise :class:`~cupyq.errors.IllegalConfig` with :attr:`refusal` where no kernel can run."""
        if self.refusal is not None:
            raise IllegalConfig(self.refusal)

    @property
    def arch(self) -> str:
        """The NVRTC architecture, "sm_80" for compute capability 8.0."""
        self.require_kernels()
        return f"sm_{self.cc[0]}{self.cc[1]}"

    @property
    def compute_capability(self) -> str:
        """Compute capability as text, "8.0"."""
        return f"{self.cc[0]}.{self.cc[1]}"

    @property
    def limits(self) -> Limits:
        """What every SM of this compute capability can hold and do in a clock."""
        self.require_kernels()
        return limits_of(self.cc)

    @property
    def shared_reserved(self) -> int:
        """Bytes of shared memory the driver takes from each resident block."""
        return self.limits.shared_reserved

    @property
    def dram_bytes_per_clock_per_sm(self) -> float:
        """DRAM bytes that one SM's share of the bandwidth brings in a clock at the boost clock."""
        self.require_kernels()
        return self.dram_gbps / (self.sms * self.clock_ghz)

    @property
    def tensor_fma_per_clock_per_sm(self) -> float:
        """Dense fp16 multiply-adds per clock per SM that :attr:`fp16_tflops` amounts to."""
        self.require_kernels()
        return self.fp16_tflops * 1e3 / (2 * self.sms * self.clock_ghz)

    def tensor_tops(self, dtype: str) -> float:
        """Return the dense tensor rate for inputs of ``dtype``, in 1e12 operations a second.

        Parameters
        ----------
        dtype : str
            "float16", "bfloat16", "int8", "float8_e4m3fn" (or "fp8") or "float4_e2m1fn" (or "fp4").

        Raises
        ------
        ArgumentError
            The dtype is unknown, or the card has no tensor instruction for it.
        """
        if dtype not in _RATE_FIELDS:
            raise ArgumentError(f"dtype is {dtype!r}; tensor rates are known for {', '.join(_RATE_FIELDS)}")
        rate = getattr(self, _RATE_FIELDS[dtype])
        if not rate:
            raise ArgumentError(f"{self.title} has no tensor instruction for {dtype}")
        return rate

    @property
    def identity(self) -> tuple[str, int, int, int, int, int]:
        """What makes two cards the same to the database.

        Returns
        -------
        tuple
            Compute capability, SMs, L2 bytes, shared bytes per SM, device memory in whole GiB, bandwidth in GB/s.
            The name is left out: one name can be a MIG slice or a smaller card.
        """
        memory_gib = round(self.memory_bytes / GIB)
        return (self.compute_capability, self.sms, self.l2_bytes, self.shared_per_sm, memory_gib, round(self.dram_gbps))

    def with_clock(self, clock_ghz: float, name: str | None = None) -> DeviceSpec:
        """Return this card locked to another SM clock: tensor rates follow it, bandwidth stays.

        Parameters
        ----------
        clock_ghz : float
            SM clock in GHz.
        name : str, optional
            Name of the returned spec; by default the old one with the clock added.
        """
        if not clock_ghz > 0:
            raise ArgumentError(f"clock_ghz is {clock_ghz!r}; a positive clock in GHz is needed")
        factor = clock_ghz / self.clock_ghz
        return replace(
            self,
            name=name or f"{self.name}@{clock_ghz:g}GHz",
            clock_ghz=clock_ghz,
            fp16_tflops=self.fp16_tflops * factor,
            int8_tops=self.int8_tops * factor,
            fp8_tflops=None if self.fp8_tflops is None else self.fp8_tflops * factor,
            fp4_tflops=None if self.fp4_tflops is None else self.fp4_tflops * factor,
        )


def limits_of(cc: tuple[int, int]) -> Limits:
    """Return the limits of a compute capability; of the nearest older one we know where it is newer than the table."""
    older = [known for known in LIMITS if known <= cc]
    if not older:
        raise UnknownDevice(f"compute capability {cc[0]}.{cc[1]} is older than any cupyq knows (7.5)")
    return LIMITS[max(older)]


# Dense rates. Those of GeForce cards and Orin follow from SMs x multiply-adds x 2 x clock; GeForce does fp16 and fp8
# with fp32 accumulation at half rate. `?` marks a row's fields that come from a secondary source.
_TABLE = """
name         | CC   | SMs | GHz   | fp16   | int8 | fp8  | fp4  | GB/s  | L2 MiB | GiB | title
t4           | 7.5  | 40  | 1.59  | 65     | 130  | -    | -    | 320   | 4      | 16  | NVIDIA T4
a10          | 8.6  | 72  | 1.695 | 125    | 250  | -    | -    | 600   | 6      | 24  | NVIDIA A10
a30          | 8.0  | 56  | 1.44  | 165    | 330  | -    | -    | 933   | 24     | 24  | NVIDIA A30
a40          | 8.6  | 84  | 1.74  | 149.7  | 299  | -    | -    | 696   | 6      | 48  | NVIDIA A40
a100-40gb    | 8.0  | 108 | 1.41  | 312    | 624  | -    | -    | 1555  | 40     | 40  | NVIDIA A100 40 GB
a100-pcie    | 8.0  | 108 | 1.41  | 312    | 624  | -    | -    | 1935  | 40     | 80  | NVIDIA A100 PCIe 80 GB
a100-sxm     | 8.0  | 108 | 1.41  | 312    | 624  | -    | -    | 2039  | 40     | 80  | NVIDIA A100 SXM 80 GB
rtx-a6000    | 8.6  | 84  | 1.80  | 154.8  | 310  | -    | -    | 768   | 6      | 48  | NVIDIA RTX A6000
rtx-3090     | 8.6  | 82  | 1.695 | 71.2   | 285  | -    | -    | 936   | 6      | 24  | NVIDIA GeForce RTX 3090
orin-agx-64  | 8.7? | 16? | 1.3?  | 42.6?  | 85?  | -    | -    | 204.8?| 4?     | 64  | NVIDIA Jetson AGX Orin 64 GB
l4           | 8.9  | 58  | 2.04  | 121    | 242  | 242  | -    | 300   | 48     | 24  | NVIDIA L4
l40s         | 8.9  | 142 | 2.52  | 362    | 733  | 733  | -    | 864   | 96?    | 48  | NVIDIA L40S
rtx-4090     | 8.9  | 128 | 2.52  | 165.2  | 661  | 330  | -    | 1008  | 72     | 24  | NVIDIA GeForce RTX 4090
h100-pcie    | 9.0  | 114 | 1.755?| 756    | 1513 | 1513 | -    | 2000  | 50     | 80  | NVIDIA H100 PCIe 80 GB
h100-sxm     | 9.0  | 132 | 1.83  | 989.5  | 1979 | 1979 | -    | 3350  | 50     | 80  | NVIDIA H100 SXM 80 GB
h200-sxm     | 9.0  | 132 | 1.83  | 989.5  | 1979 | 1979 | -    | 4800  | 60     | 141 | NVIDIA H200 SXM 141 GB
b200         | 10.0 | 148 | 1.85? | 2250   | 4500 | 4500 | 9000 | 8000  | 126    | 180 | NVIDIA B200 180 GB
rtx-5090     | 12.0 | 170 | 2.407 | 209.5  | 838  | 419  | 1676 | 1792  | 96     | 32  | NVIDIA GeForce RTX 5090
rtx-pro-6000 | 12.0 | 188 | 2.617 | 503.8  | 1007 | 1007 | 2015 | 1792  | 128    | 96  | NVIDIA RTX PRO 6000 Blackwell
mi300x       | -    | -   | -     | 1307.4 | 2615 | 2615 | -    | 5300  | -      | 192 | AMD Instinct MI300X
tpu-v5e      | -    | -   | -     | 197    | 394  | -    | -    | 819   | -      | 16  | Google TPU v5e
"""
_FIELDS = ("cc", "sms", "clock_ghz", "fp16_tflops", "int8_tops", "fp8_tflops", "fp4_tflops", "dram_gbps", "l2_bytes")
_NO_LIMITS = Limits(0, 0, 0, 0, 0, 0, 0, 0, 0)  # roofline-only entries
_OLDER = replace(
    _NO_LIMITS, tensor_fma=64, fp32_lanes=64, half2_lanes=64, int_lanes=64
)  # than any kernel: CuPy multiplies


def _parse_row(line: str) -> DeviceSpec:
    name, *cells, memory, title = (cell.strip() for cell in line.split("|"))
    unsure = tuple(field for field, cell in zip(_FIELDS, cells, strict=True) if cell.endswith("?"))
    cc, sms, clock, fp16, int8, fp8, fp4, dram, l2 = (cell.rstrip("?") for cell in cells)
    major, _, minor = cc.partition(".")
    capability = (int(major), int(minor)) if minor else (0, 0)
    limits = LIMITS.get(capability, _NO_LIMITS)
    return DeviceSpec(
        name=name,
        title=title,
        cc=capability,
        sms=0 if sms == "-" else int(sms),
        clock_ghz=0.0 if clock == "-" else float(clock),
        fp16_tflops=float(fp16),
        int8_tops=float(int8),
        fp8_tflops=None if fp8 == "-" else float(fp8),
        fp4_tflops=None if fp4 == "-" else float(fp4),
        dram_gbps=float(dram),
        l2_bytes=0 if l2 == "-" else int(l2) * MIB,
        memory_bytes=int(memory) * GIB,
        shared_per_sm=limits.shared_per_sm,
        shared_per_block=limits.shared_per_block,
        threads_per_sm=limits.threads,
        blocks_per_sm=limits.blocks,
        registers_per_sm=65536 if sms != "-" else 0,
        unsure=unsure,
    )


CATALOGUE: Mapping[str, DeviceSpec] = {
    spec.name: spec for spec in (_parse_row(line) for line in _TABLE.strip().splitlines()[1:])
}


def names() -> list[str]:
    """Return every name of the catalogue, oldest GPUs first, roofline-only entries last."""
    return list(CATALOGUE)


def get(name: str) -> DeviceSpec:
    """Return a device of the catalogue by its name.

    Parameters
    ----------
    name : str
        A name of :func:`names`; case, and spaces or underscores for hyphens, do not matter.

    Raises
    ------
    UnknownDevice
        No such name; the message gives the nearest ones.
    """
    key = re.sub(r"[\s_]+", "-", str(name).strip().lower())
    if key in CATALOGUE:
        return CATALOGUE[key]
    import difflib

    near = [known for known in CATALOGUE if key and (known.startswith(key) or key.startswith(known))]
    near += [known for known in difflib.get_close_matches(key, CATALOGUE, n=4, cutoff=0.5) if known not in near]
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(CATALOGUE)}"
    raise UnknownDevice(f"no device is called {name!r}; {hint}")


def match(spec: DeviceSpec) -> DeviceSpec | None:
    """Return the catalogue's entry for a card, found by what the card is, not by what it is called.

    Compute capability and SM count must be equal; L2, device memory (ECC takes up to an eighth) and bandwidth (drivers
    report the memory's rated clock) must be near; of several, the one of the nearest bandwidth is meant.

    Returns
    -------
    DeviceSpec or None
        None where nothing fits, a MIG slice for one.
    """

    def near(a: float, b: float, tolerance: float) -> bool:
        return abs(a - b) <= tolerance * max(a, b)

    fits = [
        known
        for known in CATALOGUE.values()
        if known.cc == spec.cc
        and known.sms == spec.sms
        and near(known.l2_bytes, spec.l2_bytes, 0.10)
        and near(known.memory_bytes, spec.memory_bytes, 0.125)
        and (spec.dram_gbps == 0 or near(known.dram_gbps, spec.dram_gbps, 0.06))
    ]
    return min(fits, key=lambda known: abs(known.dram_gbps - spec.dram_gbps), default=None)


def live_count() -> int:
    """Return how many CUDA devices can be used here; 0 without CuPy, a driver or a card."""
    try:
        return _runtime().getDeviceCount()
    except (NotInstalled, RuntimeError):  # CuPy's CUDARuntimeError is a RuntimeError
        return 0


def live(ordinal: int = 0) -> DeviceSpec:
    """Return the spec of a card in this machine, read from CuPy's device attributes.

    Parameters
    ----------
    ordinal : int
        CUDA ordinal.

    Raises
    ------
    NotInstalled
        CuPy is not installed.
    NoDevice
        There is no driver, no card, none of this ordinal, or a driver that hides the clocks of an unknown card.
    """
    runtime = _runtime()
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        raise NoDevice(f"no CUDA device can be used here: {error}") from error
    if not 0 <= ordinal < count:
        raise NoDevice(f"ordinal is {ordinal}; this machine has {count} CUDA device(s), numbered from 0")
    return _read_live(ordinal)


def resolve(device: DeviceSpec | str | int | None = None) -> DeviceSpec:
    """Return a spec for whatever a user calls a device.

    Parameters
    ----------
    device : DeviceSpec, str, int or None
        A spec (returned as it is), a catalogue name, "cuda:1" or an ordinal for a card of this machine, or None for
        CuPy's current device.
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, str):
        here = re.fullmatch(r"(?:cuda|gpu)(?::(\d+))?", device.strip().lower())
        return live(int(here.group(1) or 0)) if here else get(device)
    if device is None:
        runtime = _runtime()
        try:
            return live(runtime.getDevice())
        except RuntimeError as error:
            raise NoDevice(f"no CUDA device can be used here: {error}") from error
    return live(int(device))


def _runtime() -> Any:
    """Import CuPy's view of the CUDA runtime at the moment it is needed, never at import time."""
    try:
        import cupy
    except ImportError as error:
        raise NotInstalled("CuPy is needed for a live GPU: pip install 'cupyq[cuda13]' or 'cupyq[cuda12]'") from error
    return cupy.cuda.runtime


@functools.cache
def _read_live(ordinal: int) -> DeviceSpec:
    import cupy

    device = cupy.cuda.Device(ordinal)
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    name = properties["name"]
    return from_attributes(
        cc=(int(properties["major"]), int(properties["minor"])),  # Device.compute_capability would make a context
        attributes=device.attributes,
        memory_bytes=int(properties["totalGlobalMem"]),
        title=name.decode() if isinstance(name, bytes) else str(name),
        ordinal=ordinal,
    )


def from_attributes(
    cc: tuple[int, int], attributes: Mapping[str, int], memory_bytes: int, title: str, ordinal: int | None = None
) -> DeviceSpec:
    """Build a live card's spec from its CUDA device attributes.

    Parameters
    ----------
    cc : tuple of int
        Compute capability.
    attributes : mapping
        CUDA device attributes by name without the ``cudaDevAttr`` prefix, as CuPy's ``Device.attributes`` gives them:
        clocks in kHz, bus width in bits, sizes in bytes.
    memory_bytes : int
        Total device memory.
    title : str
        Product name the driver gives.
    ordinal : int, optional
        CUDA ordinal.

    Returns
    -------
    DeviceSpec
        Tensor rates are SMs x multiply-adds per clock x 2 x clock. Named after the catalogue's entry where
        :func:`match` finds one, after the product otherwise. A clock that the driver hides is taken after the
        catalogue, or guessed after the most similar card and named in `unsure`.
    """
    limits = _limits_of_any(cc)
    sms = int(attributes["MultiProcessorCount"])
    clock_ghz = attributes.get("ClockRate", 0) * 1e-6
    # Double data rate: two transfers a clock of the rated memory clock.
    dram_gbps = 2 * attributes.get("MemoryClockRate", 0) * 1e3 * attributes.get("GlobalMemoryBusWidth", 0) / 8 * 1e-9
    spec = DeviceSpec(
        name=re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "unnamed",
        title=title,
        cc=cc,
        sms=sms,
        clock_ghz=clock_ghz,
        fp16_tflops=0.0,
        int8_tops=0.0,
        fp8_tflops=None,
        fp4_tflops=None,
        dram_gbps=dram_gbps,
        l2_bytes=int(attributes["L2CacheSize"]),
        memory_bytes=memory_bytes,
        shared_per_sm=int(attributes.get("MaxSharedMemoryPerMultiprocessor", limits.shared_per_sm)),
        shared_per_block=int(attributes.get("MaxSharedMemoryPerBlockOptin", limits.shared_per_block)),
        threads_per_sm=int(attributes.get("MaxThreadsPerMultiProcessor", limits.threads)),
        blocks_per_sm=int(attributes.get("MaxBlocksPerMultiprocessor", limits.blocks)),
        registers_per_sm=int(attributes.get("MaxRegistersPerMultiprocessor", 65536)),
        live=True,
        ordinal=ordinal,
    )
    known = match(spec)
    if known is not None:  # drivers that hide a clock leave it 0: the catalogue's figure is the best there is
        clock_ghz, dram_gbps = clock_ghz or known.clock_ghz, dram_gbps or known.dram_gbps
        spec = replace(spec, name=known.name, clock_ghz=clock_ghz, dram_gbps=dram_gbps)
    return _with_computed_rates(_with_guessed_clocks(spec), known)


def _limits_of_any(cc: tuple[int, int]) -> Limits:
    return limits_of(cc) if cc >= min(LIMITS) else _OLDER


def _with_guessed_clocks(spec: DeviceSpec) -> DeviceSpec:
    """Fill a clock that the driver hides after the most similar card: a product must not fail for want of one."""
    if spec.clock_ghz > 0 and spec.dram_gbps > 0:
        return spec
    cards = (known for known in CATALOGUE.values() if known.runs_kernels)
    near = min(cards, key=lambda known: (abs(known.cc[0] - spec.cc[0]), abs(known.sms - spec.sms)))
    guessed = {}
    if not spec.clock_ghz > 0:
        guessed["clock_ghz"] = near.clock_ghz
    if not spec.dram_gbps > 0:
        guessed["dram_gbps"] = near.dram_gbps / near.sms * spec.sms
    return replace(spec, **guessed, unsure=(*spec.unsure, *guessed))  # type: ignore[arg-type]


def _with_computed_rates(spec: DeviceSpec, known: DeviceSpec | None) -> DeviceSpec:
    """Fill the tensor rates of a live card from its own SMs and clock, and its instruction set."""
    full = spec.sms * _limits_of_any(spec.cc).tensor_fma * 2 * spec.clock_ghz * 1e-3
    # Nothing but the product line tells that fp32 accumulation is halved; a catalogue match knows it without the name.
    if known is not None:
        halved = known.tensor_fma_per_clock_per_sm < 0.75 * limits_of(known.cc).tensor_fma
    else:
        halved = spec.cc >= (8, 6) and "geforce" in spec.title.lower()
    fp16 = full / 2 if halved else full
    return replace(
        spec,
        fp16_tflops=fp16,
        int8_tops=2 * full,
        fp8_tflops=2 * fp16 if spec.cc >= (8, 9) else None,
        fp4_tflops=4 * full if spec.cc >= (10, 0) else None,
    )
