"""A stand-in for CuPy on machines without a GPU: arrays that know their device, and launches that run in the emulator.

It is stricter than the original. Arrays of another device than the current one, NumPy arrays among CuPy's, a launch
whose arguments do not match the kernel's parameters, an untyped scalar, more dynamic shared memory than the function
was allowed on this device: all of them raise `Misuse` here, where a GPU would read what happens to lie there.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupyq import devices, emulator
from cupyq.compiler import nvrtc
from cupyq.compiler.kernel import _compile

DEFAULT_SHARED = 48 * 1024
PARAM_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}


class Misuse(AssertionError):
    """Something that CuPy would let through, and that a GPU would answer with garbage or a fault."""


@dataclass
class Launched:
    """One kernel launch, as it was asked for."""

    entry: str
    device: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    args: tuple[Any, ...]


class _Pointer:
    def __init__(self, base: np.ndarray, device_id: int) -> None:
        self.base, self.device_id = base, device_id

    @property
    def ptr(self) -> int:
        return self.base.__array_interface__["data"][0]


def _aligned(shape: Any, dtype: Any) -> np.ndarray:
    """Return memory that starts at a multiple of 512, as CuPy's pool gives it."""
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 512, np.uint8)
    start = -raw.__array_interface__["data"][0] % 512
    return raw[start : start + size].view(dtype).reshape(shape)


class FakeCuPy(types.ModuleType):
    """The module. `launches` lists every launch; `allocations` counts arrays made."""

    def __init__(self, cards: tuple[str, ...] = ("a100-sxm",), run: bool = True) -> None:
        super().__init__("cupy")
        self.cards = [devices.get(name) for name in cards]
        self.run = run
        self.launches: list[Launched] = []
        self.allocations = 0
        self.compiled: list[str] = []
        self.shared_limits: dict[tuple[Any, ...], int] = {}  # of functions: device, source, entry
        self._current = 0
        self._streams = dict.fromkeys(range(len(cards)), 0)
        self._next_stream = 4096
        fake = self
        self.ndarray = type("ndarray", (_Array,), {"_cupy": self, "__module__": "cupy"})
        self.RawModule = type("RawModule", (_RawModule,), {"_cupy": self})
        self.cuda = types.SimpleNamespace(
            Device=type("Device", (_Device,), {"_cupy": self}),
            Stream=type("Stream", (_Stream,), {"_cupy": self}),
            get_current_stream=lambda: fake.cuda.Stream.of(fake._streams[fake._current]),
            runtime=types.SimpleNamespace(
                getDevice=lambda: fake._current,
                getDeviceCount=lambda: len(fake.cards),
                getDeviceProperties=lambda i: {
                    "name": fake.cards[i].title.encode(),
                    "totalGlobalMem": fake.cards[i].memory_bytes,
                    "major": fake.cards[i].cc[0],
                    "minor": fake.cards[i].cc[1],
                },
                CUDARuntimeError=RuntimeError,
            ),
            nvrtc=_Nvrtc(),
            compiler=types.SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
        )

    # Arrays ----------------------------------------------------------------------------------------------------------

    def wrap(self, array: np.ndarray, device: int | None = None) -> Any:
        """Return a host array as one of the current (or another) device, without copying."""
        made = object.__new__(self.ndarray)
        made._a, made._device = array, self._current if device is None else device
        return made

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, _Array):
            if value._device != self._current:
                raise Misuse(f"an array of device {value._device} is used while device {self._current} is current")
            return value._a
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError(f"Unsupported type {type(value)}")
        if isinstance(value, (tuple, list)):
            return type(value)(self.unwrap(v) for v in value)
        return value

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        with np.errstate(all="ignore"):
            result = function(
                *(self.unwrap(a) for a in args),
                **{k: self.unwrap(v) if k in ("out", "where") else v for k, v in kwargs.items()},
            )
        if out is not None:
            return out[0] if isinstance(out, tuple) else out
        if isinstance(result, (np.ndarray, np.generic)):
            self.allocations += 1
            return self.wrap(np.asarray(result))
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(np, name)
        if not callable(function) or isinstance(function, type):
            return function
        return lambda *args, **kwargs: self.call(function, args, kwargs)

    def matmul(self, *args: Any, **kwargs: Any) -> Any:
        stream = self._streams[self._current]
        if stream > 1 and stream in _Stream.capturing:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        return self.call(np.matmul, args, kwargs)

    def empty(self, shape: Any, dtype: Any = float) -> Any:
        self.allocations += 1
        made = _aligned(shape, dtype)
        made.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN, or a wild integer: nothing may rely on it
        return self.wrap(made)

    def zeros(self, shape: Any, dtype: Any = float) -> Any:
        made = self.empty(shape, dtype)
        made._a[...] = 0
        return made

    def full(self, shape: Any, value: Any, dtype: Any = float) -> Any:
        made = self.empty(shape, dtype)
        made._a[...] = value
        return made

    def empty_like(self, other: Any) -> Any:
        return self.empty(other.shape, other.dtype)

    def array(self, value: Any, dtype: Any = None, copy: bool = True, order: str = "C") -> Any:
        if isinstance(value, _Array):
            value = value._a
        value = np.asarray(value, dtype)
        made = self.empty(value.shape, value.dtype)
        made._a[...] = value
        return made

    def asarray(self, value: Any, dtype: Any = None) -> Any:
        if isinstance(value, _Array) and (dtype is None or value.dtype == dtype):
            return value
        return self.array(value, dtype)

    def ascontiguousarray(self, value: Any, dtype: Any = None) -> Any:
        same = isinstance(value, _Array) and value.flags.c_contiguous and (dtype is None or value.dtype == dtype)
        return value if same else self.array(value, dtype)

    def may_share_memory(self, a: Any, b: Any) -> bool:
        return np.may_share_memory(a._a, b._a)


