"use strict";
// Assembles the page: views, theme, keyboard, URL fragments, and updates of a live run.
(() => {
  const { $, make } = shoal;
  const page = shoal.page = shoal.read("page");
  const VIEWS = ["curves", "rollouts", "events", "config", "glossary"];
  page.runs.forEach((run, i) => { run.colour = shoal.PALETTE[i % 6]; run.shown = true; });
  const source = shoal.makeSource(page);
  const browser = shoal.browser(source);
  let opened = false, behind = false;
  // With few steps, smoothing would only delay the curve.
  const many = page.runs.some((run) => run.steps.length > 60);
  shoal.smoothing = Number(shoal.stored("smoothing") ?? (many ? 0.6 : 0)) || 0;

  const shownRuns = () => page.runs.filter((run) => run.shown);

  function drawAll() {
    drawNews();
    shoal.drawConfig(page.runs);
  }

  function drawNews() {
    shoal.drawSummary(page.runs);
    drawProgress();
    shoal.drawFindings(page.runs, openStep);
    drawCurves();
    shoal.drawEvents(page.runs);
    shoal.drawGlossary(page.runs);
  }

  function drawProgress() {
    if (page.live) shoal.drawProgress(page.runs); // in a file it would be out of date
  }

  function drawCurves() {
    const runs = shownRuns();
    if (runs.length) shoal.drawCurves(runs, openStep);
  }

  function runSwitches() {
    if (page.runs.length < 2) return;
    $("runs").replaceChildren(...page.runs.map((run) => {
      const box = make("input", { type: "checkbox", checked: true });
      const swatch = make("i", { class: "swatch" });
      swatch.style.background = shoal.colour(run.colour);
      box.addEventListener("change", () => { run.shown = box.checked; drawCurves(); });
      return make("label", {}, box, swatch, run.run.name);
    }));
  }

  function show(view, focus = true) {
    for (const name of VIEWS) {
      $("view-" + name).hidden = name !== view;
      $("tab-" + name).setAttribute("aria-selected", String(name === view));
      $("tab-" + name).tabIndex = name === view ? 0 : -1;
    }
    shoal.hideTip();
    if (view === "curves") shoal.charts.forEach((chart) => chart.redraw());
    if (view === "rollouts" && !opened) { opened = true; browser.openStep(Infinity); }
    if (focus) scrollTo(0, 0);
  }

  function go(view) {
    history.replaceState(null, "", "#" + view);
    show(view);
    if (view === "rollouts" && browser.place.step !== null) browser.remember();
  }

  function openStep(step, run) {
    opened = true;
    show("rollouts");
    browser.openStep(step, null, run ?? browser.place.run).then(browser.remember);
  }

  function fromAddress() {
    const [view, words] = location.hash.slice(1).split("?");
    if (!VIEWS.includes(view)) return show("curves", false);
    if (view === "rollouts" && words) {
      const asked = new URLSearchParams(words), run = Number(asked.get("run") || 0);
      opened = true;
      browser.openStep(Number(asked.get("step")), asked.get("group"), page.runs[run] ? run : 0);
    }
    show(view, false);
  }

  function setTheme() {
    shoal.switchTheme();
    recolour();
  }

  function recolour() {
    runSwitches();
    drawCurves();
    browser.redraw();
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    const act = { j: () => browser.walk(1), k: () => browser.walk(-1), l: () => browser.move(1), h: () => browser.move(-1), f: browser.follow, x: browser.compare, c: browser.nextTint, t: setTheme, "?": () => $("keys").showModal() }[event.key];
    if (VIEWS[event.key - 1]) go(VIEWS[event.key - 1]);
    else if (event.key === "/") { event.preventDefault(); go("rollouts"); $("text").focus(); }
    else if (act && (!"jklhfxc".includes(event.key) || !$("view-rollouts").hidden)) act();
  }

  // Arrow keys move between tabs (ARIA tabs pattern).
  function onTabKey(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const at = VIEWS.findIndex((name) => $("tab-" + name) === event.target);
    const view = VIEWS[(at + by + VIEWS.length) % VIEWS.length];
    go(view);
    $("tab-" + view).focus();
  }

  function merge(run, news) {
    run.run = { ...run.run, ...news.run, name: run.run.name };
    run.rollout_steps = news.rollout_steps;
    run.events.push(...news.events);
    if (news.findings) run.findings = news.findings;
    if (!news.steps.length) return false;
    for (const name of Object.keys(news.series)) if (!run.series[name]) run.series[name] = run.steps.map(() => null);
    for (const name of Object.keys(run.series)) run.series[name].push(...(news.series[name] || news.steps.map(() => null)));
    run.steps.push(...news.steps);
    return true;
  }

  async function listen() {
    let grown = false, changed = false;
    try {
      for (const [i, run] of page.runs.entries()) {
        const before = run.run.state + run.events.length;
        const news = await source.news(i, run.steps[run.steps.length - 1] || 0, run.events.length + (run.events_left_out || 0));
        if (news.again) return location.reload();
        const newest = browser.place.run === i && browser.place.step === run.rollout_steps[run.rollout_steps.length - 1];
        if (merge(run, news)) {
          grown = true;
          if (browser.place.run === i && !$("view-rollouts").hidden && !newest) browser.refill();
        }
        changed = changed || before !== run.run.state + run.events.length;
      }
      $("pulse").classList.remove("lost");
      $("pulse").title = "live";
    } catch {
      $("pulse").classList.add("lost");
      $("pulse").title = "the server does not respond";
    }
    if (grown) browser.refill();
    behind = behind || grown;
    if (behind && $("tip").hidden) { drawNews(); behind = false; } // do not redraw while the pointer shows a value
    else if (changed) { shoal.drawSummary(page.runs); shoal.drawEvents(page.runs); }
    drawProgress();
    const going = page.runs.some((run) => run.run.state === "running");
    setTimeout(listen, document.hidden ? 10000 : going ? 1000 : 5000);
  }

  shoal.setTheme(shoal.stored("theme"));
  $("smoothing").value = shoal.smoothing;
  $("smoothing-value").textContent = shoal.smoothing.toFixed(2);
  $("smoothing").addEventListener("input", () => {
    shoal.smoothing = Number($("smoothing").value);
    $("smoothing-value").textContent = shoal.smoothing.toFixed(2);
    shoal.stored("smoothing", shoal.smoothing);
    shoal.charts.forEach((chart) => chart.redraw());
  });
  $("theme").addEventListener("click", setTheme);
  $("help").addEventListener("click", () => $("keys").showModal());
  for (const name of VIEWS) {
    $("tab-" + name).addEventListener("click", () => go(name));
    $("tab-" + name).addEventListener("keydown", onTabKey);
  }
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", fromAddress);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  if (page.listed) { $("all-runs").hidden = false; $("all-runs").href = "/"; }
  runSwitches();
  fromAddress();
  drawAll();
  if (page.live) { $("pulse").hidden = false; $("pulse").title = "live"; setTimeout(listen, 1500); }
})();
