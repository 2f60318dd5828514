"""Encoders of other tools' formats, one code at a time in Python integers: nothing shared with `cupyq.formats`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

NATURAL = tuple(range(32))
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)

DTYPE_NAMES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip


def words(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = NATURAL) -> np.ndarray:
    """Pack a matrix of integers along `axis`; place i of a word holds its code number ``order[i]``."""
    lines = [list(map(int, line)) for line in (values if axis == 1 else values.T)]
    each = 32 // bits
    packed = []
    for line in lines:
        line += [0] * (-len(line) % each)
        row = []
        for start in range(0, len(line), each):
            word = 0
            for place in range(each):
                code = line[start + order[place]]
                assert 0 <= code < 1 << bits
                word |= code << bits * place
            row.append(word - (1 << 32) if word >> 31 else word)
        packed.append(row)
    out = np.array(packed, np.int32)
    return np.ascontiguousarray(out if axis == 1 else out.T)


def dequantized(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the float64 weight: (K, N) codes, (groups, N) zeros and scales, the group of each row."""
    return (codes.astype(np.float64) - zeros[rows]) * scales.astype(np.float64)[rows]


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a file byte by byte: the dtypes that other writers lack are the point."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def random_layer(seed: int, k: int, n: int, groups: int, bits: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes (K, N), zeros (groups, N) in 1..2**bits - 1, float16 scales (groups, N)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (k, n))
    zeros = rng.integers(1, 1 << bits, (groups, n))
    return codes, zeros, rng.uniform(0.01, 0.1, (groups, n)).astype(np.float16)


def symmetric_zeros(groups: int, n: int, bits: int = 4) -> np.ndarray:
    return np.full((groups, n), 1 << bits - 1)


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
