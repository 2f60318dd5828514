"""What a checkpoint's configuration promises of each layer: method, bits, groups, version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import FormatError

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_PACKINGS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Settings:
    """Settings of one layer.

    Attributes
    ----------
    bits : int or None
        Bits of a code; None where the tensors' dtype says it.
    group_size : int or None
        -1 for the whole column; None is read off the shapes.
    symmetric : bool or None
        True where the configuration promises it; None otherwise: an asymmetric weight may happen to be symmetric.
    asymmetric : bool
        Whether zero points must be there (compressed-tensors).
    version : str
        Of GPTQ: "v1" or "v2".
    quantized_activations : bool
        Whether activations have 8 bits too (compressed-tensors).
    symmetric_activations : bool
        Whether those have no zero points.
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    asymmetric: bool = False
    version: str = "v1"
    quantized_activations: bool = True
    symmetric_activations: bool = True


class Config:
    """The `quantization_config` of a checkpoint.

    Parameters
    ----------
    data : dict
        Its content.
    origin : str
        Where it comes from, for messages.
    """

    def __init__(self, data: dict[str, Any], origin: str) -> None:
        if not isinstance(data, dict):
            raise FormatError(f"{origin} must be an object, got {data!r}")
        self.origin = origin
        self._data = data
        method = data.get("quant_method")
        if method is None:  # the files that GPTQ and AWQ tools write beside a model name no method
            if "w_bit" in data:
                method = "awq"
            elif "desc_act" in data or "bits" in data:
                method = "gptq"
            elif "config_groups" in data:
                method = "compressed-tensors"
        if method not in METHODS:
            raise self._error("quant_method", method, METHODS)
        self.method: str = method
        self._base = getattr(self, "_" + method.replace("-", "_"))()

    def layer(self, name: str) -> Settings:
        """Return the settings of a layer."""
        if self.method == "compressed-tensors":
            return self._group_of(name)
        for pattern, changes in self._get_dict("dynamic").items():  # GPTQModel's exceptions by module
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), name):
                return self._gptq_settings({**self._data, **changes})
        return self._base

    def _error(self, key: str, value: Any, accepted: Any) -> FormatError:
        return FormatError(f"{self.origin}: {key} must be {' or '.join(map(repr, accepted))}, got {value!r}")

    def _get_dict(self, key: str) -> dict[str, Any]:
        value = self._data.get(key) or {}
        if not isinstance(value, dict):
            raise FormatError(f"{self.origin}: {key} must be an object, got {value!r}")
        return value

    def _integer(self, data: dict[str, Any], *keys: str) -> int | None:
        for key in keys:
            value = data.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise FormatError(f"{self.origin}: {key} must be an integer, got {value!r}")
                return value
        return None

    def _gptq(self) -> Settings:
        return self._gptq_settings(self._data)

    def _gptq_settings(self, data: dict[str, Any]) -> Settings:
        form = data.get("checkpoint_format") or data.get("format") or "gptq"
        versions = {"gptq": "v1", "gptq_v2": "v2"}
        if data.get("is_marlin_format") or form not in versions:
            raise self._error("checkpoint_format", "marlin" if data.get("is_marlin_format") else form, versions)
        bits = self._integer(data, "bits")
        if bits is None:
            raise FormatError(f"{self.origin}: bits is missing")
        symmetric = True if data.get("sym") else None
        return Settings(bits, self._integer(data, "group_size"), symmetric, version=versions[form])

    def _awq(self) -> Settings:
        data = self._data
        version = str(data.get("version") or data.get("checkpoint_format") or data.get("format") or "gemm").lower()
        if version != "gemm":
            raise self._error("version", version, ("gemm",))
        bits = self._integer(data, "bits", "w_bit")
        return Settings(4 if bits is None else bits, self._integer(data, "group_size", "q_group_size"))

    def _fp8(self) -> Settings:
        block = self._data.get("weight_block_size")
        if block != [128, 128]:
            raise self._error("weight_block_size", block, ([128, 128],))
        return Settings()

    def _compressed_tensors(self) -> Settings:
        groups = self._get_dict("config_groups")
        if not groups:
            raise FormatError(f"{self.origin}: config_groups is missing or empty")
        self._groups: list[tuple[list[str], Settings]] = []
        for name, group in groups.items():
            where = f"config_groups.{name}"
            if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
                raise FormatError(f"{self.origin}: {where} must have an object `weights`")
            form = group.get("format") or self._data.get("format")
            if form not in _PACKINGS:
                raise self._error(f"format of {where}", form, _PACKINGS)
            self._groups.append((list(group.get("targets") or ["Linear"]), self._weights(group, where)))
        return Settings()

    def _weights(self, group: dict[str, Any], where: str) -> Settings:
        weights = group["weights"]
        kind, bits = weights.get("type", "int"), self._integer(weights, "num_bits") or 8
        if (kind, bits) not in (("int", 2), ("int", 4), ("int", 8), ("float", 8)):
            raise self._error(
                f"{where}.weights", f"{kind} of {bits} bits", ("int of 2, 4 or 8 bits", "float of 8 bits")
            )
        strategy = weights.get("strategy")
        group_size = self._integer(weights, "group_size")
        if strategy is None:
            strategy = "group" if (group_size or -1) > 0 else "channel"
        accepted = ("group", "channel", "tensor") if kind == "int" else ("channel", "tensor", "block")
        if strategy not in accepted:
            raise self._error(f"{where}.weights.strategy", strategy, accepted)
        inputs = group.get("input_activations")
        return Settings(
            bits,
            group_size if strategy == "group" else -1,
            True if weights.get("symmetric", True) else None,
            asymmetric=not weights.get("symmetric", True),
            quantized_activations=inputs is not None,
            symmetric_activations=not isinstance(inputs, dict) or bool(inputs.get("symmetric", True)),
        )

    def _group_of(self, name: str) -> Settings:
        """Return the settings whose target is the layer's name, else a pattern that fits it, else a class of layers."""

        def fits(target: str) -> Iterator[bool]:
            yield target == name
            yield target.startswith("re:") and re.match(target[3:], name) is not None
            yield not target.startswith("re:") and "." not in target

        for rule in range(3):
            for targets, settings in self._groups:
                if any(list(fits(target))[rule] for target in targets):
                    return settings
        raise FormatError(f"{self.origin}: no target of config_groups fits layer {name}")


def with_version(settings: Settings, version: str | None) -> Settings:
    return settings if version is None else replace(settings, version=version)


def find(folder: Path) -> Config:
    """Return the configuration of a Hugging Face folder, from config.json, quantize_config.json or quant_config.json.

    Raises
    ------
    FormatError
        None of them has one, or it names a method that is not read.
    """
    for name in ("config.json", "quantize_config.json", "quant_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        data = read_json(path)
        if name != "config.json":
            return Config(data, str(path))
        for part in (data, data.get("text_config")):  # the language model of a multimodal one
            for key in ("quantization_config", "compression_config"):
                if isinstance(part, dict) and part.get(key):
                    return Config(part[key], f"{path}, {key}")
    raise FormatError(
        f"{folder} has no quantization_config: config.json with that key, quantize_config.json or quant_config.json "
        "is needed; or pass config="
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is no JSON file: {error}") from error
    if not isinstance(data, dict):
        raise FormatError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data
