"""Which products to tune: shapes on the command line, built-in models, and models described by a config.json."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyq.errors import ArgumentError


@dataclass(frozen=True)
class Architecture:
    """The numbers of a transformer that decide the shapes of its linear layers.

    Parameters
    ----------
    hidden, intermediate : int
        Features of the residual stream, and of the feed-forward layer (of one expert, where there are several).
    heads, kv_heads : int
        Query heads; key and value heads.
    head_dim : int
        Features of a head.
    gated : bool
        The feed-forward layer has a gate beside its up projection, computed as one product.
    merged : bool
        Query, key and value are computed as one product.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = True
    merged: bool = True

    def layers(self, tensor_parallel: int = 1, merged: bool | None = None) -> dict[str, tuple[int, int]]:
        """Return the (K, N) of each kind of linear layer on one of `tensor_parallel` GPUs.

        Query, key, value, gate and up are split along N (a key or value head is copied where there are fewer heads than
        GPUs); attention output and down are split along K.

        Parameters
        ----------
        tensor_parallel : int
        merged : bool, optional
            Whether query, key and value, and gate and up, are one product each, as engines run them, or stay apart, as
            checkpoints store them. By default as this architecture is usually run.

        Raises
        ------
        ArgumentError
            The GPUs cannot share the heads or the intermediate features evenly.
        """
        tp = tensor_parallel
        if not self._splits(tp):
            able = [count for count in range(1, self.heads + 1) if self._splits(count)]
            raise ArgumentError(
                f"tensor_parallel={tp} cannot share {self.heads} heads, {self.kv_heads} key and value heads and "
                f"{self.intermediate} intermediate features evenly; accepted: {', '.join(map(str, able))}"
            )
        q = self.heads // tp * self.head_dim
        kv = max(1, self.kv_heads // tp) * self.head_dim
        inner = self.intermediate // tp
        layers: dict[str, tuple[int, int]]
        if self.merged if merged is None else merged:
            layers = {"qkv": (self.hidden, q + 2 * kv)}
            layers |= {"gate and up": (self.hidden, 2 * inner)} if self.gated else {"up": (self.hidden, inner)}
        else:
            layers = {"q": (self.hidden, q), "k": (self.hidden, kv), "v": (self.hidden, kv)}
            layers |= {"gate": (self.hidden, inner)} if self.gated else {}
            layers["up"] = (self.hidden, inner)
        return layers | {"attention output": (q, self.hidden), "down": (inner, self.hidden)}

    def _splits(self, tp: int) -> bool:
        if tp < 1 or self.heads % tp or self.intermediate % tp:
            return False
        return tp % self.kv_heads == 0 if tp > self.kv_heads else self.kv_heads % tp == 0


MODELS: Mapping[str, Architecture] = {
    # all-MiniLM-L6-v2 is tuned as its layers are stored: query, key and value apart, no gate.
    "minilm": Architecture(384, 1536, 12, 12, 32, gated=False, merged=False),
    "llama-2-7b": Architecture(4096, 11008, 32, 32, 128),
    "llama-2-13b": Architecture(5120, 13824, 40, 40, 128),
    "llama-2-70b": Architecture(8192, 28672, 64, 8, 128),
    "llama-3-8b": Architecture(4096, 14336, 32, 8, 128),
    "llama-3-70b": Architecture(8192, 28672, 64, 8, 128),
    "llama-3.2-1b": Architecture(2048, 8192, 32, 8, 64),
    "llama-3.2-3b": Architecture(3072, 8192, 24, 8, 128),
    "mistral-7b": Architecture(4096, 14336, 32, 8, 128),
    "qwen2.5-0.5b": Architecture(896, 4864, 14, 2, 64),
    "qwen2.5-1.5b": Architecture(1536, 8960, 12, 2, 128),
    "qwen2.5-7b": Architecture(3584, 18944, 28, 4, 128),
    "qwen2.5-14b": Architecture(5120, 13824, 40, 8, 128),
    "qwen2.5-32b": Architecture(5120, 27648, 40, 8, 128),
    "qwen2.5-72b": Architecture(8192, 29568, 64, 8, 128),
    "gemma-2-9b": Architecture(3584, 14336, 16, 8, 256),
    "phi-3-mini": Architecture(3072, 8192, 32, 32, 96),
}
"""Published configurations, by the names people use."""

LAYERS: Mapping[str, tuple[bool | None, ...]] = {
    "usual": (None,),
    "fused": (True,),
    "unfused": (False,),
    "both": (True, False),
}
"""Whether the layers that read the same input are one product: as the model is usually run, yes, no, or each way."""

# Model types whose feed-forward layer has no gate.
_PLAIN = {"bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "gpt2", "gptj", "gpt_neox", "opt", "falcon", "phi"}
# Model types whose checkpoints keep query, key and value apart because engines run them so.
_APART = {"bert", "distilbert", "roberta", "xlm-roberta", "mpnet"}


def architecture(model: str | Path) -> Architecture:
    """Return the architecture of a built-in model or of a Hugging Face config.json.

    Parameters
    ----------
    model : str or Path
        A name of `MODELS`, a config.json, or the folder that holds one.

    Raises
    ------
    ArgumentError
        There is no such model or file, or the file lacks what is needed; the message says what.
    """
    name = str(model)
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(MODELS)}"
    raise ArgumentError(f"model={name!r} is no built-in model and no config.json; {hint}")


def _read(path: Path) -> Architecture:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"{path} holds no JSON object")
    config = {**config, **(config.get("text_config") or {})}  # multimodal models nest their language model
    if config.get("kv_lora_rank"):
        raise ArgumentError(
            f"{path}: layers of multi-head latent attention (kv_lora_rank) have other shapes; name them: --shapes KxN"
        )
    kind = str(config.get("model_type", ""))
    hidden = _whole(config, path, "hidden_size", "n_embd", "d_model", "dim")
    heads = _whole(config, path, "num_attention_heads", "n_head", "n_heads")
    intermediate = _whole(
        config, path, "moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "hidden_dim",
        default=4 * hidden,
    )  # fmt: skip
    # Falcon's first version has one key and value head, and no number that says so.
    single = config.get("multi_query") is True and not config.get("new_decoder_architecture")
    kv_heads = _whole(config, path, "num_key_value_heads", "num_kv_heads", default=1 if single else heads)
    head_dim = _whole(config, path, "head_dim", default=hidden // heads)
    return Architecture(
        hidden, intermediate, heads, kv_heads, head_dim, gated=kind not in _PLAIN, merged=kind not in _APART
    )


def _whole(config: Mapping[str, Any], path: Path, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{path}: {name}={value!r} is no positive whole number")
            return value
    if default is None:
        raise ArgumentError(f"{path} has none of {', '.join(names)}: it does not describe a transformer")
    return default


def model_shapes(model: str | Path, tensor_parallel: int = 1, layers: str = "usual") -> list[tuple[int, int]]:
    """Return the distinct (K, N) of a model's linear layers on one of `tensor_parallel` GPUs.

    Parameters
    ----------
    model : str or Path
        As `architecture`.
    tensor_parallel : int
    layers : {"usual", "fused", "unfused", "both"}
        Which of `Architecture.layers`.
    """
    known = architecture(model)
    shapes: list[tuple[int, int]] = []
    for merged in LAYERS[layers]:
        shapes += known.layers(tensor_parallel, merged).values()
    return list(dict.fromkeys(shapes))


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Return the (K, N) pairs of "KxN,KxN,...".

    Raises
    ------
    ArgumentError
        A part is no KxN of positive whole numbers.
    """
    shapes = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(\d+)\s*[xX*]\s*(\d+)", part)
        if found is None or not all(0 < int(size) < 2**31 for size in found.groups()):
            raise ArgumentError(f"shapes: {part!r} is no KxN, such as 4096x11008 (input features x output features)")
        shapes.append((int(found[1]), int(found[2])))
    if not shapes:
        raise ArgumentError("shapes is empty; one KxN at least is needed, such as 4096x11008")
    return list(dict.fromkeys(shapes))


def parse_numbers(name: str, text: str) -> list[int]:
    """Return the whole numbers of "1,16,128".

    Raises
    ------
    ArgumentError
        A part is no whole number.
    """
    numbers = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if re.fullmatch(r"-?\d+", part) is None:
            raise ArgumentError(f"{name}: {part!r} is no whole number")
        numbers.append(int(part))
    if not numbers:
        raise ArgumentError(f"{name} is empty; whole numbers separated by commas are accepted")
    return list(dict.fromkeys(numbers))
