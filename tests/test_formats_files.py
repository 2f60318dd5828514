"""Checkpoints on disk: folders, shards, configurations, and what is wrong with them, by file, layer and tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupyq
from checkpoints import (
    AWQ,
    BFLOAT16,
    FLOAT8,
    dequantized,
    random_layer,
    symmetric_zeros,
    words,
    write_safetensors,
)
from cupyq import ArgumentError, FormatError
from cupyq.formats import Checkpoint, load
from cupyq.formats.tensors import SafetensorsFile

K, N, GROUP = 64, 32, 16
ROWS = np.arange(K) // GROUP
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def layer(seed: int = 0, symmetric: bool = False):
    codes, zeros, scales = random_layer(seed, K, N, K // GROUP)
    return codes, symmetric_zeros(*zeros.shape) if symmetric else zeros, scales


def gptq_tensors(name: str, codes, zeros, scales, offset: int = 1, **more) -> dict[str, np.ndarray]:
    tensors = {
        "qweight": words(codes, 4, 0),
        "qzeros": words(zeros - offset, 4, 1),
        "scales": scales,
        "g_idx": ROWS.astype(np.int32),
        **more,
    }
    return {f"{name}.{key}": value for key, value in tensors.items()}


def write_config(folder: Path, quantization: dict, name: str = "config.json", key: str = "quantization_config") -> None:
    (folder / name).write_text(json.dumps({"model_type": "x", key: quantization} if key else quantization))


def ct_config(
    group_size: int | None = GROUP, form: str = "pack-quantized", inputs=None, targets=("Linear",), **weights
):
    arguments = {
        "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group" if group_size else "channel",
        "group_size": group_size, **weights,
    }  # fmt: skip
    group = {"targets": list(targets), "weights": arguments, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


INT8_INPUTS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


@pytest.fixture
def gptq_folder(tmp_path):
    """Layers 2 and 10, in two shards, with a bias and a norm that no layer owns."""
    made = {"model.layers.10.up": layer(1), "model.layers.2.up": layer(2)}
    shards = {}
    for number, (name, parts) in enumerate(made.items()):
        tensors = gptq_tensors(name, *parts)
        if number == 0:
            tensors[f"{name}.bias"] = np.arange(N).astype(BFLOAT16)
            tensors["model.norm.weight"] = np.ones(K, BFLOAT16)
        file = f"model-{number + 1:05}-of-00002.safetensors"
        write_safetensors(tmp_path / file, tensors)
        shards.update(dict.fromkeys(tensors, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    write_config(tmp_path, GPTQ_CONFIG)
    return tmp_path, made


def test_a_sharded_folder(gptq_folder):
    folder, made = gptq_folder
    found = load(folder)
    assert list(found) == ["model.layers.2.up", "model.layers.10.up"]
    for name, (codes, zeros, scales) in made.items():
        np.testing.assert_array_equal(cupyq.dequantize(found[name], "float64"), dequantized(codes, zeros, scales, ROWS))
    [one] = load(folder, "model.layers.10.up").values()
    np.testing.assert_array_equal(one.packed, found["model.layers.10.up"].packed)


def test_a_checkpoint_reads_what_is_asked_for(gptq_folder):
    folder, _ = gptq_folder
    found = Checkpoint(folder)
    assert (found.method, len(found), "model.layers.2.up" in found, "model.norm" in found) == ("gptq", 2, True, False)
    np.testing.assert_array_equal(found.bias("model.layers.10.up").astype(int), np.arange(N))
    assert found.bias("model.layers.2.up") is None
    assert found.tensor("model.norm.weight").dtype == BFLOAT16
    assert "model.norm.weight" in found.tensors
    (folder / "model-00001-of-00002.safetensors").unlink()  # the other layer's shard
    assert found["model.layers.2.up"].shape == (K, N)
    with pytest.raises(KeyError):
        found["model.layers.3.up"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_rule_of_the_activations(tmp_path, static, symmetric):
    tensors = {"up.weight": np.ones((16, 32), np.int8), "up.weight_scale": np.ones((16, 1), np.float32)}
    if static:
        tensors["up.input_scale"] = np.array([0.5], np.float32)
        if not symmetric:
            tensors["up.input_zero_point"] = np.array([-3], np.int8)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    inputs = {**INT8_INPUTS, "symmetric": symmetric, "dynamic": not static}
    write_config(tmp_path, ct_config(None, "int-quantized", inputs, num_bits=8, symmetric=True))
    rule = load(tmp_path)["up"].activations
    assert rule.symmetric == symmetric
    assert rule.scale == (0.5 if static else None)
    assert rule.zero == (-3 if static and not symmetric else None)


def test_an_unknown_layer_names_its_neighbours(gptq_folder):
    with pytest.raises(ArgumentError, match=r"one of the 2 .* got 'layers.2.up'; near it: model.layers.2.up"):
        load(gptq_folder[0], "layers.2.up")
    with pytest.raises(ArgumentError, match=r"near it: model.norm.weight"):
        Checkpoint(gptq_folder[0]).tensor("norm.weight")


@pytest.mark.parametrize(
    ("name", "key"), [("config.json", "quantization_config"), ("quantize_config.json", None)]
)  # fmt: skip
def test_one_file_and_the_configuration_beside_it(tmp_path, name, key):
    codes, zeros, scales = layer()
    write_safetensors(tmp_path / "gptq_model-4bit-16g.safetensors", gptq_tensors("a.b", codes, zeros, scales))
    quantization = dict(GPTQ_CONFIG)
    if key is None:
        del quantization["quant_method"]  # as older tools write it
    write_config(tmp_path, quantization, name, key)
    want = dequantized(codes, zeros, scales, ROWS)
    for path in (tmp_path, tmp_path / "gptq_model-4bit-16g.safetensors"):
        np.testing.assert_array_equal(cupyq.dequantize(load(path)["a.b"], "float64"), want)
    (tmp_path / name).unlink()
    with pytest.raises(FormatError, match="no quantization_config"):
        load(tmp_path)
    np.testing.assert_array_equal(cupyq.dequantize(load(tmp_path, config=GPTQ_CONFIG)["a.b"], "float64"), want)


@pytest.mark.parametrize(("form", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_checkpoint_format_tells_the_version(tmp_path, form, offset):
    codes, zeros, scales = layer()
    write_safetensors(tmp_path / "model.safetensors", gptq_tensors("a", codes, zeros, scales, offset))
    write_config(tmp_path, {**GPTQ_CONFIG, "checkpoint_format": form})
    np.testing.assert_array_equal(
        cupyq.dequantize(load(tmp_path)["a"], "float64"), dequantized(codes, zeros, scales, ROWS)
    )


def test_a_symmetric_v2_weight_tagged_gptq_is_refused_and_read_when_told(tmp_path):
    codes, zeros, scales = layer(symmetric=True)
    write_safetensors(tmp_path / "model.safetensors", gptq_tensors("a", codes, zeros, scales, 0))
    write_config(tmp_path, {**GPTQ_CONFIG, "sym": True, "checkpoint_format": "gptq"})
    with pytest.raises(FormatError, match=r"model.safetensors, layer a: qzeros hold 8 everywhere.*version='v2'"):
        load(tmp_path)
    qw = load(tmp_path, version="v2")["a"]
    assert qw.symmetric
    np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), dequantized(codes, zeros, scales, ROWS))


def test_act_order_from_a_file(tmp_path):
    codes, zeros, scales = layer()
    g_idx = np.random.default_rng(0).permutation(ROWS).astype(np.int32)
    write_safetensors(tmp_path / "model.safetensors", gptq_tensors("a", codes, zeros, scales, g_idx=g_idx))
    write_config(tmp_path, {**GPTQ_CONFIG, "desc_act": True})
    qw = load(tmp_path)["a"]
    assert qw.perm is not None
    np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), dequantized(codes, zeros, scales, g_idx))


def test_layers_with_settings_of_their_own(tmp_path):
    codes, zeros, scales = random_layer(0, K, N, 1, 8)
    eight = {"b.qweight": words(codes, 8, 0), "b.qzeros": words(zeros - 1, 8, 1), "b.scales": scales}
    write_safetensors(tmp_path / "model.safetensors", {**gptq_tensors("a", *layer()), **eight})
    write_config(tmp_path, {**GPTQ_CONFIG, "dynamic": {"-:c.*": {}, "+:b.*": {"bits": 8, "group_size": -1}}})
    found = load(tmp_path)
    assert (found["a"].scheme, found["b"].scheme, found["b"].group_size) == ("w4a16", "w8a16", -1)
    np.testing.assert_array_equal(
        cupyq.dequantize(found["b"], "float64"), dequantized(codes, zeros, scales, np.zeros(K, int))
    )


@pytest.mark.parametrize(
    ("name", "key", "quantization"),
    [
        ("config.json", "quantization_config", AWQ_CONFIG),
        ("quant_config.json", None, {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_awq(tmp_path, name, key, quantization):
    codes, zeros, scales = layer()
    tensors = {"a.qweight": words(codes, 4, 1, AWQ), "a.qzeros": words(zeros, 4, 1, AWQ), "a.scales": scales}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    write_config(tmp_path, quantization, name, key)
    want = dequantized(codes, zeros, scales, ROWS)
    np.testing.assert_array_equal(cupyq.dequantize(load(tmp_path)["a"], "float64"), want)
    write_config(tmp_path, GPTQ_CONFIG)
    with pytest.raises(FormatError, match=r"model.safetensors, layer a: qweight must have shape .* AWQ"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_compressed_tensors_packed(tmp_path, dtype):
    codes, zeros, scales = layer()
    tensors = {
        "m.a.weight_packed": words(codes.T, 4, 1),
        "m.a.weight_scale": scales.T.astype(dtype),
        "m.a.weight_zero_point": words(zeros.T, 4, 0),
        "m.a.weight_shape": np.array([N, K], np.int64),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    write_config(tmp_path, ct_config())
    qw = load(tmp_path)["m.a"]
    assert qw.scale_dtype == dtype
    np.testing.assert_array_equal(
        cupyq.dequantize(qw, "float64"), dequantized(codes, zeros, scales.astype(dtype), ROWS)
    )
    del tensors["m.a.weight_zero_point"]  # without it every weight would be off by its zero point
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(FormatError, match=r"layer m.a: tensor weight_zero_point is missing"):
        load(tmp_path)


def test_a_scale_without_its_weight(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a.weight_scale": np.ones((N, 1), np.float32)})
    write_config(tmp_path, ct_config(None, "int-quantized", INT8_INPUTS, num_bits=8, symmetric=True))
    with pytest.raises(FormatError, match=r"model.safetensors, layer a: tensor weight is missing"):
        load(tmp_path)


@pytest.mark.parametrize("inputs", [INT8_INPUTS, None])
def test_compressed_tensors_int8(tmp_path, inputs):
    codes = np.random.default_rng(0).integers(-127, 128, (N, K)).astype(np.int8)
    scales = np.linspace(0.01, 0.02, N, dtype=np.float32).astype(BFLOAT16)[:, None]
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": codes, "a.weight_scale": scales, "n.weight": scales})
    write_config(tmp_path, ct_config(None, "int-quantized", inputs, num_bits=8, symmetric=True))
    found = load(tmp_path)
    assert {name: qw.scheme for name, qw in found.items()} == {"a": "w8a8-int8" if inputs else "w8a16"}
    np.testing.assert_array_equal(cupyq.dequantize(found["a"], "float64"), (codes * scales.astype(np.float64)).T)


@pytest.mark.parametrize(
    ("quantization", "scale_name"),
    [
        (ct_config(None, "float-quantized", {"num_bits": 8}, type="float", num_bits=8, symmetric=True), "weight_scale"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, "weight_scale_inv"),
    ],
)
def test_float8(tmp_path, quantization, scale_name):
    codes = np.random.default_rng(0).standard_normal((N, K)).astype(FLOAT8)
    blocks = scale_name == "weight_scale_inv"
    scales = np.full((1, 1), 0.25, np.float32) if blocks else np.linspace(0.1, 0.2, N, dtype=np.float32)[:, None]
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": codes, f"a.{scale_name}": scales})
    write_config(tmp_path, quantization)
    qw = load(tmp_path)["a"]
    assert qw.scheme == ("w8a8-fp8-block" if blocks else "w8a8-fp8")
    np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), (codes.astype(np.float64) * scales).T)


def test_compressed_tensors_targets(tmp_path):
    """A layer's own name beats a pattern, and a pattern beats the class."""
    codes, _, scales = layer()
    tensors = {}
    for name in ("a.q", "a.k", "b.q"):
        tensors[f"{name}.weight_packed"] = words(codes.T, 4, 1)
        tensors[f"{name}.weight_scale"] = scales.T
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config = ct_config(symmetric=True)
    weights = config["config_groups"]["group_0"]["weights"]
    for number, (target, bad_size) in enumerate([("re:a[.].*", 32), ("a.q", GROUP)], 1):
        config["config_groups"][f"group_{number}"] = {
            "targets": [target], "weights": {**weights, "group_size": bad_size}
        }  # fmt: skip
    write_config(tmp_path, config)
    found = Checkpoint(tmp_path)
    assert found["a.q"].group_size == found["b.q"].group_size == GROUP
    with pytest.raises(FormatError, match=r"layer a.k: scales must have 2 rows"):
        found["a.k"]


