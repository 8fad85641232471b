"use strict";
// Tokens of a completion, coloured by log-prob, importance ratio or advantage. All text is set as text.
shoal.TINTS = {
  logprob: { label: "log-prob", low: "likely", high: "unlikely", describe: "darker: less likely under the sampler" },
  ratio: { label: "ratio", low: "less likely", high: "more likely", describe: "probability under the trainer divided by that under the sampler" },
  advantage: { label: "advantage", low: "negative", high: "positive", describe: "relative to the largest advantage of the group" },
  none: { label: "plain", low: "", high: "", describe: "" },
};
shoal.FIRST_TOKENS = 700; // drawn at once; the rest on request

// The advantage of a token: its own, or that of the rollout.
shoal.advantageAt = (rollout, tokens, i) => (tokens.advantages ? tokens.advantages[i] : rollout.advantage);

shoal.tint = (how, rollout, tokens, i) => {
  if (!tokens.mask[i]) return null;
  const sampler = tokens.sampler && tokens.sampler[i], policy = tokens.policy && tokens.policy[i];
  if (how === "logprob" && typeof sampler === "number") return shade("c5", Math.min(1, -sampler / 4));
  const advantage = shoal.advantageAt(rollout, tokens, i);
  if (how === "advantage" && advantage !== null) return shade(advantage > 0 ? "c1" : "c2", Math.abs(advantage) / (rollout.largest || 1));
  if (how === "ratio" && typeof sampler === "number" && typeof policy === "number") {
    const gap = policy - sampler;
    return shade(gap > 0 ? "c1" : "c2", Math.min(1, Math.abs(gap) / 0.5));
  }
  return null;

  function shade(name, share) {
    return share < 0.02 ? null : shoal.mix(name, 0.62 * share);
  }
};

shoal.scaleOf = (how) => {
  const tint = shoal.TINTS[how];
  if (how === "none") return null;
  const bar = shoal.make("i", {});
  bar.style.background = how === "logprob" ? "linear-gradient(90deg, transparent, " + shoal.mix("c5", 0.62) + ")"
    : "linear-gradient(90deg, " + shoal.mix("c2", 0.62) + ", transparent, " + shoal.mix("c1", 0.62) + ")";
  return shoal.make("span", { class: "scale", title: tint.describe }, tint.low, bar, tint.high);
};

// The tokens in `range`, by default all of them.
shoal.drawTokens = (rollout, how, range) => {
  const text = shoal.make("pre", { class: "completion", tabindex: "0", "aria-label": "Completion" });
  const tokens = rollout.tokens;
  if (!tokens) {
    text.append(rollout.completion || "(empty)");
    return [text];
  }
  const [start, end] = range || [0, tokens.text.length], middle = Math.min(end, start + shoal.FIRST_TOKENS);
  draw(start, middle);
  text.addEventListener("mousemove", showTip);
  text.addEventListener("mouseleave", shoal.hideTip);
  if (middle === end) return [text, cut()];
  const button = shoal.make("button", { type: "button", class: "show-all" }, "Show " + (end - middle) + " more tokens");
  button.addEventListener("click", () => { draw(middle, end); button.remove(); });
  return [text, button, cut()];

  function draw(from, to) {
    const pieces = document.createDocumentFragment();
    for (let i = from; i < to; i++) {
      const span = document.createElement("span");
      span.className = tokens.mask[i] ? "token" : "token unmasked";
      span.dataset.i = i;
      span.textContent = tokens.text[i].replace(/\n/g, "↵\n");
      const colour = shoal.tint(how, rollout, tokens, i);
      if (colour) span.style.background = colour;
      pieces.append(span);
    }
    text.append(pieces);
  }

  function cut() {
    return tokens.left_out && end === tokens.text.length ? shoal.make("p", { class: "error" }, tokens.left_out + " more tokens are only in the run directory") : null;
  }

  function showTip(event) {
    const i = event.target.dataset ? event.target.dataset.i : undefined;
    if (i === undefined) return shoal.hideTip();
    const row = (label, value) => shoal.make("span", { class: "key" }, label, shoal.make("span", { class: "value" }, value));
    const sampler = tokens.sampler && tokens.sampler[i], policy = tokens.policy && tokens.policy[i];
    const rows = [];
    if (!tokens.mask[i]) rows.push(row("not sampled by the policy", ""));
    else {
      if (typeof sampler === "number") rows.push(row("sampler log-prob", sampler.toFixed(3) + "  (" + shoal.percent(Math.exp(sampler)) + ")"));
      if (typeof policy === "number") rows.push(row("trainer log-prob", policy.toFixed(3)), row("ratio", shoal.number(Math.exp(policy - sampler))));
      const advantage = shoal.advantageAt(rollout, tokens, i);
      if (advantage !== null) rows.push(row("advantage", shoal.signed(advantage)));
    }
    shoal.tip(event, shoal.make("b", { class: "mono" }, JSON.stringify(tokens.text[i])), ...rows);
  }
};

