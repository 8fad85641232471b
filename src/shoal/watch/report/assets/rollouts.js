"use strict";
// The rollout browser: steps, groups, filters, completions side by side, one prompt over the steps.
shoal.browser = (source) => {
  const { $, make } = shoal;
  const place = { run: 0, step: null, group: null, tint: shoal.stored("tint") || "logprob", view: shoal.stored("view") || "turns", follow: null, compare: false };
  let heads = [], next = null, requests = 0;

  const steps = () => source.steps(place.run);
  const shownRun = () => shoal.page.runs[place.run];

  function query() {
    const number = (id) => ($(id).value === "" ? null : Number($(id).value));
    return { env: $("env").value, status: $("status").value, min: number("least"), max: number("most"), text: $("text").value.trim() };
  }

  // Highest first; groups without rewards are last.
  const ORDERS = {
    reward: (head) => shoal.mean(head.rewards) ?? -Infinity,
    spread: (head) => { const known = head.rewards.filter((reward) => reward !== null); return known.length ? Math.max(...known) - Math.min(...known) : -Infinity; },
  };
  function sorted(all) {
    const value = ORDERS[$("sort").value];
    return value ? all.slice().sort((a, b) => (value(b) > value(a)) - (value(b) < value(a))) : all;
  }

  // A response that arrives after a newer request is dropped.
  async function list({ keep = false, further = false } = {}) {
    const mine = ++requests, wanted = query();
    place.follow = null;
    place.compare = false;
    if (!steps().length) return showNothing();
    try {
      let found;
      if ($("everywhere").checked) found = await source.find(place.run, wanted, further ? next : null);
      else found = { heads: await inStep(wanted), next: null };
      if (mine !== requests) return;
      heads = sorted(further ? [...heads, ...found.heads] : found.heads);
      next = found.next;
    } catch (error) {
      return failed(error);
    }
    $("go-on").hidden = next === null;
    const there = keep && heads.find((head) => head.group === place.group && head.step === place.step);
    drawList();
    if (!further) await choose(there || heads.find((head) => head.group === place.group) || heads[0], false);
  }

  async function inStep(wanted) {
    const all = (await source.heads(place.run, place.step)).filter((head) => shoal.allows(wanted, head));
    if (!wanted.text) return all;
    const keep = await Promise.all(all.map(async (head) => shoal.groupHasText(await source.group(place.run, head), wanted.text)));
    return all.filter((_, i) => keep[i]);
  }

  function failed(error) {
    $("count").textContent = "Could not read the rollouts: " + error.message;
  }

  function showNothing() {
    $("groups").replaceChildren();
    $("count").textContent = "";
    $("group").replaceChildren(make("p", { class: "empty" }, "This run has no rollouts" + (shownRun().steps.length ? "." : " yet.")));
  }

  function drawList() {
    const isHeldOut = (head) => head.group.startsWith("eval:"), trained = heads.filter((head) => !isHeldOut(head)), held = heads.filter(isHeldOut);
    const counts = (some, name) => some.length ? [some.length + " " + name + (some.length === 1 ? ", " : "s, ") + some.reduce((sum, head) => sum + head.rewards.length, 0) + " rollouts"] : [];
    const parts = [...counts(trained, "group"), ...counts(held, "evaluation prompt")];
    $("count").textContent = (parts.join("; ") || "0 groups") + (next === null ? "" : " so far");
    $("groups").replaceChildren(...heads.slice(0, 400).map((head, i) => entry(head, i)));
    if (heads.length > 400) $("groups").append(make("li", { class: "count" }, heads.length - 400 + " more; use the filters to see them"));
  }

  function entry(head, i) {
    const where = ($("everywhere").checked || place.follow ? "step " + head.step + " · " : "") + (head.prompt_id || head.group);
    const button = make("button", { type: "button", class: "entry", "data-i": i },
      make("span", { class: "entry-head" }, make("span", {}, where), make("span", { class: "mean" }, shoal.number(shoal.mean(head.rewards)))),
      make("span", { class: "preview" }, head.preview.replace(/^\[user\] /, "")), dots(head),
      head.drop_reason ? make("span", { class: "dropped" }, "dropped: " + shoal.dropText(head.drop_reason)) : null);
    button.addEventListener("click", () => choose(head));
    return make("li", {}, button);
  }

  // The colour of a dot is the position of its reward between the lowest and the highest of the group.
  function dots(head) {
    const known = head.rewards.filter((reward) => reward !== null), low = Math.min(...known), high = Math.max(...known);
    return make("span", { class: "dots" }, ...head.rewards.map((reward, i) => {
      const dot = make("i", { class: reward === null ? "dot none" : "dot", title: head.statuses[i] + " " + shoal.number(reward) });
      if (reward !== null) dot.style.background = "color-mix(in srgb, " + shoal.colour("c1") + " " + Math.round(high > low ? 12 + (88 * (reward - low)) / (high - low) : 50) + "%, " + shoal.colour("line") + ")";
      return dot;
    }));
  }

  async function choose(head, remembered = true) {
    mark(head);
    if (!head) {
      place.group = null;
      $("group").replaceChildren(make("p", { class: "empty" }, "No group matches here."));
      return;
    }
    place.group = head.group;
    place.step = head.step;
    $("step").value = String(head.step);
    const mine = requests;
    try {
      const group = await source.group(place.run, head);
      if (mine === requests && place.group === head.group) drawGroup(group, head);
    } catch (error) {
      failed(error);
    }
    if (remembered) remember();
  }

  function mark(head) {
    for (const button of $("groups").querySelectorAll(".entry")) {
      const chosen = heads[button.dataset.i] === head;
      button.classList.toggle("chosen", chosen);
      button.toggleAttribute("aria-current", chosen);
      // Only the list scrolls: scrollIntoView would move the page too.
      if (chosen) {
        const item = button.parentElement, room = $("groups");
        if (item.offsetTop < room.scrollTop + room.offsetTop || item.offsetTop + item.offsetHeight > room.scrollTop + room.offsetTop + room.clientHeight) room.scrollTop = item.offsetTop - room.offsetTop - 40;
      }
    }
  }

  function drawGroup(group, head) {
    place.shown = { group, head };
    scaleAdvantages(group);
    const button = (id, text, pressed, act) => {
      const made = make("button", { type: "button", id, "aria-pressed": String(pressed) }, text);
      made.addEventListener("click", act);
      return made;
    };
    const following = Boolean(place.follow);
    const facts = ["step " + head.step, group.env, group.rollouts.length + " rollouts", "mean " + shoal.number(shoal.mean(head.rewards))];
    const prompt = make("div", { class: "prompt" },
      make("div", { class: "prompt-head" }, make("b", {}, group.prompt_id || group.group), make("span", { class: "quiet" }, facts.filter(Boolean).join(" · ")),
        group.drop_reason ? make("span", { class: "badge warn" }, "dropped: " + shoal.dropText(group.drop_reason)) : null,
        make("span", { class: "push" }, button("compare", "Compare first and last", Boolean(place.compare), () => compare(head)),
          button("follow", following ? "Back to the step" : "Follow this prompt", following, () => (following ? list({ keep: true }) : follow(head))))),
      ...promptMessages(group).map((message) => shoal.drawMessage(message)));
    const timeline = following ? [drawTimeline()] : [];
    const cards = place.compare && following ? place.compare.drawn() : make("div", { class: "completions" }, ...group.rollouts.map(rolloutCard));
    $("group").replaceChildren(...timeline, prompt, displayChoice(group), cards);
  }

  // A prompt of one user message is stored as text with the role in front.
  function promptMessages(group) {
    if (group.messages.length) return group.messages;
    const text = group.prompt.startsWith("[user] ") ? group.prompt.slice(7) : group.prompt;
    return [{ role: text === group.prompt ? "prompt" : "user", content: text, tool_calls: [] }];
  }

  function scaleAdvantages(group) {
    const own = (rollout) => [rollout.advantage, ...((rollout.tokens && rollout.tokens.advantages) || [])];
    const largest = group.rollouts.flatMap(own).reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0);
    group.rollouts.forEach((rollout) => { rollout.largest = largest; });
  }

  function segments(what, label, options) {
    return make("span", { class: "segments", role: "group", "aria-label": label }, ...options.map(([name, text, title]) => {
      const button = make("button", { type: "button", ["data-" + what]: name, "aria-pressed": String(name === place[what]), title }, text);
      button.addEventListener("click", () => setDisplay(what, name));
      return button;
    }));
  }

  function displayChoice(group) {
    const tints = Object.entries(shoal.TINTS).map(([name, tint]) => [name, tint.label, tint.describe]);
    const turns = group.rollouts.some((rollout) => rollout.messages.length);
    return make("div", { class: "group-tools" }, "Colour by", segments("tint", "Colour tokens by", tints), shoal.scaleOf(place.tint),
      ...(turns ? [make("span", { class: "views" }, "Show"), segments("view", "Show", [["turns", "turns", "messages and tool calls"], ["tokens", "tokens", "every token, with those of the chat template"]])] : []));
  }

  // What is shown of the completions: the colours (tint), and turns or all tokens (view).
  function setDisplay(what, name) {
    place[what] = name;
    shoal.stored(what, name);
    if (place.shown) drawGroup(place.shown.group, place.shown.head);
  }

  function rolloutCard(rollout) {
    const sign = rollout.advantage > 0 ? " good" : rollout.advantage < 0 ? " bad" : "";
    const head = make("header", {},
      make("span", { class: "reward", title: "reward" }, shoal.number(rollout.reward)),
      rollout.advantage === null ? null : make("span", { class: "advantage", title: "advantage" }, shoal.signed(rollout.advantage) + " adv"),
      rollout.status && rollout.status !== "ok" ? make("span", { class: "badge warn" }, rollout.status) : null,
      rollout.truncated ? make("span", { class: "badge" }, "truncated") : null,
      make("span", { class: "facts" }, facts(rollout)));
    return make("article", { class: "card rollout" + sign }, head, parts(rollout), rollout.error ? make("p", { class: "error" }, rollout.error) : null, 
      ...(rollout.messages.length && place.view === "turns" ? shoal.drawConversation(rollout, place.tint) : shoal.drawTokens(rollout, place.tint)));
  }

  function facts(rollout) {
    const versions = [...new Set(rollout.spans.map((span) => span[2]))];
    return [rollout.tokens ? rollout.tokens.count + " tokens" : "", versions.length ? "v" + versions.join(", v") : ""].filter(Boolean).join(" · ");
  }

  function parts(rollout) {
    const all = Object.entries(rollout.parts);
    if (!all.length) return null;
    const most = Math.max(1, ...all.map(([, value]) => Math.abs(value || 0)));
    return make("div", { class: "parts" }, ...all.flatMap(([name, value]) => {
      const fill = make("i", {});
      fill.style.width = Math.round((100 * Math.abs(value || 0)) / most) + "%";
      if (value < 0) fill.style.background = shoal.colour("c2");
      return [make("span", {}, name), make("span", { class: "bar" }, fill), make("span", { class: "value" }, shoal.number(value))];
    }));
  }

  async function follow(head) {
    const mine = ++requests, found = [];
    let before = null;
    do {
      const answer = await source.follow(place.run, head.prompt_id, before);
      if (mine !== requests) return;
      found.push(...answer.heads);
      before = answer.next;
      place.follow = { prompt: head.prompt_id, heads: found };
      heads = found;
      drawList();
    } while (before !== null && found.length < 600);
    next = null;
    $("go-on").hidden = true;
    await choose(heads.find((each) => each.step === head.step && each.group === head.group) || heads[0]);
  }

  // The answers to this prompt in its first and its last step, side by side, the best ones first.
  async function compare(head) {
    if (place.compare) {
      place.compare = false;
      return drawGroup(place.shown.group, place.shown.head);
    }
    if (!place.follow) await follow(head);
    if (!place.follow) return;
    const ordered = place.follow.heads.slice().sort((a, b) => a.step - b.step), ends = [ordered[0], ordered[ordered.length - 1]];
    const groups = await Promise.all(ends.map((end) => source.group(place.run, end)));
    groups.forEach(scaleAdvantages);
    const value = (rollout) => rollout.reward ?? -Infinity;
    const column = (i) => {
      const best = groups[i].rollouts.slice().sort((a, b) => (value(b) > value(a)) - (value(b) < value(a)));
      const title = (i ? "Last: step " : "First: step ") + ends[i].step;
      return make("div", { class: "column" }, make("h2", {}, title, make("span", { class: "quiet" }, "mean reward " + shoal.number(shoal.mean(ends[i].rewards)))), ...best.map(rolloutCard));
    };
    place.compare = { drawn: () => (ends[0].step === ends[1].step ? make("p", { class: "notice" }, "This prompt has rollouts in step " + ends[0].step + " only, so there is nothing to compare.") : make("div", { class: "columns" }, column(0), column(1))) };
    drawGroup(place.shown.group, place.shown.head);
  }

  // The mean reward of this prompt at each of its steps, with the range of its group.
  function drawTimeline() {
    const ordered = place.follow.heads.slice().sort((a, b) => a.step - b.step);
    const known = (head) => head.rewards.filter((reward) => reward !== null);
    const column = (of) => ordered.map((head) => (known(head).length ? of(known(head)) : null));
    const lines = [{ label: "mean reward", values: column(shoal.mean), colour: "c1", dots: true },
      { label: "best", values: column((all) => Math.max(...all)), colour: "c1", edge: true }, { label: "worst", values: column((all) => Math.min(...all)), colour: "c1", edge: true }];
    const figure = shoal.drawChart({ title: "This prompt over the steps", note: "mean of its group; shaded: worst to best", height: 130 },
      { x: ordered.map((head) => head.step), lines }, (step) => choose(ordered.find((head) => head.step === step)));
    figure.classList.add("timeline");
    figure.append(make("div", { class: "chips" }, ...ordered.map((head) => {
      const chip = make("button", { type: "button", class: head.step === place.step && head.group === place.group ? "chosen" : "" }, String(head.step));
      chip.addEventListener("click", () => choose(head));
      return chip;
    })));
    return figure;
  }

  function remember() {
    const words = new URLSearchParams({ step: place.step, group: place.group || "" });
    if (place.run) words.set("run", place.run);
    history.replaceState(null, "", "#rollouts?" + words);
  }

  async function openStep(step, group = null, run = place.run) {
    place.run = run;
    $("run").value = String(run);
    const all = steps();
    if (step === Infinity) step = all[all.length - 1];
    place.step = all.length ? all.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), all[0]) : null;
    place.group = group;
    $("everywhere").checked = false;
    fillSteps();
    await list({ keep: true });
  }

  function fillSteps() {
    $("step").replaceChildren(...steps().map((step) => make("option", { value: step }, String(step))));
    $("step").value = String(place.step);
    const envs = new Set(Object.keys(shownRun().series).filter((name) => name.startsWith("reward/env/")).map((name) => name.slice(11)));
    heads.forEach((head) => envs.add(head.env));
    const chosen = $("env").value;
    $("env").replaceChildren(make("option", { value: "" }, "all"), ...[...envs].filter(Boolean).sort().map((env) => make("option", {}, env)));
    $("env").value = chosen;
  }

  function move(by) {
    const at = steps().indexOf(place.step) + by;
    if (steps()[at] !== undefined) openStep(steps()[at]).then(remember);
  }

  function walk(by) {
    const at = heads.findIndex((head) => head.group === place.group && head.step === place.step);
    const head = heads[Math.max(0, Math.min(heads.length - 1, at + by))];
    if (head) choose(head);
  }

  function showLeftOut() {
    const left = shownRun().left_out;
    const note = left && (left.kept < left.groups || left.unread_steps) ? "This file contains " + left.kept + " of " + left.groups + " groups: the newest, best and worst ones and an even sample." + (left.steps.length ? " " + left.steps.length + " steps have no groups here." : "") + (left.unread_steps ? " " + left.unread_steps + " steps were not read." : "") + " The live page (shoal watch) shows them all." : "";
    $("left-out").textContent = note;
    $("left-out").hidden = !note;
  }

  $("run").append(...shoal.page.runs.map((run, i) => make("option", { value: i }, run.run.name)));
  $("run-choice").hidden = shoal.page.runs.length < 2;
  $("run").addEventListener("change", () => { place.run = Number($("run").value); showLeftOut(); openStep(Infinity, null, place.run).then(remember); });
  $("step").addEventListener("change", () => openStep(Number($("step").value)).then(remember));
  for (const id of ["env", "status", "least", "most", "sort", "everywhere"]) $(id).addEventListener("change", () => list({ keep: true }));
  let typing = null;
  $("text").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => list({ keep: true }), 250); });
  $("go-on").addEventListener("click", () => list({ further: true }));
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  showLeftOut();
  return {
    openStep, move, walk, refill: fillSteps, remember, place,
    follow: () => place.shown && (place.follow ? list({ keep: true }) : follow(place.shown.head)),
    compare: () => place.shown && compare(place.shown.head),
    nextTint: () => { const names = Object.keys(shoal.TINTS); setDisplay("tint", names[(names.indexOf(place.tint) + 1) % names.length]); },
    redraw: () => { if (heads.length) { drawList(); mark(heads.find((head) => head.group === place.group && head.step === place.step)); } if (place.shown) drawGroup(place.shown.group, place.shown.head); },
  };
};
