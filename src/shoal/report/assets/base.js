"use strict";
// Shared by the report's scripts: reading the embedded data, making elements, writing numbers.
const shoal = {};

shoal.read = (id) => {
  const block = document.getElementById(id);
  return block ? JSON.parse(block.textContent) : null;
};

// Children are elements or plain text; text never becomes markup.
shoal.make = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

shoal.number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.01) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
};

shoal.percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + "%");

shoal.duration = (seconds) => {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min";
  return Math.floor(whole / 3600) + " h " + String(Math.floor((whole % 3600) / 60)).padStart(2, "0");
};

shoal.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

shoal.last = (column) => {
  for (let i = (column || []).length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
  return null;
};

shoal.first = (column) => {
  const found = (column || []).find((value) => value !== null);
  return found === undefined ? null : found;
};
