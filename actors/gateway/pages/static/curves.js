"use strict";
// The curves of a run, or of several laid over each other: which are shown, over what, and how. The
// view stands in the address, so that a link keeps it. The server down-samples; what is shown of one
// run is extended by live metrics; other pages ask anew every few seconds (`data-every`).
(() => {
  const { Plot, short } = window.tmq;
  const root = document.getElementById("charts");
  const note = document.getElementById("curves-note");
  const bar = document.getElementById("view");
  const runs = JSON.parse(root.dataset.runs).map((run) => ({ ...run, data: blank() }));
  const curated = JSON.parse(root.dataset.charts || "[]");
  const every = Number(root.dataset.every || 0);
  const MAX_POINTS = 2000, MAX_FOUND = 60, MAX_NAMED = 120;
  const one = runs.length === 1;
  let names = [], loaded = false;
  const early = [];
  const figures = new Map();

  function blank() { return { width: 1, x: [], time: [], tokens: [], series: {}, complete: true }; }

  const element = (tag, className, text = "") => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.textContent = text;
    return made;
  };

  // ---- what is looked at, and how
  const KEYS = ["x", "smooth", "log", "q", "pins", "open", "seeds"];
  const asked = new URLSearchParams(location.search);
  const list = (text) => (text ? text.split(",").map(decodeURIComponent) : []);
  const kept = (() => {
    if (KEYS.some((key) => asked.has(key))) return asked;
    try { return new URLSearchParams(localStorage.getItem("curves") || ""); } catch { return asked; }
  })();
  const view = {
    x: ["step", "time", "tokens"].includes(kept.get("x")) ? kept.get("x") : "step",
    smooth: Math.min(0.99, Math.max(0, Number(kept.get("smooth")) || 0)),
    log: kept.get("log") === "1",
    q: kept.get("q") || "",
    pins: list(kept.get("pins")),
    open: new Set(list(kept.get("open"))),
    seeds: kept.get("seeds") !== "0" && runs.some((run) => run.seeds),
  };
  const keep = () => {
    const told = { x: view.x === "step" ? "" : view.x, smooth: view.smooth || "", log: view.log ? "1" : "", q: view.q, pins: view.pins.map(encodeURIComponent).join(","), open: [...view.open].map(encodeURIComponent).join(","), seeds: view.seeds || !runs.some((run) => run.seeds) ? "" : "0" };
    const query = new URLSearchParams(location.search), own = new URLSearchParams();
    for (const [key, value] of Object.entries(told)) {
      if (value) { query.set(key, value); if (key !== "q") own.set(key, value); } else query.delete(key);
    }
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
    try { localStorage.setItem("curves", String(own)); } catch { /* a browser that keeps nothing */ }
  };

  const groupOf = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "others");
  const titles = new Map(curated.flatMap((chart) => chart.lines.map(([name, label]) => [name, chart.lines.length > 1 ? `${chart.title}, ${label}` : chart.title])));
  const WORDS = { kl: "KL", ppo: "PPO", pg: "policy", lr: "learning rate", val: "validation", num: "number of", s: "(seconds)", std: "deviation", clipfrac: "clipped share" };
  const human = (name) => {
    if (titles.has(name)) return titles.get(name);
    const words = name.replace(/^[^/]*\/(?=.)/, "").split(/[/_]/).map((word) => WORDS[word] || word).join(" ").trim() || name;
    return words[0].toUpperCase() + words.slice(1);
  };
  const chartOf = (name) => ({ key: name, title: human(name), about: name, lines: [[name, human(name)]] });
  const overview = one ? curated : curated.flatMap((chart) => chart.lines.map(([name]) => chartOf(name)));
  if (overview.length) overview[0].large = true;
  const known = (key) => overview.find((chart) => chart.key === key) || (names.includes(key) ? chartOf(key) : null);
  const matching = () => {
    const words = view.q.toLowerCase().split(/\s+/).filter(Boolean);
    return names.filter((name) => words.every((word) => `${name} ${human(name)}`.toLowerCase().includes(word)));
  };
  const sections = () => {
    if (view.q.trim()) {
      const found = matching();
      const more = found.length > MAX_FOUND ? `, the first ${MAX_FOUND}` : "";
      return [{ key: "found", title: `${found.length} metrics${more}`, charts: found.slice(0, MAX_FOUND).map(chartOf), always: true }];
    }
    const groups = new Map();
    for (const name of names) groups.set(groupOf(name), [...(groups.get(groupOf(name)) || []), name]);
    return [
      { key: "pinned", title: "Pinned", charts: view.pins.map(known).filter(Boolean), always: true },
      { key: "overview", title: "", charts: overview, always: true },
      ...[...groups].map(([key, all]) => ({ key: `of-${key}`, title: `${key} · ${all.length}`, charts: all.map(chartOf), open: view.open.has(key) || !overview.length, group: key })),
    ].filter((section) => section.charts.length);
  };
  const wanted = () => [...new Set(sections().filter((section) => section.always || section.open).flatMap((section) => section.charts.flatMap((chart) => chart.lines.map(([name]) => name))).concat(overview.flatMap((chart) => chart.lines.map(([name]) => name))))];

  // ---- the page
  const button = (text, title, act) => {
    const made = element("button", "mini", text);
    made.type = "button";
    made.title = title;
    made.setAttribute("aria-label", title);
    made.addEventListener("click", act);
    return made;
  };
  const pin = (key) => {
    view.pins = view.pins.includes(key) ? view.pins.filter((other) => other !== key) : [...view.pins, key];
    build();
  };
  const move = (key, by) => {
    const at = view.pins.indexOf(key), to = at + by;
    if (to < 0 || to >= view.pins.length) return;
    [view.pins[at], view.pins[to]] = [view.pins[to], view.pins[at]];
    build();
  };

  const figureOf = (chart, section) => {
    const id = `${section.key} ${chart.key}`;
    const old = figures.get(id);
    if (old) return old;
    const figure = element("figure", `card chart${chart.large && section.key === "overview" ? " large" : ""}`);
    figure.dataset.chart = chart.key;
    const caption = element("figcaption");
    const last = element("span", "last");
    const tools = element("span", "tools");
    const where = element("span", "dim at", chart.about);
    caption.append(element("b", "", chart.title), " ", where, last, tools);
    const place = element("div", "plot");
    figure.setAttribute("role", "figure");
    figure.setAttribute("aria-label", chart.title);
    place.setAttribute("role", "img");
    figure.append(caption, place);
    const plot = new Plot(place, figure.classList.contains("large") ? 300 : 190);
    const pinned = section.key === "pinned";
    if (pinned) tools.append(button("←", "Move to the left", () => move(chart.key, -1)), button("→", "Move to the right", () => move(chart.key, 1)));
    tools.append(
      button(view.pins.includes(chart.key) ? "★" : "☆", view.pins.includes(chart.key) ? "Unpin" : "Pin to the top", () => pin(chart.key)),
      button("CSV", "Download the values", () => plot.csv(title(chart))),
      button("PNG", "Download the picture", () => plot.png(title(chart))),
    );
    const made = { id, figure, chart, plot, last, where, place };
    plot.onCursor = (idx) => legend(made, idx);
    figures.set(id, made);
    return made;
  };
  const title = (chart) => (one ? `${runs[0].name} ${chart.title}` : chart.title);

  const legend = ({ chart, plot, last, where, place }, idx) => {
    if (last.children.length !== plot.lines.length) {
      last.replaceChildren(...plot.lines.map(({ label }, number) => {
        const item = element("span", plot.lines.length > 1 ? `line line-${number % 10}` : "line");
        item.append((one || view.seeds) && plot.lines.length > 1 ? `${label} ` : "", element("b"));
        item.title = label;
        return item;
      }));
    }
    plot.lines.forEach((_, number) => { last.children[number].lastChild.textContent = short(plot.at(number, idx)) || "–"; });
    place.setAttribute("aria-label", `${chart.title} over ${view.x}: ${plot.lines.map(({ label }, number) => `${label} ${short(plot.at(number, null))}`).join(", ")}`);
    where.textContent = Number.isInteger(idx) ? plot.where(idx) : chart.about;
  };

  const linesOf = (chart) => {
    const found = [];
    if (view.seeds) {
      for (const seeds of new Set(runs.map((run) => run.seeds).filter(Boolean))) {
        const some = runs.filter((run) => run.seeds === seeds);
        for (const [name] of chart.lines) {
          const line = meanOf(some.filter((run) => run.data.series[name]), name);
          if (line.x.length) found.push({ name: `${seeds} ${name}`, label: seeds, ...line });
        }
      }
    }
    for (const run of view.seeds ? runs.filter((other) => !other.seeds) : runs) {
      for (const [name, label] of chart.lines) {
        const values = run.data.series[name];
        if (values) found.push({ name: `${run.job} ${name}`, label: one ? label : run.name, ...over(run.data, values) });
      }
    }
    return found;
  };
  const over = (data, values) => {
    const there = (index) => values.y[index] !== null && values.y[index] !== undefined && (view.x === "step" || Number.isFinite(data[view.x]?.[index]));
    const at = data.x.map((_, index) => index).filter(there);
    const take = (all) => at.map((index) => all[index]);
    const x = take(view.x === "step" ? data.x : data[view.x] || data.x);
    return { x, y: take(values.y), ...(one && values.low ? { low: take(values.low), high: take(values.high) } : {}) };
  };

  // The mean of runs with different seeds, over the steps that all of them have, with their range.
  const meanOf = (some, name) => {
    const width = Math.max(...some.map((run) => run.data.width));
    const at = new Map();
    some.forEach((run, number) => {
      const { y } = run.data.series[name], xs = run.data[view.x === "step" ? "x" : view.x] || run.data.x;
      run.data.x.forEach((step, index) => {
        if (y[index] === null || y[index] === undefined || !Number.isFinite(xs[index])) return;
        const key = Math.floor(step / width) * width;
        const bin = at.get(key) || at.set(key, some.map(() => [])).get(key);
        bin[number].push([view.x === "step" ? key : xs[index], y[index]]);
      });
    });
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const line = { x: [], y: [], low: [], high: [] };
    for (const [, bin] of [...at].sort(([left], [right]) => left - right)) {
      if (bin.some((points) => !points.length)) continue;
      const means = bin.map((points) => mean(points.map(([, value]) => value)));
      line.x.push(mean(bin.flatMap((points) => mean(points.map(([x]) => x)))));
      line.y.push(mean(means));
      line.low.push(Math.min(...means));
      line.high.push(Math.max(...means));
    }
    return line;
  };

  // What can be seen is drawn at once, the rest when it comes into sight.
  const seen = new Set(), stale = new Set();
  const of = new WeakMap();
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const made = of.get(target);
      if (!isIntersecting) seen.delete(made);
      else {
        seen.add(made);
        if (stale.delete(made)) drawOne(made);
      }
    }
  }, { rootMargin: "200px" });
  const drawOne = (made) => made.plot.draw(linesOf(made.chart), view);

  const build = () => {
    keep();
    const shown = new Set();
    const parts = sections().map((section) => {
      const grid = element("div", "grid");
      const opened = section.always || section.open;
      if (opened) {
        for (const chart of section.charts) {
          const made = figureOf(chart, section);
          shown.add(made);
          grid.append(made.figure);
        }
      }
      const part = element(section.group ? "details" : "section", "charts-group");
      part.dataset.group = section.key;
      if (section.group) {
        part.open = Boolean(section.open);
        part.append(element("summary", "", section.title));
        part.firstChild.addEventListener("click", (event) => {
          event.preventDefault();
          view.open.has(section.group) ? view.open.delete(section.group) : view.open.add(section.group);
          build();
          load();
        });
      } else if (section.title) part.append(element("h2", "", section.title));
      part.append(grid);
      return part;
    });
    for (const [id, made] of figures) {
      if (shown.has(made)) continue;
      figures.delete(id);
      seen.delete(made);
      stale.delete(made);
      sight.unobserve(made.figure);
      made.plot.remove();
    }
    root.replaceChildren(...parts);
    draw();
  };

  const draw = () => {
    for (const made of figures.values()) {
      const lines = linesOf(made.chart);
      made.figure.hidden = !lines.length;
      if (!lines.length) continue;
      if (seen.has(made)) drawOne(made);
      else {
        stale.add(made);
        of.set(made.figure, made);
        sight.observe(made.figure);
      }
    }
    tell();
  };
  const tell = () => {
    const x = runs.flatMap((run) => run.data.x.slice(-1));
    root.dataset.points = String(Math.max(0, ...runs.map((run) => run.data.x.length)));
    root.dataset.last = String(x.length ? Math.max(...x) : -1);
    const width = Math.max(...runs.map((run) => run.data.width));
    const said = [];
    if (!x.length) said.push("No metrics yet.");
    else if (width > 1) said.push(`Each point stands for ${width} steps: ${one ? "mean, least and greatest value" : "the mean"}.`);
    if (runs.some((run) => !run.data.complete)) said.push("A sample for now; the rest is being read …");
    if (view.log) said.push("Values that are not above 0 have no place on a logarithmic axis.");
    note.textContent = said.join(" ");
  };
  // The marks of runs elsewhere on the page have the colours of their lines.
  const mark = () => {
    const groups = [...new Set(runs.map((run) => run.seeds).filter(Boolean))], alone = runs.filter((run) => !run.seeds);
    runs.forEach((run, number) => {
      const colour = !view.seeds ? number : run.seeds ? groups.indexOf(run.seeds) : groups.length + alone.indexOf(run);
      for (const made of document.querySelectorAll(`[data-run="${CSS.escape(run.job)}"]`)) made.className = `line line-${colour % 10}`;
    });
  };
  const redraw = () => {
    mark();
    for (const made of figures.values()) made.plot.remove();
    draw();
  };

  // ---- data
  const append = ({ data }, { step, time, values }) => {
    if (!Object.keys(values).length) return;
    const x = Math.floor(step / data.width) * data.width;
    let at = data.x.findLastIndex((before) => before <= x);
    if (at < 0 || data.x[at] !== x) {
      at += 1;
      data.x.splice(at, 0, x);
      data.time.splice(at, 0, null);
      data.tokens.splice(at, 0, (data.tokens[at - 1] || 0) + (values["perf/total_num_tokens"] || 0) * data.width);
      for (const line of Object.values(data.series)) for (const all of Object.values(line)) all.splice(at, 0, null);
    }
    if (time) {
      data.begun ??= time - (data.time.findLast((told) => told !== null) || 0);
      data.time[at] = time - data.begun;
    }
    for (const [name, value] of Object.entries(values)) {
      const none = () => new Array(data.x.length).fill(null);
      const line = (data.series[name] ??= data.width > 1 ? { y: none(), low: none(), high: none() } : { y: none() });
      line.y[at] = value;
      if (line.low) {
        line.low[at] = line.low[at] === null ? value : Math.min(line.low[at], value);
        line.high[at] = line.high[at] === null ? value : Math.max(line.high[at], value);
      }
    }
  };

  let due = false, fresh = false;
  document.addEventListener("metric", ({ detail }) => {
    if (!loaded) return early.push(detail);
    append(runs[0], detail);
    fresh ||= Object.keys(detail.values).some((name) => !names.includes(name));
    if (runs[0].data.x.length > MAX_POINTS) return load();
    if (due) return;
    due = true;
    setTimeout(() => {
      due = false;
      if (fresh) learn(Object.keys(runs[0].data.series));
      else draw();
    }, 250);
  });
  const learn = (more) => {
    fresh = false;
    names = [...new Set([...names, ...more])].sort();
    build();
  };

  const query = (run, some) => {
    if (run.whole) return run.url;
    return some.length > MAX_NAMED ? run.url : `${run.url}?names=${encodeURIComponent(some.map((name) => name.replace(/[,*?[\]]/g, "?")).join(","))}`;
  };
  let asking = 0, next = 0; // one request at a time is waited for, and one is to come
  const later = (ms) => { clearTimeout(next); next = setTimeout(load, ms); };
  const load = async () => {
    clearTimeout(next);
    if (document.hidden && loaded) return later(1000);
    const mine = (asking += 1), some = wanted();
    try {
      const replies = await Promise.all(runs.map(async (run) => {
        const reply = await fetch(query(run, some));
        if (!reply.ok) throw new Error(`status ${reply.status}`);
        return reply.json();
      }));
      if (mine !== asking) return;
      runs.forEach((run, number) => { run.data = { ...blank(), ...replies[number] }; });
      loaded = true;
      for (const detail of early.splice(0)) append(runs[0], detail);
      learn(replies.flatMap((reply) => reply.names || Object.keys(reply.series)));
    } catch (error) {
      if (mine !== asking) return;
      note.textContent = "The curves cannot be loaded; trying again …";
      return later(3000);
    }
    if (some.length <= MAX_NAMED && wanted().some((name) => names.includes(name) && !some.includes(name))) load();
    else if (runs.some((run) => !run.data.complete)) later(1000);
    else if (every) later(1000 * every);
  };

  // ---- the controls
  if (bar) {
    const { q, x, smooth, log, seeds } = bar.elements;
    q.value = view.q;
    x.value = view.x;
    smooth.value = view.smooth;
    log.checked = view.log;
    seeds.checked = view.seeds;
    seeds.parentElement.hidden = !runs.some((run) => run.seeds);
    seeds.addEventListener("change", () => { view.seeds = seeds.checked; keep(); redraw(); });
    bar.addEventListener("submit", (event) => event.preventDefault());
    let typing = 0;
    q.addEventListener("input", () => {
      view.q = q.value;
      clearTimeout(typing);
      typing = setTimeout(() => { build(); load(); }, 200);
    });
    x.addEventListener("change", () => { view.x = x.value; keep(); redraw(); });
    smooth.addEventListener("input", () => { view.smooth = Number(smooth.value); keep(); draw(); });
    log.addEventListener("change", () => { view.log = log.checked; keep(); redraw(); });
  }

  document.addEventListener("themechange", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  mark();
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === wide) return;
    wide = innerWidth;
    for (const { plot } of figures.values()) plot.fit();
  });
  load();
})();
