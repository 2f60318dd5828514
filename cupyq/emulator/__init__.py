"""A PTX emulator in NumPy: runs what NVRTC makes for a GPU on a machine that has none, and watches it.

``launch`` runs one kernel and raises :class:`EmulatorFault` at the first access out of bounds, uninitialized read, data
race or broken barrier; otherwise its result carries counters of instructions, memory sectors and bank conflicts.
"""

from __future__ import annotations

from .faults import EmulatorFault, UnsupportedPTX

__all__ = ["Counters", "EmulatorFault", "Result", "TensorMap", "UnsupportedPTX", "launch", "load"]

_loaded = False


def load_all() -> None:
    """Import every module that registers instructions."""
    global _loaded
    if _loaded:
        return
    from . import (  # noqa: F401
        ops_async,
        ops_atomic,
        ops_bits,
        ops_cluster,
        ops_control,
        ops_convert,
        ops_integer,
        ops_matrix,
        ops_mbarrier,
        ops_memory,
        ops_mma,
        ops_move,
        ops_tensor,
        ops_warp,
        ops_wgmma,
    )

    _loaded = True


from .counters import Counters  # noqa: E402
from .launch import Result, launch, load  # noqa: E402
from .tensormap import TensorMap  # noqa: E402
