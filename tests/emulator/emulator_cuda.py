"""Small CUDA kernels compiled to PTX with NVRTC, no headers, no GPU."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

from functools import lru_cache

import pytest


@lru_cache(maxsize=256)
def cuda_to_ptx(source: str, arch: str = "sm_80", *options: str) -> str:
    """PTX of a CUDA C++ source that includes nothing."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings (NVRTC) is not installed")

    def ok(result):
        error, *rest = result
        assert int(error) == 0, error
        return rest[0] if rest else None

    program = ok(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    flags = [f"-arch={arch}".encode(), *(o.encode() for o in options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(status):
        log = b" " * ok(nvrtc.nvrtcGetProgramLogSize(program))
        ok(nvrtc.nvrtcGetProgramLog(program, log))
        raise AssertionError(log.decode())
    text = b" " * ok(nvrtc.nvrtcGetPTXSize(program))
    ok(nvrtc.nvrtcGetPTX(program, text))
    return text.decode().rstrip("\0")


def line_of(ptx: str, *needles: str, last: bool = False) -> set[int]:
    """Numbers of the PTX lines that hold all the words."""
    found = [i + 1 for i, line in enumerate(ptx.split("\n")) if all(n in line for n in needles)]
    assert found, needles
    return set(found)


PTX_HEAD = ".version 8.7\n.target {arch}\n.address_size 64\n"


def ptx_kernel(body: str, registers: str = "", arch: str = "sm_90a", params: int = 2, shared: str = "") -> str:
    """A kernel `k` written in PTX with pointer parameters p0, p1, ..."""
    head = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %q{i}, [p{i}];" for i in range(params))
    return (
        PTX_HEAD.format(arch=arch)
        + f".visible .entry k({head})\n{{\n.reg .pred %p<64>;\n.reg .b16 %h<64>;\n.reg .b32 %r<256>;\n.reg .b64 %rd<64>;\n.reg .b64 %q<8>;\n"
        + registers + "\n" + shared + "\n" + loads + "\n" + body + "\nret;\n}\n"
    )  # fmt: skip
