"use strict";
// The page is complete without this: it adds sorting, filters, the curves' legend and tips, tables of trials, the theme.
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const times = (x) => x.toFixed(2) + "×";
  const micro = (x) => (x === null ? "–" : x.toPrecision(4) + " µs");

  // Theme: the system's, until the reader says otherwise. Storage may be forbidden for local files.
  const theme = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  let chosen = "auto";
  const setTheme = (name) => {
    chosen = order.includes(name) ? name : "auto";
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    theme.textContent = "Theme: " + chosen;
    try { localStorage.setItem("cupyq-theme", chosen); } catch { /* not kept, then */ }
  };
  let kept = "auto";
  try { kept = localStorage.getItem("cupyq-theme"); } catch { /* nothing kept */ }
  setTheme(kept);
  theme.hidden = false;
  theme.addEventListener("click", () => setTheme(order[(order.indexOf(chosen) + 1) % 3]));

  // The table of configs.
  const table = document.getElementById("best");
  if (table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const form = document.querySelector(".filters");
    const count = document.getElementById("count");
    const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const narrow = () => {
      const words = document.getElementById("search").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
      const wanted = all("select", form).filter((s) => s.value).map((s) => [s.dataset.filter, s.value]);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !(wanted.every(([key, value]) => row.getAttribute("data-f-" + key) === value)
          && words.every((word) => text.get(row).includes(word)));
        shown += !row.hidden;
      }
      count.textContent = shown === rows.length ? shown + " rows" : shown + " of " + rows.length + " rows";
    };
    form.addEventListener("input", narrow);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(narrow));
    const heads = all("thead th", table);
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.v;
      const numeric = rows.every((row) => value(row) === "" || Number.isFinite(Number(value(row))));
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === ""); // what is missing comes last either way
        const way = numeric ? x - y : x.localeCompare(y);
        return down ? -way : way;
      });
      body.append(...rows);
    }));
  }

  // Charts: the legend shows and hides curves; the pointer and the arrow keys read points.
  for (const chart of all(".chart")) {
    const series = facts.series.filter((s) => s.device === chart.dataset.device);
    const keys = all(".key", chart.previousElementSibling);
    const tip = chart.querySelector(".tip");
    const groups = (i) => all('.series[data-series="' + i + '"]', chart);
    const on = (i) => keys[i].getAttribute("aria-pressed") === "true";
    let at = null;
    const leave = () => {
      for (const point of all(".at", chart)) point.classList.remove("at");
      for (const group of all(".hot", chart)) group.classList.remove("hot");
      chart.classList.remove("one");
      tip.textContent = "";
    };
    const read = (i, p) => {
      leave();
      at = [i, p];
      chart.classList.add("one");
      for (const group of groups(i)) {
        group.classList.add("hot");
        group.querySelector('[data-point="' + p + '"]').classList.add("at");
      }
      const s = series[i], q = s.points[p];
      const grouping = (s.group_size < 0 ? " per column" : " g" + s.group_size) + (s.symmetric ? "" : " asym");
      tip.textContent = [s.op + " " + s.k + "×" + s.n + grouping, (q.band > 8192 ? "M > 8192" : "M ≤ " + q.band),
        times(q.speedup) + (q.ideal === null ? "" : " of ideal " + times(q.ideal)),
        micro(q.time_us), q.path, s.source + (q.stale ? ", stale" : "")].join(" · ");
    };
    keys.forEach((key, i) => {
      const draw = () => groups(i).forEach((group) => group.classList.toggle("off", !on(i)));
      key.addEventListener("click", () => { key.setAttribute("aria-pressed", String(!on(i))); leave(); at = null; draw(); });
      draw();
    });
    chart.addEventListener("pointermove", (event) => {
      const svg = all("svg", chart).find((s) => s.getBoundingClientRect().width > 0);
      let best = 28, found = null;
      for (const point of all("[data-point]", svg)) {
        const group = point.parentNode;
        if (group.classList.contains("off")) continue;
        const box = point.getBoundingClientRect();
        const away = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
        if (away < best) { best = away; found = [Number(group.dataset.series), Number(point.dataset.point)]; }
      }
      if (found) read(...found); else leave();
    });
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("blur", leave);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      const shown = series.map((_, i) => i).filter(on);
      if (event.key === "Escape") leave();
      if (!step || !shown.length) return;
      event.preventDefault();
      if (!at) return read(shown[0], 0);
      const next = shown[(shown.indexOf(at[0]) + step[0] + shown.length) % shown.length];
      const points = series[next].points;
      // Another curve is entered at the same band, or the nearest that it has.
      const band = series[at[0]].points[at[1]].band;
      const near = points.reduce((b, q, i) => Math.abs(Math.log(q.band / band)) < Math.abs(Math.log(points[b].band / band)) ? i : b, 0);
      read(next, step[0] ? near : Math.min(Math.max(at[1] + step[1], 0), points.length - 1));
    });
  }

  // The trials of a study become a table when somebody opens it; thousands of rows would slow the page for nothing.
  for (const details of all("[data-study]")) {
    details.addEventListener("toggle", () => {
      const fill = details.querySelector(".fill");
      if (!details.open || fill.firstChild) return;
      const region = document.createElement("div");
      Object.assign(region, { className: "scroll", tabIndex: 0 });
      region.setAttribute("role", "region");
      region.setAttribute("aria-label", "Trials of this study");
      const made = region.appendChild(document.createElement("table"));
      const head = made.createTHead().insertRow();
      for (const name of ["#", "Path", "Phase", "State", "Source", "Time", "Chosen", "Reason"]) {
        const cell = head.appendChild(document.createElement("th"));
        cell.scope = "col";
        cell.textContent = name;
      }
      const body = made.createTBody();
      facts.studies[details.dataset.study].trials.forEach(([, path, phase, state, source, time, chosen, reason], i) => {
        const row = body.insertRow();
        for (const value of [i + 1, path, phase, state, source, micro(time), chosen ? "yes" : "", reason || ""]) {
          row.insertCell().textContent = value;
        }
      });
      fill.append(region);
    });
  }
})();
