"use strict";
// The curves: which metrics share a chart, drawn with uPlot; a click opens that step's rollouts.
shoal.PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6"];

shoal.CHARTS = [
  { title: "Reward", names: ["reward/mean", "eval/"], note: "mean of trained rollouts; dots are held out", band: "reward/std" },
  { title: "Reward parts", names: ["reward/part/"] },
  { title: "Loss", names: ["sft/loss"] },
  { title: "Groups", names: ["group/mixed_frac", "group/all_good_frac", "group/all_bad_frac"], percent: true, zero: true },
  { title: "Entropy", names: ["policy/entropy", "policy/kl_ref"], zero: true },
  { title: "Mismatch", names: ["mismatch/k3"], note: "sampler against trainer; healthy below 0.01", zero: true },
  { title: "Completion length", names: ["completion/length_mean"], zero: true },
  { title: "Truncated and masked", names: ["completion/truncated_frac", "masked"], percent: true, zero: true },
  { title: "Gradient norm", names: ["optim/grad_norm"], zero: true },
  { title: "Learning rate", names: ["optim/lr"], zero: true },
  { title: "Where the time goes", stack: ["time/rollout", "time/reward", "time/train", "time/sync", "time/eval", "time/save", "time/idle"] },
  { title: "Throughput", names: ["throughput/rollout_tok_s", "throughput/train_tok_s"], zero: true, note: "tokens per second" },
];

shoal.charts = [];

shoal.drawCharts = (overview, onStep) => {
  const room = document.getElementById("charts");
  room.replaceChildren();
  shoal.charts.forEach((plot) => plot.destroy());
  shoal.charts = [];
  for (const chart of shoal.CHARTS) {
    const prepared = chart.stack ? stacked(chart, overview) : plain(chart, overview);
    if (prepared) room.append(card(chart, prepared, onStep));
  }
  if (!room.children.length) room.append(shoal.make("p", { class: "empty" }, "No step has been recorded yet."));

  function plain(chart, data) {
    const names = Object.keys(data.series).filter((name) => chart.names.some((wanted) => matches(name, wanted)) && data.series[name].some((value) => value !== null));
    if (!names.length) return null;
    const lines = names.slice(0, 6).map((name, i) => ({ label: label(name), values: data.series[name], colour: shoal.PALETTE[i], dots: name.startsWith("eval/") }));
    const spread = chart.band && data.series[chart.band];
    if (spread && names[0] === "reward/mean") addBand(lines, spread);
    return { x: data.steps, lines };
  }

  function addBand(lines, spread) {
    const mean = lines[0].values;
    const edge = (sign) => mean.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i]));
    lines.push({ label: "+1 std", values: edge(1), colour: "c1", edge: true }, { label: "−1 std", values: edge(-1), colour: "c1", edge: true });
  }

  // Shares of the step, laid on top of each other. Phases that overlap are scaled to fill the step together.
  function stacked(chart, data) {
    const names = chart.stack.filter((name) => (data.series[name] || []).some((value) => value > 0));
    if (!names.length) return null;
    const total = data.steps.map((_, i) => names.reduce((sum, name) => sum + (data.series[name][i] || 0), 0) || 1);
    let below = data.steps.map(() => 0);
    const lines = names.map((name, i) => {
      const own = data.steps.map((_, j) => (data.series[name][j] || 0) / total[j]);
      below = below.map((value, j) => value + own[j]);
      return { label: label(name), values: below, own, colour: name === "time/idle" ? "faint" : shoal.PALETTE[i % 6], area: true };
    });
    return { x: data.steps, lines: lines.reverse(), percent: true };
  }

  function matches(name, wanted) {
    return wanted === "eval/" ? name.startsWith("eval/") && name.endsWith("/mean") : wanted.endsWith("/") ? name.startsWith(wanted) : name === wanted;
  }

  function label(name) {
    if (name.startsWith("eval/")) return name.split("/")[1] + " held out";
    return name.split("/").pop().replace(/_tok_s$/, "").replace(/_frac$/, "").replace(/_mean$/, "").replace(/_/g, " ");
  }

  function card(chart, prepared, onStep) {
    const room = shoal.make("div", { class: "plot" });
    const legend = shoal.make("div", { class: "legend" });
    const box = shoal.make("figure", { class: "card" }, shoal.make("figcaption", {}, shoal.make("b", {}, chart.title), shoal.make("span", { class: "note" }, chart.note || "")), room, legend);
    const percent = chart.percent || prepared.percent;
    const write = percent ? shoal.percent : shoal.number;
    const shown = prepared.lines.filter((line) => !line.edge);
    const values = shown.map((line) => {
      const value = shoal.make("span", { class: "value" }, "");
      const swatch = shoal.make("i", { class: "swatch" });
      swatch.style.background = shoal.colour(line.colour);
      legend.append(shoal.make("span", { class: "key" }, swatch, line.label, value));
      return value;
    });
    const update = (at) => shown.forEach((line, i) => {
      const column = line.own || line.values;
      values[i].textContent = write(at === null || at === undefined ? shoal.last(column) : column[at]);
    });
    update(null);
    // The chart is made once its box has a width.
    requestAnimationFrame(() => {
      const plot = new uPlot(options(chart, prepared, percent, room, update), [prepared.x, ...prepared.lines.map((line) => line.values)], room);
      shoal.charts.push(plot);
      plot.over.addEventListener("click", () => {
        if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) onStep(prepared.x[plot.cursor.idx]);
      });
      new ResizeObserver(() => plot.setSize({ width: room.clientWidth, height: 170 })).observe(room);
    });
    return box;
  }

  function options(chart, prepared, percent, room, update) {
    const axis = { stroke: shoal.colour("muted"), grid: { stroke: shoal.colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const few = prepared.x.length < 2;
    const edges = prepared.lines.flatMap((line, i) => (line.edge ? [i + 1] : []));
    return {
      width: room.clientWidth || 320, height: 170, padding: [8, 12, 0, 0], legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "shoal" } },
      scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high, chart.zero, prepared.percent) } },
      axes: [
        { ...axis, grid: { show: false }, size: 30, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000] },
        { ...axis, size: 48, space: 28, values: (_, ticks) => ticks.map((tick) => (percent ? Math.round(100 * tick) + "%" : shoal.number(tick))) },
      ],
      bands: edges.length === 2 ? [{ series: [edges[0], edges[1]], fill: shoal.colour("c1") + "22" }] : [],
      series: [{}, ...prepared.lines.map((line) => ({
        label: line.label, stroke: shoal.colour(line.colour), width: line.edge ? 0 : line.area ? 0 : 1.75, spanGaps: true,
        fill: line.area ? shoal.colour(line.colour) : undefined,
        points: { show: (line.dots || few) && !line.edge, size: 6, fill: shoal.colour(line.colour) },
      }))],
      hooks: { setCursor: [(plot) => update(plot.cursor.idx)] },
    };
  }

  function range(low, high, zero, full) {
    if (full) return [0, 1];
    if (low === null || high === null) return [0, 1];
    const bottom = zero ? Math.min(0, low) : low;
    const margin = (high - bottom) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [zero && low >= 0 ? 0 : bottom - margin, high + margin];
  }
};
