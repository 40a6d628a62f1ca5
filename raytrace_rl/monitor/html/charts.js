// Goodput bars, the step chart, and the heat map of ranks by step.

const PARTS = ["productive", "overhead", "idle", "wasted", "recovery", "unattributed"];

function goodputBar(title, view, whole) {
  if (!view) return element("p", { class: "faint" }, `${title}: not in this run`);
  const shown = PARTS.filter((name) => view[`${name}_s`] > 0);
  const bar = element("div", { class: "bar" }, shown.map((name) => element("div", {
    style: { width: `${(100 * view[`${name}_s`]) / whole}%`, background: color(name) },
    onmousemove: (event) => showTip(event, `${name} ${seconds(view[`${name}_s`])} (${percent(view[`${name}_s`] / whole)})`),
    onmouseleave: hideTip,
  })));
  const legend = shown.map((name) => element("span", {}, swatch(name),
    `${name} ${percent(view[`${name}_s`] / whole)} (${seconds(view[`${name}_s`])})`));
  const beside = `coverage ${percent(view.coverage)}, ${count(view.dropped)} spans dropped, ${count(view.truncated)} truncated${data.clocks.beside && `, ${data.clocks.beside}`}`;
  return element("div", {}, element("h3", {}, title), bar, element("div", { class: "legend" }, legend),
    element("p", { class: "hint" }, beside));
}

function drawGoodput() {
  const { job, fleet, sum } = report.goodput;
  const place = byId("goodput");
  place.append(goodputBar(job ? `Job: ${job.no_goodput ?? percent(job.goodput)} of ${seconds(job.wall_s)}${job.excluded_s ? `, ${seconds(job.excluded_s)} left out` : ""}` : "Job", job, job && job.wall_s));
  const unit = fleet && (fleet.unit === "gpu" ? "GPUs" : "worker lanes");
  place.append(goodputBar(fleet ? `Fleet: ${fleet.no_goodput ?? percent(fleet.goodput)} of ${seconds(fleet.gpu_s)}, ${fleet.units} ${unit}` : "Fleet",
    fleet, fleet && fleet.gpu_s));
  const all = sum.productive_s + sum.overhead_s + sum.idle_s + sum.wasted_s;
  if (all) place.append(goodputBar(`Sum of spans: ${seconds(all)}, of which ${seconds(sum.overlap_s)} overlap`, sum, all));
}

// The job view window by window: what each was spent on, what was left out of it blank.
function drawWindows() {
  const { windows } = report.goodput;
  if (!windows.length) return;
  const width = 1200, height = 120, bottom = 20, left = 60;
  const begin = windows[0].start_ns, whole = windows[windows.length - 1].end_ns - begin || 1;
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "goodput of each window" });
  const across = (time) => left + (time / whole) * (width - left);
  const label = (text, x, y, anchor) => {
    const made = drawing("text", { x, y, "text-anchor": anchor });
    made.textContent = text;
    svg.append(made);
  };
  const told = (one) => one.no_goodput ?? percent(one.goodput);
  for (const one of windows) {
    const since = (one.start_ns - begin) / 1e9, until = (one.end_ns - begin) / 1e9;
    const x = across(one.start_ns - begin), wide = across(one.end_ns - begin) - x;
    const group = drawing("g", {});
    const length = until - since || 1;
    let y = height - bottom;
    for (const name of PARTS) {
      const size = (one[`${name}_s`] / length) * (height - bottom - 8);
      y -= size;
      if (size > 0) group.append(drawing("rect", { x, y, width: Math.max(0.5, wide - (wide > 3 ? 1 : 0)), height: size, style: `fill:${color(name)}` }));
    }
    const lines = [`${seconds(since)} to ${seconds(until)}: goodput ${told(one)}`,
      ...PARTS.filter((name) => one[`${name}_s`] > 0).map((name) => `${name} ${seconds(one[`${name}_s`])}`),
      ...(one.excluded_s ? [`left out ${seconds(one.excluded_s)}`] : [])];
    group.addEventListener("mousemove", (event) => showTip(event, lines.join("\n")));
    group.addEventListener("mouseleave", hideTip);
    svg.append(group);
  }
  label("100%", left - 6, 16, "end");
  label("0", left - 6, height - bottom, "end");
  label("0s", left, height - 6, "start");
  label(seconds(whole / 1e9), width, height - 6, "end");
  byId("goodput").append(element("h3", {}, `Job, in ${count(windows.length)} windows since it began`), svg,
    table([["from", "number"], ["to", "number"], ["goodput", "number"], ...PARTS.map((name) => [name, "number"]), ["left out", "number"]],
      windows.map((one) => [seconds((one.start_ns - begin) / 1e9), seconds((one.end_ns - begin) / 1e9), told(one),
        ...PARTS.map((name) => seconds(one[`${name}_s`])), seconds(one.excluded_s)]), 12));
}

const PHASE_COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac"];

