"use strict";
// The timeline: lanes of segments at several levels of detail, drawn on a canvas. Times are in the payload's unit.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("canvas");
  const stage = document.getElementById("stage");
  const tip = document.getElementById("tip");
  const range = document.getElementById("range");
  const lines = document.getElementById("lines");
  const pen = canvas.getContext("2d");
  const PARTS = data.parts;
  const WAITS = new Set(["p2p_starved", "p2p_backpressured", "collective_wait"]);
  const SPAN = 254, STEP = 253;
  const AXIS = 24, GAP = 14, PARTS_HEIGHT = 20, LANE_HEIGHT = 14, MOST_LINES = 400;
  const FONT = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  let view = [0, data.total], gutter = 100, width = 0, height = 0, colours = {}, drag = null, drawn = [], waiting = false;

  // ---- layout ------------------------------------------------------------------------------------------------------
  const lanes = [];
  const LEAST = data.rows.length > 16 ? 26 : 36;
  let bottom = AXIS + 6;
  for (const row of data.rows) {
    row.top = bottom;
    for (const lane of row.lanes) {
      lane.row = row;
      lane.top = bottom;
      lane.height = lane === row.lanes[0] ? PARTS_HEIGHT : LANE_HEIGHT;
      bottom += lane.height + 1;
      lanes.push(lane);
    }
    row.bottom = bottom = Math.max(bottom, row.top + LEAST);
    bottom += GAP;
  }
  height = bottom - GAP + 8;

  // ---- columns -----------------------------------------------------------------------------------------------------
  function column(text, Type) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Type(bytes.buffer);
  }
  function open(level) {
    if (level.start) return level;
    const start = column(level.s, Uint32Array), length = column(level.d, Uint32Array);
    const reach = new Float64Array(start.length);
    for (let i = 0, most = 0; i < start.length; i++) reach[i] = most = Math.max(most, start[i] + length[i]);
    Object.assign(level, {start, length, reach, kind: column(level.k, Uint8Array), name: column(level.n, Uint16Array)});
    if (level.c) Object.assign(level, {count: column(level.c, Uint32Array), busy: column(level.b, Uint32Array)});
    return level;
  }
  function levelFor(lane) {
    const pixel = (view[1] - view[0]) / Math.max(1, width - gutter);
    return open(lane.levels.find((level) => level.bin <= pixel) || lane.levels[lane.levels.length - 1]);
  }
  function firstAfter(sorted, value) { // the first that is greater
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] > value) high = middle; else low = middle + 1;
    }
    return low;
  }

  // ---- text --------------------------------------------------------------------------------------------------------
  function time(units, digits) {
    const ns = units * data.unit, size = Math.abs(ns);
    const [scale, unit] = size >= 1e9 ? [1e9, "s"] : size >= 1e6 ? [1e6, "ms"] : size >= 1e3 ? [1e3, "µs"] : [1, "ns"];
    return `${+(ns / scale).toPrecision(digits || 4)} ${unit}`;
  }
  function bytes(count) {
    const power = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
    return `${+(count / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB"][power]}`;
  }
  function fitted(text, room) {
    const needs = pen.measureText(text).width;
    if (needs <= room) return text;
    const letters = Math.floor(text.length * room / needs) - 1;
    return letters >= 3 ? text.slice(0, letters) + "…" : "";
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const named = (name) => style.getPropertyValue(name).trim();
    colours = {kinds: []};
    for (const name of ["ink", "soft", "rule", "span", "span-edge", "step", "step-edge", "card", "hatch", "select"]) colours[name] = named(`--${name}`);
    PARTS.forEach((part, place) => { colours.kinds[place] = WAITS.has(part) ? hatched(named(`--c-${part}`)) : named(`--c-${part}`); });
    colours.kinds[SPAN] = colours.span;
    colours.kinds[STEP] = colours.step;
  }
  const scale = () => Math.min(devicePixelRatio || 1, 16000 / height); // what browsers let a canvas be
  function hatched(colour) {
    const tile = document.createElement("canvas"), ratio = devicePixelRatio || 1, side = Math.round(8 * ratio);
    tile.width = tile.height = side;
    const brush = tile.getContext("2d");
    brush.fillStyle = colour;
    brush.fillRect(0, 0, side, side);
    brush.strokeStyle = colours.hatch;
    brush.lineWidth = side / 5;
    for (const shift of [-side, 0, side]) {
      brush.beginPath();
      brush.moveTo(shift - 2, side + 2);
      brush.lineTo(shift + side + 2, -2);
      brush.stroke();
    }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }
  const place = (when) => gutter + (when - view[0]) * (width - gutter) / (view[1] - view[0]);
  const when = (x) => view[0] + (x - gutter) * (view[1] - view[0]) / (width - gutter);

  function drawLane(lane) {
    const level = levelFor(lane), ratio = scale();
    const snap = (x) => Math.round(x * ratio) / ratio;
    const columns = new Map(); // by kind: how much of each pixel's time what is narrower than it takes
    let kind = -1;
    for (let i = firstAfter(level.reach, view[0]); i < level.start.length && level.start[i] < view[1]; i++) {
      const begin = Math.max(gutter, place(level.start[i])), end = Math.min(width, place(level.start[i] + level.length[i]));
      if (end < gutter) continue;
      const merged = level.count && level.count[i] > 1;
      const share = merged ? Math.min(1, level.busy[i] / Math.max(1, level.length[i])) : 1;
      if (end - begin < (merged ? 3 : 1) / ratio) {
        addTo(columns, level.kind[i], (begin - gutter) * ratio, (end - gutter) * ratio, share);
        continue;
      }
      const left = snap(begin), size = snap(end) - left;
      if (level.kind[i] !== kind) pen.fillStyle = colours.kinds[kind = level.kind[i]];
      if (merged) pen.globalAlpha = 0.15 + 0.85 * share;
      pen.fillRect(left, lane.top, size, lane.height);
      pen.globalAlpha = 1;
      if (kind >= STEP && size > 3) {
        pen.fillStyle = colours[kind === SPAN ? "span-edge" : "step-edge"];
        pen.fillRect(left, lane.top, 1, lane.height);
        pen.fillStyle = colours.kinds[kind];
      }
      if (size > 34 && lane !== lane.row.lanes[0] && !merged) label(lane, data.names[level.name[i]], left, size, kind);
    }
    drawColumns(lane, columns, ratio);
  }
  function addTo(columns, kind, begin, end, share) {
    if (!columns.has(kind)) columns.set(kind, new Float32Array(Math.ceil((width - gutter) * scale()) + 4));
    const of = columns.get(kind);
    for (let x = Math.floor(begin); x < end || x === Math.floor(begin); x++) {
      of[x] += Math.max(share * (Math.min(end, x + 1) - Math.max(begin, x)), 0.002);
    }
  }
  function drawColumns(lane, columns, ratio) { // a pixel's height is shared out among what goes on in its time
    if (!columns.size) return;
    const kinds = [...columns.keys()].sort((a, b) => a - b), size = columns.get(kinds[0]).length;
    const total = new Float32Array(size), low = new Float32Array(size);
    for (const kind of kinds) columns.get(kind).forEach((share, x) => { total[x] += share; });
    for (const kind of kinds) {
      const of = columns.get(kind);
      pen.fillStyle = colours.kinds[kind];
      for (let x = 0; x < size; x++) {
        if (!of[x]) continue;
        const high = lane.height * Math.max(of[x], total[x] < 0.1 ? 0.1 : 0) / Math.max(1, total[x]);
        pen.fillRect(gutter + x / ratio, lane.top + lane.height - low[x] - high, 1 / ratio, high);
        low[x] += high;
      }
    }
  }
  function label(lane, name, left, size, kind) {
    const text = fitted(name.replace("ProfilerStep#", "step "), size - 8);
    const before = pen.fillStyle;
    pen.fillStyle = kind >= STEP ? colours.ink : kind === PARTS.indexOf("unexplained") ? colours.ink : "#fff";
    if (kind < STEP) { pen.shadowColor = "rgba(0,0,0,.8)"; pen.shadowBlur = 3; }
    pen.fillText(text, left + 4, lane.top + lane.height / 2 + 0.5);
    pen.shadowBlur = 0;
    pen.fillStyle = before;
  }
  function drawAxis() {
    const least = (view[1] - view[0]) * 90 / Math.max(1, width - gutter), power = 10 ** Math.floor(Math.log10(least * data.unit));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * data.unit) / data.unit;
    pen.textAlign = "left";
    for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1]; tick += step) {
      const x = Math.round(place(tick)) + 0.5;
      pen.fillStyle = colours.rule;
      pen.fillRect(x, AXIS - 4, 1, height);
      pen.fillStyle = colours.soft;
      const text = time(tick, Math.min(12, Math.max(4, 2 + Math.ceil(Math.log10(view[1] / step + 1)))));
      if (x + pen.measureText(text).width + 4 < width) pen.fillText(text, x + 3, AXIS / 2);
    }
  }
  function drawMessages() {
    drawn = [];
    if (!lines.checked) return 1;
    const seen = data.messages.filter(([, , sent, arrived]) => arrived >= view[0] && sent <= view[1]);
    const every = Math.ceil(seen.length / MOST_LINES);
    pen.strokeStyle = pen.fillStyle = colours.ink;
    pen.lineWidth = 1.2;
    for (let i = 0; i < seen.length; i += every) {
      const [source, destination, sent, arrived] = seen[i];
      const down = destination > source, from = data.rows[source].lanes[0], to = data.rows[destination].lanes[0];
      if (!from || !to) continue;
      const line = [place(sent), from.top + from.height / 2, place(arrived), down ? to.top : to.top + to.height, seen[i]];
      drawn.push(line);
      pen.globalAlpha = 0.55;
      pen.beginPath();
      pen.moveTo(line[0], line[1]);
      pen.lineTo(line[2], line[3]);
      pen.stroke();
      pen.globalAlpha = 0.9;
      const angle = Math.atan2(line[3] - line[1], line[2] - line[0]);
      pen.beginPath();
      pen.moveTo(line[2], line[3]);
      for (const turn of [2.75, -2.75]) pen.lineTo(line[2] + 7 * Math.cos(angle + turn), line[3] + 7 * Math.sin(angle + turn));
      pen.fill();
    }
    pen.globalAlpha = 1;
    return every;
  }
  function drawGutter() {
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, gutter, height);
    for (const row of data.rows) {
      pen.fillStyle = colours.ink;
      pen.font = "600 " + FONT.replace("11px", "12px");
      pen.fillText(fitted(`rank ${row.rank}`, gutter - 12), 8, row.top + 9);
      pen.font = FONT;
      pen.fillStyle = colours.soft;
      if (LEAST > 26) pen.fillText(fitted(row.role, gutter - 12), 8, row.top + 26);
      pen.fillStyle = colours.rule;
      pen.fillRect(0, row.bottom + GAP / 2 - 1, width, 1);
    }
  }
  function draw() {
    waiting = false;
    const ratio = scale();
    width = stage.clientWidth;
    gutter = width < 620 ? 62 : 100;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    drawAxis();
    lanes.forEach(drawLane);
    const every = drawMessages();
    drawGutter();
    if (drag && drag.now !== undefined && !drag.moves) {
      pen.fillStyle = colours.select;
      pen.fillRect(Math.min(drag.x, drag.now), 0, Math.abs(drag.now - drag.x), height);
    }
    const digits = 5;
    range.textContent = `${time(view[0], digits)} to ${time(view[1], digits)}` + (every > 1 ? `; every ${every}th message is drawn` : "");
    canvas.dataset.view = view.join(",");
    if (!document.documentElement.dataset.painted) document.documentElement.dataset.painted = Math.round(performance.now());
  }
  function redraw() {
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }

  // ---- moving ------------------------------------------------------------------------------------------------------
  function show(begin, end) {
    const size = Math.min(data.total, Math.max(end - begin, Math.min(data.total, 20 / data.unit)));
    const from = Math.min(Math.max(0, begin), data.total - size);
    view = [from, from + size];
    redraw();
  }
  function zoom(factor, at) {
    show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }
  const middle = () => (view[0] + view[1]) / 2;
  const move = (share) => show(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
  const reset = () => show(0, data.total);
  const spot = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("wheel", (event) => {
    const whole = view[1] - view[0] >= data.total;
    if (whole && (event.deltaY > 0 || event.shiftKey)) return; // nothing to zoom out of: the page scrolls
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 1000);
    else zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 300), when(Math.max(gutter, spot(event)[0])));
  }, {passive: false});
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = {x: Math.max(gutter, spot(event)[0]), view: [...view], moves: event.shiftKey || event.pointerType === "touch"};
    canvas.setPointerCapture(event.pointerId);
    tip.hidden = true;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = spot(event);
    if (!drag) return hover(x, y);
    drag.now = Math.min(width, Math.max(gutter, x));
    if (!drag.moves) return redraw();
    const shift = (drag.x - x) * (drag.view[1] - drag.view[0]) / (width - gutter);
    show(drag.view[0] + shift, drag.view[1] + shift);
  });
  canvas.addEventListener("pointerup", () => {
    const ended = drag;
    drag = null;
    if (!ended) return;
    if (!ended.moves && ended.now !== undefined && Math.abs(ended.now - ended.x) > 4) {
      show(when(Math.min(ended.x, ended.now)), when(Math.max(ended.x, ended.now)));
    } else redraw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; redraw(); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => zoom(0.6, middle()), "=": () => zoom(0.6, middle()), "-": () => zoom(1 / 0.6, middle()), 0: reset, Home: reset, Escape: reset,
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  });
  document.getElementById("in").addEventListener("click", () => zoom(0.5, middle()));
  document.getElementById("out").addEventListener("click", () => zoom(2, middle()));
  document.getElementById("reset").addEventListener("click", reset);
  lines.addEventListener("change", redraw);

  // ---- what lies under the pointer ---------------------------------------------------------------------------------
  function segmentAt(lane, x) {
    const level = levelFor(lane), slack = 2 * (view[1] - view[0]) / (width - gutter), at = when(x);
    let best = -1, nearest = Infinity;
    for (let i = firstAfter(level.start, at + slack) - 1; i >= 0 && level.reach[i] >= at - slack; i--) {
      const off = Math.max(0, level.start[i] - at, at - level.start[i] - level.length[i]);
      if (off <= slack && off < nearest) [best, nearest] = [i, off];
      if (!off) break;
    }
    return best < 0 ? "" : described(lane, level, best);
  }
  function described(lane, level, i) {
    const name = data.names[level.name[i]], from = `from ${time(level.start[i], 7)}, lasts ${time(level.length[i])}`;
    const where = `rank ${lane.row.rank}, ${lane.title}`;
    if (!level.count || level.count[i] === 1) return `${name}\n${from}\n${where}`;
    const share = Math.round(100 * level.busy[i] / Math.max(1, level.length[i]));
    return `${level.count[i]} short events like ${name}\ntogether ${Math.min(share, 100)} % of this stretch\n${from}\n${where}`;
  }
  function messageAt(x, y) {
    for (const [x0, y0, x1, y1, message] of drawn) {
      const long = (x1 - x0) ** 2 + (y1 - y0) ** 2 || 1;
      const share = Math.max(0, Math.min(1, ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / long));
      if (Math.hypot(x - x0 - share * (x1 - x0), y - y0 - share * (y1 - y0)) > 3) continue;
      const [source, destination, sent, arrived, size, waited] = message;
      return `message of rank ${data.rows[source].rank} to ${data.rows[destination].rank}${size < 0 ? "" : `, ${bytes(size)}`}\n` +
        `sent at ${time(sent, 7)}, there ${time(arrived - sent)} later\nthe receiver had waited ${time(waited / data.unit)}`;
    }
    return "";
  }
  function hover(x, y) {
    const lane = lanes.find((lane) => y >= lane.top && y <= lane.top + lane.height);
    const text = x < gutter ? "" : messageAt(x, y) || (lane ? segmentAt(lane, x) : "");
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = x + 14 + tip.offsetWidth < width ? x + 14 : Math.max(4, x - 14 - tip.offsetWidth);
    const top = y + 18 + tip.offsetHeight < height ? y + 18 : Math.max(2, y - 10 - tip.offsetHeight);
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  }

  function repaint() { readColours(); draw(); }
  for (const query of ["print", "(prefers-color-scheme: dark)"]) matchMedia(query).addEventListener("change", repaint);
  new ResizeObserver(() => { if (stage.clientWidth !== width) redraw(); }).observe(stage);
  repaint();
})();
