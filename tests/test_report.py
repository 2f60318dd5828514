"""The report: what the page holds, that nothing in it runs or loads, and how it behaves in a browser."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest

import cupyq.db
from cupyq import devices, roofline
from cupyq.errors import ArgumentError, NotInstalled
from cupyq.kernels.problem import Problem
from cupyq.report import chart, cli, data, markup, page, png

HERE = cupyq.db.Environment("13.0", "13.0", "library-1", lambda config, problem: "v1", "14.0", "0.1.0")
A100 = devices.get("a100-sxm")
H100 = devices.get("h100-sxm")
EVIL = '<script>document.title="owned"</script><img src=x onerror="document.title=1">"\'&'
BANDS = (1, 16, 256, 2048)
VOID = {"meta", "link", "input", "br", "line", "path", "rect", "circle"}


def fill(store):
    """Write measured rows for an A100, predicted ones for an H100, a Pareto front, and a failed trial."""
    study = store.start_study("night run", A100, Problem("w4a16", 16, 4096, 8192), weights="layer 3")
    for device, source, factor in ((A100, "measured", 1.0), (H100, "predicted", 0.5)):
        for m in BANDS:
            problem = Problem("w4a16", m, 4096, 8192)
            usual = {"device": device, "problem": problem, "source": source, "verified": True}
            fused = factor * (10 + m / 10)
            store.add_trial(time_us=fused, config={"family": "w4a16_mma", "block_m": m}, error=2e-3, **usual)
            store.add_trial(time_us=2 * fused, config={"family": "w4a16_mma", "block_m": 7}, error=2e-3, **usual)
            store.add_trial(time_us=factor * (30 + m / 20), path="fp16", **usual)
    usual = {"device": A100, "source": "measured", "verified": True, "study": study}
    for group, took, error in ((128, 10.0, 0.09), (64, 11.0, 0.07), (32, 12.0, 0.08)):
        problem = Problem("w4a16", 16, 4096, 8192, group_size=group)
        store.add_trial(problem=problem, time_us=took, quantization_error=error, config={"g": group}, **usual)
    failed = {"state": "failed", "reason": "illegal <b>address</b>", "config": {"g": 1}}
    store.add_trial(problem=Problem("w4a16", 16, 4096, 8192), time_us=None, **usual, **failed)


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "tuning.db"
    with cupyq.db.open(path, environment=HERE, presets=False) as store:
        fill(store)
    return path


@pytest.fixture
def facts(database):
    with cupyq.db.open(database, readonly=True, environment=HERE, presets=False) as store:
        return data.gather(store)


class Page(HTMLParser):
    """The elements of a page, in order: (name, attributes, text), and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append([name, dict(attributes), ""])
        if name not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, name, attributes):
        self.elements.append([name, dict(attributes), ""])

    def handle_endtag(self, name):
        assert self.open, f"</{name}> closes nothing"
        assert self.open.pop()[0] == name, f"</{name}> closes something else"

    def handle_data(self, text):
        for element in self.open:
            element[2] += text

    def all(self, name, **attributes):
        return [e for e in self.elements if e[0] == name and all(e[1].get(k) == v for k, v in attributes.items())]


def table_rows(text):
    return [e for e in Page(text).all("tr") if "data-f-source" in e[1]]


def embedded(text):
    [element] = Page(text).all("script", id="facts")
    return json.loads(element[2])


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "cupyq.report", *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )


