"""safetensors files as NumPy arrays: bfloat16 and float8 included, one tensor at a time, without torch.

The container is eight bytes with the length of a JSON header, the header, and the tensors' bytes, little-endian
(https://github.com/huggingface/safetensors, "Format"). The safetensors package checks that a file is whole; its NumPy
side knows no float8, so the bytes are read here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import BFLOAT16, FLOAT8
from ..errors import FormatError

DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": FLOAT8,
    "BF16": BFLOAT16,
    **{
        name: np.dtype(code)
        for name, code in {
            "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
            "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
        }.items()
    },
}  # fmt: skip
"""Dtype of a header -> NumPy's."""


class SafetensorsFile:
    """One file, opened anew for each tensor: nothing is held open, and only what is asked for is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        try:
            with safe_open(os.fspath(path), framework="np"):
                pass
        except SafetensorError as error:
            raise FormatError(f"{self.path} is no complete safetensors file: {error}") from error
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        self._start = 8 + length
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._tensors = header

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def read(self, name: str) -> np.ndarray:
        """Return one tensor."""
        entry = self._tensors[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise FormatError(
                f"{self.path}: tensor {name} has dtype {entry['dtype']}; {', '.join(sorted(DTYPES))} are read"
            )
        begin, end = entry["data_offsets"]
        raw = np.fromfile(self.path, np.uint8, end - begin, offset=self._start + begin)
        if raw.size != end - begin:  # the file changed since it was opened
            raise FormatError(f"{self.path}: tensor {name} is cut short")
        return raw.view(dtype).reshape(entry["shape"])
