"""The same source on a GPU: `cupy.RawModule`, loaded for the device that is current."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cupyq.errors import CompileError
from cupyq.kernels import Config, Problem, source

DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory a block may have without asking."""


def load(cfg: Config, prob: Problem) -> Any:
    """Return the `cupy.RawKernel` of `cfg` for `prob`, ready to launch on the current device.

    CuPy compiles the source for the current device, keeps the result on disk, and loads it in each device's context;
    the limit on dynamic shared memory is an attribute of the function on one device, so kernels are kept per device.

    Raises
    ------
    CompileError
        CuPy's NVRTC refused the source.
    """
    import cupy

    device = int(cupy.cuda.runtime.getDevice())
    return _load(device, source(cfg, prob), cfg.entry(prob), cfg.launch(prob.with_m(max(1, prob.m))).shared_bytes)


@functools.lru_cache(maxsize=4096)
def _load(device: int, text: str, entry: str, shared_bytes: int) -> Any:
    del device  # part of the key: see `load`
    import cupy

    try:
        newest = max(cupy.cuda.nvrtc.getSupportedArchs())
        if int(cupy.cuda.Device().compute_capability) > newest:
            kernel = _from_ptx(text, entry, newest)
        else:
            # CuPy adds -arch for the current device and -ftz=true.
            kernel = cupy.RawModule(code=text, options=("-std=c++17",)).get_function(entry)
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(f"CuPy's NVRTC refused {entry}: {error}") from error
    if shared_bytes > DEFAULT_SHARED:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def _from_ptx(text: str, entry: str, newest: int) -> Any:
    """Load a kernel on a GPU that is newer than NVRTC, as PTX of the newest architecture it knows.

    The driver compiles PTX for newer GPUs. CuPy would make machine code of that architecture, which runs only there.
    """
    import tempfile

    import cupy

    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(text, f"{entry}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch=compute_{newest}", "-std=c++17", "-ftz=true"))
        ptx = nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"CuPy's NVRTC refused {entry}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    with tempfile.TemporaryDirectory(prefix="cupyq-") as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_bytes(ptx)
        return cupy.RawModule(path=str(path)).get_function(entry)
