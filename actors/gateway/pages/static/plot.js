"use strict";
// One chart: lines of one run or of several, drawn by uPlot; its picture and its table.
(() => {
  // A colour of the theme, as a canvas takes it.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const style = (name, opacity = 1) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.replace("rgb(", "rgba(").replace(")", `, ${opacity})`);
  };
  const sync = uPlot.sync("steps");

  const short = (value) => {
    if (value === null || value === undefined) return "";
    if (Math.abs(value) < 1e-12) return "0";
    const size = Math.abs(value);
    if (size >= 1e12) return value.toExponential(1);
    if (size >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
    if (size >= 100 || Number.isInteger(value)) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  };
  const whole = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
  const clock = (seconds) => {
    if (seconds < 120) return `${short(seconds)} s`;
    return seconds < 7200 ? `${short(seconds / 60)} min` : `${short(seconds / 3600)} h`;
  };

  // The exponential mean of what came so far, its start corrected for having come from nothing.
  const smoothed = (values, weight) => {
    let sum = 0, weights = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = weight * sum + (1 - weight) * value;
      weights = weight * weights + 1 - weight;
      return sum / weights;
    });
  };

  const padded = (_, least, greatest) => {
    if (least === null || greatest === null) return [0, 1];
    const room = greatest > least ? (greatest - least) * 0.06 : Math.abs(greatest) * 0.1 || 1;
    return [least - room, greatest + room];
  };

  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name.replace(/[^\w.@-]+/g, "_");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  class Plot {
    constructor(place, height) {
      Object.assign(this, { place, height, plot: null, shape: "", lines: [] });
      this.onCursor = () => {};
    }

    // Each line: name, x, y, and where a point stands for several steps also low and high.
    draw(lines, view) {
      this.lines = lines;
      this.view = view;
      const shape = JSON.stringify([view.x, view.log, view.smooth > 0, lines.map((line) => [line.name, Boolean(line.low), line.y.length < 60])]);
      const columns = this.columns();
      if (this.plot && shape === this.shape) this.plot.setData(columns);
      else {
        this.plot?.destroy();
        this.shape = shape;
        this.plot = new uPlot(this.options(), columns, this.place);
      }
      this.onCursor(this.plot.cursor.idx);
    }

    columns() {
      const { smooth, log } = this.view;
      const shown = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
      return uPlot.join(this.lines.map((line) => {
        const table = [line.x];
        if (line.low) table.push(shown(line.high), shown(line.low));
        if (smooth > 0) table.push(shown(line.y));
        table.push(shown(smooth > 0 ? smoothed(line.y, smooth) : line.y));
        return table;
      }));
    }

    options() {
      const { smooth, log, x } = this.view;
      const series = [{ label: x }], bands = [];
      this.main = [];
      this.lines.forEach((line, number) => {
        const name = `--c${1 + (number % 10)}`, colour = style(name);
        if (line.low) {
          bands.push({ series: [series.length, series.length + 1], fill: style(name, 0.17) });
          const edge = { show: true, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
          series.push({ ...edge }, { ...edge });
        }
        if (smooth > 0) series.push({ stroke: style(name, 0.25), width: 1, spanGaps: true, points: { show: false } });
        this.main.push(series.length);
        const few = line.y.length < 60;
        series.push({ label: line.label, stroke: colour, width: 1.5, spanGaps: true, points: { show: few, size: 4, fill: colour } });
      });
      const axis = { stroke: style("--dim"), font: "11px system-ui", grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
      const format = x === "time" ? clock : short;
      return {
        width: this.width(), height: this.height, bands, series,
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range: padded } },
        axes: [{ ...axis, size: 24, ...(x === "time" ? {} : { incrs: whole }), values: (_, splits) => splits.map((one) => (one === null ? "" : format(one))) }, { ...axis, size: 52, values: (_, splits) => splits.map(short) }],
        legend: { show: false },
        hooks: { setCursor: [(plot) => this.onCursor(plot.cursor.idx)] },
        cursor: { sync: { key: sync.key }, drag: { x: true, y: false }, points: { size: 6 } },
      };
    }

    width() { return Math.max(200, this.place.clientWidth); }
    fit() { this.plot?.setSize({ width: this.width(), height: this.height }); }

    // What was told of a line at a place of the cursor, or last; never the smoothed value.
    at(number, idx) {
      const values = this.plot.data[this.main[number] - (this.view.smooth > 0 ? 1 : 0)];
      let place = Number.isInteger(idx) ? idx : values.length - 1;
      while (place >= 0 && (values[place] === null || values[place] === undefined)) place -= 1;
      return place < 0 ? null : values[place];
    }

    where(idx) {
      const x = this.plot.data[0][idx];
      return this.view.x === "time" ? clock(x) : `${this.view.x.replace(/s$/, "")} ${short(x)}`;
    }

    // The values as they came, not smoothed.
    csv(title) {
      const [x, ...rows] = uPlot.join(this.lines.map((line) => [line.x, line.y]));
      const cell = (text) => (/^[=+@\t\r-]|[",\n]/.test(text) ? `"${/^[=+@\t\r-]/.test(text) ? "'" : ""}${text.replaceAll('"', '""')}"` : text);
      const text = [[this.view.x, ...this.lines.map((line) => cell(line.label))].join(",")];
      x.forEach((value, place) => text.push([value, ...rows.map((row) => row[place] ?? "")].join(",")));
      save(`${title}.csv`, new Blob([`${text.join("\n")}\n`], { type: "text/csv" }));
    }

    png(title) {
      const drawn = this.plot.ctx.canvas, scale = devicePixelRatio || 1, head = 26 * scale;
      const made = document.createElement("canvas");
      made.width = drawn.width;
      made.height = drawn.height + head;
      const pen = made.getContext("2d");
      pen.fillStyle = style("--surface");
      pen.fillRect(0, 0, made.width, made.height);
      pen.font = `600 ${12 * scale}px system-ui`;
      pen.textBaseline = "middle";
      let left = 8 * scale;
      const say = (text, colour) => {
        pen.fillStyle = colour;
        pen.fillText(text, left, head / 2);
        left += pen.measureText(text).width + 12 * scale;
      };
      say(title, style("--text"));
      if (this.lines.length > 1) this.lines.forEach((line, number) => say(line.label, style(`--c${1 + (number % 10)}`)));
      pen.drawImage(drawn, 0, head);
      made.toBlob((blob) => save(`${title}.png`, blob));
    }

    remove() {
      this.plot?.destroy();
      this.plot = null;
      this.shape = "";
    }
  }

  window.tmq = { Plot, short };
})();
