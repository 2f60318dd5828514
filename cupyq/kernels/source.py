"""Generated source: one self-contained translation unit for a config and a problem, and its hash.

Headers of `kernels_cu` are inlined, so whatever caches by source sees every byte that matters.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources

from .config import Config
from .problem import Problem

_INCLUDE = re.compile(r'^#include "([^"]+)"\s*$')


@cache
def template(name: str) -> str:
    """Return the text of `kernels_cu/<name>` with its includes inlined, each once."""
    return _inline(name, set())


def _inline(name: str, seen: set[str]) -> str:
    text = resources.files("cupyq.kernels_cu").joinpath(name).read_text(encoding="utf-8")
    lines = []
    for line in text.splitlines():
        found = _INCLUDE.match(line)
        if found is None:
            if line.strip() != "#pragma once":
                lines.append(line)
        elif found[1] not in seen:
            seen.add(found[1])
            lines.append(_inline(found[1], seen))
    return "\n".join(lines)


def source(cfg: Config, prob: Problem) -> str:
    """Return the CUDA C++ source of `cfg` for `prob`: the same text for NVRTC here and for CuPy on a GPU."""
    return template(cfg.template) + "\n" + cfg.instance(prob)


def source_hash(cfg: Config, prob: Problem) -> str:
    """Return 16 hex digits that change with any byte of the generated source."""
    return hashlib.sha256(source(cfg, prob).encode()).hexdigest()[:16]
