"""What ptxas made of a kernel: the machine instructions of its main loop, read with the nvdisasm wheel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path

from cupyq.errors import NotInstalled

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*);")
_TENSOR = ("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA")


@cache
def nvdisasm() -> Path:
    """Return the path of nvdisasm.

    Raises
    ------
    NotInstalled
        The wheel is missing.
    """
    spec = util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in sorted(Path(folder).glob("*/bin/nvdisasm*")):
            return found
    raise NotInstalled("reading SASS needs nvdisasm: pip install nvidia-cuda-nvdisasm")


@dataclass(frozen=True)
class Loop:
    """The loop that holds the most tensor-core instructions, one turn of it.

    Attributes
    ----------
    instructions : int
        Warp instructions, branches that leave aside code out included as if it ran.
    tensor : int
        Tensor-core instructions among them.
    by_opcode : dict of str to int
        Count of each opcode without its modifiers.
    """

    instructions: int
    tensor: int
    by_opcode: dict[str, int]

    @property
    def overhead(self) -> float:
        """Instructions beside each tensor-core instruction."""
        return (self.instructions - self.tensor) / max(self.tensor, 1)


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def main_loop(cubin: bytes) -> Loop:
    """Return the innermost loop with the most tensor-core instructions."""
    code: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in disassemble(cubin).splitlines():
        label = _LABEL.match(line)
        if label is not None:
            labels[label[1]] = len(code)
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        target = re.search(r"`\((\.L_x_\d+)\)", found[2])
        if found[1].startswith("BRA") and target is not None:
            branches.append((len(code), target[1]))
        code.append(found[1].split(".")[0])
    spans = [(labels.get(back_to, at + 1), at) for at, back_to in branches]
    spans = [(first, at) for first, at in spans if any(op in _TENSOR for op in code[first : at + 1])]
    best = Loop(0, 0, {})
    for first, at in spans:
        if any(first <= f and a <= at and (f, a) != (first, at) for f, a in spans):
            continue  # a loop around loops, or code set aside that jumps back over one
        body = code[first : at + 1]
        tensor = sum(op in _TENSOR for op in body)
        if (tensor, -len(body)) > (best.tensor, -best.instructions or 0):
            best = Loop(len(body), tensor, dict(Counter(body)))
    return best
