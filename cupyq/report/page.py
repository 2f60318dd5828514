"""The page: facts in, one HTML document out, complete without JavaScript, which only adds sorting and the like."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from cupyq.errors import ArgumentError
from cupyq.report import chart
from cupyq.report.chart import band_label, group_label, problem_label, shape_label
from cupyq.report.data import TRIAL_COLUMNS
from cupyq.report.markup import Safe, embedded, join, tag

#: Curves that a chart shows at first; the others wait in its legend.
SHOWN = chart.COLOURS


def render(facts: Mapping[str, Any]) -> str:
    """Return the page that shows the facts of `gather`: HTML that loads nothing from anywhere.

    All text that came from the database is escaped, and the page's policy lets no script run but its own.
    """
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body = _sections(facts) if facts["devices"] else [_empty()]
    return Template(_resource("page.html")).substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        style=style, script=script, facts=embedded(facts), summary=_summary(facts), sections=join(*body),
    )  # fmt: skip


def write(facts: Mapping[str, Any], target: Path) -> None:
    """Write the page; a reader, or a crash, never sees half of it.

    Raises
    ------
    ArgumentError
        The file cannot be written there.
    """
    replace(Path(target), render(facts).encode())


def replace(target: Path, content: bytes) -> None:
    """Write a file whole, by renaming one written beside it."""
    if target.is_dir():
        raise ArgumentError(f"output is {target}, which is a folder")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise ArgumentError(f"output is {target}, which cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp lets nobody else read
        Path(name).replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        if isinstance(error, OSError):
            raise ArgumentError(f"output is {target}, which cannot be written: {error.strerror}") from None
        raise


def _resource(name: str) -> str:
    return resources.files("cupyq.report").joinpath(name).read_text(encoding="utf-8")


def badge(source: str) -> Safe:
    """Return the label that every time carries."""
    return tag("span", source, class_=f"badge {source}")


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    """Return a number for people, a dash where there is none."""
    if value is None:
        return "–"
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}") + unit


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> Safe:
    """Return a plain table that scrolls by itself, also from the keyboard."""
    top = tag("tr", [tag("th", head, scope="col") for head in heads])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    made = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", body))
    return tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _summary(facts: Mapping[str, Any]) -> Safe:
    trials = sum(d["trials"] for d in facts["devices"])
    measured = sum(d["measured"] for d in facts["devices"])
    speedups = [(r["speedup_vs_fp16"], r) for r in facts["best"] if r["speedup_vs_fp16"] is not None]
    top = max(speedups, key=lambda pair: pair[0], default=None)
    best = "–" if top is None else f"{top[0]:.2f}×"
    said = "no fp16 time to compare with" if top is None else f"{top[1]['device']}, {top[1]['source']}"
    tiles = [
        (str(len(facts["devices"])), "devices", f"database {facts['database']}"),
        (f"{trials:,}", "trials", f"{measured:,} measured, {trials - measured:,} predicted"),
        (f"{len(facts['best']):,}", "tuned problems", "one a device, shape, grouping and band"),
        (best, "largest speed-up over fp16", said),
    ]
    items = [
        tag("div", tag("dt", name), tag("dd", value, class_="big"), tag("dd", more, class_="more"))
        for value, name, more in tiles
    ]
    if not facts["devices"]:
        note = None
    elif not measured:
        note = tag(
            "p", tag("strong", "Every time on this page is predicted."),
            " None was measured on a GPU: they come from a model of the device, and are no benchmark.",
            class_="note predicted", role="note",
        )  # fmt: skip
    elif measured < trials:
        note = tag(
            "p", tag("strong", "Some times on this page are predicted."),
            " Each says so; hollow points are predictions, filled points are measurements.",
            class_="note predicted", role="note",
        )  # fmt: skip
    else:
        note = None
    made = f"Made {facts['generated_at']} by cupyq {facts['judged_by']['cupyq'] or 'of unknown version'}"
    return join(tag("p", made, class_="made"), tag("dl", items, class_="tiles"), note)


def _empty() -> Safe:
    command = tag("code", "python -m cupyq.tune --device rtx-4090 --model minilm")
    words = tag(
        "p", "Tune this machine's GPU with ", tag("code", "python -m cupyq.tune --model minilm"), ", or predict"
    )
    return tag(
        "section", tag("h2", "Nothing is tuned yet", id="empty-h"),
        words, tag("p", "for one that is not here: ", command), aria_labelledby="empty-h", id="empty",
    )  # fmt: skip


def _section(key: str, title: str, *children: Any) -> Safe:
    return tag("section", tag("h2", title, id=f"{key}-h"), *children, id=key, aria_labelledby=f"{key}-h")


def _sections(facts: Mapping[str, Any]) -> list[Safe]:
    return [
        _section(
            "speedup", "Speed-up against batch",
            tag("p", "Time of the fp16 product divided by the time of the best config, per batch band. Dashed: the "
                "roofline's ideal for the same weights; a point above it means that fp16 is further from its own "
                "roofline than the quantized product is. Circles: fused kernel; squares: dequantize, then cuBLAS."),
            [_speedup(facts, place, device) for place, device in enumerate(facts["devices"])],
        ),
        _section("configs", "Best configs", _configs(facts["best"])),
        _section("crossover", "Crossover", _crossover(facts["crossover"])),
        _section("pareto", "Group size: time against quantization error", _pareto(facts["pareto"])),
        _section("history", "Trial history", _history(facts)),
        _section("provenance", "Provenance", _provenance(facts)),
    ]  # fmt: skip


def _speedup(facts: Mapping[str, Any], place: int, device: Mapping[str, Any]) -> Safe:
    series = [s for s in facts["series"] if s["device"] == device["device"]]
    head = tag("h3", device["title"] or device["device"], " ", tag("span", device["device"], class_="quiet"))
    stale = any(row["stale"] for row in facts["crossover"] if row["device"] == device["device"])
    note = "Some fused times are stale: the kernel, the driver or NVRTC has changed since. They rank last; tune again."
    head = join(head, tag("p", note, class_="note", role="note") if stale else None)
    if not series:
        return tag("article", head, tag("p", "No row of this device has an fp16 time beside it to compare with."))
    name = f"Speed-up over fp16 against batch on {device['device']}"
    words = " ".join(_in_words(s) for s in series)
    drawings = [chart.speedup(series, name, words, n, f"c{place}{'n' if n else 'w'}") for n in (False, True)]
    several = len({s["dtype"] for s in series}) > 1
    legend = [
        tag(
            "button", tag("span", class_="swatch", aria_hidden="true"),
            problem_label(s) if several else problem_label({**s, "dtype": "float16"}), " ", badge(s["source"]),
            type="button", class_=f"key s{i % chart.COLOURS} {s['source']}",
            aria_pressed="true" if i < SHOWN else "false", data_series=i,
        )
        for i, s in enumerate(series)
    ]  # fmt: skip
    ends = sorted({p["band"] for s in series for p in s["points"]})
    by_band = [{p["band"]: p for p in s["points"]} for s in series]
    heads = ["M ≤", *(f"{problem_label(s)} ({s['source']}; ideal)" for s in series)]
    rows = [
        [band_label(end), *(_cell(points.get(end)) for points in by_band)]
        for end in ends
    ]  # fmt: skip
    behind = tag("details", tag("summary", "The chart as a table"), table(heads, rows, name))
    return tag(
        "article", head,
        tag("div", legend, class_="legend", role="group", aria_label="Curves shown"),
        tag("div", drawings, tag("p", class_="tip", role="status"), class_="chart", tabindex=0, role="group",
            aria_label=f"{name}. Arrow keys walk through the points.", data_device=device["device"]),
        behind,
    )  # fmt: skip


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    stale = ", stale" if point["stale"] else ""
    limit = "" if point["ideal"] is None else f" (ideal {point['ideal']:.2f}×)"
    return f"{point['speedup']:.2f}× {point['path']}{stale}{limit}"


def _in_words(curve: Mapping[str, Any]) -> str:
    first, last = curve["points"][0], curve["points"][-1]
    return (
        f"{problem_label(curve)}, {curve['source']}: {first['speedup']:.2f} times fp16 up to a batch of "
        f"{band_label(first['band'])}, {last['speedup']:.2f} times at {band_label(last['band'])}."
    )


_COLUMNS = (
    ("device", "Device", ""), ("op", "Op", ""), ("shape", "K×N", "n"), ("group", "Groups", "n"), ("band", "M ≤", "n"),
    ("path", "Path", ""), ("source", "Source", ""), ("time", "Time (µs)", "n"), ("speedup", "Over fp16", "n"),
    ("share", "Of ideal", "n"), ("error", "Error", "n"), ("trials", "Trials", "n"), ("config", "Config", ""),
)  # fmt: skip
_FILTERS = (
    ("device", "Device"),
    ("op", "Op"),
    ("shape", "K×N"),
    ("band", "M ≤"),
    ("path", "Path"),
    ("source", "Source"),
)


def _configs(best: Sequence[Mapping[str, Any]]) -> Safe:
    heads = [
        tag("th", tag("button", label, tag("span", class_="arrow", aria_hidden="true"), type="button"), scope="col",
            class_=kind or None, data_key=key)
        for key, label, kind in _COLUMNS
    ]  # fmt: skip
    choices = []
    for key, label in _FILTERS:
        seen: dict[str, Any] = {str(_plain(row, key)): _sorting(row, key) for row in best}
        options = [tag("option", text, value=text) for text in sorted(seen, key=lambda text: seen[text])]
        every = tag("option", "all", value="")
        choices.append(tag("label", label, " ", tag("select", every, options, data_filter=key)))
    words = tag("label", "Search ", tag("input", type="search", id="search", placeholder="block_m 16, 4096, stale …"))
    form = tag("form", words, choices, tag("button", "Reset", type="reset"), class_="filters", role="search",
               aria_label="Filter the configs")  # fmt: skip
    caption = tag("caption", "The best row of each device, problem and batch band. A heading sorts by its column.")
    made = tag(
        "table", caption, tag("thead", tag("tr", heads)), tag("tbody", [_config_row(r) for r in best]), id="best"
    )
    count = tag("p", f"{len(best)} rows", id="count", role="status", class_="quiet")
    region = tag("div", made, class_="scroll tall", tabindex=0, role="region", aria_label="Best configs")
    return join(form, count, region)


def _plain(row: Mapping[str, Any], key: str) -> str:
    made: dict[str, Any] = {"shape": shape_label, "group": group_label, "band": lambda r: band_label(r["band"])}
    return made[key](row) if key in made else str(row[key])


def _sorting(row: Mapping[str, Any], key: str) -> Any:
    values = {
        "shape": row["k"] * row["n"], "group": row["group_size"] if row["group_size"] > 0 else 1 << 30,
        "time": row["time_us"], "speedup": row["speedup_vs_fp16"], "share": row["of_ideal"],
        "config": _config_text(row["config"]),
    }  # fmt: skip
    return values[key] if key in values else row[key]


def _config_text(config: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in config.items() if name != "family")


def _config_row(row: Mapping[str, Any]) -> Safe:
    interval = None
    if row["time_low_us"] is not None and row["time_high_us"] is not None:
        interval = tag("small", f" {number(row['time_low_us'])}–{number(row['time_high_us'])}", class_="quiet")
    speedup = "–" if row["speedup_vs_fp16"] is None else f"{row['speedup_vs_fp16']:.2f}×"
    share = "–" if row["of_ideal"] is None else f"{row['of_ideal']:.0%}"
    stale = stale_badge()
    family = row["config"].get("family", row["path"])
    shown = {
        "device": row["device"], "op": row["op"] if row["dtype"] == "float16" else f"{row['op']} {row['dtype']}",
        "shape": shape_label(row), "group": group_label(row), "band": band_label(row["band"]), "path": row["path"],
        "source": [badge(row["source"]), " ", stale if row["stale"] else ""],
        "time": [number(row["time_us"], 4), interval], "speedup": speedup,
        "share": share, "error": number(row["error"], 2), "trials": row["trials"],
        "config": tag("details", tag("summary", family), tag("code", _config_text(row["config"]) or "–")),
    }  # fmt: skip
    filtering = {f"data_f_{key}": _plain(row, key) for key, _ in _FILTERS}
    cells = []
    for key, _, kind in _COLUMNS:
        value = _sorting(row, key)
        attributes = {"class_": kind or None, "data_v": "" if value is None else value}
        cells.append(
            tag("th", shown[key], scope="row", **attributes) if key == "device" else tag("td", shown[key], **attributes)
        )
    return tag("tr", cells, **filtering)


def _against(row: Mapping[str, Any]) -> list[Safe]:
    """Return from which M on each rival beats fused, and from which the roofline lets it, a line each."""
    lines = []
    for rival, band in row["against"].items():
        ideal = row["ideal"][rival]
        allowed = "" if ideal is None else f" (roofline {ideal:.0f})"
        lines.append(tag("div", f"{rival}: {'never' if band is None else band_label(band)}{allowed}"))
    return lines


def _crossover(rows: Sequence[Mapping[str, Any]]) -> Safe:
    if not rows:
        return tag("p", "No fused time has a time of another path beside it, so there is nothing to compare.")
    heads = ["Device", "Problem", "Source", "Fused wins", "Beaten from", "By", "Fused (µs)", "Other (µs)",
             "Against each", "Compared", "Roofline's M"]  # fmt: skip
    cells = [
        [
            row["device"], problem_label(row), [badge(row["source"]), " ", stale_badge() if row["stale"] else ""],
            chart.reach(row, f"x{i}"), "never" if row["crossover"] is None else f"M ≤ {band_label(row['crossover'])}",
            "–" if row["crossover"] is None else row["winner"], number(row["fused_us"]), number(row["other_us"]),
            _against(row), f"{band_label(row['first_band'])} … {band_label(row['last_band'])}", number(row["roofline"]),
        ]
        for i, row in enumerate(rows)
    ]  # fmt: skip
    words = tag(
        "p", "From which band on dequantize + cuBLAS, or plain fp16, is faster than the fused kernel. The bar covers "
        "the bands that fused wins, the ring is where it is beaten, the upright line is the batch at which the "
        "roofline lets fp16 become bound by its tensor cores. W8A8 kernels are listed as rivals too, but their weights "
        "are quantized otherwise.",
    )  # fmt: skip
    return join(words, table(heads, cells, "Crossover of the fused kernel"))


def stale_badge() -> Safe:
    """Return the mark of a stale row."""
    return tag("span", "stale", class_="badge stale", title="The kernel's source, the driver or NVRTC has changed")


def _pareto(fronts: Sequence[Mapping[str, Any]]) -> Safe:
    if not fronts:
        return tag(
            "p", "No row has a quantization error. It is taken on your own weights: tune with ",
            tag("code", "--group-sizes 32,64,128 --weights model.safetensors"), ".",
        )  # fmt: skip
    cards = []
    for i, front in enumerate(fronts):
        heads = ["Groups", "Op", "Path", "Time (µs)", "Quantization error", "On the front"]
        rows = [
            [group_label(p), p["op"], p["path"], number(p["time_us"], 4), number(p["quantization_error"], 4),
             ["yes" if p["front"] else "beaten", " ", stale_badge() if p["stale"] else ""]]
            for p in front["points"]
        ]  # fmt: skip
        caption = tag(
            "figcaption", tag("strong", f"{shape_label(front)}, M ≤ {band_label(front['band'])}"),
            f" {front['device']}, error on {front['weights'] or 'unnamed weights'} ", badge(front["source"]),
        )  # fmt: skip
        behind = tag("details", tag("summary", "As a table"), table(heads, rows, f"Front of {shape_label(front)}"))
        cards.append(tag("figure", caption, chart.pareto(front, f"p{i}"), behind, class_="card"))
    words = tag(
        "p", "Lower and further left is better. The line joins what no other choice beats in both; points with a "
        "broken outline are stale.",
    )  # fmt: skip
    return join(words, tag("div", cards, class_="cards"))


def _history(facts: Mapping[str, Any]) -> Safe:
    parts = []
    for device in facts["devices"]:
        mine = [(i, s) for i, s in enumerate(facts["studies"]) if s["device"] == device["device"]]
        if mine:
            cards = tag("div", [_study(i, study) for i, study in mine], class_="cards")
            head = tag("summary", f"{device['device']}: {len(mine)} studies")
            parts.append(tag("details", head, cards, open=len(facts["devices"]) == 1 and len(mine) <= 6))
    words = tag("p", "Each point is a trial in the order in which it ran, the line the best so far, a cross a trial "
                "that was pruned or failed. Times in µs, logarithmic.")  # fmt: skip
    return join(words, parts)


def _study(place: int, study: Mapping[str, Any]) -> Safe:
    rows = [dict(zip(TRIAL_COLUMNS, row, strict=True)) for row in study["trials"]]
    bad = sum(row["state"] != "complete" for row in rows)
    sources = sorted({row["source"] for row in rows})
    title = study["name"] or "trials outside a study"
    state = "" if study["state"] in (None, "finished") else f", {study['state']}"
    caption = tag(
        "figcaption", tag("strong", problem_label(study), f", M = {study['m']}"),
        f" {title}{state}; {len(rows)} trials, {bad} pruned or failed ", [badge(source) for source in sources],
    )  # fmt: skip
    behind = tag("details", tag("summary", "As a table"), tag("div", class_="fill"), data_study=place)
    return tag("figure", caption, chart.history(study, TRIAL_COLUMNS, f"h{place}"), behind, class_="card")


def _provenance(facts: Mapping[str, Any]) -> Safe:
    judged = facts["judged_by"]
    parts = [
        tag(
            "p", "Stale rows are judged by cupyq ", judged["cupyq"] or "unknown", ", NVRTC ", judged["nvrtc"] or "none",
            ", driver ", judged["driver"] or "none", ". Conflicts found while merging files: ", facts["conflicts"], ".",
        )
    ]  # fmt: skip
    for device in facts["devices"]:
        clock = device["clock_mhz"]
        identity = [
            ("Compute capability", device["compute_capability"]), ("SMs", device["sms"]),
            ("L2", f"{device['l2_bytes'] / 2**20:g} MiB"),
            ("Shared memory per SM", f"{device['shared_per_sm'] / 1024:g} KiB"),
            ("Memory", f"{device['memory_gib']} GiB"), ("DRAM bandwidth", f"{device['dram_gbps']:,} GB/s"),
            ("fp16 tensor rate", number(device["fp16_tflops"], 4, " TFLOP/s")),
            ("fp16 ridge batch", number(device["ridge_batch"], 4)),
            ("SM clock while measuring", "–" if clock is None else f"{clock[0]:g}–{clock[1]:g} MHz"),
            ("Last trial", f"{device['last_trial'][:16].replace('T', ' ')} UTC" if device["last_trial"] else "–"),
            ("Of secondary sources", ", ".join(device["unsure"]) or "nothing"),
        ]  # fmt: skip
        terms = [tag("div", tag("dt", name), tag("dd", value)) for name, value in identity]
        made = [
            [badge(m["source"]), m["trials"], m["cupyq_version"] or "–", m["nvrtc_version"] or "–",
             m["driver_version"] or "–", m["cupy_version"] or "–", m["origin"] or "this file"]
            for m in device["made_with"]
        ]  # fmt: skip
        heads = ["Source", "Trials", "cupyq", "NVRTC", "Driver", "CuPy", "Recorded in"]
        parts.append(
            tag("article", tag("h3", device["title"] or device["device"], " ",
                               tag("span", device["device"], class_="quiet")),
                tag("dl", terms, class_="facts"), table(heads, made, f"What made the rows of {device['device']}"))
        )  # fmt: skip
    return join(parts)
