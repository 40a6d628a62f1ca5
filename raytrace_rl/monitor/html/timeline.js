// The timeline: nodes, worker groups, lanes, threads. Only what is visible is drawn.

const LABEL = 240, LINE = 15, HEAD = 22, RULER = 22;
const FLAGS = { truncated: 8, open: 16, error: 32, merged: 64 };

// Flat numbers of one row to arrays that can be searched.
function decode(flat) {
  let slices = 0;
  for (let at = 0; at < flat.length; at += flat[at + 3] & FLAGS.merged ? 5 : 4) slices += 1;
  const row = { start: new Float64Array(slices), end: new Float64Array(slices), name: new Uint32Array(slices),
    code: new Uint8Array(slices), count: new Uint32Array(slices) };
  let now = 0;
  for (let at = 0, n = 0; at < flat.length; n += 1) {
    row.start[n] = now + flat[at];
    now = row.end[n] = row.start[n] + flat[at + 1];
    row.name[n] = flat[at + 2];
    row.code[n] = flat[at + 3];
    row.count[n] = flat[at + 3] & FLAGS.merged ? flat[at + 4] : 1;
    at += flat[at + 3] & FLAGS.merged ? 5 : 4;
  }
  return row;
}

class Timeline {
  constructor() {
    this.source = data.timeline;
    this.canvas = byId("canvas");
    this.context = this.canvas.getContext("2d");
    this.from = 0;
    this.to = this.source.length;
    this.scroll = 0;
    this.hidden = new Set();
    this.query = "";
    const lanes = this.source.lanes.length;
    this.expanded = new Set(lanes <= 64 ? this.source.groups.map((_, n) => n) : []);
    this.rows = new Map();
    this.matching = null;
    this.listen();
    this.resize();
  }

  // -- what there is to draw

  decoded(lane, track, depth) {
    const key = `${lane}/${track}/${depth}`;
    if (!this.rows.has(key)) this.rows.set(key, decode(this.source.lanes[lane].tracks[track].rows[depth]));
    return this.rows.get(key);
  }

  filter(query) {
    this.query = query.trim().toLowerCase();
    this.matching = this.query ? this.source.names.map((name) => name.toLowerCase().includes(this.query)) : null;
    this.scroll = 0;
    this.layout();
  }

  laneNames(lane) {
    const own = this.source.lanes[lane];
    if (!own.names) {
      own.names = new Set();
      own.tracks.forEach((track, t) => track.rows.forEach((_, d) => this.decoded(lane, t, d).name.forEach((n) => own.names.add(n))));
    }
    return own.names;
  }

  shows(lane) {
    if (!this.matching) return true;
    if (this.source.lanes[lane].label.toLowerCase().includes(this.query)) return true;
    for (const name of this.laneNames(lane)) if (this.matching[name]) return true;
    return false;
  }

  layout() {
    const items = [];
    let y = 0;
    const add = (item, height) => { items.push({ ...item, y, height }); y += height; };
    if (data.path.slices.length) add({ kind: "path" }, HEAD);
    this.source.groups.forEach((group, n) => {
      const shown = group.lanes.filter((lane) => this.shows(lane));
      if (!shown.length) return;
      add({ kind: "group", group, n, shown }, HEAD);
      if (!this.expanded.has(n) && !this.matching) return;
      for (const lane of shown) {
        this.source.lanes[lane].tracks.forEach((track, t) => {
          add({ kind: "track", lane, track, t, first: t === 0 }, Math.max(1, track.rows.length) * LINE + 3);
        });
      }
    });
    this.items = items;
    this.height = y;
    this.draw();
  }

  resize() {
    const width = byId("stage").clientWidth || 1200;
    const height = Math.max(240, Math.min(720, window.innerHeight - 160));
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.view = height;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.layout();
  }

  // -- drawing

  x(time) { return LABEL + ((time - this.from) / (this.to - this.from)) * (this.width - LABEL); }

  time(x) { return this.from + ((x - LABEL) / (this.width - LABEL)) * (this.to - this.from); }

