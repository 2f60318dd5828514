"""Shapes from the command line, from built-in models, and from a config.json."""

from __future__ import annotations

import json

import pytest

from cupyq.errors import ArgumentError
from cupyq.tuner.study import problems_of
from cupyq.tuner.workloads import MODELS, architecture, model_shapes, parse_numbers, parse_shapes


def test_shapes_are_k_by_n():
    assert parse_shapes("4096x11008, 11008X4096,4096x11008") == [(4096, 11008), (11008, 4096)]


@pytest.mark.parametrize("text", ["", "4096", "4096x", "x4096", "0x16", "axb", "1x2x3", "4096x-1", "9999999999x1"])
def test_bad_shapes_are_named(text):
    with pytest.raises(ArgumentError, match="shapes"):
        parse_shapes(text)


def test_numbers():
    assert parse_numbers("batches", "1, 16,128,16") == [1, 16, 128]
    for text in ("", "1.5", "a", "1;2"):
        with pytest.raises(ArgumentError, match="batches"):
            parse_numbers("batches", text)


def test_built_in_models():
    assert model_shapes("minilm") == [(384, 384), (384, 1536), (1536, 384)]
    assert model_shapes("llama-3-8b") == [(4096, 6144), (4096, 28672), (4096, 4096), (14336, 4096)]
    assert model_shapes("Llama-3-70B", 8) == [(8192, 1280), (8192, 7168), (1024, 8192), (3584, 8192)]


def test_more_gpus_than_key_value_heads_copy_a_head():
    assert model_shapes("qwen2.5-7b", 4)[0] == (3584, (7 + 2 * 1) * 128)
    assert model_shapes("qwen2.5-0.5b", 2)[0] == (896, (7 + 2 * 1) * 64)
    assert model_shapes("qwen2.5-72b", 16)[0] == (8192, (4 + 2 * 1) * 128)


def test_what_does_not_divide_is_refused():
    with pytest.raises(ArgumentError, match=r"tensor_parallel=3 .*accepted: 1, 2, 4, 8, 16, 32$"):
        model_shapes("llama-3-8b", 3)
    with pytest.raises(ArgumentError, match="tensor_parallel=0"):
        model_shapes("llama-3-8b", 0)
    with pytest.raises(ArgumentError, match=r"5 cannot share 40 heads, 8 key and value heads"):
        model_shapes("qwen2.5-32b", 5)


def test_layers_are_fused_or_apart_or_both():
    fused, apart = model_shapes("llama-3-8b", 2, "fused"), model_shapes("llama-3-8b", 2, "unfused")
    assert fused == model_shapes("llama-3-8b", 2) == [(4096, 3072), (4096, 14336), (2048, 4096), (7168, 4096)]
    assert apart == [(4096, 2048), (4096, 512), (4096, 7168), (2048, 4096), (7168, 4096)]
    assert model_shapes("llama-3-8b", 2, "both") == list(dict.fromkeys(fused + apart))
    assert model_shapes("minilm") == model_shapes("minilm", 1, "unfused")
    assert (384, 3 * 384) in model_shapes("minilm", 1, "fused")


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("merged", [True, False])
def test_fused_layers_hold_all_that_the_others_do(name, merged):
    """The same weights, whether fused or apart, on one GPU and on two together."""
    whole = MODELS[name]
    kv = whole.kv_heads * whole.head_dim
    want = whole.hidden * (2 * whole.heads * whole.head_dim + 2 * kv + (3 if whole.gated else 2) * whole.intermediate)
    assert sum(k * n for k, n in whole.layers(1, merged).values()) == want
    assert 2 * sum(k * n for k, n in whole.layers(2, merged).values()) == want


def test_unknown_models_get_the_nearest_names():
    with pytest.raises(ArgumentError, match="llama-3-8b"):
        model_shapes("llama3-8b")


def test_a_config_json(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    want = [(2048, 2048 + 2 * 256), (2048, 11264), (2048, 2048), (5632, 2048)]
    assert model_shapes(file) == want
    assert model_shapes(str(tmp_path)) == want
    file.write_text(
        json.dumps({"model_type": "bert", "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12})
    )
    assert model_shapes(file) == model_shapes("minilm")


def test_a_single_key_and_value_head_that_no_number_says(tmp_path):
    file = tmp_path / "config.json"
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True}
    file.write_text(json.dumps(falcon))
    assert architecture(file).layers()["qkv"] == (4544, (71 + 2) * 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "no JSON object"),
        ("{}", "hidden_size"),
        ('{"hidden_size": "many", "num_attention_heads": 2}', "hidden_size='many'"),
        ('{"hidden_size": 64, "num_attention_heads": 2, "kv_lora_rank": 512}', "latent attention"),
        ('{"hidden_size": 0, "num_attention_heads": 2}', "hidden_size=0"),
    ],
)
def test_bad_config_files_are_named(tmp_path, text, words):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=words):
        model_shapes(file)


def test_problems_of_batches_are_bands():
    made = problems_of([(64, 32)], ["w4a16", "w8a8-int8"], [1, 9, 16, 100], [32, 64])
    assert [(p.op, p.group_size, p.m) for p in made] == [
        ("w4a16", 32, 1), ("w4a16", 32, 16), ("w4a16", 32, 128),
        ("w4a16", 64, 1), ("w4a16", 64, 16), ("w4a16", 64, 128),
        ("w8a8-int8", -1, 1), ("w8a8-int8", -1, 16), ("w8a8-int8", -1, 128),
    ]  # fmt: skip
    assert len(problems_of([(64, 32)])) == 15