class _Array(np.lib.mixins.NDArrayOperatorsMixin):
    _cupy: FakeCuPy

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None) -> Any:
        made = object.__new__(cls)
        base = np.frombuffer(memptr.base, np.uint8)
        dtype = np.dtype(dtype)
        strides = np.cumprod((dtype.itemsize, *shape[:0:-1]))[::-1]
        # As in CuPy, nobody checks that the memory is large enough.
        head = base[: dtype.itemsize].view(dtype)
        made._a = np.lib.stride_tricks.as_strided(head, shape, tuple(int(s) for s in strides))
        made._device = memptr.device_id
        return made

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    flags = property(lambda self: self._a.flags)
    T = property(lambda self: self._view(self._a.T))
    device = property(lambda self: self._cupy.cuda.Device(self._device))
    data = property(lambda self: _Pointer(self._a, self._device))

    @property
    def base(self) -> Any:
        """The array that owns this view's memory, or None."""
        return self.__dict__.get("_base")

    def _view(self, array: np.ndarray) -> Any:
        made = self._cupy.wrap(array, self._device)
        if np.may_share_memory(array, self._a):
            made._base = self if self.base is None else self.base
        return made

    def get(self) -> np.ndarray:
        return self._a.copy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._cupy.call(getattr(ufunc, method), inputs, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._view(self._a[self._cupy.unwrap(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._a[self._cupy.unwrap(key)] = self._cupy.unwrap(value)

    def __len__(self) -> int:
        return len(self._a)

    def __bool__(self) -> bool:
        return bool(self._a)

    def __int__(self) -> int:
        return int(self._a)

    def __float__(self) -> float:
        return float(self._a)

    def copy(self, order: str = "C") -> Any:
        return self._cupy.array(self)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        if not copy and self.dtype == dtype:
            return self
        with np.errstate(all="ignore"):
            return self._cupy.array(self._a.astype(dtype))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._a, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*(self._cupy.unwrap(a) for a in args), **kwargs)
            return self._view(np.asarray(result)) if isinstance(result, (np.ndarray, np.generic)) else result

        return call


class _Device:
    _cupy: FakeCuPy

    def __init__(self, device: int | None = None) -> None:
        self.id = self._cupy._current if device is None else int(device)

    def __enter__(self) -> Any:
        self._before, self._cupy._current = self._cupy._current, self.id
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy._current = self._before

    @property
    def compute_capability(self) -> str:
        return "{}{}".format(*self._cupy.cards[self.id].cc)

    @property
    def attributes(self) -> dict[str, int]:
        card = self._cupy.cards[self.id]
        return {
            "MultiProcessorCount": card.sms,
            "ClockRate": round(card.clock_ghz * 1e6),
            "MemoryClockRate": round(card.dram_gbps * 1e9 * 8 / 5120 / 2 / 1e3),
            "GlobalMemoryBusWidth": 5120,
            "L2CacheSize": card.l2_bytes,
            "MaxSharedMemoryPerMultiprocessor": card.shared_per_sm,
            "MaxSharedMemoryPerBlockOptin": card.shared_per_block,
            "MaxThreadsPerMultiProcessor": card.threads_per_sm,
            "MaxBlocksPerMultiprocessor": card.blocks_per_sm,
            "MaxRegistersPerMultiprocessor": 65536,
        }


class _Graph:
    """The kernel launches of one capture; none of them ran. CuPy's own operations are not captured here."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], None]] = []

    def launch(self) -> None:
        for node in self.nodes:
            node()


class _Stream:
    _cupy: FakeCuPy
    capturing: dict[int, _Graph] = {}  # noqa: RUF012 (shared on purpose: streams are found by their handle)

    def __init__(self, non_blocking: bool = False) -> None:
        self._cupy._next_stream += 16
        self.ptr = self._cupy._next_stream

    @classmethod
    def of(cls, ptr: int) -> Any:
        stream = object.__new__(cls)
        stream.ptr = ptr
        return stream

    def synchronize(self) -> None:
        if self.ptr > 1 and self.is_capturing():
            raise Misuse("a stream is synchronized while it is captured")

    def is_capturing(self) -> bool:
        if self.ptr <= 1:
            raise Misuse("the legacy default stream is asked whether it is captured")
        return self.ptr in self.capturing

    def begin_capture(self) -> None:
        self.capturing[self.ptr] = _Graph()

    def end_capture(self) -> _Graph:
        return self.capturing.pop(self.ptr)

    def __enter__(self) -> Any:
        device = self._cupy._current
        self._before = (device, self._cupy._streams[device])
        self._cupy._streams[device] = self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        device, stream = self._before
        self._cupy._streams[device] = stream


class _Nvrtc:
    """CuPy's binding: enough of it to make PTX of one architecture."""

    NVRTCError = type("NVRTCError", (RuntimeError,), {})

    def __init__(self) -> None:
        self.options: dict[int, tuple[str, ...]] = {}
        self.sources: dict[int, str] = {}

    def getVersion(self) -> tuple[int, int]:
        major, minor = nvrtc.version().split(".")
        return int(major), int(minor)

    def getSupportedArchs(self) -> list[int]:
        return list(nvrtc.archs())

    def createProgram(self, source: str, name: str, headers: Any, names: Any) -> int:
        self.sources[len(self.sources) + 1] = source
        return len(self.sources)

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.options[program] = options

    def getPTX(self, program: int) -> bytes:
        arch, *_ = (option[len("-arch=compute_") :] for option in self.options[program] if "-arch=compute_" in option)
        return nvrtc.compile_source(self.sources[program], "kernel.cu", f"sm_{arch}").ptx.encode()

    def destroyProgram(self, program: int) -> None:
        pass


class _RawModule:
    _cupy: FakeCuPy

    def __init__(self, code: str | None = None, options: tuple[str, ...] = (), path: str | None = None) -> None:
        self.ptx = None if path is None else Path(path).read_text(encoding="utf-8")
        if any(option.startswith("-arch") for option in options):
            raise Misuse("CuPy adds -arch itself")
        self.code, self.device = code, self._cupy._current

    def get_function(self, entry: str) -> Any:
        arch = "sm_{}{}".format(*self._cupy.cards[self.device].cc)
        if self.ptx is not None:
            return _Kernel(self._cupy, types.SimpleNamespace(ptx=self.ptx), entry, self.device)
        if int(arch[3:]) not in self._cupy.cuda.nvrtc.getSupportedArchs():
            raise Misuse(f"CuPy asks NVRTC for {arch}, which it does not know, or makes what {arch} cannot run")
        self._cupy.compiled.append(entry)
        return _Kernel(self._cupy, _compile(self.code, entry, arch), entry, self.device)


@dataclass
class _Kernel:
    """A function of one module, which was loaded on one device. CuPy loads equal sources once, so they share it."""

    cupy: FakeCuPy
    compiled: Any
    entry: str
    device: int
    params: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        head = self.compiled.ptx.partition(f".entry {self.entry}(")[2].partition(")")[0]
        self.params = [PARAM_BYTES[bits] for bits in re.findall(r"\.param \.[a-z](\d+)", head)]
        if not self.params:
            raise Misuse(f"{self.entry} has no parameters")

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.cupy.shared_limits.get((self.device, self.compiled.ptx, self.entry), DEFAULT_SHARED)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, limit: int) -> None:
        self.cupy.shared_limits[self.device, self.compiled.ptx, self.entry] = limit

    def __call__(self, grid: Any, block: Any, args: tuple[Any, ...], *, shared_mem: int = 0) -> None:
        cupy = self.cupy
        if cupy._current != self.device:
            raise Misuse(f"a kernel loaded on device {self.device} is launched while {cupy._current} is current")
        if len(grid) != 3 or min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise Misuse(f"grid {grid}")
        if not 1 <= np.prod(block) <= 1024:
            raise Misuse(f"block {block}")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise Misuse(f"{shared_mem} bytes of shared memory; {self.max_dynamic_shared_size_bytes} were allowed")
        if self.max_dynamic_shared_size_bytes > cupy.cards[self.device].shared_per_block:
            raise Misuse("more shared memory than a block can have")
        if not isinstance(args, tuple) or len(args) != len(self.params):
            raise Misuse(f"{self.entry} takes {len(self.params)} arguments, got {len(args)}")
        plain = []
        for place, (arg, size) in enumerate(zip(args, self.params, strict=True)):
            if isinstance(arg, _Array):
                given = 8
                if arg._device != self.device:
                    raise Misuse(f"argument {place} lives on device {arg._device}, the launch is on {self.device}")
                plain.append(arg._a)
            elif isinstance(arg, np.generic):
                given = arg.itemsize
                plain.append(arg)
            else:
                raise Misuse(f"argument {place} is a {type(arg).__name__}: neither a CuPy array nor a typed scalar")
            if given != size:
                raise Misuse(f"argument {place} has {given} bytes, the parameter {size}")
        cupy.launches.append(
            Launched(
                self.entry, self.device, cupy._streams[self.device], tuple(grid), tuple(block), shared_mem, tuple(args)
            )
        )
        if not cupy.run:
            return
        run = functools.partial(emulator.launch, self.compiled.ptx, self.entry, grid, block, tuple(plain), shared_mem)
        graph = _Stream.capturing.get(cupy._streams[self.device])
        if graph is None:
            run()
        else:
            graph.nodes.append(run)
