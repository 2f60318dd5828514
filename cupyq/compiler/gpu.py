"""The same source on a GPU: `cupy.RawModule`, loaded for the device that is current."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

from cupyq.errors import CompileError
from cupyq.kernels import Config, Problem, source

from .nvrtc import OPTIONS

DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory a block may have without asking."""

_UNFIT = ("UNSUPPORTED_PTX_VERSION", "NO_BINARY_FOR_GPU", "INVALID_PTX", "INVALID_IMAGE", "INVALID_SOURCE")
"""What the driver says of a module that is not for it or its GPU. CuPy's own RuntimeError says: no CUDA headers."""

_lock = threading.Lock()


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
        arch = int(cupy.cuda.Device().compute_capability)
        known = cupy.cuda.nvrtc.getSupportedArchs()
        older = [one for one in known if one <= arch]
        if arch not in known and older:
            kernel = _from_ptx(text, entry, max(older))
        else:
            # CuPy adds -arch for the current device and -ftz=true.
            kernel = cupy.RawModule(code=text, options=("-std=c++17",)).get_function(entry)
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(f"CuPy's NVRTC refused {entry}: {error}") from error
    except RuntimeError as error:
        if type(error) is not RuntimeError and not any(name in str(error) for name in _UNFIT):
            raise  # of the device, not of this kernel
        raise CompileError(
            f"CuPy cannot compile or load {entry}: {error}; `python -m cupyq doctor` says more"
        ) from error
    if shared_bytes > DEFAULT_SHARED:
        # CuPy gives one function for one source, and other problems may share it: the limit may only rise.
        with _lock:
            kernel.max_dynamic_shared_size_bytes = max(shared_bytes, kernel.max_dynamic_shared_size_bytes)
    return kernel


def _from_ptx(text: str, entry: str, newest: int) -> Any:
    """Load a kernel on a GPU that NVRTC does not know, as PTX of the newest architecture before it.

    The driver compiles PTX for newer GPUs. CuPy would make machine code of that architecture, which runs only there.
    """
    import tempfile

    import cupy

    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(text, f"{entry}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch=compute_{newest}", *OPTIONS))
        ptx = nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"CuPy's NVRTC refused {entry}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    with tempfile.TemporaryDirectory(prefix="cupyq-") as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_bytes(ptx)
        return cupy.RawModule(path=str(path)).get_function(entry)
