"""CUDA C++ to PTX and cubin with NVRTC, on any machine: no GPU, no driver, no nvcc, no header.

The binding is cuda-bindings, NVIDIA's public one. (CuPy's is private, and its cubin lacks the last byte.)
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from cupyq.errors import CompileError, NotInstalled

OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space")
"""Options of every compilation. CuPy adds the last two by itself, so that both ways give the same PTX; without the last
NVRTC 12 takes a generic lambda for a host function."""

_INSTALL = "pip install 'cupyq[offline]' (beside CuPy for CUDA 12: 'cupyq[offline12]')"


@dataclass(frozen=True)
class Compiled:
    """What NVRTC and ptxas made of one translation unit.

    Attributes
    ----------
    ptx : str
    cubin : bytes
    log : str
        Messages of NVRTC and ptxas.
    """

    ptx: str
    cubin: bytes
    log: str


@functools.cache
def binding() -> Any:
    """Return the `cuda.bindings.nvrtc` module, or raise `NotInstalled` saying what to install."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError:
        raise NotInstalled(f"cuda-bindings is not installed: {_INSTALL}") from None
    except RuntimeError as error:  # the binding is there, the library is not
        raise NotInstalled(f"the NVRTC library was not found ({error}): {_INSTALL}") from None
    return nvrtc


@functools.cache
def version() -> str:
    """Return NVRTC's version, "13.5"."""
    _, major, minor = binding().nvrtcVersion()
    return f"{major}.{minor}"


@functools.cache
def archs() -> tuple[int, ...]:
    """Return the compute capabilities this NVRTC compiles for, as integers: 75, 80, ..., 121."""
    _, found = binding().nvrtcGetSupportedArchs()
    return tuple(found)


def check_arch(arch: str) -> str:
    """Return `arch` if this NVRTC knows it; else raise `CompileError` with those it knows."""
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None or int(number[1]) not in archs():
        known = ", ".join(f"sm_{a}" for a in archs())
        raise CompileError(f"arch={arch!r} is not known to NVRTC {version()}; it compiles for {known}")
    return arch


def compile_source(source: str, name: str, arch: str) -> Compiled:
    """Compile one self-contained translation unit.

    Parameters
    ----------
    source : str
        CUDA C++.
    name : str
        File name used in messages.
    arch : str
        "sm_80", "sm_90a", ...

    Raises
    ------
    CompileError
        NVRTC or ptxas refused the source; the message ends with what they said.
    NotInstalled
        NVRTC is missing.
    """
    nvrtc = binding()
    check_arch(arch)
    options = [option.encode() for option in (f"-arch={arch}", *OPTIONS, "--ptxas-options=-v")]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC {version()} refused {name} for {arch} ({status.name}):\n{log}")
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(ptx, cubin, log)


def _bytes(size_of: Any, fill: Any, program: Any) -> bytes:
    _, size = size_of(program)
    buffer = bytes(size)  # filled in place by the binding
    fill(program, buffer)
    return buffer


def _text(size_of: Any, fill: Any, program: Any) -> str:
    return _bytes(size_of, fill, program).rstrip(b"\0").decode(errors="replace").strip() + "\n"
