"""What this process runs: the facts that a stored time depends on, and that make an old row `stale`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cupyq.errors import CupyqError

SourceHash = Callable[[Mapping[str, Any], Mapping[str, Any]], "str | None"]


@dataclass(frozen=True)
class Environment:
    """The versions that a stored time depends on; None where a fact is not known here.

    Parameters
    ----------
    driver_version : str, optional
        Of the CUDA driver, such as "13.0"; only the part before the first dot decides staleness.
    nvrtc_version : str, optional
        Major and minor, such as "13.0".
    library : str, optional
        Digest of every kernel template and of the code that fills them in.
    source_hash : callable, optional
        `(config, problem) -> str or None`: the hash of the source that this library generates for a stored config
        (a dict with "family") and problem (a dict of its fields); None when it no longer can.
    cupy_version, cupyq_version : str, optional
        Recorded beside each trial; they make nothing stale.
    """

    driver_version: str | None = None
    nvrtc_version: str | None = None
    library: str | None = None
    source_hash: SourceHash | None = field(default=None, repr=False, compare=False)
    cupy_version: str | None = None
    cupyq_version: str | None = None

    @classmethod
    def here(cls) -> Environment:
        """Return the facts of this process; each read once, with no CUDA context and without importing CuPy."""
        return _here()

    def parameters(self, sources: str) -> dict[str, str | None]:
        """Return the parameters of `views.judged`; `sources` is a JSON list of the hashes that are current."""
        return {
            "driver_version": self.driver_version,
            "nvrtc_version": self.nvrtc_version,
            "library": self.library if self.source_hash else None,
            "sources": sources,
        }


@functools.lru_cache(maxsize=1)
def _here() -> Environment:
    return _Here()


class _Here(Environment):
    """The facts of this process, each found out when it is first asked for: some take longer than a user's product."""

    def __init__(self) -> None:
        """Know nothing yet. (The fields' own values would hide the properties.)"""
        object.__setattr__(self, "source_hash", _source_hash)

    driver_version = functools.cached_property(lambda self: _driver_version())
    nvrtc_version = functools.cached_property(lambda self: _nvrtc_version())
    library = functools.cached_property(lambda self: _library_digest())
    cupy_version = functools.cached_property(lambda self: _version_of("cupy", "cupy-cuda13x", "cupy-cuda12x"))
    cupyq_version = functools.cached_property(lambda self: _version_of("cupyq"))


def _version_of(*names: str) -> str | None:
    import importlib.metadata

    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver_version() -> str | None:
    """Return the CUDA version of the driver, asked of the driver itself: this needs no context and no CuPy."""
    import ctypes

    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        value = ctypes.c_int(0)
        if driver.cuDriverGetVersion(ctypes.byref(value)) != 0 or value.value == 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def _nvrtc_version() -> str | None:
    """Return the version of the NVRTC that compiles here: CuPy's where CuPy is in use, else cuda-bindings'."""
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        try:
            return major_minor(cupy.cuda.nvrtc.getVersion())
        except (AttributeError, ImportError, OSError, RuntimeError):
            pass  # CuPy is there, its NVRTC is not
    try:
        from cupyq import compiler

        return major_minor(compiler.version())
    except (CupyqError, ImportError, AttributeError, OSError):
        return None


def major_minor(version: Any) -> str | None:
    """Return "13.0" for "13.0.88", (13, 0) and "13.0"."""
    if version is None:
        return None
    parts = version.split(".") if isinstance(version, str) else list(version)
    return ".".join(str(part) for part in parts[:2])


def _library_digest() -> str | None:
    import hashlib
    from importlib import resources

    digest = hashlib.sha256()
    try:
        for package, endings in (("cupyq.kernels_cu", (".cu", ".cuh")), ("cupyq.kernels", (".py",))):
            entries = sorted(resources.files(package).iterdir(), key=lambda entry: entry.name)
            for entry in entries:
                if entry.name.endswith(endings):
                    content = entry.read_bytes()
                    digest.update(f"{package}/{entry.name} {len(content)}\n".encode())
                    digest.update(content)
    except (ImportError, OSError):
        return None
    return digest.hexdigest()[:32]


def _source_hash(config: Mapping[str, Any], problem: Mapping[str, Any]) -> str | None:
    try:
        from cupyq import kernels

        return kernels.source_hash(kernels.from_dict(dict(config)), kernels.Problem(**problem))
    except (CupyqError, ImportError, AttributeError, LookupError, TypeError, ValueError):
        # A config of another version that this one cannot read is not current; that is all there is to say of it.
        return None
