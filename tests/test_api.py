"""What `import cupyq` gives, and what it must not bring along."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

import cupyq
from cupyq import errors

HEAVY = ("cupy", "cupyx", "cuda", "optuna", "sqlalchemy", "sqlite3", "sqlite_utils", "rich", "click", "safetensors")


def python(code, **environment):
    """Run code in a fresh interpreter and return what it printed."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_is_light():
    code = f"import sys, cupyq; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert python(code) == "[]"


@pytest.mark.parametrize("lazy", ["matmul", "plan", "explain", "warmup", "dequantize", "quantize_activations"])
def test_functions_found_on_first_use_import_no_cupy(lazy):
    code = f"import sys, cupyq; f = cupyq.{lazy}; print(f.__name__, 'cupy' in sys.modules, f is cupyq.{lazy})"
    assert python(code) == f"{lazy} False True"


def test_numpy_work_needs_no_cupy_and_no_database():
    # f1: packing, files and the NumPy product on a machine where importing CuPy fails.
    code = """
import sys
sys.modules["cupy"] = None  # import cupy raises ImportError
import numpy as np, cupyq
qw = cupyq.quantize(np.ones((64, 16), np.float32))
y = cupyq.matmul(np.ones((2, 64), np.float16), qw)
planned = cupyq.plan(qw, 2)(np.ones((2, 64), np.float16))
print(y.tolist() == [[64.0] * 16] * 2, planned.max() == 64, "sqlite3" in sys.modules)
try:
    qw.to_cupy()
except cupyq.NotInstalled as error:
    print(error)
"""
    first, second = python(code).splitlines()
    assert first == "True True False"
    assert second == "moving a weight to a GPU needs CuPy: pip install 'cupyq[cuda12]' or 'cupyq[cuda13]'"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_import():  # f1
    code = """
import os, numpy as np, cupyq
pid = os.fork()
qw = cupyq.quantize(np.ones((64, 16), np.float32))
assert (cupyq.matmul(np.ones((1, 64), np.float16), qw) == 64).all()
if pid == 0:
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""
    assert python(code) == "0"


def test_every_name_of_all_exists_and_has_a_docstring():
    for name in cupyq.__all__:
        value = getattr(cupyq, name)
        if name != "__version__":
            assert inspect.getdoc(value), name


def test_dir_lists_what_is_there():
    assert {*cupyq.__all__, "kernels", "reference", "devices"} <= set(dir(cupyq))
    with pytest.raises(AttributeError, match="module 'cupyq' has no attribute 'nothing'"):
        _ = cupyq.nothing


def test_functions_are_not_hidden_by_modules_of_their_name():
    code = "import cupyq.quantize, cupyq.ops, cupyq; print(callable(cupyq.quantize), callable(cupyq.matmul))"
    assert python(code) == "True True"


def test_one_tree_of_errors_each_with_one_sentence():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == "cupyq.errors"]
    assert len(classes) > 10
    for cls in classes:
        assert issubclass(cls, cupyq.CupyqError)
        assert getattr(cupyq, cls.__name__) is cls
        lines = inspect.getdoc(cls).splitlines()
        assert len(lines) == 1, cls
        assert lines[0].endswith("."), cls


@pytest.mark.parametrize("error", [cupyq.DTypeError, cupyq.ShapeError, cupyq.DeviceMismatch])
def test_wrong_arguments_are_value_errors(error):
    assert issubclass(error, (cupyq.ArgumentError, ValueError))


def test_contract_of_signatures():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(cupyq.quantize) == ["w", "scheme", "group_size", "symmetric", "clip", "scale_dtype", "activations"]
    assert names(cupyq.matmul)[:4] == ["x", "qw", "bias", "out"]
    assert names(cupyq.pack)[:5] == ["codes", "scales", "zeros", "scheme", "group_size"]
    assert names(cupyq.explain)[:3] == ["m", "qw", "device"]
    assert names(cupyq.plan)[:2] == ["qw", "m"]
    assert inspect.signature(cupyq.quantize).parameters["group_size"].default == 128


def test_readme_of_the_package_runs():
    assert doctest.testmod(cupyq).failed == 0


def test_the_whole_api_in_one_go(tmp_path):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((256, 48)).astype(np.float32), rng.standard_normal((4, 256)).astype(np.float16)
    bias, out = np.ones(48, np.float16), np.empty((4, 48), np.float16)
    qw = cupyq.quantize(w, "w4a16", group_size=128, symmetric=True)
    y = cupyq.matmul(x, qw)
    assert cupyq.matmul(x, qw, bias=bias, out=out) is out
    assert np.allclose(out, y + bias, atol=0.1)
    assert np.allclose(y, x.astype(np.float32) @ cupyq.dequantize(qw), rtol=2e-3, atol=2e-2)
    qw.save(tmp_path / "layer.safetensors")
    again = cupyq.QuantizedWeight.load(tmp_path / "layer.safetensors")
    codes, scales, zeros = cupyq.unpack(again)
    same = cupyq.pack(codes, scales, zeros, scheme="w4a16", group_size=128)
    assert np.array_equal(cupyq.plan(same, m=4)(x), y)
