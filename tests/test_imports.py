"""Imports go down only: one table of floors, held against every module's syntax tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

# Lowest floor first. A module imports from the floors below its own, and from its own package. A package stands for
# all its modules but those that have a line of their own. Modules on one floor know nothing of each other.
FLOORS = (
    ("cupyq.errors",),
    ("cupyq.arrays", "cupyq.bands"),
    ("cupyq.scratch",),
    ("cupyq.devices",),
    ("cupyq.roofline",),
    ("cupyq.layout", "cupyq.activations"),
    ("cupyq.weights",),
    ("cupyq.quantize",),
    ("cupyq.formats",),
    ("cupyq.reference",),
    ("cupyq.kernels_cu",),
    ("cupyq.kernels",),
    ("cupyq.compiler",),
    ("cupyq.emulator",),
    ("cupyq.predictor",),
    ("cupyq.db",),
    ("cupyq.rows",),
    ("cupyq.ladder",),
    ("cupyq.invariant",),
    ("cupyq.dispatch",),
    ("cupyq.launch", "cupyq.packing"),
    ("cupyq.ops",),
    ("cupyq.tuner",),
    ("cupyq",),
    ("cupyq.db.searching",),
    ("cupyq.db.making",),
    ("cupyq.db.checking",),
    ("cupyq.tune", "cupyq.db.cli", "cupyq.report", "cupyq.doctor"),
    ("cupyq.__main__", "cupyq.db.__main__"),
)

# The emulator judges the kernels, so it shares nothing with them, and leans on nothing that could.
EMULATOR_MAY_IMPORT = {"cupyq.errors", "numpy", "ml_dtypes"}

# Imported inside the functions that need them: `import cupyq` works without a GPU, a driver or CuPy.
NEVER_AT_THE_TOP = {"cupy", "cupyx", "cuda", "matplotlib", "pynvml"}


class Module(NamedTuple):
    """One file that the wheel carries."""

    name: str
    tree: ast.Module
    is_package: bool


class Import(NamedTuple):
    """One imported name, written in full ("cupyq.errors.ShapeError"); `lazy`: in a function, or for type checkers."""

    target: str
    line: int
    lazy: bool


@cache
def modules() -> dict[str, Module]:
    """Return every module that pyproject.toml puts into the wheel, by its dotted name."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = setuptools["package-dir"]
    found = {}
    for package in setuptools["packages"]:
        mapped = max((p for p in folders if package == p or package.startswith(f"{p}.")), key=len)
        folder = ROOT / folders[mapped] / package[len(mapped) + 1 :].replace(".", "/")
        for path in sorted(folder.glob("*.py")):
            is_package = path.name == "__init__.py"
            name = package if is_package else f"{package}.{path.stem}"
            found[name] = Module(name, ast.parse(path.read_text(encoding="utf-8"), str(path)), is_package)
    return found


def imports(module: Module) -> Iterator[Import]:
    """Yield all that `module` imports, wherever in the file it does so."""
    later = [n for n in ast.walk(module.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    later += [n for n in ast.walk(module.tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    inside = {id(n) for block in later for n in ast.walk(block)}
    for node in ast.walk(module.tree):
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            yield from (Import(a.name, node.lineno, lazy) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                package = parts[: len(parts) - node.level + module.is_package]
                base = ".".join([*package, base] if base else package)
            yield from (Import(f"{base}.{a.name}", node.lineno, lazy) for a in node.names)


def longest_prefix(dotted: str, names: object) -> str | None:
    """Return the longest of `names` that is `dotted` or a package above it."""
    parts = dotted.split(".")
    return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in names), None)  # type: ignore[operator]


def floor(name: str) -> tuple[int, str] | None:
    """Return the floor of a module and the table's entry that says so; None if the table does not know it."""
    table = {entry: n for n, entries in enumerate(FLOORS) for entry in entries}
    entry = longest_prefix(name, table)
    if entry is None or (entry == "cupyq" and name != "cupyq"):  # the root stands for itself only
        return None
    return table[entry], entry


def climbs(module: Module) -> list[str]:
    """Return a sentence for every import of `module` that goes up or sideways."""
    here = floor(module.name)
    if here is None:
        return [f"{module.name} has no floor"]
    wrong = []
    for target, line, _ in imports(module):
        imported = longest_prefix(target, modules())
        if imported is None or imported == module.name:
            continue
        there = floor(imported)
        if there is None:
            wrong.append(f"{module.name}, line {line}: imports {target}, which has no floor")
        elif there[0] > here[0] or (there[0] == here[0] and there[1] != here[1]):
            wrong.append(f"{module.name}, line {line}: imports {target}, and {there[1]} is not below {here[1]}")
    return wrong


def test_every_module_has_a_floor():
    unknown = [name for name in modules() if floor(name) is None]
    assert not unknown, (
        f"{', '.join(unknown)}: not in FLOORS of tests/test_imports.py. Decide what the module may know of, "
        "and add it above the highest module that it imports."
    )


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down_only(name):
    wrong = climbs(modules()[name])
    assert not wrong, "\n".join(wrong) + "\nMove what is shared to a lower floor; do not move the module up."


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("cupyq.errors", "import cupyq.ops", "cupyq.ops is not below cupyq.errors"),
        ("cupyq.devices", "def f():\n    from cupyq import db", "cupyq.db is not below cupyq.devices"),
        ("cupyq.devices", "from .kernels import Problem", "cupyq.kernels is not below cupyq.devices"),
        ("cupyq.bands", "from cupyq.arrays import x", "cupyq.arrays is not below cupyq.bands"),
        ("cupyq.bands", "from cupyq import matmul", "cupyq is not below cupyq.bands"),
    ],
)
def test_a_climbing_import_is_found(monkeypatch, name, source, words):
    known = dict(modules())
    known.setdefault("cupyq.ops", Module("cupyq.ops", ast.parse(""), False))
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: known)
    [sentence] = climbs(Module(name, ast.parse(source), False))
    assert words in sentence


@pytest.mark.parametrize("name", sorted(n for n in modules() if n.startswith("cupyq.emulator")))
def test_the_emulator_stands_alone(name):
    for target, line, _ in imports(modules()[name]):
        top = target.split(".")[0]
        fine = (
            top in sys.stdlib_module_names
            or target.startswith("cupyq.emulator")
            or longest_prefix(target, EMULATOR_MAY_IMPORT)
            or (name == "cupyq.emulator.__main__" and top in ("click", "rich", "cuda"))  # its command line alone
        )
        assert fine, f"{name}, line {line}: the emulator imports {target}, and may only {sorted(EMULATOR_MAY_IMPORT)}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_gpu_is_never_needed_to_import(name):
    for target, line, lazy in imports(modules()[name]):
        top = target.split(".")[0]
        assert top != "torch", f"{name}, line {line}: cupyq does not use torch"
        assert lazy or top not in NEVER_AT_THE_TOP, (
            f"{name}, line {line}: import {top} inside the function that needs it"
        )


def test_import_cupyq_is_light():
    """A fresh interpreter imports cupyq and nothing that a user who only multiplies would have to wait for."""
    heavy = ["cupy", "cuda", "optuna", "sqlite_utils", "sqlalchemy", "rich", "click", "matplotlib", "torch"]
    code = (
        "import sys, time; start = time.perf_counter(); import cupyq; elapsed = time.perf_counter() - start;"
        f"print(round(elapsed * 1e3), *(name for name in {heavy} if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    milliseconds, *loaded = run.stdout.split()
    print(f"import cupyq: {milliseconds} ms")
    assert not loaded, f"import cupyq also imports {', '.join(loaded)}"
