"""What is installed and usable here, what is not, and the command that mends it: `python -m cupyq doctor`.

No CUDA context is made, and nothing is written but a nameless file in each folder that cupyq and CuPy write to, which
goes away at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupyq import compiler, db, devices
from cupyq.compiler import cache, sass
from cupyq.db import presets
from cupyq.errors import CupyqError, NotInstalled, SchemaTooNew

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
STATES = (OK, NOTE, WARNING, PROBLEM)

OLDEST_CUPY = (14, 0)
"""The first CuPy that multiplies bfloat16 and looks for the CUDA libraries that pip installs."""

BFLOAT16_NUMPY = (2, 1, 2)
"""The first NumPy with which CuPy has bfloat16."""

LIBRARIES = "nvidia-cublas nvidia-cuda-nvrtc nvidia-cuda-runtime"
"""The wheels of the newest CUDA's libraries. CuPy takes them where it also finds older ones, which bear "-cu12"."""


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes
    ----------
    name : str
        What: "driver", "CuPy", ...
    state : str
        "ok"; "note": fine, but good to know; "warning": works, with trouble ahead; "problem": something cannot work.
    said : str
        What was found.
    mend : str or None
        The command that mends it.
    """

    name: str
    state: str
    said: str
    mend: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


def examine() -> list[Check]:
    """Look at everything and return what was found, in the order in which things depend on each other."""
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        _python, _driver, _cupy, _nvrtc, _headers, _cublas, _tools, _cache, _cupy_cache, _database, _gpus,
    )  # fmt: skip
    return [check for part in parts for check in part()]


# --- what the machine says; tests put their own answers here ----------------------------------------------------------


def driver_version() -> str | None:
    """Return the newest CUDA version that the NVIDIA driver runs, "13.0", or None where there is no driver."""
    return db.Environment.here().driver_version


def distributions() -> dict[str, str]:
    """Return name -> version of every installed distribution of CuPy."""
    found = {}
    for each in importlib.metadata.distributions():
        name = (each.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")):
            found[name] = each.version
    return dict(sorted(found.items()))


def import_cupy() -> Any:
    """Return the module `cupy`, or None where it is not installed; any other fault of importing it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns of two variants, which is said here with the command
            import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return None
        raise
    return cupy


def import_cublas() -> None:
    """Load cuBLAS as CuPy does before its first product; whatever fails raises."""
    from cupy_backends.cuda.libs import cublas  # noqa: F401 (the package finds the library when it is asked for this name)


def header_folder() -> str | None:
    """Return the folder of CUDA headers that CuPy compiles with, found as CuPy finds it, or None."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    return find_nvidia_header_directory("cudart")


# --- software ---------------------------------------------------------------------------------------------------------


def _python() -> Iterator[Check]:
    versions = [f"{name} {_version(name)}" for name in ("cupyq", "numpy")]
    yield Check("cupyq", OK, f"{', '.join(versions)}, Python {platform.python_version()} ({sys.executable})")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed as a package)"


def extra() -> str:
    """Return the extra of cupyq that fits the driver: "cuda12" or "cuda13"."""
    found = driver_version()
    return "cuda12" if found is not None and int(found.split(".")[0]) < 13 else "cuda13"


def offline() -> str:
    """Return the extra that brings the NVRTC and the tools that fit the driver: "offline12" or "offline"."""
    return "offline12" if extra() == "cuda12" else "offline"


def _cupy_extra() -> str:
    """Return the extra that the installed CuPy belongs to, so that installing it brings no second one."""
    known = [name for name in distributions() if name in ("cupy-cuda12x", "cupy-cuda13x")]
    return known[0].removeprefix("cupy-").rstrip("x") if len(known) == 1 else extra()


def _instead_of(*names: str) -> str:
    """Return the command that removes packages of CuPy, and CUDA 13's libraries with one of its kind."""
    newer = f" {LIBRARIES}" if extra() == "cuda12" and "cupy-cuda13x" in names else ""
    return f"pip uninstall -y {' '.join(names)}{newer} && pip install 'cupyq[{extra()}]'"


