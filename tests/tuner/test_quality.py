"""Quantization error on a user's own weights, and the front of group sizes that it gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from cupyq import db, quantize, reference, tune
from cupyq.errors import ArgumentError, FormatError
from cupyq.kernels import Problem
from cupyq.tuner.quality import Weights

QUICK = ("--device", "rtx-4090", "--batches", "1", "--trials", "4", "--no-verify")


@pytest.fixture
def file(tmp_path):
    """Return a file with two linear layers as PyTorch stores them, (N, K), and what is none."""
    rng = np.random.default_rng(0)
    tensors = {
        "layer.0.up.weight": (rng.standard_normal((96, 256)) * np.exp2(rng.integers(-4, 4, 256))).astype(np.float32),
        "layer.0.down.weight": rng.standard_normal((256, 96)).astype(np.float16),
        "layer.1.down.weight": np.ones((256, 96), np.float16),
        "embeddings.weight": rng.standard_normal((500, 64)).astype(np.float32),
        "layer.0.up.bias": np.ones(96, np.float32),
        "positions": np.ones((4, 4), np.int64),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path, tensors


def test_linear_layers_are_found_with_k_and_n_the_right_way_round(file):
    path, tensors = file
    weights = Weights(str(path))
    assert sorted(weights.shapes()) == [(96, 256), (256, 96)]
    np.testing.assert_array_equal(weights.matrix(256, 96), tensors["layer.0.up.weight"].T)
    assert weights.name == "model.safetensors"


def test_one_tensor_can_be_named(file):
    weights = Weights(f"{file[0]}:layer.1.down.weight")
    assert weights.shapes() == [(96, 256)]
    assert (weights.matrix(96, 256) == 1).all()
    assert weights.name == "model.safetensors:layer.1.down.weight"


def test_errors_are_those_of_quantize(file):
    path, tensors = file
    problems = [Problem("w4a16", m, 96, 256, g) for g in (32, 128) for m in (1, 16)]
    errors = Weights(str(path)).errors(problems)
    assert set(errors) == {problem.with_m(1) for problem in problems}
    w = tensors["layer.0.up.weight"].T
    want = np.linalg.norm(reference.dequantize(quantize(w, "w4a16", 32)) - w) / np.linalg.norm(w)
    assert errors[problems[0].with_m(1)] == pytest.approx(want, rel=1e-5)
    assert errors[problems[0].with_m(1)] < errors[problems[2].with_m(1)], "smaller groups are closer"


def test_what_is_not_there_is_named(file, tmp_path):
    path, _ = file
    with pytest.raises(ArgumentError, match="no file"):
        Weights(str(tmp_path / "none.safetensors"))
    with pytest.raises(ArgumentError, match=r"no tensor 'layer\.9'.*layer\.0"):
        Weights(f"{path}:layer.9")
    with pytest.raises(ArgumentError, match="no 64x64 weight; it has"):
        Weights(str(path)).matrix(64, 64)
    with pytest.raises(ArgumentError, match="no float matrix"):
        Weights(f"{path}:layer.0.up.bias").shapes()
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError):
        Weights(str(tmp_path / "cut.safetensors"))


def test_the_command_stores_and_shows_the_front(file, tmp_path, capsys):
    path, out = file[0], tmp_path / "tuning.db"
    arguments = [*QUICK[:-1], "--shapes", "256x96", "--group-sizes", "32,128", "--op", "w4a16,w8a8-int8"]
    assert tune.main([*arguments, "--weights", str(path), "--db", str(out)]) == 0
    assert "time against quantization error on model.safetensors" in capsys.readouterr().out
    with db.open(out) as store:
        front = store.pareto()
        fp16 = [row for row in store.trials() if row["path"] == "fp16"]
    assert front
    assert {row["weights"] for row in front} == {"model.safetensors"}
    errors = [row["quantization_error"] for row in front]
    assert errors == sorted(errors, reverse=True), "faster ones are less exact"
    assert all(row["quantization_error"] is None for row in fp16)


def test_shapes_come_from_the_weights_when_none_are_given(file, tmp_path, capsys):
    assert tune.main([*QUICK, "--json", "--weights", str(file[0]), "--db", str(tmp_path / "tuning.db")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted((p["k"], p["n"]) for p in told["problems"]) == [(96, 256), (256, 96)]


def test_a_shape_that_the_file_lacks_is_status_2_and_touches_nothing(file, tmp_path, capsys):
    out = tmp_path / "tuning.db"
    assert tune.main([*QUICK, "--shapes", "64x64", "--weights", str(file[0]), "--db", str(out)]) == 2
    assert "64x64" in capsys.readouterr().err
    assert not out.exists()