def test_the_text_model_of_a_multimodal_one(tmp_path):
    codes, zeros, scales = layer()
    write_safetensors(tmp_path / "model.safetensors", gptq_tensors("a", codes, zeros, scales))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": GPTQ_CONFIG}}))
    assert load(tmp_path)["a"].shape == (K, N)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "config.json, quantization_config: quant_method must be .* got 'bi",
        ),
        ({**GPTQ_CONFIG, "checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'"),
        ({**GPTQ_CONFIG, "is_marlin_format": True}, "checkpoint_format must be"),
        ({**GPTQ_CONFIG, "bits": "4"}, "bits must be an integer, got '4'"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({**GPTQ_CONFIG, "bits": 3}, "layer a: bits must be 2 or 4 or 8, got 3"),
        ({**AWQ_CONFIG, "version": "gemv"}, "version must be 'gemm', got 'gemv'"),
        ({"quant_method": "fp8"}, r"weight_block_size must be \[128, 128\], got None"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing or empty"),
        (ct_config(form="marlin-24"), "format of config_groups.group_0 must be 'pack-quantized' .* got 'marlin-24'"),
        (ct_config(num_bits=3), "got 'int of 3 bits'"),
        (ct_config(type="float"), "got 'float of 4 bits'"),
        (ct_config(strategy="tensor_group"), "weights.strategy must be 'group' or 'channel' or 'tensor'"),
        ("gptq", "must be an object, got 'gptq'"),
    ],
)
def test_configurations_that_are_not_read(tmp_path, quantization, message):
    write_safetensors(tmp_path / "model.safetensors", gptq_tensors("a", *layer()))
    write_config(tmp_path, quantization)
    with pytest.raises(FormatError, match=message):
        load(tmp_path)


def test_no_target_fits(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a.weight_packed": np.zeros((N, 8), np.int32)})
    write_config(tmp_path, ct_config(targets=["re:b.*"]))
    with pytest.raises(FormatError, match="no target of config_groups fits layer a"):
        load(tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_file_cut_short(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, gptq_tensors("a", *layer()))
    write_config(tmp_path, GPTQ_CONFIG)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"model.safetensors is no complete safetensors file"):
            load(tmp_path)
    path.write_bytes(whole)
    found = Checkpoint(tmp_path)
    path.write_bytes(whole[:-1])  # after it was opened
    with pytest.raises(FormatError, match="is cut short"):
        found["a"]


@pytest.mark.parametrize("tensor", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(tmp_path, tensor):
    tensors = gptq_tensors("a", *layer())
    del tensors[f"a.{tensor}"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    write_config(tmp_path, GPTQ_CONFIG)
    message = "no layer of a gptq checkpoint" if tensor == "qweight" else f"layer a: tensor {tensor} is missing"
    with pytest.raises(FormatError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.qweight": "../x.safetensors"}, "files must lie in the folder of the index, got '../x.safetensors'"),
        ({"a.qweight": "gone.safetensors"}, "names gone.safetensors, which is not in"),
        ({"b.qweight": "model.safetensors"}, "says that model.safetensors holds b.qweight, which it does not"),
        (["a.qweight"], "must have an object weight_map"),
    ],
)
def test_an_index_that_is_wrong(tmp_path, weight_map, message):
    write_safetensors(tmp_path / "model.safetensors", gptq_tensors("a", *layer()))
    write_config(tmp_path, GPTQ_CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=message):
        load(tmp_path)


def test_files_that_are_not_there_or_no_json(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere")
    write_config(tmp_path, GPTQ_CONFIG)
    with pytest.raises(FormatError, match="has no safetensors file"):
        load(tmp_path)
    for text, message in (("{", "config.json is no JSON file"), ("[]", "must hold a JSON object, got list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(FormatError, match=message):
            load(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    for name in ("one", "two"):
        write_safetensors(tmp_path / f"{name}.safetensors", gptq_tensors("a", *layer()))
    write_config(tmp_path, GPTQ_CONFIG)
    with pytest.raises(FormatError, match=r"is in both one.safetensors and two.safetensors"):
        load(tmp_path)


def test_options_are_checked_before_files(tmp_path):
    for options, message in (({"version": "v3"}, "version must be"), ({"overflow": "x"}, "overflow must be")):
        with pytest.raises(ArgumentError, match=message):
            load(tmp_path, **options)


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_every_dtype_comes_back(tmp_path):
    tensors = {
        "half": np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3),
        "brain": np.linspace(-1, 1, 5, dtype=np.float32).astype(BFLOAT16),
        "eighth": np.arange(256, dtype=np.uint8).view(FLOAT8),
        "words": np.array([[-1, 2**31 - 1]], np.int32),
        "long": np.array(-(2**63), np.int64),
        "none": np.zeros((0, 4), np.int8),
    }
    write_safetensors(tmp_path / "t.safetensors", tensors)
    file = SafetensorsFile(tmp_path / "t.safetensors")
    assert file.names == list(tensors)
    assert file.metadata == {"format": "pt"}
    for name, array in tensors.items():
        found = file.read(name)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_dtype_that_is_not_read(tmp_path):
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"a": np.zeros(4, FLOAT8)})
    path.write_bytes(path.read_bytes().replace(b"F8_E4M3", b"F8_E5M2"))
    with pytest.raises(FormatError, match=r"t.safetensors: tensor a has dtype F8_E5M2; BF16, .* are read"):
        SafetensorsFile(path).read("a")


def test_files_of_the_safetensors_package_are_read(tmp_path):
    from safetensors.numpy import save_file

    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.int32)}
    save_file(tensors, tmp_path / "t.safetensors")
    file = SafetensorsFile(tmp_path / "t.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(file.read(name), array)


def test_neither_torch_nor_cupy_is_imported(gptq_folder):
    code = (
        "import sys, cupyq; cupyq.formats.load(sys.argv[1]);"
        "print(*(name for name in ('torch', 'cupy', 'ml_dtypes') if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(gptq_folder[0])], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["ml_dtypes"]
