"""Charts as SVG: scales, axes and marks, drawn once, so that the page shows them without JavaScript too.

Colours come from the page's style sheet (classes `s0`..`s7`), so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyq import bands
from cupyq.report.markup import Safe, tag

#: Colours that a chart tells apart; further series begin again with the first and another dash of their own label.
COLOURS = 8

WIDE, NARROW = (920, 430), (372, 330)


def band_label(band: int, short: bool = False) -> str:
    """Return how a band is written: its end, or what it is open above."""
    if band >= bands.OPEN_END:
        return f">{bands.LAST_CLOSED_END // 1024}k" if short else f"> {bands.LAST_CLOSED_END}"
    return f"{band // 1024}k" if short and band >= 1024 else str(band)


def shape_label(row: Mapping[str, Any]) -> str:
    """Return K x N of a row."""
    return f"{row['k']}×{row['n']}"


def group_label(row: Mapping[str, Any]) -> str:
    """Return the grouping of a row: g128, "g128 asym" with zero points, "per column"."""
    size = "per column" if row["group_size"] == -1 else f"g{row['group_size']}"
    return size if row["symmetric"] else f"{size} asym"


def problem_label(row: Mapping[str, Any]) -> str:
    """Return op, shape and grouping of a row, and the dtype where it is not float16."""
    other = "" if row["dtype"] == "float16" else f" {row['dtype']}"
    return f"{row['op']} {shape_label(row)} {group_label(row)}{other}"


@dataclass(frozen=True)
class Frame:
    """The drawing area of a chart: data to pixels, both axes linear or log2."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    left: int = 44
    right: int = 14
    top: int = 14
    bottom: int = 44

    def px(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return self.left + _share(value, *self.x, self.log_x) * (self.width - self.left - self.right)

    def py(self, value: float) -> float:
        """Return the vertical position of a value."""
        return self.height - self.bottom - _share(value, *self.y, self.log_y) * (self.height - self.top - self.bottom)

    def line(self, points: Iterable[Sequence[float]], **attributes: Any) -> Safe:
        """Return a path through points."""
        moves = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        return tag("path", d=f"M{moves}", **attributes)

    def steps(self, points: Sequence[Sequence[float]], **attributes: Any) -> Safe:
        """Return a path that keeps each value until the next."""
        held = [points[0]]
        for x, y in points[1:]:
            held += [(x, held[-1][1]), (x, y)]
        return self.line(held, **attributes)

    def grid(self, ticks: Iterable[tuple[float, str]], across: bool) -> list[Safe]:
        """Return lines and labels of an axis: across the chart for y, up and down for x."""
        drawn = []
        floor = self.height - self.bottom
        for value, label in ticks:
            if across:
                y = f"{self.py(value):.1f}"
                drawn.append(tag("line", class_="grid", x1=self.left, x2=self.width - self.right, y1=y, y2=y))
                drawn.append(tag("text", label, x=self.left - 8, y=y, dy="0.32em", text_anchor="end"))
            else:
                x = f"{self.px(value):.1f}"
                drawn.append(tag("line", class_="grid v", x1=x, x2=x, y1=self.top, y2=floor))
                drawn.append(tag("text", label, x=x, y=floor + 18, text_anchor="middle"))
        return drawn


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log:
        value, low, high = math.log2(value), math.log2(low), math.log2(high)
    return 0.5 if high == low else (value - low) / (high - low)


def mark(kind: str, x: float, y: float, size: float = 4.2, **attributes: Any) -> Safe:
    """Return a point: a circle for the fused kernel, a square for dequantize + cuBLAS."""
    if kind == "dequant":
        half = size * 0.9
        corner = {"x": f"{x - half:.1f}", "y": f"{y - half:.1f}"}
        return tag("rect", **corner, width=f"{2 * half:.1f}", height=f"{2 * half:.1f}", **attributes)
    return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=size, **attributes)


