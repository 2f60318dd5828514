"""A checkpoint on disk: which layers it has, in which files, and each as a `QuantizedWeight` when asked for."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, CupyqError, FormatError
from ..weights import QuantizedWeight
from . import config as configs
from .awq import from_awq
from .compressed_tensors import from_compressed_tensors, from_fp8_blocks
from .gptq import OVERFLOWS, VERSIONS, from_gptq
from .tensors import SafetensorsFile

# Method -> names that tell a quantized layer; the others of these tensors must be there too.
_MARKS = {
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv",),
}


class Checkpoint(Mapping[str, QuantizedWeight]):
    """The quantized layers of a checkpoint, by name; each is read and packed when it is asked for.

    Parameters
    ----------
    path : path
        A Hugging Face folder (its index names the shards; without one, all its safetensors files), or one file, whose
        configuration lies beside it.
    config : dict, optional
        The `quantization_config`, instead of the one on disk.
    version : str, optional
        GPTQ: "v1" or "v2", where the configuration says it wrongly.
    symmetric, overflow, scale_dtype
        As for :func:`from_gptq`; `symmetric` None is what the configuration says.

    Raises
    ------
    FormatError
        A file is damaged or missing, or says what cupyq does not read; the message names file, layer and tensor.
    OSError
        A file cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: dict[str, Any] | None = None,
        version: str | None = None,
        symmetric: bool | None = None,
        overflow: str = "error",
        scale_dtype: str | np.dtype | None = None,
    ) -> None:
        if version not in (None, *VERSIONS):
            raise ArgumentError(f"version must be 'v1', 'v2' or None, got {version!r}")
        if overflow not in OVERFLOWS:
            raise ArgumentError(f"overflow must be {', '.join(map(repr, OVERFLOWS))}, got {overflow!r}")
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} does not exist")
        folder = self.path if self.path.is_dir() else self.path.parent
        self._config = configs.find(folder) if config is None else configs.Config(config, "config")
        self._version, self._symmetric, self._overflow, self._scale_dtype = version, symmetric, overflow, scale_dtype
        self._file_of = _tensor_files(self.path)
        marks = _MARKS[self._config.method]
        layers = (name.rpartition(".") for name in self._file_of)
        self._layers = sorted({layer for layer, _, tensor in layers if tensor in marks}, key=_natural)
        if not self._layers:
            raise FormatError(
                f"{self.path} has no layer of a {self._config.method} checkpoint: no tensor is called "
                f"{' or '.join('*.' + m for m in marks)}"
            )

    @property
    def method(self) -> str:
        """ "gptq", "awq", "compressed-tensors" or "fp8"."""
        return self._config.method

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors, those of unquantized layers and biases included."""
        return tuple(self._file_of)

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as it is stored: a bias, a norm, an embedding."""
        if name not in self._file_of:
            raise ArgumentError(f"name must be a tensor of {self.path}, got {name!r}{_near(name, self._file_of)}")
        return self._file_of[name].read(name)

    def bias(self, layer: str) -> np.ndarray | None:
        """Return the bias of a layer, (N,) in its stored dtype, or None."""
        name = f"{layer}.bias"
        return self.tensor(name) if name in self._file_of else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __repr__(self) -> str:
        return f"Checkpoint({os.fspath(self.path)!r}: {self.method}, {len(self)} layers)"

    def __getitem__(self, layer: str) -> QuantizedWeight:
        if layer not in self._layers:
            raise KeyError(layer)
        settings = configs.with_version(self._config.layer(layer), self._version)
        symmetric = settings.symmetric if self._symmetric is None else self._symmetric
        tensors = _Layer(layer, self._file_of)
        common: dict[str, Any] = dict(
            group_size=settings.group_size, symmetric=symmetric, scale_dtype=self._scale_dtype
        )
        try:
            if self.method == "gptq":
                return from_gptq(
                    tensors.need("qweight"),
                    tensors.need("qzeros"),
                    tensors.need("scales"),
                    tensors.get("g_idx"),
                    bits=settings.bits or 4,
                    version=settings.version,
                    overflow=self._overflow,
                    **common,
                )
            if self.method == "awq":
                return from_awq(
                    tensors.need("qweight"),
                    tensors.need("qzeros"),
                    tensors.need("scales"),
                    bits=settings.bits or 4,
                    **common,
                )
            if self.method == "fp8":
                return from_fp8_blocks(tensors.need("weight"), tensors.need("weight_scale_inv"))
            dense = tensors.get("weight_packed") is None
            shape = tensors.get("weight_shape")
            return from_compressed_tensors(
                tensors.need("weight" if dense else "weight_packed"),
                tensors.need("weight_scale"),
                (tensors.need if settings.asymmetric else tensors.get)("weight_zero_point"),
                tensors.get("weight_g_idx"),
                weight_shape=None if shape is None else tuple(shape.ravel().tolist()),
                bits=settings.bits,
                quantized_activations=settings.quantized_activations,
                input_scale=tensors.get("input_scale"),
                input_zero_point=tensors.get("input_zero_point"),
                symmetric_activations=settings.symmetric_activations,
                **common,
            )
        except CupyqError as error:
            raise FormatError(f"{tensors.files()}, layer {layer}: {error}") from error


