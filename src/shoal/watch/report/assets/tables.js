"use strict";
// Summary, findings, events, configuration and glossary.
shoal.table = (heads, rows, empty) => {
  const { make } = shoal;
  if (!rows.length) return make("p", { class: "empty" }, empty);
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
};

shoal.drawSummary = (runs) => {
  const { $, make, number, first, last } = shoal;
  const one = runs.length === 1 ? runs[0] : null;
  $("name").textContent = runs.map((run) => run.run.name).join(" · ");
  $("state").textContent = one ? one.run.state : runs.length + " runs";
  $("state").className = "badge" + (one ? " state-" + one.run.state : "");
  $("about").replaceChildren(...(one ? about(one) : []));
  $("reason").textContent = one ? [one.run.state === "finished" ? "" : one.run.reason, one.run.next_command ? "Continue with: " + one.run.next_command : ""].filter(Boolean).join("  ·  ") : "";
  $("tiles").replaceChildren(...runs.flatMap((run) => tiles(run, runs.length > 1)));

  function about(run) {
    const start = run.run.created_at ? { Start: new Date(run.run.created_at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) } : {};
    return Object.entries({ ...run.about, ...start }).map(([label, text]) => make("div", {}, make("dt", {}, label), make("dd", {}, text)));
  }

  function tile(label, value, small) {
    return make("div", { class: "tile" }, make("span", { class: "label" }, label), make("span", { class: "big" }, ...[].concat(value)), make("span", { class: "small", title: small }, small || " "));
  }

  function change(series, name) {
    const from = first(series[name]), to = last(series[name]);
    return from === to ? number(to) : [make("span", { class: "from" }, number(from) + " → "), number(to)];
  }

  function tiles(run, several) {
    const { series } = run, out = [];
    const evals = Object.keys(series).filter((name) => /^eval\/.+\/mean$/.test(name));
    const total = run.run.total_steps;
    if (several) out.push(tile(run.run.name, String(run.run.step ?? 0) + " steps", run.run.state));
    else out.push(tile("Steps", [String(last(run.steps) ?? run.run.step ?? 0), total ? make("span", { class: "from" }, " of " + total) : ""], run.run.state));
    evals.slice(0, several ? 1 : 3).forEach((name) => out.push(tile("Held out", change(series, name), several ? run.run.name : name.split("/")[1] + ", first to last")));
    if (series["reward/mean"]) out.push(tile("Reward", change(series, "reward/mean"), several ? run.run.name : "training rollouts, first to last"));
    for (const [label, name] of [["Loss", "sft/loss"], ["Loss", "dpo/loss"], ["Preference accuracy", "dpo/accuracy"]])
      if (series[name]) out.push(tile(label, change(series, name), "first to last"));
    if (several) return out;
    const rollouts = series["batch/rollouts"], tokens = series["tokens/completion"];
    const sum = (column) => column.reduce((a, b) => a + (b || 0), 0);
    if (rollouts) out.push(tile("Rollouts", number(sum(rollouts)), tokens ? number(sum(tokens)) + " sampled tokens" : ""));
    const speed = series["throughput/rollout_tok_s"], spent = series["time/rollout"];
    if (speed && spent) out.push(tile("Speed", number(sum(speed.map((rate, i) => rate * spent[i])) / sum(spent)), "sampled tokens per second"));
    const used = series["tokens/used_frac"];
    if (used && tokens && sum(tokens)) out.push(tile("Trained tokens", number(100 * used.reduce((a, share, i) => a + (share || 0) * (tokens[i] || 0), 0) / sum(tokens)) + " %", "share of the sampled tokens"));
    const seconds = sum(series["time/step"] || []);
    if (seconds) out.push(tile("Time", shoal.duration(seconds), "in steps"));
    return out;
  }
};

