"use strict";
// One chart: a card with a uPlot drawing, a legend with the last values (or shares of the run), and a tooltip with the values under the pointer.
shoal.drawChart = (chart, prepared, onStep) => {
  const height = chart.height || 176;
  const percent = chart.percent || prepared.stacked;
  const write = percent ? shoal.percent : shoal.number;
  const shown = prepared.lines.filter((line) => !line.edge);
  const summary = (line) => write(line.overall ?? shoal.last(line.own || line.values));
  const room = shoal.make("div", { class: "plot", "data-chart": chart.title });
  const box = shoal.make("figure", { class: "card", "aria-label": chart.title + ": " + shown.map((line) => line.label + " " + summary(line)).join(", ") },
    shoal.make("figcaption", {}, shoal.make("b", {}, chart.title), shoal.make("span", { class: "note", title: prepared.note || chart.note }, prepared.note || (prepared.several && chart.band ? "" : chart.note || ""))), room, legend());
  let plot = null, watcher = null;
  const self = { redraw, destroy };
  shoal.charts.push(self);
  // The chart is drawn when its box has a width, and again when the theme or the smoothing changes.
  requestAnimationFrame(redraw);
  return box;

  function legend() {
    return shoal.make("div", { class: "legend" }, ...shown.map((line) => shoal.make("span", { class: "key", title: line.name || "" }, swatch(line), line.label,
      shoal.make("span", { class: "value" }, summary(line)))), prepared.healthy ? healthyKey() : null);
  }

  function healthyKey() {
    const { low, high } = prepared.healthy, both = low > -Infinity && high < Infinity;
    const text = both ? write(low) + " to " + write(high) : low > -Infinity ? "above " + write(low) : "below " + write(high);
    return shoal.make("span", { class: "key healthy" }, shoal.make("i", { class: "swatch block" }), (chart.healthy ? shoal.metricLabel(chart.healthy) + ": " : "") + "healthy " + text);
  }

  function swatch(line) {
    const mark = shoal.make("i", { class: "swatch" + (line.area ? " block" : line.dots ? " dot" : "") });
    const colour = shoal.colour(line.colour);
    mark.style.background = line.dash ? "repeating-linear-gradient(90deg, " + colour + " 0 4px, transparent 4px 7px)" : colour;
    return mark;
  }

  // uPlot series: faint measured lines below, smoothed lines above.
  function layers() {
    const weight = prepared.stacked || chart.exact ? 0 : shoal.smoothing;
    const raw = weight ? prepared.lines.filter((line) => !line.edge && !line.dots).map((line) => ({ ...line, faint: true })) : [];
    const main = prepared.lines.map((line) => (line.dots ? line : { ...line, values: shoal.smooth(line.values, weight) }));
    return [...raw, ...main];
  }

  function redraw() {
    if (!box.isConnected || !room.clientWidth) {
      if (!watcher) watch();
      return;
    }
    if (plot) plot.destroy();
    const lines = layers();
    plot = new uPlot(options(lines), [prepared.x, ...lines.map((line) => line.values)], room);
    if (shoal.zooms.has(chart.title)) plot.setScale("x", shoal.zooms.get(chart.title));
    // A press and release at one place is a click: uPlot consumes the click event of the browser.
    let pressed = null, waiting = null;
    plot.over.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
    plot.over.addEventListener("pointerup", (event) => {
      const still = pressed !== null && Math.abs(event.clientX - pressed) < 4;
      pressed = null;
      if (!onStep || !still || event.button !== 0) return;
      const step = prepared.x[plot.posToIdx(event.clientX - plot.over.getBoundingClientRect().left)];
      clearTimeout(waiting);
      if (shoal.zooms.has(chart.title)) waiting = setTimeout(() => onStep(step), 260); // a second click means zoom out
      else onStep(step);
    });
    plot.over.addEventListener("dblclick", () => { clearTimeout(waiting); shoal.zooms.delete(chart.title); });
    plot.over.addEventListener("mouseleave", shoal.hideTip);
    plot.over.addEventListener("mousemove", showTip);
    if (!watcher) watch();
  }

  function watch() {
    let width = room.clientWidth;
    watcher = new ResizeObserver(() => {
      if (!room.clientWidth || room.clientWidth === width) return;
      width = room.clientWidth;
      if (plot) plot.setSize({ width, height });
      else redraw();
    });
    watcher.observe(room);
  }

  function destroy() {
    if (watcher) watcher.disconnect();
    if (plot) plot.destroy();
    plot = null;
  }

  function showTip(event) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) return shoal.hideTip();
    const rows = shown.flatMap((line) => {
      const raw = (line.own || line.values)[at];
      if (raw === null || raw === undefined) return [];
      const smoothed = prepared.stacked || chart.exact || line.dots || !shoal.smoothing ? null : shoal.smooth(line.values, shoal.smoothing)[at];
      return [shoal.make("span", { class: "key" }, swatch(line), line.label,
        shoal.make("span", { class: "value" }, write(raw), smoothed === null ? null : shoal.make("span", { class: "raw" }, "  smoothed " + write(smoothed))))];
    });
    shoal.tip(event, shoal.make("b", {}, (chart.x || "Step ") + prepared.x[at]), ...(rows.length ? rows : [shoal.make("span", { class: "raw" }, "not measured here")]));
  }

  function options(lines) {
    const axis = { stroke: shoal.colour("muted"), grid: { stroke: shoal.colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const few = prepared.x.length < 3;
    const edges = lines.flatMap((line, i) => (line.edge ? [i + 1] : []));
    const reach = [prepared.x[0], prepared.x[prepared.x.length - 1]];
    return {
      width: room.clientWidth, height, padding: [8, 10, 0, 0], legend: { show: false },
      cursor: { y: false, points: { size: (_, i) => (i > 0 && (lines[i - 1].edge || lines[i - 1].faint || lines[i - 1].area) ? 0 : 7) }, drag: { x: true, y: false, dist: 5 }, sync: { key: "shoal" } },
      scales: { x: { time: false, range: (_, low, high) => (reach[0] === reach[1] ? [reach[0] - 1, reach[0] + 1] : [low, high]) }, y: { range: (_, low, high) => range(low, high) } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000] },
        { ...axis, size: 46, space: 28, values: (_, ticks) => ticks.map((tick) => (percent ? Math.round(1000 * tick) / 10 + "%" : shoal.number(tick))) },
      ],
      bands: edges.length === 2 ? [{ series: [edges[0], edges[1]], fill: shoal.colour("c1") + "26" }] : [],
      series: [{}, ...lines.map((line) => ({
        label: line.label, stroke: line.faint ? shoal.colour(line.colour) + "40" : shoal.colour(line.colour), dash: line.dash || undefined,
        width: line.edge || line.area ? 0 : line.faint ? 1 : 2, spanGaps: true, fill: line.area ? shoal.colour(line.colour) : undefined,
        points: { show: (line.dots || few) && !line.edge && !line.faint, size: 7, fill: shoal.colour(line.colour), stroke: shoal.colour("card") },
      }))],
      hooks: { drawClear: [drawHealthy], setSelect: [(drawn) => { if (drawn.select.width > 0) shoal.zooms.set(chart.title, { min: drawn.posToVal(drawn.select.left, "x"), max: drawn.posToVal(drawn.select.left + drawn.select.width, "x") }); }] },
    };
  }

  // The healthy range as a soft background, and its limits as lines.
  function drawHealthy(drawn) {
    const range = prepared.healthy, { min, max } = drawn.scales.y, { ctx, bbox } = drawn;
    if (!range || min === null || min === undefined) return;
    const place = (value) => Math.round(drawn.valToPos(value, "y", true));
    const top = place(Math.min(range.high, max)), bottom = place(Math.max(range.low, min));
    if (bottom <= top) return;
    ctx.fillStyle = shoal.colour("c3") + "14";
    ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
    ctx.fillStyle = shoal.colour("c3") + "99";
    if (range.high < max) ctx.fillRect(bbox.left, top, bbox.width, devicePixelRatio);
    if (range.low > min) ctx.fillRect(bbox.left, bottom, bbox.width, devicePixelRatio);
  }

  function range(low, high) {
    if (prepared.stacked) return [0, 1];
    if (low === null || high === null) return [0, 1];
    if (low === 0 && high === 0 && prepared.healthy && prepared.healthy.high < Infinity) return [0, 1.25 * prepared.healthy.high];
    const bottom = chart.zero ? Math.min(0, low) : low;
    const margin = (high - bottom) * 0.08 || Math.abs(high) * 0.1 || (percent ? 0.1 : 1);
    return [chart.zero && low >= 0 ? 0 : bottom - margin, high + margin];
  }
};
