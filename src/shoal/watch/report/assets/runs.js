"use strict";
// The list of all runs below a folder, with links to their pages.
(() => {
  const { $, make, number, duration } = shoal;
  const page = shoal.read("page");
  const chosen = new Set();
  let signature = "";

  function draw(runs) {
    if (JSON.stringify(runs) === signature) return; // keeps the focus
    signature = JSON.stringify(runs);
    $("count").textContent = runs.length + (runs.length === 1 ? " run" : " runs");
    $("list").replaceChildren(...runs.map(row));
    if (!runs.length) $("list").append(make("li", { class: "empty" }, "There is no run here any more."));
  }

  const address = (...ids) => "/view?" + new URLSearchParams(ids.map((id) => ["run", id]));

  function row(run) {
    const box = make("input", { type: "checkbox", "aria-label": "Select " + run.name, checked: chosen.has(run.id) });
    box.addEventListener("change", () => { if (box.checked) chosen.add(run.id); else chosen.delete(run.id); allow(); });
    const readable = run.state !== "unreadable";
    const about = Object.entries(run.about || {}).map(([label, text]) => (label === "Learning rate" ? "lr " + text : text)).join(" · ");
    return make("li", { class: "card run" }, readable ? box : make("span", {}),
      make("div", { class: "run-name" }, readable ? make("a", { href: address(run.id) }, run.name) : make("b", {}, run.name), make("span", { class: "badge state-" + run.state }, run.state),
        about ? make("div", { class: "small", title: about }, about) : null),
      steps(run), curve(run), heldOut(run), make("div", { class: "when" }, ...when(run)));
  }

  function steps(run) {
    const done = run.step || 0, fill = make("i", {}), now = run.progress;
    fill.style.width = (run.total_steps ? Math.min(100, (100 * done) / run.total_steps) : 0) + "%";
    const left = now && now.left_s !== null && now.left_s !== undefined ? "about " + duration(now.left_s) + " left" : "";
    const text = run.state === "running" ? [now ? now.doing : "", left].filter(Boolean).join(" · ") : run.state === "finished" ? "" : run.reason || "";
    return make("div", { class: "run-steps" }, make("div", {}, make("b", {}, String(done)), run.total_steps ? " of " + run.total_steps + " steps" : " steps"), make("span", { class: "bar" }, fill), text ? make("div", { class: "small", title: text }, text) : null);
  }

  // Two numbers and a line between them.
  function curve(run) {
    if (!run.curve || !run.curve.length) return make("div", { class: "run-curve" });
    const low = Math.min(...run.curve), high = Math.max(...run.curve);
    const points = run.curve.map((value, i) => [(100 * i) / Math.max(1, run.curve.length - 1), high > low ? 22 - (20 * (value - low)) / (high - low) : 12].map((at) => at.toFixed(1)).join(",")).join(" ");
    const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    for (const [name, value] of Object.entries({ viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" })) drawing.setAttribute(name, value);
    line.setAttribute("points", points);
    drawing.append(line);
    return make("div", { class: "run-curve" }, measured(/^(sft|dpo)\/loss$/.test(run.metric) ? "Loss" : "Reward", run.curve), drawing);
  }

  const measured = (label, values) => make("div", { class: "measured" }, make("span", { class: "small" }, label), " ", values.length > 1 ? make("span", { class: "from" }, number(values[0]) + " → ") : null, make("b", {}, number(values[values.length - 1])));

  function heldOut(run) {
    return make("div", { class: "run-held-out" }, run.held_out && run.held_out.length ? measured("Held out", run.held_out) : null);
  }

  function when(run) {
    const date = (text) => new Date(text).toLocaleString([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
    const times = [["Start", run.created_at], [run.state === "running" ? "" : "End", run.updated_at]].filter(([label, time]) => label && time);
    return times.map(([label, time]) => make("div", { class: "small" }, label + " " + date(time)));
  }

  function allow() {
    $("compare").disabled = chosen.size < 2 || chosen.size > 6;
    $("compare").textContent = chosen.size > 1 ? "Compare " + chosen.size + " runs" : "Compare";
  }

  async function listen() {
    try {
      const answer = await fetch("/api/runs");
      if (!answer.ok) throw new Error(answer.status);
      draw((await answer.json()).runs);
      $("pulse").classList.remove("lost");
    } catch {
      $("pulse").classList.add("lost");
      $("pulse").title = "the server does not respond";
    }
    setTimeout(listen, document.hidden ? 15000 : 3000);
  }

  $("name").textContent = page.title;
  shoal.setTheme(shoal.stored("theme"));
  $("theme").addEventListener("click", shoal.switchTheme);
  document.addEventListener("keydown", (event) => { if (event.key === "t" && !event.ctrlKey && !event.metaKey) shoal.switchTheme(); });
  $("compare").addEventListener("click", () => { location.href = address(...chosen); });
  draw(page.runs);
  setTimeout(listen, 2000);
})();
