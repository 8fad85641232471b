"use strict";
// The charts and their lines: one line per metric for one run, one per run for several runs.
shoal.PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6"];
shoal.OWN_COLOURS = { "group/mixed_frac": "c1", "group/all_good_frac": "c3", "group/all_bad_frac": "c2", "time/idle": "idle" };
shoal.DASHES = [null, [6, 4], [2, 3], [9, 3, 2, 3]];

shoal.CHARTS = [
  { title: "Reward", names: ["reward/mean"], band: ["reward/p10", "reward/p90"], note: "mean of the step; shaded: 10th to 90th percentile", fallback: "reward/std" },
  { title: "Held-out evaluation", names: ["eval/*/mean", "eval/*/pass_at_k"], note: "prompts not used for training", dots: true },
  { title: "Groups", names: ["group/mixed_frac", "group/all_good_frac", "group/all_bad_frac"], note: "only mixed groups give a training signal", healthy: "group/mixed_frac", percent: true, zero: true },
  { title: "Reward parts", names: ["reward/part/*"] },
  { title: "Reward by environment", names: ["reward/env/*"] },
  { title: "Loss", names: ["sft/loss", "dpo/loss"], zero: true },
  { title: "Preference accuracy", names: ["dpo/accuracy"], percent: true, zero: true, note: "pairs whose chosen completion has the higher implicit reward" },
  { title: "Implicit rewards", names: ["dpo/chosen_reward", "dpo/rejected_reward", "dpo/margin"], note: "beta times policy against reference log-probs" },
  { title: "Log-probs of completions", names: ["dpo/chosen_logprobs", "dpo/rejected_logprobs"], note: "summed over each completion" },
  { title: "Share of prompts by environment", names: ["batch/env/*"], zero: true },
  { title: "KL to the reference", names: ["policy/kl_ref"], zero: true, note: "policy against reference, in nats" },
  { title: "Entropy", names: ["policy/entropy"], zero: true, note: "falls slowly, not to 0" },
  { title: "Mismatch", names: ["mismatch/k3"], zero: true, noise: 1e-8, note: "between sampler and trainer log-probs" },
  { title: "Masked", names: ["masked", "mask/token_frac", "mask/sequence_frac"], healthy: "masked", percent: true, zero: true, note: "tokens masked by the loss" },
  { title: "Clipped", names: ["policy/clip_frac"], percent: true, zero: true, onlyAbove: 0 },
  { title: "Completion length", names: ["completion/length_mean"], band: ["completion/length_min", "completion/length_max"], zero: true, note: "mean; shaded: shortest to longest" },
  { title: "Length by environment", names: ["completion/env/*"], zero: true },
  { title: "Truncated", names: ["completion/truncated_frac"], percent: true, zero: true, note: "stopped at max_tokens" },
  { title: "Gradient norm", names: ["optim/grad_norm"], zero: true },
  { title: "Learning rate", names: ["optim/lr"], zero: true, exact: true },
  { title: "Staleness", names: ["staleness/mean", "staleness/max"], zero: true, onlyAbove: 0, note: "versions between sampling and training" },
  { title: "Replayed", names: ["replay/frac"], percent: true, zero: true, onlyAbove: 0, note: "share of the trained rollouts" },
  { title: "Time split", stack: ["time/rollout", "time/reward", "time/train", "time/sync", "time/eval", "time/save", "time/idle"], instead: "time/step", note: "per step; legend: whole run" },
  { title: "Throughput", names: ["throughput/rollout_tok_s", "throughput/train_tok_s"], zero: true, note: "tokens per second" },
  { title: "Reward failures", names: ["reward/error_frac", "reward/timeout_frac"], percent: true, zero: true, onlyAbove: 0 },
];

