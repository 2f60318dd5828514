"""What users install is what the repository holds: wheel and sdist, file by file, and an import from a clean folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

# Where a folder of the repository ends up in a user's site-packages.
INSTALLED_AS = {"cupyq": "cupyq", "kernels_cu": "cupyq/kernels_cu", "tuner": "cupyq/tuner", "db": "cupyq/db"}


def run(*command: object, **kwargs: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the files that git tracks or would track, since building leaves build/ and egg-info behind."""
    copy = tmp_path_factory.mktemp("source")
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def package_files(source):
    """The files of the four package folders, as paths in site-packages; before any build adds to them."""
    return {
        f"{installed}/{path.relative_to(source / folder).as_posix()}"
        for folder, installed in INSTALLED_AS.items()
        for path in (source / folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def wheel(source, package_files, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    """Built by the backend itself, in an environment with the setuptools that pyproject.toml asks for."""
    out = tmp_path_factory.mktemp("sdist")
    tools = tmp_path_factory.mktemp("setuptools")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tools, "setuptools>=69")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    run(sys.executable, "-c", build, cwd=source, env={**os.environ, "PYTHONPATH": str(tools)})
    [path] = out.glob("*.tar.gz")
    return path


def test_wheel_holds_every_package_file_and_nothing_else(wheel, package_files):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n and not n.endswith("/")}
    assert sorted(package_files - names) == [], "missing: name them under [tool.setuptools] in pyproject.toml"
    assert sorted(names - package_files) == []


def test_wheel_fills_one_top_level_name(wheel):
    tops = {n.split("/")[0] for n in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"cupyq"}


def test_wheel_carries_templates_licence_and_readme(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert any(n.startswith("cupyq/kernels_cu/") and n.endswith(".cu") for n in names)
    assert any(n.startswith("cupyq/kernels_cu/") and n.endswith(".cuh") for n in names)
    assert "cupyq/py.typed" in names
    assert any(n.endswith("LICENSE") for n in names)
    [metadata] = [n for n in names if n.endswith(".dist-info/METADATA")]
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0] in archive.read(metadata).decode()


def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sdist)
    [again] = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        assert any(n.endswith("/LICENSE") for n in archive.getnames())


def test_wheel_works_from_a_clean_folder(wheel, tmp_path):
    """Installed alone into a folder with a space and an accent: imports, finds its templates, multiplies."""
    target = tmp_path / "sitio é paquetes"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import importlib.resources, numpy, cupyq, cupyq.db, cupyq.kernels_cu, cupyq.tuner\n"
        "print(cupyq.__file__, cupyq.db.__file__, cupyq.kernels_cu.__file__, cupyq.tuner.__file__, sep='\\n')\n"
        "assert any(f.name.endswith('.cu') for f in importlib.resources.files(cupyq.kernels_cu).iterdir())\n"
        "qw = cupyq.quantize(numpy.eye(64, dtype=numpy.float32), 'w4a16', group_size=32)\n"
        "y = cupyq.matmul(numpy.ones((1, 64), numpy.float16), qw)\n"
        "assert y.shape == (1, 64) and numpy.allclose(y, 1)\n"
    )
    files = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert len(files) == 4
    assert all(Path(file).is_relative_to(target) for file in files), files


# --- extras -----------------------------------------------------------------------------------------------------------

# Libraries of one CUDA major: CuPy and cuda-bindings load the newest of each that they find.
LIBRARIES = {"nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"}


def extra(*names):
    """Return name -> what versions are accepted, of all that some extras install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found = [Requirement(line) for name in names for line in extras[name]]
    return {each.name: each.specifier for each in found}


def admits(found, name, version):
    return name in found and version in found[name]


@pytest.mark.parametrize(("major", "suffix"), [("12", "-cu12"), ("13", "")])
def test_cupy_comes_with_the_libraries_that_its_wheel_lacks(major, suffix):
    """cuBLAS, NVRTC, and the runtime's headers, without which it compiles nothing; a CuPy and NumPy with bfloat16."""
    found = extra(f"cuda{major}")
    assert {name + suffix for name in LIBRARIES} <= set(found)
    assert admits(found, f"cupy-cuda{major}x", "14.2.0")
    assert not admits(found, f"cupy-cuda{major}x", "13.6.0")
    assert admits(found, "numpy", "2.1.2")
    assert not admits(found, "numpy", "2.1.1")


def test_no_extra_for_a_cuda_12_driver_brings_a_library_of_cuda_13():
    found = extra("cuda12", "offline12")
    assert not LIBRARIES & set(found)
    assert admits(found, "nvidia-cuda-nvrtc-cu12", "12.9.86")
    assert admits(found, "cuda-bindings", "12.9.10")
    assert not admits(found, "cuda-bindings", "13.0.0")


def test_no_extra_for_a_cuda_13_driver_brings_a_library_of_another_major():
    found = extra("cuda13", "offline")
    for name in (*LIBRARIES, "cuda-bindings"):
        assert [admits(found, name, version) for version in ("12.9.0", "13.0.0", "13.9.1", "14.0.0")] == [
            False, True, True, False
        ]  # fmt: skip
    assert not [name for name in found if name.endswith("-cu12")]


@pytest.mark.skipif(sys.platform == "win32" or shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        (None, "offline"),
        ("Driver Version: 450.51.06   CUDA Version: 11.0", "offline"),
        ("Driver Version: 550.54.14   CUDA Version: 12.4", "cuda12,offline12"),
        ("Driver Version: 580.65.06   CUDA Version: 13.0", "cuda13,offline"),
        ("KMD Version: 999.1   CUDA UMD Version: 14.1", "cuda13,offline"),
    ],
)
def test_make_installs_what_the_driver_runs(said, chosen, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n" if said is None else f"#!/bin/sh\necho '| NVIDIA-SMI {said} |'\n")
    smi.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    out = run("make", "--no-print-directory", "-n", f"VENV={tmp_path / 'venv'}", "tune", cwd=ROOT, env=env)
    assert f"-e '.[{chosen}]'" in out
    assert extra(*chosen.split(","))
