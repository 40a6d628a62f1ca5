// Puts the page together.

const painters = [];

function drawHead() {
  const { run, loss } = report;
  document.title = `${run.id}: raytrace_rl report`;
  byId("title").textContent = `Run ${run.id}`;
  const length = run.start_ns === null ? 0 : (run.end_ns - run.start_ns) / 1e9;
  const date = run.start_ns === null ? "" : `, from ${new Date(run.start_ns / 1e6).toISOString().slice(0, 19).replace("T", " ")} UTC`;
  byId("about").textContent = `${count(loss.spans)} spans, ${count(run.processes)} processes, ${seconds(length)}${date}`;
  for (const section of document.querySelectorAll("main section")) {
    byId("nav").append(element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
  }
}

function drawFindings() {
  const place = byId("findings");
  if (!report.findings.length) place.append(element("p", { class: "faint" }, "None."));
  else place.append(element("ul", { class: "findings" }, report.findings.map((one) => element("li", {}, one.text))));
}

function part(value, bucket) {
  return element("span", { class: "part", style: { width: `${Math.max(1, 160 * value)}px`, background: color(bucket) } });
}

function drawPath() {
  const place = byId("path");
  const view = report.critical_path;
  if (!view) { place.append(element("p", { class: "faint" }, "No complete step in this run.")); return; }
  place.append(element("p", {}, `What ${count(view.steps)} steps (${seconds(view.total_s)}) waited for, instant by instant.`));
  place.append(table([["span", ""], ["lane", ""], ["bucket", ""], ["part", "number"], ["", ""], ["p50", "number"], ["p95", "number"], ["steps", "number"]],
    view.spans.map((one) => [one.name, one.lane, one.bucket ?? "-", percent(one.part), part(one.part, one.bucket), seconds(one.p50_s),
      seconds(one.p95_s), count(one.steps)])));
}

function drawStragglers() {
  const place = byId("stragglers");
  const view = report.stragglers;
  const found = view.ranks.filter((one) => one.straggler);
  if (!view.compared) { place.append(element("p", { class: "faint" }, "No ranks to compare in this run.")); return; }
  place.append(element("p", {}, `${found.length || "None"} of ${count(view.compared)} ranks.`));
  if (found.length) {
    place.append(table([["rank", ""], ["node", ""], ["a step", "number"], ["part", "number"], ["in", "long"]],
      found.map((one) => [`${one.worker_group}[${one.rank}]`, one.nodes.join(", "), seconds(one.excess_s), percent(one.part_of_step),
        one.spans.filter((span) => span.straggler).map((span) => (span.kind === "late" ? `last into ${span.name}`
          : `${span.name}${span.ratio ? ` (${span.ratio.toFixed(1)} x)` : ""}`)).join(", ")])));
  }
}

function drawBubbles() {
  const place = byId("bubbles");
  const view = report.bubbles;
  if (!view || !view.waits.length) { place.append(element("p", { class: "faint" }, "No idle worker inside a step.")); return; }
  place.append(element("p", {}, "Idle time of workers inside steps, and what for."));
  place.append(table([["worker group", ""], ["idle", "number"], ["part", "number"], ["", ""], ["while", "long"]],
    view.waits.map((one) => [one.worker_group, seconds(one.idle_s), percent(one.part), part(one.part, "idle"),
      one.kind === "span" ? one.name : `the step was in ${one.name} of ${one.of}`]), 12));
}

function drawFlow() {
  const place = byId("flow");
  const { trajectories, queueing } = report;
  if (!trajectories.count && !queueing.calls) { place.append(element("p", { class: "faint" }, "None in this run.")); return; }
  if (trajectories.count) {
    const { age_s: age, lag } = trajectories;
    place.append(element("p", {}, `${count(trajectories.count)} trajectories trained on`
      + (age ? `, age ${seconds(age.min)} to ${seconds(age.max)} (median ${seconds(age.median)})` : "")
      + (lag ? `, ${lag.min} to ${lag.max} weight versions behind (median ${lag.median})` : "")));
  }
  if (queueing.calls) {
    place.append(table([["callee", ""], ["rank", "number"], ["calls", "number"], ["median", "number"], ["p95", "number"], ["max", "number"]],
      queueing.ranks.map((one) => [one.callee, one.rank ?? "-", count(one.calls), seconds(one.median_s), seconds(one.p95_s), seconds(one.max_s)]), 10));
  }
}

function drawNames() {
  byId("names").append(table([["span", ""], ["bucket", ""], ["count", "number"], ["total", "number"], ["p50", "number"], ["p95", "number"], ["max", "number"], ["errors", "number"]],
    report.span_names.map((one) => [one.name, one.bucket ?? "-", count(one.count), seconds(one.total_s), seconds(one.p50_s), seconds(one.p95_s),
      seconds(one.max_s), one.errors || ""])));
}

function drawProcesses() {
  byId("processes").append(table([["process", ""], ["node", ""], ["state", ""], ["spans", "number"], ["open", "number"], ["truncated", "number"], ["dropped", "number"]],
    report.processes.map((one) => [one.label, one.node, one.state, count(one.spans), one.open || "", one.truncated || "", one.drops.spans || ""])));
}

function drawLoss() {
  const place = byId("loss");
  const { loss, traces } = report;
  place.append(table([["", ""], ["", "number"]], [["spans", count(loss.spans)], ["truncated", count(loss.truncated)], ["still open", count(loss.open)],
    ["dropped", count(loss.dropped)], ["damaged records", count(loss.damaged_records)], ["lost records", count(loss.lost_records)],
    ["unreachable files", count(loss.unreachable_segments)], ["duplicates", count(loss.duplicates)],
    ["spans whose parent is missing", count(traces.missing_parent)]]));
  report.relay.summary.forEach((line) => place.append(element("p", {}, line)));
  const clocks = data.clocks.lines;
  if (clocks.length) place.append(element("h3", {}, "Clocks"), element("pre", { class: "hint" }, clocks.join("\n")));
  const spans = [...loss.truncated_spans.map((one) => ["truncated", one]), ...loss.open_spans.map((one) => ["open", one])];
  if (spans.length) {
    place.append(element("h3", {}, "Truncated and open spans"), table([["", ""], ["span", ""], ["process", ""], ["thread", ""], ["after", "number"]],
      spans.map(([state, one]) => [state, one.name, one.process.label, one.thread ?? "", seconds(one.duration_s)]), 10));
  }
  if (loss.damage.length) {
    place.append(element("h3", {}, "Damage"), table([["file", "long"], ["at", "number"], ["skipped", "number"], ["reason", "long"]],
      loss.damage.map((one) => [one.path, count(one.offset), count(one.skipped), one.reason]), 10));
  }
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  painters.forEach((paint) => paint());
}

theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
drawHead();
drawFindings();
drawGoodput();
drawWindows();
const timeline = new Timeline();
painters.push(() => timeline.draw());
drawSteps((start, length) => { timeline.zoomTo(start, length); byId("timeline").scrollIntoView(); });
drawPath();
drawStragglers();
drawHeat();
drawBubbles();
drawFlow();
drawNames();
drawProcesses();
drawLoss();

byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("filter").addEventListener("input", (event) => timeline.filter(event.target.value));
byId("zoom-in").addEventListener("click", () => timeline.zoom(0.5));
byId("zoom-out").addEventListener("click", () => timeline.zoom(2));
byId("fit").addEventListener("click", () => timeline.show(0, timeline.source.length));
byId("expand").addEventListener("click", () => { timeline.expanded = new Set(timeline.source.groups.map((_, n) => n)); timeline.layout(); });
byId("collapse").addEventListener("click", () => { timeline.expanded.clear(); timeline.layout(); });
for (const bucket of BUCKETS) {
  const box = element("input", { type: "checkbox", checked: "", "data-bucket": bucket });
  box.addEventListener("change", () => {
    if (box.checked) timeline.hidden.delete(bucket);
    else timeline.hidden.add(bucket);
    timeline.draw();
  });
  byId("buckets").append(element("label", {}, box, swatch(bucket), bucket === "none" ? "no bucket" : bucket));
}
if (timeline.source.resolution) {
  byId("merged").textContent = `Spans shorter than ${seconds(timeline.source.resolution / 1e6)} are merged with their neighbours: `
    + "all of them would be more than a page can hold. raytrace-rl export --format perfetto has each.";
}