  paints() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    return { back: get("back"), panel: get("panel"), text: get("text"), faint: get("faint"), line: get("line"), ink: get("ink"),
      buckets: BUCKETS.map(get), hot: get("hot"), accent: get("accent") };
  }

  draw() {
    const c = this.context;
    const paint = this.paints();
    const most = Math.max(0, this.height - (this.view - RULER));
    this.scroll = Math.max(0, Math.min(most, this.scroll));
    c.fillStyle = paint.back;
    c.fillRect(0, 0, this.width, this.view);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (const item of this.items) {
      const y = item.y - this.scroll + RULER;
      if (y + item.height < RULER || y > this.view) continue;
      if (item.kind === "group") this.drawGroup(c, paint, item, y);
      else if (item.kind === "path") this.drawPath(c, paint, y);
      else this.drawTrack(c, paint, item, y);
    }
    this.drawRuler(c, paint);
    const range = `${seconds(this.from / 1e6)} to ${seconds(this.to / 1e6)} (${seconds((this.to - this.from) / 1e6)})`;
    byId("range").textContent = range;
  }

  label(c, paint, text, y, indent, strong) {
    c.save();
    c.beginPath();
    c.rect(0, y, LABEL - 8, LINE + 6);
    c.clip();
    c.font = `${strong ? "600 " : ""}11px system-ui, sans-serif`;
    c.fillStyle = strong ? paint.text : paint.faint;
    c.fillText(text, 8 + indent, y + LINE / 2 + 2);
    c.restore();
  }

  drawRuler(c, paint) {
    c.fillStyle = paint.panel;
    c.fillRect(0, 0, this.width, RULER);
    const span = this.to - this.from;
    const rough = span / Math.max(2, (this.width - LABEL) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    c.fillStyle = paint.faint;
    c.strokeStyle = paint.line;
    for (let at = Math.ceil(this.from / tick) * tick; at <= this.to; at += tick) {
      const x = this.x(at);
      c.beginPath();
      c.moveTo(x, 0);
      c.lineTo(x, this.view);
      c.globalAlpha = 0.5;
      c.stroke();
      c.globalAlpha = 1;
      c.fillText(seconds(at / 1e6), x + 3, RULER / 2);
    }
  }

  drawGroup(c, paint, item, y) {
    const { group } = item;
    c.fillStyle = paint.panel;
    c.fillRect(0, y, this.width, item.height - 1);
    const open = this.expanded.has(item.n) || this.matching;
    const lanes = item.shown.length === 1 ? "1 lane" : `${item.shown.length} lanes`;
    this.label(c, paint, `${open ? "\u25be" : "\u25b8"} ${group.node} / ${group.group} (${lanes})`, y + 1, 0, true);
    const width = this.source.length / this.source.bins;
    const first = Math.max(0, Math.floor(this.from / width));
    const last = Math.min(this.source.bins - 1, Math.floor(this.to / width));
    for (let n = first; n <= last; n += 1) {
      const left = Math.max(LABEL, this.x(n * width)), right = this.x((n + 1) * width);
      let bottom = y + item.height - 2;
      for (let at = 0; at < 4; at += 1) {
        const part = parseInt(group.parts.substr((n * 4 + at) * 2, 2), 16) / 255;
        const high = part * (item.height - 4);
        c.fillStyle = paint.buckets[at + 1];
        c.fillRect(left, bottom - high, Math.max(0.5, right - left + 0.5), high);
        bottom -= high;
      }
    }
  }

  drawPath(c, paint, y) {
    this.label(c, paint, "critical path", y + 1, 0, true);
    const { slices, names } = data.path;
    for (const [start, length, name, , bucket] of slices) {
      if (start + length < this.from || start > this.to) continue;
      this.slice(c, paint, start, start + length, y + 2, HEAD - 6, bucket, names[name], false);
    }
  }

  drawTrack(c, paint, item, y) {
    const { lane, track, t } = item;
    const own = this.source.lanes[lane];
    if (item.first) {
      c.strokeStyle = paint.line;
      c.beginPath();
      c.moveTo(0, y + 0.5);
      c.lineTo(this.width, y + 0.5);
      c.stroke();
    }
    const state = own.state === "dead" ? " \u2020" : "";
    this.label(c, paint, item.first ? `${own.label}${state}` : track.name, y + 1, item.first ? 12 : 24, false);
    track.rows.forEach((_, depth) => this.drawRow(c, paint, this.decoded(lane, t, depth), y + 1 + depth * LINE));
  }

  drawRow(c, paint, row, y) {
    let n = this.firstAfter(row, this.from);
    let edge = -1;
    for (; n < row.start.length && row.start[n] <= this.to; n += 1) {
      const bucket = row.code[n] & 7;
      if (this.hidden.has(BUCKETS[bucket])) continue;
      const right = this.x(row.end[n]);
      if (right - edge < 0.5 && right - this.x(row.start[n]) < 0.5) continue;
      edge = right;
      const dim = this.matching && !this.matching[row.name[n]];
      const many = row.count[n] > 1 ? ` (+${row.count[n] - 1})` : "";
      this.slice(c, paint, row.start[n], row.end[n], y, LINE - 2, bucket, this.source.names[row.name[n]] + many, dim, row.code[n]);
    }
  }

  firstAfter(row, time) {
    let low = 0, high = row.end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  slice(c, paint, start, end, y, height, bucket, name, dim, code = 0) {
    const left = Math.max(LABEL, this.x(start)), right = Math.min(this.width, Math.max(this.x(end), this.x(start) + 1));
    if (right <= left) return;
    c.globalAlpha = dim ? 0.15 : code & FLAGS.merged ? 0.7 : 1;
    c.fillStyle = paint.buckets[bucket];
    c.fillRect(left, y, right - left - (right - left > 4 ? 1 : 0), height);
    if (code & (FLAGS.truncated | FLAGS.error | FLAGS.open)) {
      c.fillStyle = code & FLAGS.open ? paint.accent : paint.hot;
      c.fillRect(right - Math.min(3, right - left), y, Math.min(3, right - left), height);
    }
    if (right - left > 34 && !dim) {
      c.save();
      c.beginPath();
      c.rect(left, y, right - left - 2, height);
      c.clip();
      c.fillStyle = paint.ink;
      c.fillText(name, left + 3, y + height / 2 + 0.5);
      c.restore();
    }
    c.globalAlpha = 1;
  }

  // -- what the mouse is on

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top - RULER + this.scroll;
    const item = this.items.find((one) => y >= one.y && y < one.y + one.height);
    if (!item || event.clientY - box.top < RULER) return null;
    if (x < LABEL || item.kind === "group") return { item };
    const time = this.time(x), slack = ((this.to - this.from) / (this.width - LABEL)) * 2;
    if (item.kind === "path") {
      const { slices, names, lanes } = data.path;
      const found = slices.find(([start, length]) => time >= start && time <= start + length);
      return found ? { item, start: found[0], end: found[0] + found[1], bucket: found[4], code: 0,
        lines: [names[found[2]], `on ${lanes[found[3]]}`, seconds(found[1] / 1e6)] } : { item };
    }
    const depth = Math.floor((y - item.y - 1) / LINE);
    if (depth < 0 || depth >= item.track.rows.length) return { item };
    const row = this.decoded(item.lane, item.t, depth);
    const n = this.firstAfter(row, time - slack);
    if (n >= row.start.length || row.start[n] > time + slack) return { item };
    const own = this.source.lanes[item.lane], code = row.code[n];
    const lines = [this.source.names[row.name[n]], `${own.label} on ${own.node}, ${item.track.name}`,
      `${seconds((row.end[n] - row.start[n]) / 1e6)} from ${seconds(row.start[n] / 1e6)}, ${BUCKETS[code & 7]}`];
    if (row.count[n] > 1) lines.push(`${count(row.count[n])} spans, merged: this name takes longest`);
    for (const [flag, bit] of [["truncated", 8], ["still open", 16], ["ended with an error", 32]]) if (code & bit) lines.push(flag);
    return { item, start: row.start[n], end: row.end[n], code, lines };
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const span = Math.min(this.source.length, Math.max(5, (this.to - this.from) * factor));
    const part = (around - this.from) / (this.to - this.from);
    this.show(around - part * span, span);
  }

  show(from, span) {
    this.from = Math.max(0, Math.min(this.source.length - span, from));
    this.to = this.from + span;
    this.draw();
  }

  zoomTo(start, length) {
    const span = Math.min(this.source.length, Math.max(5, length * 1.1));
    this.show(start - (span - length) / 2, span);
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      const box = canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey || event.altKey) {
        this.zoom(Math.exp(event.deltaY / 300), this.time(event.clientX - box.left));
      } else if (event.shiftKey) {
        this.show(this.from + ((event.deltaY || event.deltaX) / this.width) * (this.to - this.from), this.to - this.from);
      } else {
        const before = this.scroll;
        this.scroll += event.deltaY;
        this.draw();
        if (before === this.scroll) return; // at an end: the page scrolls
      }
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, from: this.from, scroll: this.scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) {
        const found = this.at(event);
        if (found && found.lines) showTip(event, found.lines.join("\n"));
        else hideTip();
        return;
      }
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (Math.abs(dx) + Math.abs(dy) > 3) drag.moved = true;
      const span = this.to - this.from;
      this.scroll = drag.scroll - dy;
      this.show(drag.from - (dx / (this.width - LABEL)) * span, span);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.click(event);
      drag = null;
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => {
      const found = this.at(event);
      if (found && found.lines) this.zoomTo(found.start, found.end - found.start);
    });
    canvas.addEventListener("keydown", (event) => {
      const span = this.to - this.from;
      const keys = { w: () => this.zoom(0.7), s: () => this.zoom(1.4), a: () => this.show(this.from - span / 5, span),
        d: () => this.show(this.from + span / 5, span), 0: () => this.show(0, this.source.length) };
      if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
    });
    window.addEventListener("resize", () => this.resize());
  }

  click(event) {
    const found = this.at(event);
    const detail = byId("detail");
    if (found && found.item.kind === "group") {
      const { n } = found.item;
      if (this.expanded.has(n)) this.expanded.delete(n);
      else this.expanded.add(n);
      this.layout();
    }
    detail.hidden = !(found && found.lines);
    if (found && found.lines) detail.replaceChildren(...found.lines.map((line) => element("div", {}, line)));
  }
}
