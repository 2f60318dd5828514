"""A stand-in for CuPy that takes launches and does nothing, so that what is left of a product is cupyq's own time.

It imports nothing of cupyq before cupyq is asked about the card, so that first calls cost here what they cost a user.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import types
from typing import Any

import numpy as np

CARD = "h100-sxm"

OF_CUPY = (
    "hashlib", "importlib.metadata", "importlib.resources", "random", "shutil", "tempfile", "threading", "zipfile",
)  # fmt: skip
"""What CuPy 14 has imported of the standard library by the time a user has an array: no product pays for it."""


class LightArray:
    """What of a CuPy array dispatch looks at, as plain attributes: CuPy's are about as fast to read."""

    __slots__ = ("data", "device", "dtype", "flags", "nbytes", "ndim", "shape", "size")

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
        self.shape = shape if isinstance(shape, tuple) else (int(shape),)
        self.dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)
        self.ndim, self.flags, self.device = len(self.shape), _CONTIGUOUS, _HERE
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data = next(_POINTERS) if memptr is None else memptr

    def reshape(self, *shape: Any) -> LightArray:
        """Return the same memory in another shape."""
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        rest = self.size // max(1, -math.prod(shape)) if -1 in shape else 0
        return LightArray(tuple(rest if n == -1 else n for n in shape), self.dtype, self.data)

    def __getitem__(self, key: slice) -> LightArray:
        return LightArray((min(key.stop, self.size),), self.dtype, self.data)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of C order, in bytes."""
        sizes = [self.dtype.itemsize]
        for n in self.shape[:0:-1]:
            sizes.append(sizes[-1] * n)
        return tuple(sizes[::-1])


class LightKernel:
    """A launch that only takes its arguments."""

    max_dynamic_shared_size_bytes = 0

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        """Take a launch."""


class LightDevice:
    """The one card, with the figures of the catalogue's `CARD`."""

    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0

    def __enter__(self) -> LightDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        """As CuPy writes it: "90"."""
        return "{}{}".format(*_card().cc)

    @property
    def attributes(self) -> dict[str, int]:
        """As CUDA names them."""
        card = _card()
        return {
            "MultiProcessorCount": card.sms,
            "ClockRate": round(card.clock_ghz * 1e6),
            "MemoryClockRate": round(card.dram_gbps * 1e9 * 8 / 5120 / 2 / 1e3),
            "GlobalMemoryBusWidth": 5120,
            "L2CacheSize": card.l2_bytes,
            "MaxSharedMemoryPerMultiprocessor": card.shared_per_sm,
            "MaxSharedMemoryPerBlockOptin": card.shared_per_block,
        }


_CONTIGUOUS = types.SimpleNamespace(c_contiguous=True)
_HERE = types.SimpleNamespace(id=0)
_POINTERS = (types.SimpleNamespace(ptr=512 * i, device_id=0) for i in itertools.count(1))


def _card() -> Any:
    from cupyq import devices

    return devices.get(CARD)


def _as_light(value: Any, *args: Any, **options: Any) -> LightArray:
    return value if isinstance(value, LightArray) else LightArray(value.shape, value.dtype)


def install() -> Any:
    """Put the stand-in where `import cupy` finds it, and return it."""
    for name in OF_CUPY:
        importlib.import_module(name)
    fake: Any = types.ModuleType("cupy")
    fake.ndarray = fake.empty = fake.zeros = LightArray
    fake.array = fake.asarray = fake.ascontiguousarray = _as_light
    fake.matmul = lambda a, b, out: out
    fake.may_share_memory = lambda a, b: a.data is b.data
    fake.RawModule = lambda code, options=(): types.SimpleNamespace(get_function=lambda entry: LightKernel())
    stream = types.SimpleNamespace(ptr=0, synchronize=lambda: None)
    fake.cuda = types.SimpleNamespace(
        Device=LightDevice,
        get_current_stream=lambda: stream,
        runtime=types.SimpleNamespace(
            getDevice=int,  # 0
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda i: {
                "name": _card().title.encode(),
                "totalGlobalMem": _card().memory_bytes,
                "major": _card().cc[0],
                "minor": _card().cc[1],
            },
        ),
        nvrtc=types.SimpleNamespace(getSupportedArchs=lambda: [75, 80, 90, 120], getVersion=lambda: (13, 0)),
        compiler=types.SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
    )
    sys.modules["cupy"] = fake
    return fake