// What running runs do now: the operation with its progress, the position of the run, and before the first step what is done.
shoal.drawProgress = (runs) => {
  const { $, make, duration } = shoal;
  const all = runs.filter((run) => run.run.state === "running" && run.run.progress);
  $("progress").hidden = !all.length;
  $("progress").replaceChildren(...all.map((run) => make("div", {}, ...lines(run, run.run.progress))));

  function lines(run, now) {
    const share = now.total ? Math.min(1, now.done / now.total) : null;
    const silent = (Date.now() - Date.parse(now.time)) / 1000;
    const facts = [now.total ? Math.floor(now.done) + " of " + now.total : "", now.activity, silent > 20 ? "no report for " + duration(silent) : duration(now.elapsed_s),
      now.operation_left_s !== null && now.operation_left_s !== undefined ? "about " + duration(now.operation_left_s) + " left" : ""];
    const whole = now.total_steps ? ["step " + now.step + " of " + now.total_steps + " done", now.left_s === null ? "time left: known after the first step" : "about " + duration(now.left_s) + " left"] : [];
    return [
      make("div", { class: "now-head" }, runs.length > 1 ? make("b", {}, run.run.name) : null, make("b", {}, shoal.capitalise(now.doing)), make("span", { class: "quiet" }, facts.filter(Boolean).join(" · "))),
      bar(share), make("div", { class: "now-foot" }, make("span", {}, whole.join(" · ")), ...now.finished.map(([name, seconds]) => make("span", { class: "done" }, name + " " + duration(seconds)))),
    ];
  }

  function bar(share) {
    const fill = make("i", {});
    fill.style.width = 100 * (share ?? 0) + "%";
    fill.style.animationDelay = -(performance.now() % 4000) + "ms"; // goes on smoothly although it is drawn again
    return make("span", { class: share === null ? "bar unknown" : "bar", role: "progressbar", "aria-valuenow": share === null ? null : Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  }
};

shoal.drawFindings = (runs, onStep) => {
  const { $, make } = shoal;
  const all = runs.flatMap((run, i) => (run.findings || []).map((finding) => ({ ...finding, run: i })));
  const warnings = all.filter((finding) => finding.level === "warning"), notices = all.filter((finding) => finding.level !== "warning");
  const cards = (list) => list.map((finding) => make("div", { class: "finding " + finding.level },
    make("span", { class: "sign", "aria-hidden": "true" }, finding.level === "warning" ? "!" : "i"),
    make("div", {}, runs.length > 1 ? make("b", {}, runs[finding.run].run.name + ": ") : null, make("b", {}, finding.what), " ", steps(finding)),
    make("div", { class: "remedy" }, finding.remedy)));
  const open = Boolean($("findings").querySelector("details[open]"));
  const quiet = notices.length ? [make("details", { class: "more", open }, make("summary", {}, notices.length + (notices.length === 1 ? " notice" : " notices")), make("div", { class: "findings" }, ...cards(notices)))] : [];
  $("findings").replaceChildren(...cards(warnings), ...quiet);

  function steps(finding) {
    if (!finding.steps.length) return null;
    const [from, to] = [finding.steps[0], finding.steps[finding.steps.length - 1]];
    const link = make("button", { type: "button", class: "link" }, from === to ? "step " + from : "steps " + from + "–" + to);
    link.addEventListener("click", () => onStep(to, finding.run));
    return make("span", { class: "remedy" }, finding.metric ? finding.metric + ", " : "", link);
  }
};

shoal.drawEvents = (runs) => {
  const { make } = shoal;
  const several = runs.length > 1;
  const events = runs.flatMap((run) => run.events.map((event) => ({ ...event, run: run.run.name }))).sort((a, b) => (a.time || 0) - (b.time || 0));
  const rows = events.reverse().map((event) => make("tr", { class: "level-" + String(event.level || "notice") },
    make("td", { class: "num" }, String(event.step ?? "")), make("td", { class: "quiet" }, event.time ? new Date(1000 * event.time).toLocaleString() : ""),
    make("td", {}, String(event.kind ?? "")), several ? make("td", {}, event.run) : null, make("td", { class: "wide" }, String(event.message ?? ""))));
  const left = runs.reduce((sum, run) => sum + (run.events_left_out || 0), 0);
  const heads = ["Step", "Time", "Kind", ...(several ? ["Run"] : []), "Message"];
  shoal.$("event-table").replaceChildren(make("h2", {}, "Events"), shoal.table(heads, rows, "No events."),
    left ? make("p", { class: "notice" }, left + " earlier events are only in events.jsonl.") : "");
};

shoal.drawConfig = (runs) => {
  const { make } = shoal;
  const write = (value) => (value === null || value === undefined ? "unset" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const tables = runs.length > 1 ? compared() : alone();
  const texts = runs.map((run) => make("details", { class: "config" }, make("summary", {}, "config.yaml" + (runs.length > 1 ? " of " + run.run.name : "")), make("pre", { class: "mono" }, run.config || "There is no config.yaml.")));
  shoal.$("config-tables").replaceChildren(...tables, make("h2", {}, "Full text"), ...texts);

  function alone() {
    const changes = runs[0].config_changes;
    if (!changes) return [make("p", { class: "empty" }, "The configuration cannot be compared with the defaults of this version.")];
    const rows = changes.map((change) => make("tr", {}, make("td", { class: "mono" }, change.key), make("td", { class: "mono wide" }, write(change.value)), make("td", { class: "mono quiet" }, write(change.default))));
    return [make("h2", {}, "Changes from the defaults"), shoal.table(["Key", "This run", "Default"], rows, "None.")];
  }

  function compared() {
    const keys = [...new Set(runs.flatMap((run) => (run.config_changes || []).map((change) => change.key)))];
    const value = (run, key) => { const found = (run.config_changes || []).find((change) => change.key === key); return found ? write(found.value) : null; };
    const fallback = (key) => runs.flatMap((run) => run.config_changes || []).find((change) => change.key === key).default;
    const cells = (key) => runs.map((run) => value(run, key) ?? write(fallback(key)));
    const differing = keys.filter((key) => new Set(cells(key)).size > 1), same = keys.filter((key) => new Set(cells(key)).size === 1);
    const row = (key) => make("tr", {}, make("td", { class: "mono" }, key), ...cells(key).map((cell) => make("td", { class: "mono wide" }, cell)));
    return [make("h2", {}, "Differences between the runs"), shoal.table(["Key", ...runs.map((run) => run.run.name)], differing.map(row), "None."),
      make("h2", {}, "Changes from the defaults in all runs"), shoal.table(["Key", "All runs"], same.map((key) => make("tr", {}, make("td", { class: "mono" }, key), make("td", { class: "mono wide" }, cells(key)[0]))), "None.")];
  }
};

shoal.drawGlossary = (runs) => {
  const { make } = shoal;
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))];
  const rows = names.map((name) => {
    const about = shoal.page.glossary[name] || { meaning: "", unit: "", healthy: "", change: "" };
    return make("tr", {}, make("td", { class: "mono" }, name), ...runs.map((run) => make("td", { class: "num" }, shoal.number(shoal.last(run.series[name])))),
      make("td", { class: "quiet" }, about.unit === "1" ? "" : about.unit), make("td", { class: "wide" }, about.meaning), make("td", { class: "wide" }, about.healthy), make("td", { class: "wide quiet" }, about.change));
  });
  const heads = ["Metric", ...runs.map((run) => (runs.length > 1 ? run.run.name : "Last")), "Unit", "Meaning", "Healthy", "What to change"];
  shoal.$("glossary-table").replaceChildren(make("h2", {}, "Metrics of this run"), shoal.table(heads, rows, "No metric has been recorded yet."));
};
