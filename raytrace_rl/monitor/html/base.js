// What every part of the page uses: the data, elements made without markup, times drawn as text.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const report = data.report;
const BUCKETS = ["none", "productive", "overhead", "wasted", "idle"];

const byId = (id) => document.getElementById(id);

// Children are elements or text; text never becomes markup, whatever it holds.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function drawing(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function seconds(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 86400) return `${Math.floor(value / 86400)}d${String(Math.floor((value % 86400) / 3600)).padStart(2, "0")}h`;
  if (size >= 3600) return `${Math.floor(value / 3600)}h${String(Math.floor((value % 3600) / 60)).padStart(2, "0")}m`;
  if (size >= 60) return `${Math.floor(value / 60)}m${String(Math.floor(value % 60)).padStart(2, "0")}s`;
  if (size >= 1) return `${value.toFixed(2)}s`;
  if (size >= 1e-3) return `${(value * 1e3).toFixed(1)}ms`;
  return size ? `${(value * 1e6).toFixed(0)}us` : "0s";
}

const percent = (part) => (part === null || part === undefined ? "n/a" : `${(part * 100).toFixed(1)}%`);
const count = (number) => number.toLocaleString("en-US");
const color = (name) => `var(--${name || "none"})`;

function swatch(name) {
  return element("span", { class: "swatch", style: { background: color(name) } });
}

// heads: [title, "number" or "" or "long"]; rows: arrays of cells. Long tables show their rest on demand.
function table(heads, rows, most = 20) {
  const cell = (tag, kind, value) => element(tag, { class: kind || null }, value);
  const body = element("tbody");
  const show = (from, to) => {
    for (const row of rows.slice(from, to)) body.append(element("tr", {}, row.map((v, i) => cell("td", heads[i][1], v))));
  };
  show(0, most);
  const made = element("table", {}, element("thead", {}, element("tr", {}, heads.map((h) => cell("th", h[1], h[0])))), body);
  if (rows.length <= most) return made;
  const button = element("button", { type: "button" }, `${count(rows.length - most)} more`);
  button.addEventListener("click", () => { show(most); button.remove(); });
  return element("div", {}, made, button);
}

const tip = byId("tip");

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8);
  const top = Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

const hideTip = () => { tip.hidden = true; };
