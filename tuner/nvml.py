"""Clock, power, temperature and throttling of a GPU, from the driver's own NVML library; nothing where it is absent."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

# Reasons that make a sample useless: hardware slowdown, thermal limits, power brake. A power cap is not among them: a
# card that runs at its cap runs so in production.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80

_CLOCK_SM = 1
_TEMPERATURE_GPU = 0


@dataclass(frozen=True)
class State:
    """What NVML says at one moment; None where it does not answer."""

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: bool = False


class Monitor:
    """Reads one GPU.

    Parameters
    ----------
    bus_id : str or None
        PCI bus id ("0000:01:00.0"), by which CUDA and NVML mean the same card whatever their numbering.
    """

    def __init__(self, bus_id: str | None) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        if bus_id is None:
            return
        try:
            library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
            if library.nvmlInit_v2() != 0:
                return
            if library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(self._handle)) == 0:
                self._library = library
        except (OSError, AttributeError):  # no driver, or one too old
            return

    def read(self) -> State:
        """Return the GPU's state now."""
        if self._library is None:
            return State()
        clock = self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint, _CLOCK_SM)
        power = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        warmth = self._ask("nvmlDeviceGetTemperature", ctypes.c_uint, _TEMPERATURE_GPU)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        return State(
            None if clock is None else float(clock),
            None if power is None else power / 1e3,
            None if warmth is None else float(warmth),
            bool((reasons or 0) & THROTTLED),
        )

    def _ask(self, name: str, kind: Any, *arguments: int) -> int | None:
        try:
            value = kind(0)
            status = getattr(self._library, name)(self._handle, *map(ctypes.c_int, arguments), ctypes.byref(value))
        except AttributeError:
            return None
        return int(value.value) if status == 0 else None
