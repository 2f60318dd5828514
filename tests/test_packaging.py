"""What users install is what the repository holds: wheel and sdist, file by file, and an import from a clean folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

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
