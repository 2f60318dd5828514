"""PNG plots for papers, drawn with matplotlib from the same facts as the page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyq import bands
from cupyq.errors import ArgumentError, NotInstalled
from cupyq.report.chart import band_label, group_label, problem_label, shape_label
from cupyq.report.page import replace


def write(facts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write one plot of speed-up against batch a device, and one a Pareto front, and return the files.

    Raises
    ------
    NotInstalled
        There is no matplotlib.
    ArgumentError
        The folder cannot be made or written.
    """
    figure = _figure_class()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--png is {folder}, which cannot be made: {error.strerror}") from None
    written: list[Path] = []
    for device in facts["devices"]:
        series = [s for s in facts["series"] if s["device"] == device["device"]]
        if series:
            drawn = figure(figsize=(6.4, 4.0), layout="constrained")
            _speedup(drawn.subplots(), series, device["title"] or device["device"])
            written.append(_save(drawn, folder, f"speedup-{device['device']}", written))
    for front in facts["pareto"]:
        drawn = figure(figsize=(4.8, 3.6), layout="constrained")
        _pareto(drawn.subplots(), front)
        name = f"pareto-{front['device']}-{front['k']}x{front['n']}-{front['band']}-{front['source']}"
        written.append(_save(drawn, folder, name, written))
    return written


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # needs no display and leaves pyplot's global state alone
    except ImportError:
        raise NotInstalled("PNG plots need matplotlib: pip install 'cupyq[docs]'") from None
    return Figure


def _save(drawn: Any, folder: Path, name: str, taken: Sequence[Path]) -> Path:
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:120] or "plot"
    target = folder / f"{stem}.png"
    count = 2
    while target in taken:
        target = folder / f"{stem}-{count}.png"
        count += 1
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=200)
    replace(target, content.getvalue())
    return target


def _plain(text: str) -> str:
    """Return text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def _speedup(axes: Any, series: Sequence[Mapping[str, Any]], title: str) -> None:
    for place, curve in enumerate(series):
        colour = f"C{place % 10}"
        x, y = [p["band"] for p in curve["points"]], [p["speedup"] for p in curve["points"]]
        face = "white" if curve["source"] == "predicted" else colour
        label = _plain(f"{problem_label(curve)} ({curve['source']})")
        axes.plot(x, y, "-o", color=colour, markerfacecolor=face, markersize=4, linewidth=1.4, label=label)
        if curve["ideal"]:
            axes.plot(*zip(*curve["ideal"], strict=True), "--", color=colour, linewidth=0.9, alpha=0.7)
    axes.plot([], [], "--", color="0.4", linewidth=0.9, label="ideal (roofline)")
    axes.axhline(1, color="0.4", linewidth=0.8)
    ends = bands.ends()[::2]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, [band_label(end, short=True) for end in ends])
    axes.set(xlabel="batch M (tokens)", ylabel="speed-up over fp16", title=_plain(title))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)


def _pareto(axes: Any, front: Mapping[str, Any]) -> None:
    points = front["points"]
    best = [(p["time_us"], p["quantization_error"]) for p in points if p["front"]]
    face = "white" if front["source"] == "predicted" else "C0"
    axes.step(*zip(*best, strict=True), where="post", color="C0")
    for p in points:
        colour = "C0" if p["front"] else "0.6"
        inside = face if p["front"] else ("white" if face == "white" else "0.6")
        axes.plot(p["time_us"], p["quantization_error"], "o", color=colour, markerfacecolor=inside)
    title = f"{front['device']} {shape_label(front)}, M ≤ {band_label(front['band'])} ({front['source']})"
    axes.set(xlabel="time (µs)", ylabel="quantization error", title=_plain(title))
    axes.grid(alpha=0.25)
    axes.margins(x=0.12, y=0.08)
    _label(axes, {(p["time_us"], p["quantization_error"]): _plain(f"{group_label(p)} {p['op']}") for p in points})


LABEL = 7
"""Font size of the labels of points."""


def _label(axes: Any, texts: Mapping[tuple[float, float], str]) -> None:
    """Write each point's label in the first place beside it that is in the frame and over no point or other label."""
    axes.figure.draw_without_rendering()  # only then is it known where points lie
    scale = 72 / axes.figure.dpi
    frame = axes.get_window_extent()
    left, bottom, right, top = (edge * scale for edge in (frame.x0, frame.y0, frame.x1, frame.y1))
    dots = [tuple(axes.transData.transform(point) * scale) for point in texts]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    places = [(side, dy) for far in range(0, 100, 10) for dy in (4 + far, -10 - far) for side in (1, -1)]
    for (point, text), (x, y) in zip(texts.items(), dots, strict=True):
        width = 0.65 * LABEL * len(text)
        for side, dy in places:
            start = x + 5 if side > 0 else x - 5 - width
            where = (start, y + dy - 2, start + width, y + dy + LABEL)
            inside = left <= where[0] and bottom <= where[1] and where[2] <= right and where[3] <= top
            if inside and not any(_overlap(where, other) for other in taken):
                break
        else:
            side, dy = places[0]
        taken.append(where)
        axes.annotate(
            text, point, textcoords="offset points", xytext=(5 * side, dy), fontsize=LABEL,
            horizontalalignment="left" if side > 0 else "right",
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.5} if abs(dy) > 10 else None,
        )  # fmt: skip


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