function drawSteps(zoomTo) {
  const place = byId("steps");
  const { bars, phases } = data.steps;
  const { steps } = report;
  if (!bars.length) {
    place.append(element("p", { class: "faint" }, "No complete step in this run."));
    return;
  }
  place.append(element("p", {}, `${count(steps.count)} complete, mean ${seconds(steps.mean_s)}, median ${seconds(steps.p50_s)}, `
    + `95th percentile ${seconds(steps.p95_s)}, longest ${seconds(steps.max_s)}`
    + (steps.incomplete ? `, ${count(steps.incomplete)} incomplete` : "")));
  const width = 1200, height = 220, left = 60, bottom = 24;
  const top = Math.max(...bars.map((bar) => bar.total_s)) || 1;
  const step = (width - left) / bars.length;
  const scale = (value) => (value / top) * (height - bottom - 8);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "duration of each step" });
  for (const part of [0, 0.5, 1]) {
    const y = height - bottom - scale(part * top);
    const label = drawing("text", { x: left - 6, y: y + 4, "text-anchor": "end" });
    label.textContent = seconds(part * top);
    svg.append(drawing("line", { x1: left, x2: width, y1: y, y2: y, style: "stroke:var(--line)" }), label);
  }
  bars.forEach((bar, n) => {
    const group = drawing("g", { style: "cursor:pointer" });
    let y = height - bottom;
    const draw = (value, fill) => {
      const size = scale(Math.max(0, value));
      y -= size;
      group.append(drawing("rect", { x: left + n * step, y, width: Math.max(0.5, step - (step > 3 ? 1 : 0)), height: size, style: `fill:${fill}` }));
    };
    bar.phases_s.forEach((value, at) => draw(value, PHASE_COLORS[at]));
    draw(bar.total_s - bar.phases_s.reduce((sum, value) => sum + value, 0), "var(--unattributed)");
    const name = bar.first === bar.last ? `step ${bar.first ?? n + 1}` : `steps ${bar.first} to ${bar.last} (mean)`;
    const lines = [name, seconds(bar.total_s), ...bar.phases_s.map((v, at) => `${phases[at].name} ${seconds(v)}`)];
    group.addEventListener("mousemove", (event) => showTip(event, lines.join("\n")));
    group.addEventListener("mouseleave", hideTip);
    group.addEventListener("click", () => zoomTo(bar.start_us - data.timeline.start_ms * 1000, bar.total_s * 1e6));
    svg.append(group);
  });
  const ends = [[bars[0].first, left, "start"], [bars[bars.length - 1].last, width, "end"]];
  for (const [text, x, anchor] of ends) {
    const label = drawing("text", { x, y: height - 8, "text-anchor": anchor });
    label.textContent = `step ${text ?? ""}`;
    svg.append(label);
  }
  place.append(svg, element("div", { class: "legend" }, phases.map((phase, at) => element("span", {},
    element("span", { class: "swatch", style: { background: PHASE_COLORS[at] } }), phase.name))));
  place.append(table([["phase", ""], ["part", "number"], ["mean", "number"], ["p50", "number"], ["p95", "number"], ["p99", "number"], ["max", "number"]],
    steps.phases.map((one) => [one.name ?? "(no span)", percent(one.part), seconds(one.mean_s), seconds(one.p50_s), seconds(one.p95_s),
      seconds(one.p99_s), seconds(one.max_s)]), 12));
  const { first } = steps;
  if (first && first.stands_out) {
    place.append(element("p", {}, `The first step took ${seconds(first.duration_s)}, later ones ${seconds(first.later_p50_s)} (median): `
      + first.spans.slice(0, 3).map((one) => `${one.name} +${seconds(one.extra_s)}`).join(", ")));
  }
}

function drawHeat() {
  const place = byId("stragglers");
  for (const heat of data.heat) {
    const { ranks, columns, values_ms: values } = heat;
    const sizes = values.flat().map(Math.abs).sort((a, b) => a - b);
    const top = Math.max(heat.least_ms, sizes[Math.floor(sizes.length * 0.98)] || sizes[sizes.length - 1]) || 1;
    const high = Math.max(1, Math.min(16, Math.floor(640 / ranks.length)));
    const wide = Math.max(4, Math.min(24, Math.floor(960 / columns.length)));
    const canvas = element("canvas", { width: wide * columns.length, height: high * ranks.length, class: "heat" });
    const paint = () => {
      const context = canvas.getContext("2d");
      const style = getComputedStyle(document.documentElement);
      context.clearRect(0, 0, canvas.width, canvas.height);
      values.forEach((row, y) => row.forEach((value, x) => {
        context.globalAlpha = Math.min(1, Math.abs(value) / top);
        context.fillStyle = style.getPropertyValue(value > 0 ? "--hot" : "--cold");
        context.fillRect(x * wide, y * high, wide, high);
      }));
    };
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      const x = Math.floor((event.clientX - box.left) / wide), y = Math.floor((event.clientY - box.top) / high);
      if (!values[y] || values[y][x] === undefined) return hideTip();
      const [first, last] = columns[x];
      showTip(event, `${heat.group}[${ranks[y]}], step ${first}${last === first ? "" : ` to ${last}`}\n`
        + `${seconds(values[y][x] / 1e3)} beside the median rank`);
    });
    canvas.addEventListener("mouseleave", hideTip);
    painters.push(paint);
    paint();
    place.append(element("h3", {}, `${heat.group}: ${count(ranks.length)} ranks, down; steps, across`),
      element("p", { class: "hint" }, "Time at work beside the median rank: red is longer, blue is shorter. Waiting for each other is left out."),
      canvas);
  }
}