shoal.matching = (series, pattern) => {
  const test = new RegExp("^" + pattern.split("*").map((piece) => piece.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join("[^/]+") + "$");
  return Object.keys(series).filter((name) => test.test(name) && series[name].some((value) => value !== null));
};

shoal.metricLabel = (name) => {
  if (name.startsWith("eval/")) return name.split("/")[1] + (name.endsWith("pass_at_k") ? " pass@k" : "");
  const known = { "throughput/rollout_tok_s": "rollout", "throughput/train_tok_s": "training", "group/all_good_frac": "zero-variance, all good", "group/all_bad_frac": "zero-variance, all bad", masked: "all" };
  return known[name] || name.split("/").pop().replace(/_(frac|mean)$/, "").replace(/_/g, " ");
};

// The healthy range of a metric as numbers, or null. A range relative to the start of a run needs its first values.
shoal.healthyRange = (name, runs) => {
  const limits = (shoal.page.glossary[name] || {}).limits || {};
  let { low, high } = limits;
  if (limits.start_share && runs.length === 1) {
    const first = (runs[0].series[name] || []).filter((value) => value !== null).slice(0, limits.start_steps);
    if (first.length === limits.start_steps) low = limits.start_share * shoal.mean(first);
  }
  return low === undefined && high === undefined ? null : { low: low ?? -Infinity, high: high ?? Infinity };
};

// Values below chart.noise are rounding errors of fp32 log-probs; they are drawn as zero.
shoal.denoise = (chart, values) => (chart.noise ? values.map((value) => (value !== null && Math.abs(value) < chart.noise ? 0 : value)) : values);

// The steps of all shown runs, and the column of a run on these steps.
shoal.grid = (runs) => [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);

shoal.lay = (run, name, grid) => {
  const column = run.series[name];
  if (!column) return grid.map(() => null);
  if (run.steps.length === grid.length) return column;
  const at = new Map(run.steps.map((step, i) => [step, column[i]]));
  return grid.map((step) => at.get(step) ?? null);
};

// { x, lines, stacked }, or null if the runs have no values.
shoal.prepareChart = (chart, runs) => {
  const x = shoal.grid(runs);
  if (!x.length) return null;
  if (chart.stack && runs.length === 1) return stackLines(chart, runs[0], x);
  const patterns = chart.stack ? [chart.instead] : chart.names;
  const lines = runs.length === 1 ? metricLines(chart, runs[0], patterns, x) : runLines(runs, patterns, x);
  if (!lines.length) return null;
  if (chart.onlyAbove !== undefined && !lines.some((line) => line.values.some((value) => value > chart.onlyAbove))) return null;
  const healthy = chart.healthy || (chart.names && chart.names.length === 1 && chart.names[0]);
  return { x, lines, several: runs.length > 1, healthy: healthy ? shoal.healthyRange(healthy, runs) : null, note: chart.stack ? "seconds per step" : undefined };

  function metricLines(chart, run, patterns, x) {
    const names = [...new Set(patterns.flatMap((pattern) => shoal.matching(run.series, pattern)))];
    const lines = names.slice(0, 12).map((name, i) => ({
      name, label: shoal.metricLabel(name), values: shoal.denoise(chart, shoal.lay(run, name, x)), colour: shoal.OWN_COLOURS[name] || shoal.PALETTE[i % 6], dash: shoal.DASHES[Math.floor(i / 6) % 4], dots: chart.dots,
    }));
    if (lines.length && chart.band) addBand(lines, chart, run, x);
    return lines;
  }

  function addBand(lines, chart, run, x) {
    let [low, high] = chart.band.map((name) => run.series[name] && shoal.lay(run, name, x));
    const spread = chart.fallback && run.series[chart.fallback] && shoal.lay(run, chart.fallback, x);
    if (!low && spread) [low, high] = [-1, 1].map((sign) => lines[0].values.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i])));
    if (low && high) lines.push({ label: "high", values: high, colour: "c1", edge: true }, { label: "low", values: low, colour: "c1", edge: true });
  }

  // Several runs: one colour per run; several metrics: one dash pattern per metric.
  function runLines(runs, patterns, x) {
    const names = [...new Set(runs.flatMap((run) => patterns.flatMap((pattern) => shoal.matching(run.series, pattern))))].slice(0, 4);
    return runs.flatMap((run) => names.filter((name) => run.series[name]).map((name) => ({
      name, label: run.run.name + (names.length > 1 ? " " + shoal.metricLabel(name) : ""), values: shoal.denoise(chart, shoal.lay(run, name, x)), colour: run.colour, dash: shoal.DASHES[names.indexOf(name) % 4], dots: name.startsWith("eval/"),
    })));
  }
};

// Shares of the step, stacked. Overlapping phases are scaled so that they fill the step.
function stackLines(chart, run, x) {
  const names = chart.stack.filter((name) => (run.series[name] || []).some((value) => value > 0));
  if (!names.length) return null;
  const total = x.map((_, i) => names.reduce((sum, name) => sum + (run.series[name][i] || 0), 0));
  const shown = x.map((_, i) => i).filter((i) => total[i] > 0);
  const all = shown.reduce((sum, j) => sum + total[j], 0);
  let below = shown.map(() => 0);
  const lines = names.map((name, i) => {
    const own = shown.map((j) => (run.series[name][j] || 0) / total[j]);
    below = below.map((value, j) => value + own[j]);
    const overall = shown.reduce((sum, j) => sum + (run.series[name][j] || 0), 0) / all; // for the legend
    return { name, label: shoal.metricLabel(name), values: below, own, overall, colour: shoal.OWN_COLOURS[name] || shoal.PALETTE[i % 6], area: true };
  });
  return { x: shown.map((i) => x[i]), lines: lines.reverse(), stacked: true };
}

// Draws all charts. Later calls redraw them and keep the zoom.
shoal.drawCurves = (runs, onStep) => {
  const room = shoal.$("charts");
  shoal.charts.forEach((chart) => chart.destroy());
  shoal.charts = [];
  room.replaceChildren();
  const used = new Set();
  for (const chart of shoal.CHARTS) {
    const prepared = shoal.prepareChart(chart, runs);
    if (!prepared) continue;
    room.append(shoal.drawChart(chart, prepared, onStep));
    for (const pattern of [...(chart.names || chart.stack), ...(chart.band || [])]) runs.forEach((run) => shoal.matching(run.series, pattern).forEach((name) => used.add(name)));
  }
  if (!room.children.length) room.append(shoal.make("p", { class: "empty" }, "No step has been recorded yet."));
  const others = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !used.has(name));
  const more = shoal.$("more");
  more.hidden = !others.length;
  const drawMore = () => {
    if (!more.open || more.dataset.drawn === "yes") return;
    more.dataset.drawn = "yes";
    const charts = others.map((name) => ({ title: name, names: [name], percent: name.endsWith("_frac"), note: (shoal.page.glossary[name] || {}).meaning || "" }));
    shoal.$("more-charts").replaceChildren(...charts.flatMap((chart) => {
      const prepared = shoal.prepareChart(chart, runs);
      return prepared ? [shoal.drawChart(chart, prepared, onStep)] : [];
    }));
  };
  more.dataset.drawn = "no";
  more.ontoggle = drawMore;
  drawMore();
};
