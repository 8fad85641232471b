"use strict";
// The rollout browser: steps, groups, completions side by side, tokens tinted. All text is set as text.
shoal.browser = (overview) => {
  const $ = (id) => document.getElementById(id);
  const steps = overview.rollout_steps.filter((step) => $("rollouts-" + step));
  const place = { step: steps[steps.length - 1], group: 0 };
  const cache = new Map();

  const groupsOf = (step) => {
    if (!cache.has(step)) cache.set(step, shoal.read("rollouts-" + step) || []);
    const groups = cache.get(step);
    return $("only-mixed").checked ? groups.filter(isMixed) : groups;
  };

  function rewards(group) {
    return group.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null);
  }

  function isMixed(group) {
    const all = rewards(group);
    return all.length > 1 && Math.max(...all) !== Math.min(...all);
  }

  function showStep(step, group) {
    if (!steps.length) return showNothing();
    place.step = nearest(step);
    place.group = group || 0;
    $("step").value = String(place.step);
    drawGroups();
  }

  function nearest(step) {
    return steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0]);
  }

  function showNothing() {
    $("group").replaceChildren(shoal.make("p", { class: "empty" }, "No rollouts are stored in this report."));
  }

  function drawGroups() {
    const groups = groupsOf(place.step);
    place.group = Math.max(0, Math.min(place.group, groups.length - 1));
    $("groups").replaceChildren(...groups.map((group, i) => groupEntry(group, i)));
    drawGroup(groups[place.group]);
  }

  function groupEntry(group, i) {
    const dots = shoal.make("span", { class: "dots" }, ...group.rollouts.map((rollout) => rewardDot(rollout, group)));
    const all = rewards(group);
    const mean = all.length ? all.reduce((a, b) => a + b, 0) / all.length : null;
    const entry = shoal.make("button", { type: "button", class: i === place.group ? "entry chosen" : "entry" },
      shoal.make("span", { class: "entry-head" }, shoal.make("b", {}, group.prompt_id || group.group), shoal.make("span", { class: "mean" }, shoal.number(mean))),
      shoal.make("span", { class: "preview" }, group.prompt.trim().split("\n").pop().slice(-90)), dots,
      group.drop_reason ? shoal.make("span", { class: "dropped" }, "set aside: " + group.drop_reason) : null);
    entry.addEventListener("click", () => choose(i));
    return shoal.make("li", {}, entry);
  }

  // Filled by rank between the group's worst and best, so that a group can be judged at a glance.
  function rewardDot(rollout, group) {
    const dot = shoal.make("i", { class: rollout.reward === null ? "dot none" : "dot", title: rollout.status + " " + shoal.number(rollout.reward) });
    if (rollout.reward !== null) {
      const all = rewards(group), low = Math.min(...all), high = Math.max(...all);
      const share = high > low ? (rollout.reward - low) / (high - low) : 0.5;
      dot.style.background = "color-mix(in srgb, " + shoal.colour("c1") + " " + Math.round(12 + 88 * share) + "%, " + shoal.colour("line") + ")";
    }
    return dot;
  }

  function choose(i) {
    place.group = i;
    drawGroups();
    const entry = $("groups").children[place.group];
    if (entry) entry.scrollIntoView({ block: "nearest" });
    remember();
  }

  function drawGroup(group) {
    if (!group) {
      $("group").replaceChildren(shoal.make("p", { class: "empty" }, "No group to show at this step."));
      return;
    }
    const head = shoal.make("details", { class: "prompt", open: "" }, shoal.make("summary", {}, "Prompt"), shoal.make("pre", {}, group.prompt));
    const cards = shoal.make("div", { class: "completions" }, ...group.rollouts.map((rollout) => rolloutCard(rollout)));
    $("group").replaceChildren(head, cards);
  }

  function rolloutCard(rollout) {
    const sign = rollout.advantage === null ? "" : rollout.advantage > 0 ? " good" : rollout.advantage < 0 ? " bad" : "";
    const head = shoal.make("header", {},
      shoal.make("span", { class: "reward" }, shoal.number(rollout.reward)),
      rollout.advantage === null ? null : shoal.make("span", { class: "advantage" + sign }, (rollout.advantage > 0 ? "+" : "") + shoal.number(rollout.advantage)),
      rollout.status && rollout.status !== "ok" ? shoal.make("span", { class: "badge warn" }, rollout.status) : null,
      shoal.make("span", { class: "facts" }, facts(rollout)));
    const parts = Object.entries(rollout.parts);
    const partRow = parts.length ? shoal.make("div", { class: "parts" }, ...parts.map(([name, value]) => shoal.make("span", {}, name + " " + shoal.number(value)))) : null;
    return shoal.make("article", { class: "card rollout" }, head, partRow, body(rollout));
  }

  function facts(rollout) {
    const versions = [...new Set(rollout.spans.map((span) => span[2]))];
    const count = rollout.tokens ? rollout.tokens.count + " tokens" : "";
    return [count, versions.length ? "v" + versions.join(", v") : ""].filter(Boolean).join(" · ");
  }

  function body(rollout) {
    const text = shoal.make("pre", { class: "completion" });
    const tokens = rollout.tokens;
    if (!tokens) {
      text.append(rollout.completion || "(empty)");
      return text;
    }
    tokens.text.forEach((piece, i) => {
      const shown = piece.replace(/\n/g, "↵\n");
      const span = shoal.make("span", { class: tokens.mask[i] ? "token" : "token unmasked", title: describe(tokens, i, piece) }, shown);
      const colour = tokens.mask[i] ? tint(rollout, tokens, i) : null;
      if (colour) span.style.background = colour;
      text.append(span);
    });
    if (tokens.left_out) text.append(shoal.make("span", { class: "cut" }, " … " + tokens.left_out + " more tokens"));
    return text;
  }

  function describe(tokens, i, piece) {
    const lines = [JSON.stringify(piece)];
    if (!tokens.mask[i]) lines.push("not sampled by the policy");
    if (tokens.sampler && tokens.sampler[i] !== null) lines.push("sampler log-prob " + tokens.sampler[i]);
    if (tokens.policy && tokens.policy[i] !== null) lines.push("trainer log-prob " + tokens.policy[i]);
    return lines.join("\n");
  }

  function tint(rollout, tokens, i) {
    const how = $("tint").value;
    if (how === "sampler" && tokens.sampler && tokens.sampler[i] !== null) return mix("c2", Math.min(1, -tokens.sampler[i] / 4));
    if (how === "advantage" && rollout.advantage !== null) return mix(rollout.advantage > 0 ? "c1" : "c2", Math.min(1, Math.abs(rollout.advantage) / 2));
    if (how === "gap" && tokens.policy && tokens.sampler) {
      const gap = (tokens.policy[i] || 0) - (tokens.sampler[i] || 0);
      return mix(gap > 0 ? "c1" : "c2", Math.min(1, Math.abs(gap) / 0.5));
    }
    return null;
  }

  function mix(name, share) {
    return share < 0.02 ? null : "color-mix(in srgb, " + shoal.colour(name) + " " + Math.round(55 * share) + "%, transparent)";
  }

  function remember() {
    history.replaceState(null, "", "#step=" + place.step + "&group=" + place.group);
  }

  function fromAddress() {
    const match = location.hash.match(/^#step=(\d+)(?:&group=(\d+))?$/);
    if (match) openStep(Number(match[1]), Number(match[2] || 0));
    return Boolean(match);
  }

  function openStep(step, group) {
    showStep(step, group);
    remember();
    $("rollouts").scrollIntoView({ behavior: "auto" });
  }

  function move(by) {
    const next = steps[steps.indexOf(place.step) + by];
    if (next !== undefined) {
      showStep(next, place.group);
      remember();
    }
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "j") choose(place.group + 1);
    else if (event.key === "k") choose(Math.max(0, place.group - 1));
    else if (event.key === "l") move(1);
    else if (event.key === "h") move(-1);
  }

  $("step").append(...steps.map((step) => shoal.make("option", { value: step }, String(step))));
  $("step").addEventListener("change", () => { showStep(Number($("step").value), place.group); remember(); });
  $("tint").addEventListener("change", () => drawGroups());
  $("only-mixed").addEventListener("change", () => { place.group = 0; drawGroups(); });
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", fromAddress);
  if (!fromAddress()) showStep(place.step, 0);
  return { openStep, redraw: () => steps.length && drawGroups() };
};