def _driver() -> Iterator[Check]:
    found = driver_version()
    if found is None:
        yield Check(
            "driver",
            NOTE,
            "no NVIDIA driver: kernels are compiled, emulated and predicted here, not run",
            None if sys.platform == "darwin" else "install the driver of your GPU: https://www.nvidia.com/drivers",
        )
    elif int(found.split(".")[0]) < 12:
        yield Check(
            "driver",
            PROBLEM,
            f"the driver runs CUDA {found}; cupyq needs 12.0 or newer",
            "update the driver: https://www.nvidia.com/drivers",
        )
    else:
        yield Check("driver", OK, f"runs CUDA {found} and older")


def _cupy() -> Iterator[Check]:
    found, driver = distributions(), driver_version()
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    install = f"pip install 'cupyq[{extra()}]'"
    if not found:
        if driver is None:
            yield Check("CuPy", NOTE, "not installed; without a GPU it is not needed", install)
        else:
            yield Check("CuPy", PROBLEM, "not installed, so no kernel can run on the GPU", install)
        return
    if len(found) > 1:
        yield Check(
            "CuPy",
            WARNING,
            f"{said}: they overwrite each other's files; one is accepted",
            _instead_of(*found),
        )
    else:
        yield _variant(*next(iter(found.items())), driver)
    yield from _importing(said)
    numpy = _version("numpy")
    if () < _numbers(numpy) < BFLOAT16_NUMPY:
        least = ".".join(map(str, BFLOAT16_NUMPY))
        said = f"{numpy}: CuPy has bfloat16 with NumPy {least} or newer only"
        yield Check("NumPy", WARNING, said, f"pip install -U 'numpy>={least}'")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (14, 2, 0) of "14.2.0", (14, 0) of "14.0.0rc1"."""
    found = re.match(r"\d+(?:\.\d+)*(?!\w)", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _variant(name: str, version: str, driver: str | None) -> Check:
    """Judge one installed CuPy by its version and by what the driver runs."""
    major = name[len("cupy-cuda") :].rstrip("x") if name.startswith("cupy-cuda") else ""
    if driver is not None and major.isdigit() and int(major) > int(driver.split(".")[0]):
        said = f"{name} {version} is for CUDA {major}, and the driver runs CUDA {driver} at most"
        return Check("CuPy", PROBLEM, said, _instead_of(name))
    if major in ("12", "13") and _numbers(version)[:2] < OLDEST_CUPY:
        said = f"{name} {version}; {'.'.join(map(str, OLDEST_CUPY))} or newer is needed"
        return Check("CuPy", PROBLEM, said, f"pip install -U 'cupyq[cuda{major}]'")
    return Check("CuPy", OK, f"{name} {version}")


def _importing(said: str) -> Iterator[Check]:
    try:
        cupy = import_cupy()
    except Exception as error:  # noqa: BLE001 (a broken installation raises whatever it likes, and that is the finding)
        last = _one_line(error)
        mend = f"pip install --force-reinstall {' '.join(distributions())}"
        yield Check("CuPy", PROBLEM, f"{said} cannot be imported: {last}", mend)
        return
    if cupy is None:
        mend = f"pip install --force-reinstall {' '.join(distributions())}"
        yield Check("CuPy", PROBLEM, f"{said} is installed but has no module cupy", mend)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _nvrtc() -> Iterator[Check]:
    install = f"pip install 'cupyq[{offline()}]'"
    try:
        known = compiler.archs()
        yield Check("NVRTC", OK, f"{compiler.version()}, compiles for sm_{known[0]} to sm_{known[-1]}")
    except NotInstalled as error:
        said = f"{error.args[0].split(':')[0]}: kernels cannot be compiled, emulated or verified without a GPU"
        yield Check("NVRTC", NOTE if driver_version() is not None else WARNING, said, install)
    driver = driver_version()
    if driver is None or not distributions():
        return
    try:
        cupy = import_cupy()
        major, minor = cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001 (see `_importing`)
        said = f"cannot be loaded: {_one_line(error)}"
        yield Check("CuPy's NVRTC", PROBLEM, said, _again("nvidia-cuda-nvrtc"))
        return
    if major > int(driver.split(".")[0]):
        said = f"{major}.{minor} makes code that the driver, CUDA {driver} at most, cannot load"
        mend = f"pip uninstall -y {LIBRARIES} && pip install 'cupyq[{extra()},{offline()}]'"
        yield Check("CuPy's NVRTC", PROBLEM, said, mend)
    else:
        yield Check("CuPy's NVRTC", OK, f"{major}.{minor}")


def _headers() -> Iterator[Check]:
    if not distributions():
        yield Check("headers", OK, "none needed without CuPy: cupyq's kernels include nothing")
        return
    found = header_folder()
    if found is not None:
        yield Check("headers", OK, found)
        return
    said = "CUDA's headers were not found, and CuPy compiles no kernel without them, whatever it includes"
    yield Check("headers", NOTE if driver_version() is None else PROBLEM, said, _again("nvidia-cuda-runtime"))


def _cublas() -> Iterator[Check]:
    if driver_version() is None or not distributions():
        return
    try:
        import_cublas()
    except Exception as error:  # noqa: BLE001 (see `_importing`)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]  # then the folders that were searched
        said = f"CuPy cannot load it, so the paths dequant and fp16 cannot run: {reason}"
        yield Check("cuBLAS", PROBLEM, said, _again("nvidia-cublas"))
        return
    yield Check("cuBLAS", OK, "CuPy can load it")


def _again(wheel: str) -> str:
    """Return the command that installs a library of the installed CuPy, whether it was missing or broken.

    CuPy of CUDA 12 finds the library of CUDA 13 first and cannot use it, so that one goes as well.
    """
    gone = f"{wheel} {wheel}-cu12" if _cupy_extra() == "cuda12" else wheel
    return f"pip uninstall -y {gone} && pip install 'cupyq[{_cupy_extra()}]'"


def _tools() -> Iterator[Check]:
    try:
        path = sass.nvdisasm()
    except NotInstalled:
        said = "not installed: predictions count instructions in the emulator, without the machine code"
        yield Check("nvdisasm", NOTE, said, f"pip install 'cupyq[{offline()}]'")
        return
    yield Check("nvdisasm", OK, str(path))
    other = next(iter(sorted(path.parent.glob("cuobjdump*"))), None)
    if other is None:
        said = "not installed; nothing of cupyq needs it"
        yield Check("cuobjdump", NOTE, said, f"pip install 'cupyq[{offline()}]'")
    else:
        yield Check("cuobjdump", OK, str(other))


# --- files ------------------------------------------------------------------------------------------------------------


def _cache() -> Iterator[Check]:
    yield _folder("cache", cache.folder(), "CUPYQ_CACHE_DIR", "kernels are compiled again by each process")


def _cupy_cache() -> Iterator[Check]:
    if distributions():
        folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache").expanduser()
        yield _folder("CuPy's cache", folder, "CUPY_CACHE_DIR", "CuPy cannot keep what it compiles")


def _folder(name: str, folder: Path, variable: str, consequence: str) -> Check:
    reason = _cannot_write(folder)
    if reason is not None:
        mend = f"mkdir -p '{folder}' && chmod u+rwx '{folder}'   # or set {variable} to a folder that can be written"
        return Check(name, PROBLEM, f"{folder} {reason}: {consequence}", mend)
    if not folder.is_dir():
        return Check(name, OK, f"{folder} (made when first needed)")
    files = [each.stat().st_size for each in folder.iterdir() if each.is_file()]
    return Check(name, OK, f"{folder} ({len(files)} entries, {sum(files) / 1e6:.1f} MB)")


def _cannot_write(folder: Path) -> str | None:
    """Say why files cannot be made in a folder (or the folder itself), or None."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"cannot be made: {place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _database() -> Iterator[Check]:
    shipped = presets.names()
    yield Check("presets", OK if shipped else NOTE, f"predicted rows for {', '.join(shipped) or 'no GPU'}")
    path = db.default_path()
    if not path.exists():
        reason = _cannot_write(path.parent)
        if reason is None:
            yield Check("database", NOTE, f"{path}: none yet", "python -m cupyq.tune")
        else:
            yield Check("database", PROBLEM, f"{path.parent} {reason}", "export CUPYQ_DB=a-file-that-can-be-written.db")
        return
    try:
        with db.open(path, readonly=True) as store:
            counts = [(row["measured"], row["predicted"]) for row in store.devices()]
    except SchemaTooNew as error:
        yield Check("database", PROBLEM, str(error), "pip install -U cupyq")
        return
    except (CupyqError, OSError) as error:
        if os.access(path, os.R_OK):
            yield Check("database", PROBLEM, str(error), f"mv '{path}' '{path}.damaged'")
        else:
            yield Check("database", PROBLEM, f"{path} cannot be read", f"chmod u+rw '{path}'")
        return
    measured, predicted = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    said = f"{path} ({measured} measured and {predicted} predicted trials of {len(counts)} devices)"
    if os.access(path, os.W_OK) and _cannot_write(path.parent) is None:
        yield Check("database", OK, said)
    else:
        mend = f"chmod u+rw '{path}' '{path.parent}'   # or name another file with CUPYQ_DB"
        yield Check("database", WARNING, f"{said}: read-only, so tuning cannot write to it", mend)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus() -> Iterator[Check]:
    if driver_version() is None or not distributions():
        return
    try:
        cupy = import_cupy()
        count = 0 if cupy is None else int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # noqa: BLE001 (see `_importing`)
        yield Check("GPU", PROBLEM, f"CUDA finds no device: {_one_line(error)}", "nvidia-smi")
        return
    if count == 0:
        yield Check(
            "GPU", PROBLEM, "the driver has no device for this process (see CUDA_VISIBLE_DEVICES)", "nvidia-smi"
        )
    for ordinal in range(count):
        yield _gpu(ordinal)


def _gpu(ordinal: int) -> Check:
    name = f"GPU {ordinal}"
    try:
        spec = devices.live(ordinal)
    except CupyqError as error:
        return Check(name, PROBLEM, str(error), "nvidia-smi")
    said = f"{spec.title}, {spec.compute_capability}, {spec.sms} SMs, {spec.memory_bytes / 2**30:.0f} GiB"
    if spec.refusal is not None:
        return Check(name, PROBLEM, f"{said}: cupyq's kernels need compute capability 7.5 or newer; CuPy multiplies")
    unknown = _unknown_to_nvrtc(spec)
    if unknown is not None:
        wheel = "nvidia-cuda-nvrtc-cu12" if extra() == "cuda12" else "'nvidia-cuda-nvrtc==13.*'"
        return Check(name, WARNING, f"{said}: {unknown}", f"pip install -U {wheel}")
    listed = devices.match(spec)
    if listed is None:
        said += "; not in the catalogue (a MIG slice, or a card it does not know): predictions go by what it reports"
        return Check(name, NOTE, said, "python -m cupyq.tune")
    return Check(name, OK, f"{said}; {listed.name} in the catalogue")


def _unknown_to_nvrtc(spec: devices.DeviceSpec) -> str | None:
    """Say what CuPy's NVRTC makes for an architecture that it does not list, a new one or one in between; else None."""
    try:
        nvrtc = import_cupy().cuda.nvrtc
        known, (major, minor) = sorted(nvrtc.getSupportedArchs()), nvrtc.getVersion()
    except Exception:  # noqa: BLE001 (`_nvrtc` has said that it cannot be loaded)
        return None
    number = spec.cc[0] * 10 + spec.cc[1]
    if number in known:
        return None
    older = [arch for arch in known if arch <= number]
    instead = f"PTX of sm_{older[-1]} for the driver to compile" if older else "nothing, for it knows newer ones only"
    return f"NVRTC {major}.{minor} does not know sm_{number} and makes {instead}"
