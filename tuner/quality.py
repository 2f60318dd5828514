"""The other side of a group size: how far quantization moves a user's own weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cupyq import reference
from cupyq.errors import ArgumentError
from cupyq.formats.tensors import SafetensorsFile
from cupyq.kernels import Problem
from cupyq.quantize import quantize

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that were not quantized yet, as safetensors calls them."""


class Weights:
    """Float weights of a safetensors file, stored (N, K) as PyTorch's linear layers are.

    Parameters
    ----------
    named : str
        "FILE", whose first tensor of each wanted shape is taken, or "FILE:TENSOR".

    Raises
    ------
    ArgumentError
        There is no such file or tensor, or the tensor is no float matrix.
    FormatError
        The file is no complete safetensors file.
    """

    def __init__(self, named: str) -> None:
        path, _, tensor = named.rpartition(":")
        if not path or not Path(path).is_file():
            path, tensor = named, ""
        if not Path(path).is_file():
            raise ArgumentError(f"weights: there is no file {path}")
        self.name = f"{Path(path).name}:{tensor}" if tensor else Path(path).name
        self._file = SafetensorsFile(path)
        if tensor and tensor not in self._file.names:
            raise ArgumentError(f"weights: {path} has no tensor {tensor!r}; it has {_some(self._file.names)}")
        self._names = [tensor] if tensor else self._file.names

    @functools.cached_property
    def _matrices(self) -> dict[tuple[int, int], str]:
        from safetensors import safe_open

        found: dict[tuple[int, int], str] = {}
        with safe_open(str(self._file.path), framework="np") as file:
            for name in self._names:
                piece = file.get_slice(name)
                shape = piece.get_shape()
                # Embeddings are matrices too, and no linear layers.
                if len(shape) == 2 and "embed" not in name and piece.get_dtype() in FLOATS:
                    found.setdefault((shape[1], shape[0]), name)
        if not found:
            raise ArgumentError(f"weights: {self.name} holds no float matrix, of which a linear layer is made")
        return found

    def shapes(self) -> list[tuple[int, int]]:
        """Return the distinct (K, N) of the matrices."""
        return list(self._matrices)

    def matrix(self, k: int, n: int) -> np.ndarray:
        """Return the first weight of this shape, (K, N) float32.

        Raises
        ------
        ArgumentError
            The file has none.
        """
        if (k, n) not in self._matrices:
            raise ArgumentError(
                f"weights: {self.name} has no {k}x{n} weight; it has {_some([f'{a}x{b}' for a, b in self._matrices])}"
            )
        return np.ascontiguousarray(self._file.read(self._matrices[k, n]).astype(np.float32).T)

    def errors(self, problems: Iterable[Problem]) -> dict[Problem, float]:
        """Return, per problem with M = 1, ``||w - quantized w|| / ||w||`` in the Frobenius norm."""
        errors: dict[Problem, float] = {}
        by_shape: dict[tuple[int, int], list[Problem]] = {}
        for problem in dict.fromkeys(p.with_m(1) for p in problems):
            by_shape.setdefault((problem.k, problem.n), []).append(problem)
        for (k, n), alike in by_shape.items():
            w = self.matrix(k, n)
            for problem in alike:
                errors[problem] = _relative_error(w, problem)
        return errors


def _relative_error(w: np.ndarray, problem: Problem) -> float:
    qw = quantize(w, problem.op, problem.group_size, problem.symmetric)
    apart = reference.dequantize(qw, "float32") - w
    size = float(np.linalg.norm(w))
    return float(np.linalg.norm(apart)) / size if size else 0.0


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
