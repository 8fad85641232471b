"use strict";
// Puts the page together: summary, curves, rollouts, events, metrics, configuration, theme.
(() => {
  const overview = shoal.read("overview");
  const $ = (id) => document.getElementById(id);
  const { series, run } = overview;

  function summary() {
    $("name").textContent = run.name;
    $("state").textContent = run.state;
    $("state").classList.add("state-" + run.state);
    $("reason").textContent = [run.reason, run.next_command ? "Next: " + run.next_command : ""].filter(Boolean).join("  ·  ");
    const tile = (label, value, small) => $("tiles").append(shoal.make("div", { class: "tile" },
      shoal.make("span", { class: "label" }, label), shoal.make("span", { class: "big" }, value), shoal.make("span", { class: "small" }, small || "")));
    const change = (name) => shoal.number(shoal.first(series[name])) + " → " + shoal.number(shoal.last(series[name]));
    const evals = Object.keys(series).filter((name) => /^eval\/.+\/mean$/.test(name));
    tile("Steps", String(run.step ?? 0));
    if (series["reward/mean"]) tile("Reward", change("reward/mean"), "trained rollouts, first to last step");
    evals.slice(0, 3).forEach((name) => tile("Held out", change(name), name.split("/")[1]));
    if (series["sft/loss"]) tile("Loss", change("sft/loss"));
    const tokens = series["tokens/completion"];
    if (tokens) tile("Tokens drawn", shoal.number(tokens.reduce((a, b) => a + (b || 0), 0)));
    if (series["throughput/rollout_tok_s"]) tile("Rollout speed", shoal.number(shoal.last(series["throughput/rollout_tok_s"])), "tokens per second");
    const seconds = (series["time/step"] || []).reduce((a, b) => a + (b || 0), 0);
    if (seconds) tile("Time in steps", shoal.duration(seconds));
  }

  function leftOut() {
    const { steps, partly } = overview.left_out, told = [];
    if (steps.length) told.push(steps.length + " of " + overview.rollout_steps.length + " steps are left out to keep this file small: " + ranges(steps) + ".");
    for (const [step, count] of Object.entries(partly)) told.push("Step " + step + " lacks " + count + " groups.");
    if (told.length) told.push("They are in the run directory under rollouts/.");
    $("left-out").textContent = told.join(" ");
    $("left-out").hidden = !told.length;
  }

  // Runs over what is stored, so that 10, 20, 30 reads as 10–30 when nothing between them exists.
  function ranges(steps) {
    const all = overview.rollout_steps, out = [];
    let begin = steps[0], end = steps[0];
    const close = () => out.push(begin === end ? String(begin) : begin + "–" + end);
    for (const step of steps.slice(1)) {
      if (all.indexOf(step) !== all.indexOf(end) + 1) { close(); begin = step; }
      end = step;
    }
    close();
    return out.slice(0, 12).join(", ") + (out.length > 12 ? ", …" : "");
  }

  function table(heads, rows, empty) {
    if (!rows.length) return shoal.make("p", { class: "empty" }, empty);
    const head = shoal.make("tr", {}, ...heads.map((text) => shoal.make("th", { scope: "col" }, text)));
    return shoal.make("div", { class: "scroll" }, shoal.make("table", {}, shoal.make("thead", {}, head), shoal.make("tbody", {}, ...rows)));
  }

  function events() {
    const rows = overview.events.map((event) => shoal.make("tr", { class: "level-" + String(event.level || "notice") },
      shoal.make("td", { class: "num" }, String(event.step ?? "")), shoal.make("td", {}, event.time ? new Date(1000 * event.time).toLocaleString() : ""),
      shoal.make("td", {}, String(event.kind ?? "")), shoal.make("td", { class: "wide" }, String(event.message ?? ""))));
    $("event-table").append(table(["Step", "Time", "Kind", "What happened"], rows.reverse(), "Nothing notable happened."));
    if (overview.events_left_out) $("event-table").append(shoal.make("p", { class: "notice" }, overview.events_left_out + " earlier events are in events.jsonl."));
  }

  function metrics() {
    const rows = Object.keys(series).map((name) => {
      const about = overview.catalogue[name];
      return shoal.make("tr", {}, shoal.make("td", { class: "mono" }, name), shoal.make("td", { class: "num" }, shoal.number(shoal.last(series[name]))),
        shoal.make("td", {}, about.unit === "1" ? "" : about.unit), shoal.make("td", { class: "wide" }, about.meaning), shoal.make("td", {}, about.healthy));
    });
    $("metric-table").append(table(["Metric", "Last", "Unit", "Meaning", "Healthy"], rows, "No metric has been recorded yet."));
  }

  function theme(browser) {
    const root = document.documentElement;
    const stored = (() => { try { return localStorage.getItem("shoal-theme"); } catch { return null; } })();
    if (stored === "light" || stored === "dark") root.dataset.theme = stored;
    const redraw = () => { shoal.drawCharts(overview, browser.openStep); browser.redraw(); };
    $("theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("shoal-theme", root.dataset.theme); } catch { /* a file page may have no storage */ }
      redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    redraw();
  }

  summary();
  leftOut();
  events();
  metrics();
  $("config-text").textContent = overview.config;
  theme(shoal.browser(overview));
})();