// A conversation as turns. The policy's turns are drawn from its tokens, all others from their text.
shoal.drawConversation = (rollout, how) => {
  const ranges = turnRanges(), rewards = rollout.turn_rewards.slice();
  return rollout.messages.map((message) => {
    const own = message.role === "assistant";
    const range = own && ranges.length ? ranges.shift() : null;
    if (!range) return shoal.drawMessage(message, null, own ? rewards.shift() : undefined);
    const answer = answerStart(range, message.reasoning);
    const draw = (from, to) => shoal.drawTokens(rollout, how, [from, to]);
    return shoal.drawMessage(message, draw(answer, range[1]), rewards.shift(), answer > range[0] ? draw(range[0], answer) : null);
  });

  // The first token after the reasoning; the first of the turn if the reasoning is not found in its tokens.
  function answerStart([start, end], reasoning) {
    const texts = rollout.tokens.text.slice(start, end), found = reasoning ? texts.join("").indexOf(reasoning) : -1;
    if (found < 0) return start;
    let at = start;
    for (let length = 0; at < end && length < found + reasoning.length; at++) length += rollout.tokens.text[at].length;
    return at;
  }

  // The place of each turn of the policy in the tokens; empty if turns and messages do not correspond.
  function turnRanges() {
    const { tokens, turn_tokens: sizes } = rollout, own = rollout.messages.filter((message) => message.role === "assistant");
    const sampled = tokens ? tokens.mask.flatMap((mask, i) => (mask ? [i] : [])) : [];
    if (sizes.length !== own.length || sizes.reduce((a, b) => a + b, 0) !== sampled.length) return [];
    let at = 0;
    return sizes.map((size) => { at += size; return size ? [sampled[at - size], sampled[at - 1] + 1] : [0, 0]; });
  }
};

shoal.ROLES = { system: "system", user: "user", assistant: "assistant", tool: "tool" };

// One message: its role, its reward if it has one, its reasoning (collapsed), its text and its tool calls. `body` and
// `thoughts` are elements that replace the text and the reasoning.
shoal.drawMessage = (message, body, reward, thoughts) => {
  const { make } = shoal;
  const calls = message.tool_calls.map((call) => make("div", { class: "call" }, make("b", {}, call.name), make("pre", {}, call.arguments)));
  const shown = thoughts || [make("pre", { "aria-label": "Reasoning" }, message.reasoning)];
  const reasoning = message.reasoning ? make("details", { class: "reasoning" }, make("summary", {}, "Reasoning"), ...shown) : null;
  const text = body || (message.content || !calls.length ? [make("pre", { tabindex: "0" }, message.content || "(empty)")] : []);
  return make("section", { class: "turn turn-" + (shoal.ROLES[message.role] || "other") },
    make("div", { class: "role" }, message.role + (message.name ? " · " + message.name : ""), typeof reward === "number" ? make("span", { class: "turn-reward" }, "reward " + shoal.number(reward)) : null), reasoning, ...text, ...calls);
};