class _Layer:
    """Tensors of one layer, and which files they came from."""

    def __init__(self, layer: str, file_of: dict[str, SafetensorsFile]) -> None:
        self._layer, self._file_of = layer, file_of
        self._read: dict[str, np.ndarray] = {}

    def get(self, tensor: str) -> np.ndarray | None:
        name = f"{self._layer}.{tensor}" if self._layer else tensor
        if tensor not in self._read and name in self._file_of:
            self._read[tensor] = self._file_of[name].read(name)
        return self._read.get(tensor)

    def need(self, tensor: str) -> np.ndarray:
        found = self.get(tensor)
        if found is None:
            raise FormatError(f"tensor {tensor} is missing")
        return found

    def files(self) -> str:
        """Say which files hold the tensors that were read, or, of none, those of the layer."""
        prefix = f"{self._layer}." if self._layer else ""
        names = [prefix + t for t in self._read] or [n for n in self._file_of if n.startswith(prefix)]
        return ", ".join(sorted({str(self._file_of[name].path) for name in names}))


def load(
    path: str | os.PathLike[str],
    layer: str | None = None,
    *,
    config: dict[str, Any] | None = None,
    version: str | None = None,
    symmetric: bool | None = None,
    overflow: str = "error",
    scale_dtype: str | np.dtype | None = None,
) -> dict[str, QuantizedWeight]:
    """Read the quantized layers of a checkpoint, all at once, or one.

    For a model that does not fit in memory, go through a :class:`Checkpoint` layer by layer. Parameters and errors are
    those of :class:`Checkpoint`.

    Parameters
    ----------
    layer : str, optional
        Only this layer: "model.layers.0.mlp.down_proj".

    Returns
    -------
    dict of str to QuantizedWeight
        In host memory, by layer.
    """
    found = Checkpoint(
        path, config=config, version=version, symmetric=symmetric, overflow=overflow, scale_dtype=scale_dtype
    )
    if layer is None:
        return dict(found.items())
    if layer not in found:
        raise ArgumentError(
            f"layer must be one of the {len(found)} of {found.path}, got {layer!r}{_near(layer, found)}"
        )
    return {layer: found[layer]}


def _near(name: str, names: Any) -> str:
    near = difflib.get_close_matches(str(name), list(names), 3, 0.3)
    return f"; near it: {', '.join(near)}" if near else ""


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which layer 10 comes after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _tensor_files(path: Path) -> dict[str, SafetensorsFile]:
    """Return the file of each tensor."""
    if path.is_file():
        file = SafetensorsFile(path)
        return dict.fromkeys(file.names, file)
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise FormatError(f"{path} must have one index, got {', '.join(i.name for i in indexes)}; pass a single file")
    if indexes:
        return _indexed(path, indexes[0])
    found: dict[str, SafetensorsFile] = {}
    for part in sorted(path.glob("*.safetensors")):
        file = SafetensorsFile(part)
        for name in file.names:
            if name in found:
                raise FormatError(f"{path}: tensor {name} is in both {found[name].path.name} and {part.name}")
            found[name] = file
    if not found:
        raise FormatError(f"{path} has no safetensors file")
    return found


def _indexed(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map = configs.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FormatError(f"{index} must have an object weight_map of tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or "\\" in name:
            raise FormatError(f"{index}: files must lie in the folder of the index, got {name!r}")
        if not (folder / name).is_file():
            raise FormatError(f"{index} names {name}, which is not in {folder}")
        files[name] = SafetensorsFile(folder / name)
    held = {name: set(file.names) for name, file in files.items()}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise FormatError(f"{index} says that {name} holds {tensor}, which it does not")
    return {tensor: files[name] for tensor, name in weight_map.items()}
