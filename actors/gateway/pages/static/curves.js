"use strict";
// Curves: down-sampled by the server, drawn by uPlot; those of a job are extended by live metrics,
// others are fetched anew every few seconds (`data-every`).
(() => {
  const { url, every } = document.getElementById("charts").dataset;
  const note = document.getElementById("curves-note");
  const figures = [...document.querySelectorAll("[data-chart]")];
  const sync = uPlot.sync("steps");
  const MAX_POINTS = 2000;
  let data = { width: 1, x: [], series: {}, complete: true };
  let loaded = false;
  const early = [];
  const charts = new Map();

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => {
    if (value === null || value === undefined) return "";
    if (Math.abs(value) < 1e-12) return "0";
    const size = Math.abs(value);
    if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
    if (size >= 100 || Number.isInteger(value)) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  };
  const linesOf = (figure) => figure.dataset.lines.split(";").map((line) => {
    const at = line.indexOf("=");
    return { name: line.slice(0, at), label: line.slice(at + 1) };
  }).filter((line) => data.series[line.name]);

  // With several steps to a point each line has a band from its least to its greatest value.
  const columns = (lines) => {
    const found = [data.x];
    for (const { name } of lines) {
      const one = data.series[name];
      if (data.width > 1) found.push(one.high, one.low);
      found.push(one.y);
    }
    return found;
  };

  // Beside the title: each line's newest value, or the one under the cursor.
  const legend = (figure, lines, at) => {
    const place = figure.querySelector(".last");
    if (place.children.length !== lines.length) {
      place.replaceChildren(...lines.map(({ label }, number) => {
        const item = document.createElement("span");
        item.className = lines.length > 1 ? `line line-${number}` : "line";
        item.append(lines.length > 1 ? `${label} ` : "", document.createElement("b"));
        return item;
      }));
    }
    lines.forEach(({ name }, number) => {
      const values = data.series[name].y;
      const value = Number.isInteger(at) ? values[at] : values.findLast((one) => one !== null);
      place.children[number].lastChild.textContent = short(value) || "–";
    });
    figure.querySelector("figcaption .at").textContent = Number.isInteger(at) ? `step ${short(data.x[at])}` : figure.dataset.about;
  };

  const options = (figure, lines) => {
    const colours = [style("--c1"), style("--c2"), style("--c3")];
    const series = [{ label: "step" }];
    const bands = [];
    lines.forEach((line, place) => {
      const colour = colours[place % 3];
      if (data.width > 1) {
        bands.push({ series: [series.length, series.length + 1], fill: `${colour}2b` });
        const edge = { show: true, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push({ ...edge, label: `${line.label} greatest`, class: "edge" }, { ...edge, label: `${line.label} least`, class: "edge" });
      }
      const few = data.series[line.name].y.filter((value) => value !== null).length < 60;
      series.push({ label: line.label, stroke: colour, width: 1.5, spanGaps: true, points: { show: few, size: 4, fill: colour } });
    });
    const axis = { stroke: style("--dim"), font: "11px system-ui", grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
    return {
      width: Math.max(200, figure.querySelector(".plot").clientWidth), height: 190, bands, series,
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 24, values: (_, splits) => splits.map(short) }, { ...axis, size: 48, values: (_, splits) => splits.map(short) }],
      legend: { show: false },
      hooks: { setCursor: [(plot) => legend(figure, lines, plot.cursor.idx)] },
      cursor: { sync: { key: sync.key }, drag: { x: true, y: false }, points: { size: 6 } },
    };
  };

  const drawOne = (figure, lines) => {
    const shape = `${data.width}:${lines.map((line) => line.name)}`;
    const old = charts.get(figure);
    if (old && old.shape === shape) old.plot.setData(columns(lines));
    else {
      old?.plot.destroy();
      const plot = new uPlot(options(figure, lines), columns(lines), figure.querySelector(".plot"));
      charts.set(figure, { plot, shape });
    }
    legend(figure, lines, charts.get(figure).plot.cursor.idx);
  };

  // What can be seen is drawn at once, the rest when it comes into sight.
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) seen.delete(target);
      else {
        seen.add(target);
        if (stale.delete(target)) drawOne(target, linesOf(target));
      }
    }
  }, { rootMargin: "200px" });
  const seen = new Set();
  const stale = new Set();

  const draw = () => {
    for (const figure of figures) {
      const lines = linesOf(figure);
      figure.hidden = !lines.length;
      if (!lines.length) continue;
      if (seen.has(figure)) drawOne(figure, lines);
      else {
        stale.add(figure);
        sight.observe(figure);
      }
    }
    const points = data.x.length;
    document.getElementById("charts").dataset.points = String(points);
    document.getElementById("charts").dataset.last = String(points ? data.x[points - 1] : -1);
    note.textContent = !points ? "No metrics yet." : data.width === 1 ? ""
      : `Each point stands for ${data.width} steps: mean, least and greatest value.` + (data.complete ? "" : " A sample for now; the rest is being read …");
  };

  const redraw = () => {
    for (const { plot } of charts.values()) plot.destroy();
    charts.clear();
    for (const figure of figures) if (!figure.hidden) (seen.has(figure) ? drawOne(figure, linesOf(figure)) : stale.add(figure));
  };

  const append = ({ step, values }) => {
    if (!Object.keys(values).length) return;
    const x = Math.floor(step / data.width) * data.width;
    let at = data.x.findLastIndex((known) => known <= x);
    if (at < 0 || data.x[at] !== x) {
      at += 1;
      data.x.splice(at, 0, x);
      for (const one of Object.values(data.series)) for (const list of Object.values(one)) list.splice(at, 0, null);
    }
    for (const [name, value] of Object.entries(values)) {
      const blank = () => new Array(data.x.length).fill(null);
      const one = (data.series[name] ??= data.width > 1 ? { y: blank(), low: blank(), high: blank() } : { y: blank() });
      one.y[at] = value;
      if (one.low) {
        one.low[at] = one.low[at] === null ? value : Math.min(one.low[at], value);
        one.high[at] = one.high[at] === null ? value : Math.max(one.high[at], value);
      }
    }
  };

  let due = false;
  document.addEventListener("metric", ({ detail }) => {
    if (!loaded) return early.push(detail);
    append(detail);
    if (data.x.length > MAX_POINTS) return load();
    if (due) return;
    due = true;
    setTimeout(() => { due = false; draw(); }, 250);
  });

  const load = async () => {
    loaded = false;
    try {
      const reply = await fetch(url);
      if (!reply.ok) throw new Error(`status ${reply.status}`);
      data = await reply.json();
    } catch (error) {
      note.textContent = "The curves cannot be loaded; trying again …";
      return setTimeout(load, 3000);
    }
    loaded = true;
    for (const detail of early.splice(0)) append(detail);
    draw();
    if (!data.complete) setTimeout(load, 1000);
    else if (every) setTimeout(load, 1000 * every);
  };

  document.addEventListener("themechange", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const [figure, { plot }] of charts) plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: 190 });
  });
  load();
})();