def speedup(series: Sequence[Mapping[str, Any]], name: str, description: str, narrow: bool, key: str) -> Safe:
    """Return the chart of speed-up over fp16 against the batch, one curve a series, each with its ideal dashed."""
    size = NARROW if narrow else WIDE
    tops = [p["speedup"] for s in series for p in s["points"]] + [p[1] for s in series for p in s["ideal"]]
    high = max(2.0, math.ceil(2 * max(tops, default=1.0) + 0.1) / 2)
    ends = bands.ends()
    frame = Frame(*size, (ends[0], ends[-1]), (0, high), log_x=True, left=34 if narrow else 48, bottom=46)
    step = 0.5 if high <= 3 else 1.0 if high <= 10 else math.ceil(high / 8)
    drawn = frame.grid([(i * step, f"{i * step:g}×") for i in range(int(high / step) + 1)], across=True)
    drawn += frame.grid([(end, band_label(end, True)) for end in ends[:: 3 if narrow else 1]], across=False)
    base = f"{frame.py(1):.1f}"
    drawn.append(tag("line", class_="unit", x1=frame.left, x2=size[0] - frame.right, y1=base, y2=base))
    label = {"x": frame.left + 6, "y": f"{frame.py(1) + 14:.1f}", "class_": "unit-label"}
    drawn.append(tag("text", "fp16 = 1×", **label))
    middle = (frame.left + size[0] - frame.right) / 2
    drawn.append(tag("text", "batch M (tokens), upper end of the band", x=middle, y=size[1] - 6, text_anchor="middle"))
    for index, curve in enumerate(series):
        drawn.append(_curve(frame, index, curve))
    return _svg(size, drawn, name, description, key, "wide" if not narrow else "narrow")


def _curve(frame: Frame, index: int, curve: Mapping[str, Any]) -> Safe:
    predicted = curve["source"] == "predicted"
    parts = []
    if curve["ideal"]:
        parts.append(frame.line(curve["ideal"], class_="ideal"))
    points = [(p["band"], p["speedup"]) for p in curve["points"]]
    if len(points) > 1:
        parts.append(frame.line(points, class_="curve"))
    for place, point in enumerate(curve["points"]):
        where = (frame.px(point["band"]), frame.py(point["speedup"]))
        stale = " stale" if point["stale"] else ""
        parts.append(mark(point["path"], *where, class_=f"point{stale}", data_point=place))
    kind = "predicted" if predicted else "measured"
    return tag("g", *parts, class_=f"series s{index % COLOURS} {kind}", data_series=index)


def _svg(size: tuple[int, int], drawn: Sequence[Safe], name: str, description: str, key: str, class_: str) -> Safe:
    texts = [tag("title", name, id=f"{key}-t"), tag("desc", description, id=f"{key}-d")]
    return tag(
        "svg", *texts, *drawn, class_=class_, viewBox=f"0 0 {size[0]} {size[1]}", role="img",
        aria_labelledby=f"{key}-t", aria_describedby=f"{key}-d",
    )  # fmt: skip


def history(study: Mapping[str, Any], columns: Sequence[str], key: str) -> Safe:
    """Return the small chart of a study: time of each trial, the best so far, what failed, fp16 as a line."""
    rows = [dict(zip(columns, row, strict=True)) for row in study["trials"]]
    timed = [(i + 1, r) for i, r in enumerate(rows) if r["time_us"]]
    times = [r["time_us"] for _, r in timed]
    low, high = (min(times) / 1.15, max(times) * 1.15) if times else (1.0, 2.0)
    frame = Frame(300, 150, (1, max(len(rows), 2)), (low, high), log_y=True, left=44, right=10, top=10, bottom=24)
    ticks = [low * 1.15, math.sqrt(low * high), high / 1.15] if high / low > 1.5 else [math.sqrt(low * high)]
    drawn = frame.grid([(value, f"{value:.3g}") for value in ticks if times], across=True)
    drawn += [
        tag("text", "1", x=frame.left, y=143, text_anchor="middle"),
        tag("text", f"{len(rows)} trials", x=290, y=143, text_anchor="end"),
    ]
    # A prediction is never the best of measurements: the lines follow one kind only.
    kind = "measured" if any(r["source"] == "measured" for r in rows) else "predicted"
    plain = [r["time_us"] for _, r in timed if r["path"] == "fp16" and r["source"] == kind]
    if plain:
        y = f"{frame.py(min(plain)):.1f}"
        drawn.append(tag("line", class_="unit", x1=frame.left, x2=290, y1=y, y2=y))
        drawn.append(tag("text", "fp16", x=288, y=f"{frame.py(min(plain)) - 4:.1f}", text_anchor="end"))
    best: list[tuple[float, float]] = []
    for place, row in timed:
        if row["path"] != "fp16" and row["state"] == "complete" and row["source"] == kind:
            best.append((place, min(row["time_us"], best[-1][1] if best else math.inf)))
    if best:
        drawn.append(frame.steps([*best, (max(len(rows), 2), best[-1][1])], class_="curve"))
    for place, row in enumerate(rows, 1):
        x = frame.px(place)
        if row["state"] != "complete":
            drawn.append(tag("path", d=f"M{x - 3:.1f},{frame.top}l6,6m0,-6l-6,6", class_="failed"))
        elif row["time_us"] and row["path"] != "fp16":
            drawn.append(mark(row["path"], x, frame.py(row["time_us"]), 2.6, class_=f"point {row['source']}"))
    name = f"Trials of {problem_label(study)}, band {band_label(study['band'])}"
    sources = " and ".join(sorted({r["source"] for r in rows}))
    words = f"Time in microseconds of {len(rows)} trials in order ({sources}), and the best so far."
    return _svg((300, 150), [tag("g", *drawn, class_=f"series s0 {kind}")], name, words, key, "small")


