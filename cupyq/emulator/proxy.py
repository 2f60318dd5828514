"""The check that ordinary shared stores are fenced before the async proxy (TMA, wgmma) reads them.

A shared byte written by an ordinary store is dirty until the thread's warp executes ``fence.proxy.async``.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def fenced(m: Any, g: Any, active: np.ndarray | None) -> None:
    """The group's warps executed ``fence.proxy.async``: what they know of is visible to the async proxy."""
    if m.wgmma is not None:
        m.wgmma.proxy_fence(g, active)
