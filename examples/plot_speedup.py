"""Draw what a tuning database knows of one weight shape: speed-up over float16 against batch, the roofline dashed.

    python -m cupyq.tune --device rtx-4090 --shapes 8192x8192 --db tuning.db
    python examples/plot_speedup.py --db tuning.db --shape 8192x8192 speedup.png

Every curve says whether its times were measured or predicted, as the rows do. Needs matplotlib.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from cupyq import devices, roofline

QUERY = """
    select device, source, band, max(speedup_vs_fp16) from best
    where op = 'w4a16' and k = ? and n = ? and group_size = ? and speedup_vs_fp16 is not null
    group by device, source, band order by device, source, band
"""
# One colour a device, distinct in grey too.
COLOURS = ("#1f6f8b", "#d1495b", "#6a994e", "#7b2d8b", "#b08900")


@click.command()
@click.argument("picture", type=click.Path(path_type=Path))
@click.option("--db", "database", type=click.Path(exists=True, path_type=Path), default="tuning.db", show_default=True)
@click.option("--shape", default="8192x8192", show_default=True, metavar="KxN")
@click.option("--group-size", type=int, default=128, show_default=True)
@click.option("--up-to", type=int, default=1024, show_default=True, metavar="M", help="Last batch to draw.")
def main(picture: Path, database: Path, shape: str, group_size: int, up_to: int) -> None:
    """Draw PICTURE (png, svg or pdf by its ending)."""
    k, n = (int(part) for part in shape.split("x"))
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute(QUERY, (k, n, group_size)).fetchall()
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for device, source, band, speedup in rows:
        if band <= up_to:
            curves.setdefault((device, source), []).append((band, speedup))
    if not curves:
        raise click.ClickException(f"{database} has no W4A16 rows for {shape}, group size {group_size}")

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for ((device, source), points), colour in zip(curves.items(), COLOURS, strict=False):
        bands, speedups = zip(*points, strict=True)
        spec = devices.get(device)
        ideal = [roofline.ideal_speedup_at(spec, m, n, k, bits=4, group_size=group_size) for m in bands]
        axes.plot(bands, ideal, "--", color=colour, alpha=0.55, linewidth=1.2)
        axes.plot(bands, speedups, "o-", color=colour, markersize=4.5, label=f"{spec.title}, {source}")
    axes.plot([], [], "--", color="0.4", linewidth=1.2, label="roofline of each GPU")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := sorted({m for points in curves.values() for m, _ in points}), [str(m) for m in ticks])
    axes.set_ylim(0, 4.2)
    axes.set_xlabel("batch M (tokens)")
    axes.set_ylabel("speed-up over float16")
    sources = " and ".join(sorted({source for _, source in curves}))
    axes.set_title(f"4-bit weights {k} x {n}, group size {group_size}: {sources}", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
