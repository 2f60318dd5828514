"""A config and a problem, compiled: PTX, cubin, and what ptxas says of registers, spills and shared memory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from cupyq.errors import CompileError, IllegalConfig
from cupyq.kernels import Config, Problem, check, source

from . import cache, nvrtc


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel, compiled for one arch.

    Attributes
    ----------
    source : str
        The CUDA C++ translation unit.
    ptx : str
    cubin : bytes
    entry : str
        Name of the `extern "C"` entry function.
    arch : str
        "sm_80", ...
    registers : int
        Of a thread.
    spill_bytes : int
        Local memory that ptxas spills to, stores and loads together, of a thread.
    shared_bytes : int
        Static shared memory of a block; a launch adds its dynamic part (`kernels.call`).
    nvrtc_version : str
    """

    source: str
    ptx: str
    cubin: bytes
    entry: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    nvrtc_version: str

    def __repr__(self) -> str:
        return (
            f"CompiledKernel({self.entry!r}, arch={self.arch!r}, registers={self.registers}, "
            f"spill_bytes={self.spill_bytes}, shared_bytes={self.shared_bytes})"
        )


def compile_kernel(cfg: Config, prob: Problem, arch: str = "sm_80") -> CompiledKernel:
    """Compile `cfg` for `prob` with NVRTC; needs no GPU.

    Results are kept in memory and, across processes, in a folder (`compiler.cache`).

    Parameters
    ----------
    cfg : Config
    prob : Problem
        M does not matter: it is an argument of the kernel.
    arch : str
        Real architecture to compile for: "sm_80", "sm_90a", ...

    Raises
    ------
    IllegalConfig
        `kernels.check` has a reason against it on this arch; the message is that reason.
    CompileError
        NVRTC refused the source or does not know the arch.
    NotInstalled
        NVRTC is missing.
    """
    nvrtc.check_arch(arch)
    reason = check(cfg, prob, arch)
    if reason is not None:
        raise IllegalConfig(f"{cfg} cannot be compiled for {arch}: {reason}")
    return _compile(source(cfg, prob), cfg.entry(prob), arch)


@functools.lru_cache(maxsize=512)
def _compile(text: str, entry: str, arch: str) -> CompiledKernel:
    name = cache.key(text, arch, " ".join(nvrtc.OPTIONS), nvrtc.version())
    stored = cache.read(name)
    if stored is None:
        made = nvrtc.compile_source(text, f"{entry}.cu", arch)
        facts = {"registers": 0, "spill_bytes": 0, "shared_bytes": 0, **_resources(made.log, entry)}
        ptx = made.ptx.encode()
        cache.write(name, {**facts, "ptx_bytes": len(ptx)}, ptx + made.cubin)
        return CompiledKernel(text, made.ptx, made.cubin, entry, arch, nvrtc_version=nvrtc.version(), **facts)
    facts, payload = stored
    size = facts.pop("ptx_bytes")
    ptx_text = payload[:size].decode()
    return CompiledKernel(text, ptx_text, payload[size:], entry, arch, nvrtc_version=nvrtc.version(), **facts)


def _resources(log: str, entry: str) -> dict[str, int]:
    """Read what ptxas -v prints of `entry`."""
    part = log[log.find(f"entry function '{entry}'") :]
    used = re.search(r"Used (\d+) registers", part)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
    if used is None or spills is None:
        raise CompileError(f"ptxas did not state the registers of {entry}; it said:\n{log}")
    shared = re.search(r"(\d+) bytes smem", part[: part.find("\n", used.end())])
    return {
        "registers": int(used[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "shared_bytes": int(shared[1]) if shared else 0,
    }
