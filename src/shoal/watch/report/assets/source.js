"use strict";
// The source of rollouts: blocks in this file, or the server of the live page. Both have the same methods:
// heads(run, step), group(run, head), find(run, query, before), follow(run, prompt, before).
shoal.makeSource = (page) => (page.live ? liveSource() : fileSource(page));

function fileSource(page) {
  const heads = page.runs.map((_, run) => shoal.read("heads-" + run) || []);
  const bySteps = heads.map((all) => {
    const steps = new Map();
    for (const head of all) {
      if (!steps.has(head.step)) steps.set(head.step, []);
      head.position = steps.get(head.step).length;
      steps.get(head.step).push(head);
    }
    return steps;
  });
  const cache = new Map();

  async function group(run, head) {
    const key = run + "/" + head.step + "/" + head.position;
    if (!cache.has(key)) {
      if (cache.size > 200) cache.clear();
      const packed = shoal.$("groups-" + run + "-" + head.step).textContent.split("\n")[head.position];
      cache.set(key, unpack(packed));
    }
    return cache.get(key);
  }

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  async function find(run, query) {
    const found = [];
    for (const head of heads[run].slice().sort((a, b) => b.step - a.step)) {
      if (shoal.allows(query, head) && (!query.text || (await hasText(run, head, query.text)))) found.push(head);
    }
    return { heads: found, next: null };
  }

  async function hasText(run, head, text) {
    const whole = await group(run, head);
    return shoal.groupHasText(whole, text);
  }

  return {
    steps: (run) => [...bySteps[run].keys()].sort((a, b) => a - b),
    heads: async (run, step) => bySteps[run].get(step) || [],
    group, find,
    follow: async (run, prompt) => ({ heads: heads[run].filter((head) => head.prompt_id === prompt).sort((a, b) => b.step - a.step), next: null }),
  };
}

function liveSource() {
  const ask = async (run, path, query) => {
    const words = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined && value !== ""));
    const answer = await fetch("/api/runs/" + shoal.page.runs[run].index + path + (words.size ? "?" + words : ""));
    if (!answer.ok) throw new Error(answer.status + " " + (await answer.text()));
    return answer.json();
  };
  return {
    steps: (run) => shoal.page.runs[run].rollout_steps,
    heads: (run, step) => ask(run, "/steps/" + step),
    group: (run, head) => ask(run, "/steps/" + head.step + "/group", { id: head.group }),
    find: (run, query, before) => ask(run, "/find", { ...query, before }),
    follow: (run, prompt, before) => ask(run, "/follow", { prompt, before }),
    news: (run, after, events) => ask(run, "/news", { after, events }),
  };
}

// The same rules as in the server (Query in rollouts.py).
shoal.allows = (query, head) => {
  if (query.env && head.env !== query.env) return false;
  if (query.status === "dropped" && !head.drop_reason) return false;
  if (query.status === "mixed" && new Set(head.rewards.filter((reward) => reward !== null)).size < 2) return false;
  if (query.status && !["dropped", "mixed"].includes(query.status) && !head.statuses.includes(query.status)) return false;
  if (query.min === null && query.max === null) return true;
  return head.rewards.some((reward) => reward !== null && reward >= (query.min ?? -Infinity) && reward <= (query.max ?? Infinity));
};

shoal.groupHasText = (group, text) => {
  const wanted = text.toLowerCase();
  return group.prompt.toLowerCase().includes(wanted) || group.rollouts.some((rollout) => rollout.completion.toLowerCase().includes(wanted));
};
