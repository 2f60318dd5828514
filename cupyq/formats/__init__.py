"""Quantized checkpoints of other tools -> :class:`cupyq.QuantizedWeight`: GPTQ, AWQ, compressed-tensors, fp8 by blocks.

:func:`load` reads a Hugging Face folder or one safetensors file, :class:`Checkpoint` does so layer by layer, and
`from_gptq`, `from_awq`, `from_compressed_tensors` convert arrays that are already in memory. Nothing here needs torch.

No value is guessed, and none is rounded unless asked for: a weight that the packed layout cannot hold exactly, or
whose tensors can be read in two ways, raises :class:`cupyq.FormatError`.
"""

from __future__ import annotations

from .awq import from_awq
from .checkpoint import Checkpoint, load
from .compressed_tensors import from_compressed_tensors
from .gptq import from_gptq

__all__ = ["Checkpoint", "from_awq", "from_compressed_tensors", "from_gptq", "load"]