def test_page_has_its_parts_and_every_one_is_named(facts):
    parsed = Page(page.render(facts))
    sections = parsed.all("section")
    assert [s[1]["id"] for s in sections] == ["speedup", "configs", "crossover", "pareto", "history", "provenance"]
    ids = [e[1]["id"] for e in parsed.elements if "id" in e[1]]
    assert len(ids) == len(set(ids)), "ids occur twice"
    named = [e[1][k] for e in parsed.elements for k in ("aria-labelledby", "aria-describedby") if k in e[1]]
    assert set(named) <= set(ids)
    links = [e[1]["href"] for e in parsed.all("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert parsed.elements[0][1] == {"lang": "en"}
    for svg in parsed.all("svg"):
        assert svg[1]["role"] == "img"
        assert "aria-labelledby" in svg[1]
    for region in (e for e in parsed.elements if e[1].get("class", "").startswith("scroll")):
        assert region[1]["tabindex"] == "0"
        assert region[1]["aria-label"]
    assert len(parsed.all("caption")) == len(parsed.all("table"))


def test_page_loads_nothing_and_only_its_own_script_may_run(facts):
    text = page.render(facts)
    parsed = Page(text)
    for _, attributes, _ in parsed.elements:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:"))
        assert not [name for name in attributes if name.startswith("on")]
    style = parsed.all("style")[0][2]
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|innerHTML|eval\(", text)
    [policy] = [e[1]["content"] for e in parsed.all("meta") if e[1].get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_best_table_says_what_the_database_says(facts):
    [table] = Page(page.render(facts)).all("table", id="best")
    for row in facts["best"]:
        assert f"{row['time_us']:.4g}" in table[2]
        assert row["source"] in table[2]
    first = next(r for r in facts["best"] if r["device"] == "a100-sxm" and r["band"] == 1)
    assert first["time_us"] == 10.1
    assert first["config"] == {"block_m": 1, "family": "w4a16_mma"}
    assert first["speedup_vs_fp16"] == pytest.approx(30.05 / 10.1)
    assert first["ideal"] == pytest.approx(roofline.ideal_speedup_at(A100, 1, 4096, 8192))
    assert first["of_ideal"] == pytest.approx(first["speedup_vs_fp16"] / first["ideal"])


def test_series_keep_measured_and_predicted_apart(facts):
    sources = {(s["device"], s["source"]) for s in facts["series"]}
    assert sources == {("a100-sxm", "measured"), ("h100-sxm", "predicted")}
    whole = [s for s in facts["series"] if s["group_size"] == 128]
    assert [[p["band"] for p in s["points"]] for s in whole] == [list(BANDS)] * 2
    drawn = [e[1]["class"] for e in Page(page.render(facts)).all("g") if "data-series" in e[1]]
    for series in facts["series"]:  # each drawn wide and narrow
        count = 2 * sum(s["source"] == series["source"] for s in facts["series"])
        assert len([class_ for class_ in drawn if class_.endswith(series["source"])]) == count


def test_every_time_that_was_predicted_says_so(facts):
    [table] = Page(page.render(facts)).all("table", id="best")
    for row in table_rows(page.render(facts)):
        assert ("predicted" in row[2]) == (row[1]["data-f-source"] == "predicted")
    assert table[2].count("predicted") == sum(r["source"] == "predicted" for r in facts["best"]) == len(BANDS)
    only = {**facts, "devices": [{**d, "measured": 0} for d in facts["devices"]]}
    assert "Every time on this page is predicted." in page.render(only)
    assert "Some times on this page are predicted." in page.render(facts)
    none = {**facts, "devices": [{**d, "measured": d["trials"]} for d in facts["devices"]]}
    assert "on this page are predicted" not in page.render(none)


def test_ideal_counts_zero_points_and_the_ops_own_tensor_cores():
    shape = {"n": 8192, "k": 8192, "group_size": 128}
    plain = data.ideal(A100, {**shape, "op": "w4a16", "symmetric": True}, 1)
    zeros = data.ideal(A100, {**shape, "op": "w4a16", "symmetric": False}, 1)
    assert plain == pytest.approx(3.88, abs=0.02)
    assert zeros < plain
    column = {**shape, "group_size": -1, "symmetric": True}
    assert data.ideal(A100, {**column, "op": "w8a8-int8"}, 8192) == pytest.approx(2, rel=0.02)
    assert data.ideal(A100, {**column, "op": "w8a8-fp8"}, 1) is None  # an A100 has no fp8
    assert data.ideal(A100, {**column, "op": "w3a3"}, 1) is None
    assert data.ideal(None, {**column, "op": "w4a16"}, 1) is None


def test_crossover_stands_beside_the_roofline(facts):
    row = next(r for r in facts["crossover"] if r["device"] == "a100-sxm" and r["group_size"] == 128)
    assert (row["crossover"], row["winner"]) == (2048, "fp16")
    assert row["roofline"] == pytest.approx(roofline.crossover_batch(A100))
    assert row["ideal"]["fp16"] == pytest.approx(row["roofline"], abs=0.05)
    assert "fp16: 2048 (roofline 153)" in page.render(facts)


def test_pareto_marks_what_is_beaten(facts):
    [front] = facts["pareto"]
    assert front["weights"] == "layer 3"
    assert [(p["group_size"], p["front"]) for p in front["points"]] == [(128, True), (64, True), (32, False)]
    assert "beaten" in page.render(facts)


def test_pareto_says_what_is_stale(tmp_path):
    with cupyq.db.open(tmp_path / "p.db", environment=HERE, presets=False) as store:
        usual = {"device": A100, "problem": Problem("w4a16", 16, 4096, 8192), "source": "measured", "verified": True}
        other = usual | {"problem": Problem("w4a16", 16, 4096, 8192, 64)}
        store.add_trial(time_us=7.0, quantization_error=0.2, config={"a": 1}, source_hash="v0", **usual)
        store.add_trial(time_us=9.0, quantization_error=0.2, config={"a": 2}, **usual)
        store.add_trial(time_us=8.0, quantization_error=0.1, config={"a": 3}, source_hash="v0", **other)
        facts = data.gather(store)
    [front] = facts["pareto"]
    assert [(p["time_us"], p["stale"], p["front"]) for p in front["points"]] == [(8.0, True, True), (9.0, False, False)]
    elements = Page(page.render(facts)).elements
    figure = [e for e in elements if e[0] in ("path", "circle", "rect") and "point" in (e[1].get("class") or "")]
    assert sum("stale" in e[1]["class"] and "front" in e[1]["class"] for e in figure) == 1
    assert sum("stale" in e[1]["class"] and "beaten" in e[1]["class"] for e in figure) == 0
    assert "1 are stale" in page.render(facts)


def test_pareto_takes_the_faster_path_of_each_grouping(tmp_path):
    with cupyq.db.open(tmp_path / "p.db", environment=HERE, presets=False) as store:
        usual = {"device": A100, "problem": Problem("w4a16", 16, 4096, 8192), "source": "predicted", "verified": True}
        store.add_trial(time_us=9.0, path="dequant", quantization_error=0.1, config={"a": 1}, **usual)
        store.add_trial(time_us=7.0, quantization_error=0.1, config={"a": 2}, **usual)
        store.add_trial(time_us=1.0, quantization_error=0.1, config={"a": 3}, **(usual | {"verified": False}))
        store.add_trial(time_us=2.0, quantization_error=0.1, config={"a": 4}, cache="warm", **usual)
        [front] = data.gather(store)["pareto"]
    [point] = front["points"]
    assert (point["time_us"], point["path"], point["front"]) == (7.0, "fused", True)


def test_history_keeps_every_finished_trial(facts):
    study = next(s for s in facts["studies"] if s["name"] == "night run" and s["group_size"] == 128)
    states = [dict(zip(data.TRIAL_COLUMNS, t, strict=True))["state"] for t in study["trials"]]
    assert states == ["complete", "failed"]
    assert sum(len(s["trials"]) for s in facts["studies"]) == sum(d["trials"] for d in facts["devices"]) == 28


def test_history_draws_predictions_as_such_beside_measurements():
    rows = [[1, "fused", "search", "complete", "measured", 9.0, True, None],
            [2, "fused", "search", "complete", "predicted", 3.0, False, None]]  # fmt: skip
    study = {"op": "w4a16", "dtype": "float16", "n": 8, "k": 8, "group_size": 32, "symmetric": True, "band": 1}
    drawn = Page(chart.history({**study, "trials": rows}, data.TRIAL_COLUMNS, "h"))
    assert [e[1]["class"] for e in drawn.all("circle")] == ["point measured", "point predicted"]
    [line] = drawn.all("path", **{"class": "curve"})
    assert len({point.split(",")[1] for point in line[1]["d"][1:].split()}) == 1  # the prediction does not lower it


def test_provenance_counts_trials_by_version(facts):
    device = next(d for d in facts["devices"] if d["device"] == "a100-sxm")
    assert sum(m["trials"] for m in device["made_with"]) == 16
    assert {m["cupyq_version"] for m in device["made_with"]} == {"0.1.0"}
    assert {m["driver_version"] for m in device["made_with"]} == {"13.0"}


def evil_database(path):
    """Write a database whose every text is hostile."""
    import dataclasses

    spec = dataclasses.replace(A100, name=EVIL, title=EVIL)
    problem = Problem("w4a16", 4, 512, 512)
    with cupyq.db.open(path, environment=HERE, presets=False) as store:
        study = store.start_study(EVIL, spec, problem, weights=EVIL)
        usual = {"device": spec, "problem": problem, "source": "measured", "verified": True, "study": study}
        versions = {"cupyq_version": EVIL, "cupy_version": EVIL, "driver_version": EVIL}
        store.add_trial(time_us=5.0, config={EVIL: EVIL}, quantization_error=0.1, **usual, **versions)
        store.add_trial(time_us=9.0, path="fp16", **usual)
        store.add_trial(time_us=None, state="failed", reason=EVIL, config={"a": 1}, **usual)
        return data.gather(store)


def test_text_from_the_database_never_becomes_markup(tmp_path):
    facts = evil_database(tmp_path / "evil.db")
    text = page.render(facts)
    parsed = Page(text)
    assert len(parsed.all("script")) == 2
    assert not parsed.all("img")
    assert EVIL in parsed.all("table", id="best")[0][2]
    assert embedded(text) == facts


def test_markup_escapes_what_is_not_safe():
    assert markup.tag("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert markup.tag("p", markup.tag("b", 1), None, [2, "&"]) == "<p><b>1</b>2&amp;</p>"
    assert "</script" not in markup.embedded({"a": "</script><!--"})
    assert json.loads(markup.embedded(["\u2028<&>"])) == ["\u2028<&>"]


def test_empty_database_says_how_to_fill_it(tmp_path):
    path = tmp_path / "empty.db"
    cupyq.db.open(path).close()
    done = run("--db", path, "-o", "empty.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "empty.html").read_text(encoding="utf-8")
    assert "Nothing is tuned yet" in text
    assert "python -m cupyq.tune" in text
    assert embedded(text)["best"] == []
    Page(text)


def test_json_is_what_the_page_embeds(database, tmp_path):
    done = run("--db", database, "--json", "-o", "r.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == embedded((tmp_path / "r.html").read_text(encoding="utf-8"))
    alone = run("--db", database, "--json", cwd=tmp_path)
    assert json.loads(alone.stdout)["best"] == json.loads(done.stdout)["best"]
    assert sorted(p.name for p in tmp_path.glob("*.html")) == ["r.html"]


def test_one_device_only(database, tmp_path):
    done = run("--db", database, "--json", "--device", "h100-sxm", cwd=tmp_path)
    facts = json.loads(done.stdout)
    for key in ("devices", "best", "series", "crossover", "studies"):
        assert {row["device"] for row in facts[key]} == {"h100-sxm"}


def test_date_can_be_fixed(facts, database, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    with cupyq.db.open(database, readonly=True, environment=HERE, presets=False) as store:
        fixed = data.gather(store)
        assert fixed["generated_at"] == "1970-01-01T00:00:00+00:00"
        assert page.render(fixed) == page.render(data.gather(store))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--db", "missing.db"], "missing.db, which is no file"),
        (["--db", "."], "which is a folder"),
        (["--db", "tuning.db", "-o", "no/such/folder/r.html"], "cannot be written"),
        (["--db", "tuning.db", "-o", "."], "which is a folder"),
        (["--db", "tuning.db", "--device", "b200"], "the database has a100-sxm, h100-sxm"),
        (["--what"], "No such option"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(database, tmp_path, arguments, words):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if "html" in p.name) == []


def test_a_damaged_file_is_one_line_and_status_1(tmp_path):
    (tmp_path / "bad.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    done = run("--db", "bad.db", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_nothing_is_ever_half_written(facts, tmp_path, monkeypatch):
    target = tmp_path / "r.html"
    target.write_text("the old page")

    def full(self, other):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ArgumentError, match="No space left"):
        page.write(facts, target)
    assert target.read_text() == "the old page"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_png_plots(facts, tmp_path):
    pytest.importorskip("matplotlib")
    written = png.write(facts, tmp_path / "plots")
    names = [file.name for file in written]
    assert names == ["speedup-a100-sxm.png", "speedup-h100-sxm.png", "pareto-a100-sxm-8192x4096-16-measured.png"]
    for file in written:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


def test_labels_of_close_points_do_not_cover_each_other():
    Text = pytest.importorskip("matplotlib.text").Text
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(4.8, 3.6), layout="constrained")
    axes = figure.subplots()
    points = {(10 + i / 10, 0.1 - (i * 7 % 5) / 1000): f"g{16 << i} w4a16" for i in range(5)} | {(16.0, 0.01): "g128"}
    axes.plot(*zip(*points, strict=True), "o")
    png._label(axes, points)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to its point
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
    assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)


def test_png_plots_of_hostile_names(tmp_path):
    pytest.importorskip("matplotlib")
    written = png.write(evil_database(tmp_path / "evil.db"), tmp_path / "plots")
    assert {file.parent for file in written} == {tmp_path / "plots"}
    assert len(written) == 2


def test_png_without_matplotlib_names_the_command(database, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotInstalled, match=r"pip install 'cupyq\[docs\]'"):
        png.write({"devices": [], "series": [], "pareto": []}, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
    assert cli.main(["--db", str(database), "--png", str(tmp_path / "plots")]) == 1
    assert "cupyq[docs]" in capsys.readouterr().err


def test_every_option_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")
    for parameter in cli.command.params:
        for option in parameter.opts:
            assert f"`{option}" in text, f"docs/report.md does not name {option}"


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_have_the_contrast_that_wcag_asks_for():
    style = page._resource("page.css")
    themes = re.findall(r"\{\s*(--bg.*?)\}", style, re.DOTALL)
    assert len(themes) == 3
    for theme in themes:
        c = dict(re.findall(r"--([\w-]+): (#\w+)", theme))
        c = {k: v if len(v) == 7 else "#" + "".join(2 * x for x in v[1:]) for k, v in c.items()}
        for ink, paper in [(a, b) for a in ("ink", "soft", "accent") for b in ("bg", "card")]:
            assert contrast(c[ink], c[paper]) >= 4.5, (ink, paper)
        for pair in (("warn", "warn-bg"), ("good", "good-bg")):
            assert contrast(c[pair[0]], c[pair[1]]) >= 4.5, pair
        for i in range(8):
            assert contrast(c[f"s{i}"], c["card"]) >= 3, f"s{i}"
    assert themes[1].split() == themes[2].split()[: len(themes[1].split())]


# In a browser


class Browser:
    """A headless Chromium, spoken to by WebDriver over plain HTTP."""

    def __init__(self, url):
        self.url = url

    def call(self, method, path, body=None):
        request = urllib.request.Request(
            self.url + path, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"},
            method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def script(self, code):
        return self.call("POST", "/execute/sync", {"script": code, "args": []})

    def keys(self, text):
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def log(self):
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]


@contextlib.contextmanager
def chromedriver(program):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1200,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = [n for n, f in (("chromium", chromium), ("chromedriver", driver)) if f is None]
        pytest.skip(f"no {' and no '.join(missing)} on PATH (Debian: apt-get install chromium chromium-driver)")
    profile = tmp_path_factory.mktemp("profile")
    options = {"binary": chromium, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    with chromedriver(driver) as url:
        body = {"capabilities": {"alwaysMatch": wanted}}
        for _ in range(100):
            try:
                session = Browser(url).call("POST", "/session", body)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        else:
            raise AssertionError("chromedriver does not answer")
        made = Browser(f"{url}/session/{session['sessionId']}")
        yield made
        made.call("DELETE", "")


def visit(browser, facts, tmp_path):
    page.write(facts, tmp_path / "r.html")
    browser.call("POST", "/url", {"url": (tmp_path / "r.html").as_uri()})
    browser.log()


COLUMN = (
    "return [...document.querySelectorAll('#best tbody tr')].filter(r => !r.hidden).map(r => r.cells[{}].dataset.v)"
)
PRESS = "document.querySelector('#best th[data-key={}] button').focus()"
ENTER, TAB, RIGHT, DOWN = "\ue007", "\ue004", "\ue014", "\ue015"


def test_table_sorts_from_the_keyboard(browser, facts, tmp_path):
    visit(browser, facts, tmp_path)
    times = [row["time_us"] for row in facts["best"]]
    browser.script(PRESS.format("time"))
    browser.keys(ENTER)
    assert [float(v) for v in browser.script(COLUMN.format(7))] == sorted(times)
    assert browser.script("return document.querySelector('th[data-key=time]').ariaSort") == "ascending"
    browser.keys(ENTER)
    assert [float(v) for v in browser.script(COLUMN.format(7))] == sorted(times, reverse=True)
    browser.keys(TAB + ENTER)  # the next heading
    shares = [float(v) for v in browser.script(COLUMN.format(8)) if v]
    assert shares == sorted(shares)
    assert browser.script("return document.querySelectorAll('[aria-sort]').length") == 1


def test_table_filters_and_says_how_many(browser, facts, tmp_path):
    visit(browser, facts, tmp_path)
    total = len(facts["best"])
    browser.script("document.getElementById('search').focus()")
    browser.keys("predicted 2048")
    assert browser.script(COLUMN.format(0)) == ["h100-sxm"]
    assert browser.script("return document.getElementById('count').textContent") == f"1 of {total} rows"
    browser.script("document.querySelector('.filters [type=reset]').click()")
    time.sleep(0.1)
    assert len(browser.script(COLUMN.format(0))) == total
    browser.script(
        "const s = document.querySelector('[data-filter=source]'); s.value = 'measured';"
        "s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert set(browser.script(COLUMN.format(6))) == {"measured"}


def test_arrow_keys_read_the_chart(browser, facts, tmp_path):
    one = [s for s in facts["series"] if s["device"] == "a100-sxm" and s["group_size"] == 128]
    other = [{**s, "group_size": 64, "points": s["points"][1:]} for s in one]
    visit(browser, {**facts, "series": one + other}, tmp_path)
    browser.script("document.querySelector('.chart').focus()")
    tip = "return document.querySelector('.chart .tip').textContent"
    browser.keys(RIGHT)
    assert "M ≤ 1 ·" in browser.script(tip)
    browser.keys(RIGHT)
    said = browser.script(tip)
    assert "M ≤ 16 ·" in said
    assert "measured" in said
    assert "g128" in said
    browser.keys(DOWN)
    assert "g64 · M ≤ 16 ·" in browser.script(tip)
    browser.keys("\ue00c")  # Escape
    assert browser.script(tip) == ""


def test_legend_hides_a_curve(browser, facts, tmp_path):
    visit(browser, facts, tmp_path)
    shown = "return getComputedStyle(document.querySelector('svg.wide [data-series=\"0\"]')).display"
    assert browser.script(shown) != "none"
    browser.script("document.querySelector('.key').focus()")
    browser.keys(ENTER)
    assert browser.script("return document.querySelector('.key').ariaPressed") == "false"
    assert browser.script(shown) == "none"


def test_theme_follows_the_system_and_the_toggle(browser, facts, tmp_path):
    visit(browser, facts, tmp_path)
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = browser.script(paper)
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})
    try:
        dark = browser.script(paper)
        assert dark != light
        toggle = "document.getElementById('theme').click(); return document.getElementById('theme').textContent"
        assert browser.script(toggle) == "Theme: light"
        assert browser.script(paper) == light
        assert browser.script(toggle) == "Theme: dark"
        assert browser.script(paper) == dark
        assert browser.script(toggle) == "Theme: auto"
    finally:
        browser.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": []}})


@pytest.mark.parametrize("width", [390, 1200])
def test_page_is_never_wider_than_the_screen(browser, facts, tmp_path, width):
    visit(browser, facts, tmp_path)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})
    try:
        browser.script("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert browser.script("return innerWidth") == width
        assert browser.script("return document.documentElement.scrollWidth") <= width
        narrow = "return getComputedStyle(document.querySelector('svg.narrow')).display !== 'none'"
        assert browser.script(narrow) is (width == 390)
    finally:
        clear = {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}}
        browser.call("POST", "/goog/cdp/execute", clear)


def test_trials_become_a_table_on_request(browser, facts, tmp_path):
    visit(browser, facts, tmp_path)
    place = next(i for i, s in enumerate(facts["studies"]) if s["name"] == "night run" and s["group_size"] == 128)
    browser.script(f"document.querySelector('[data-study=\"{place}\"]').open = true")
    time.sleep(0.2)
    rows = browser.script(
        f"return [...document.querySelectorAll('[data-study=\"{place}\"] tbody tr')].map(r => r.textContent)"
    )
    assert len(rows) == 2
    assert "illegal <b>address</b>" in rows[1]


def test_hostile_text_does_not_run(browser, tmp_path):
    facts = evil_database(tmp_path / "evil.db")
    visit(browser, facts, tmp_path)
    browser.script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.script("document.querySelector('.chart').focus()")
    browser.keys(RIGHT)
    time.sleep(0.2)
    assert browser.script("return document.title") == "cupyq tuning report"
    assert browser.script("return document.images.length") == 0
    added = "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
    browser.script(added)
    assert browser.script("return document.title") == "cupyq tuning report"  # the policy, were escaping to fail


def test_browser_has_nothing_to_complain_about(browser, facts, tmp_path):
    page.write(facts, tmp_path / "r.html")
    browser.log()  # what earlier pages said
    browser.call("POST", "/url", {"url": (tmp_path / "r.html").as_uri()})
    assert browser.log() == []
    requests = browser.script("return performance.getEntriesByType('resource').map(r => r.name)")
    assert [r for r in requests if not r.startswith("data:")] == []
