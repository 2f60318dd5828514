"""What is installed and usable here, what is not, and the command that mends it: `python -m cupyq doctor`.

No CUDA context is made, and nothing is written but a file in the cache folder that goes away at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
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
        _python, _driver, _cupy, _nvrtc, _headers, _tools, _cache, _cupy_cache, _database, _gpus,
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
            f"pip uninstall -y {' '.join(found)} && {install}",
        )
    else:
        yield _variant(*next(iter(found.items())), driver, install)
    yield from _importing(said, install)


def _variant(name: str, version: str, driver: str | None, install: str) -> Check:
    """Judge one installed CuPy by its version and by what the driver runs."""
    major = name[len("cupy-cuda") :].rstrip("x") if name.startswith("cupy-cuda") else ""
    least = {"12": (13, 4), "13": (14, 0)}.get(major)
    if driver is not None and major.isdigit() and int(major) > int(driver.split(".")[0]):
        said = f"{name} {version} is for CUDA {major}, and the driver runs CUDA {driver} at most"
        return Check("CuPy", PROBLEM, said, f"pip uninstall -y {name} && {install}")
    if least is not None and tuple(int(p) for p in version.split(".")[:2] if p.isdigit()) < least:
        said = f"{name} {version}; {least[0]}.{least[1]} or newer is needed"
        return Check("CuPy", PROBLEM, said, f"pip install -U 'cupyq[cuda{major}]'")
    return Check("CuPy", OK, f"{name} {version}")


def _importing(said: str, install: str) -> Iterator[Check]:
    try:
        cupy = import_cupy()
    except Exception as error:  # noqa: BLE001 (a broken installation raises whatever it likes, and that is the finding)
        last = " ".join(str(error).split()) or type(error).__name__
        mend = f"pip install --force-reinstall {' '.join(distributions())}"
        yield Check("CuPy", PROBLEM, f"{said} cannot be imported: {last}", mend)
        return
    if cupy is None:
        yield Check("CuPy", PROBLEM, f"{said} is installed but has no module cupy", f"{install} --force-reinstall")


def _nvrtc() -> Iterator[Check]:
    offline = "pip install 'cupyq[offline]'"
    try:
        known = compiler.archs()
        yield Check("NVRTC", OK, f"{compiler.version()}, compiles for sm_{known[0]} to sm_{known[-1]}")
    except NotInstalled as error:
        said = f"{error.args[0].split(':')[0]}: kernels cannot be compiled, emulated or verified without a GPU"
        yield Check("NVRTC", NOTE if driver_version() is not None else WARNING, said, offline)
    driver = driver_version()
    if driver is None or not distributions():
        return
    try:
        cupy = import_cupy()
        major, minor = cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001 (see `_importing`)
        last = " ".join(str(error).split()) or type(error).__name__
        yield Check("CuPy's NVRTC", PROBLEM, f"cannot be loaded: {last}", f"pip install -U 'cupyq[{extra()}]'")
        return
    if major > int(driver.split(".")[0]):
        said = f"{major}.{minor} makes code that the driver, CUDA {driver} at most, cannot load"
        yield Check("CuPy's NVRTC", PROBLEM, said, f"pip install -U 'cupyq[{extra()}]'")
    else:
        yield Check("CuPy's NVRTC", OK, f"{major}.{minor}")


def _headers() -> Iterator[Check]:
    yield Check("headers", OK, "none needed: kernels include nothing")


def _tools() -> Iterator[Check]:
    try:
        path = sass.nvdisasm()
    except NotInstalled:
        said = "not installed: predictions count instructions in the emulator, without the machine code"
        yield Check("nvdisasm", NOTE, said, "pip install 'cupyq[offline]'")
        return
    yield Check("nvdisasm", OK, str(path))
    other = next(iter(sorted(path.parent.glob("cuobjdump*"))), None)
    if other is None:
        yield Check("cuobjdump", NOTE, "not installed; nothing of cupyq needs it", "pip install 'cupyq[offline]'")
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
        yield Check("GPU", PROBLEM, f"CUDA finds no device: {' '.join(str(error).split())}", "nvidia-smi")
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
    newer = _newer_than_nvrtc(spec)
    if newer is not None:
        return Check(name, WARNING, f"{said}: {newer}", f"pip install -U 'cupyq[{extra()},offline]'")
    listed = devices.match(spec)
    if listed is None:
        said += "; not in the catalogue (a MIG slice, or a card it does not know): predictions go by what it reports"
        return Check(name, NOTE, said, "python -m cupyq.tune")
    return Check(name, OK, f"{said}; {listed.name} in the catalogue")


def _newer_than_nvrtc(spec: devices.DeviceSpec) -> str | None:
    try:
        newest = compiler.archs()[-1]
    except NotInstalled:
        return None
    number = spec.cc[0] * 10 + spec.cc[1]
    return f"newer than NVRTC {compiler.version()}, which knows sm_{newest} at most" if number > newest else None
