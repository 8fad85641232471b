"use strict";
// Shared by all scripts of the page: elements, numbers, colours, the tooltip.
const shoal = { charts: [], zooms: new Map() };

shoal.$ = (id) => document.getElementById(id);

shoal.read = (id) => {
  const block = document.getElementById(id);
  return block ? JSON.parse(block.textContent) : null;
};

// Children are elements or plain text; text never becomes markup.
shoal.make = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
};

shoal.number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
};

// The drop reason of a group in words, as DROP_REASONS in core/types.py.
shoal.dropText = (reason) => ({
  "uniform": "zero-variance group",
  "uniform-good": "zero-variance group (all good)",
  "uniform-bad": "zero-variance group (all bad)",
  "too-few-scored": "group with fewer than two rewards",
  "stale": "stale group",
  "filtered": "group rejected by orch.groups.filter",
})[reason] || reason;

shoal.percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + "%");

shoal.capitalise = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

shoal.signed = (value) => (value > 0 ? "+" : "") + shoal.number(value);

shoal.duration = (seconds) => {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min " + String(whole % 60).padStart(2, "0") + " s";
  return Math.floor(whole / 3600) + " h " + String(Math.floor((whole % 3600) / 60)).padStart(2, "0") + " min";
};

shoal.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

shoal.last = (column) => {
  for (let i = (column || []).length - 1; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return column[i];
  return null;
};

shoal.first = (column) => {
  const found = (column || []).find((value) => value !== null);
  return found === undefined ? null : found;
};

shoal.mean = (values) => {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

shoal.mix = (name, share) => "color-mix(in srgb, " + shoal.colour(name) + " " + Math.round(100 * Math.max(0, Math.min(1, share))) + "%, transparent)";

// A tooltip near the pointer, always inside the window.
shoal.tip = (event, ...children) => {
  const tip = shoal.$("tip");
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  tip.style.left = Math.max(6, left) + "px";
  tip.style.top = Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
};

shoal.hideTip = () => { shoal.$("tip").hidden = true; };

// Bias-corrected exponential moving average: early values are not pulled towards zero.
shoal.smooth = (values, weight) => {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
};

shoal.setTheme = (name) => { if (name === "light" || name === "dark") document.documentElement.dataset.theme = name; };

shoal.switchTheme = () => {
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  shoal.setTheme(dark ? "light" : "dark");
  shoal.stored("theme", dark ? "light" : "dark");
};

shoal.stored = (key, value) => {
  try {
    if (value !== undefined) localStorage.setItem("shoal-" + key, value);
    return localStorage.getItem("shoal-" + key);
  } catch {
    return null; // a page from a file may have no storage
  }
};