def pareto(front: Mapping[str, Any], key: str) -> Safe:
    """Return the small chart of time against quantization error; the points that no other beats are joined."""
    points = front["points"]
    times, errors = [p["time_us"] for p in points], [p["quantization_error"] for p in points]
    spread, tall = (max(times) - min(times)) or max(times), (max(errors) - min(errors)) or max(errors) or 1.0
    x = (min(times) - 0.12 * spread, max(times) + 0.25 * spread)
    y = (min(errors) - 0.15 * tall, max(errors) + 0.15 * tall)
    frame = Frame(400, 250, x, y, left=62, right=12, top=28, bottom=42)
    drawn = frame.grid([(v, f"{v:.3g}") for v in _between(*x)], across=False)
    drawn += frame.grid([(v, f"{v:.3g}") for v in _between(*y)], across=True)
    drawn.append(tag("text", "quantization error", x=6, y=14))
    drawn.append(tag("text", "time (µs)", x=226, y=246, text_anchor="middle"))
    best = [(p["time_us"], p["quantization_error"]) for p in points if p["front"]]
    if len(best) > 1:
        drawn.append(frame.steps(best, class_="curve"))
    for p in points:
        where = (frame.px(p["time_us"]), frame.py(p["quantization_error"]))
        kind = ("front" if p["front"] else "beaten") + (" stale" if p["stale"] else "")
        drawn.append(mark(p["path"], *where, 5, class_=f"point {kind}"))
        text = f"{group_label(p)} {p['op']}" if len({q["op"] for q in points}) > 1 else group_label(p)
        right = where[0] > 300  # there is no room for the label on the other side
        side = {"x": f"{where[0] + (-9 if right else 9):.1f}", "text_anchor": "end" if right else None}
        drawn.append(tag("text", text, y=f"{where[1] - 5:.1f}", class_="mark-label", **side))
    name = f"Time and quantization error of {shape_label(front)}, band {band_label(front['band'])}"
    old = sum(p["stale"] for p in points)
    words = f"{len(points)} choices ({front['source']}); {len(best)} of them no other beats in both."
    words += f" {old} are stale." if old else ""
    return _svg((400, 250), [tag("g", *drawn, class_=f"series s3 {front['source']}")], name, words, key, "small")


def _between(low: float, high: float) -> list[float]:
    """Return about four round numbers inside an interval."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next((f for f in (5, 2) if (high - low) / (f * step) >= 3), 1)
    first = math.ceil(low / step)
    return [i * step for i in range(first, first + 12) if i * step <= high]


def reach(row: Mapping[str, Any], key: str) -> Safe:
    """Return a strip over the bands: where fused was compared and won, where another path wins, the roofline's M."""
    ends = bands.ends()
    frame = Frame(200, 22, (1, ends[-1]), (0, 1), log_x=True, left=6, right=6, top=0, bottom=0)
    first, last = frame.px(row["first_band"]), frame.px(row["last_band"])
    until = last if row["crossover"] is None else frame.px(row["crossover"])
    drawn = [tag("rect", class_="rail", x=6, y=9, width=188, height=4, rx=2)]
    if until > first or row["crossover"] is None:
        # One band alone has no length of its own.
        won = {"x": f"{first - 3:.1f}", "width": f"{until - first + 6:.1f}"}
        drawn.append(tag("rect", class_="won", y=7, height=8, rx=3, **won))
    if row["crossover"] is not None:
        drawn.append(tag("circle", class_="cross", cx=f"{until:.1f}", cy=11, r=5))
    if row["roofline"] and 1 <= row["roofline"] <= ends[-1]:
        x = f"{frame.px(row['roofline']):.1f}"
        drawn.append(tag("line", class_="roof", x1=x, x2=x, y1=1, y2=21))
    return _svg((200, 22), drawn, "Bands in which the fused kernel wins", "", key, "strip")
