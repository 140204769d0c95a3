"use strict";
/* Draws the runs' data, and asks for newer data as long as a server answers. Texts of runs become text, never markup. */
const NAMES = { lm: "loss", grad_norm: "norm of the gradient, before clipping", learning_rate: "learning rate" };
const SECONDS_BETWEEN = 2;
let data = JSON.parse(document.getElementById("data").textContent);

const make = (tag, attributes = {}, ...children) => {
  const isSvg = ["svg", "line", "text", "polyline", "polygon", "circle", "title"].includes(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

const number = (value) => {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1e4 ? 6 : 4 });
};

const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, name] = units[first], [small, smallName] = units[first + 1] ?? [];
  const rest = small && Math.floor((seconds % size) / small);
  return `${Math.floor(seconds / size)} ${name}${rest ? ` ${rest} ${smallName}` : ""}`;
};

const words = (name) => NAMES[name] ?? name.replaceAll("_", " ");

/* Panels: what is measured at evaluations stands beside what is measured at steps. */
const panels = () => {
  const names = new Set(data.runs.flatMap((run) => Object.keys(run.curves)));
  const base = [...new Set([...names].map((name) => name.replace(/^eval_/, "")))];
  const rank = (name) => name === "loss" ? 0 : name.endsWith("loss") ? 1 : names.has(`eval_${name}`) ? 2 : 3;
  return base.sort((a, b) => rank(a) - rank(b));
};

const round = (low, high) => {
  const span = high - low || Math.abs(high) || 1, power = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => span / size <= 5);
  const ticks = [], first = Math.ceil(low / step - 1e-9);
  for (let i = 0; i < 6 && (first + i) * step <= high + 1e-9 * span; i++) ticks.push((first + i) * step + 0); /* no -0 */
  return { ticks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
};

/* Beyond this, differences of values are no numbers any more; it is drawn as if it were there. */
const LARGEST = 1e300;
const clip = (value) => value === null ? null : Math.min(Math.max(value, -LARGEST), LARGEST);

const drawPanel = (name) => {
  const series = data.runs.flatMap((run, index) => [name, `eval_${name}`]
    .filter((key) => run.curves[key]?.step.length)
    .map((key) => ({ index, isEvaluation: key !== name, ...run.curves[key] }))
    .map((curve) => ({ ...curve, drawn: curve.mean.map(clip), low: curve.low.map(clip), high: curve.high.map(clip) })));
  const values = series.flatMap((curve) => curve.drawn.filter((value) => value !== null));
  if (!values.length) return null;
  const steps = series.flatMap((curve) => curve.step), left = Math.min(...steps), right = Math.max(...steps, left + 1);
  /* All means, and all but the outermost of what lies around them */
  const around = series.flatMap((curve) => [...curve.low, ...curve.high].filter((value) => value !== null)).sort((a, b) => a - b);
  let low = Math.min(...values, around[Math.floor(0.02 * around.length)]);
  let high = Math.max(...values, around[Math.ceil(0.98 * around.length) - 1]);
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  const margin = (high - low) / 20;
  low = low >= 0 ? Math.max(0, low - margin) : low - margin;
  high += margin;
  const x = (step) => 100 * (step - left) / (right - left);
  const y = (value) => 100 * (high - Math.min(Math.max(value, low), high)) / (high - low);
  const unit = name === "speed" ? `${data.runs[0].unit} per second` : words(name);
  const svg = make("svg", { class: "chart curves", role: "img", height: 180 }, make("title", {}, `${unit} by step`));
  const vertical = round(low, high), horizontal = round(left, right);
  for (const tick of vertical.ticks) {
    svg.append(make("line", { class: "grid", x2: "100%", y1: `${y(tick)}%`, y2: `${y(tick)}%` }));
    const label = Math.abs(tick) < 1e-3 && tick !== 0 ? tick.toExponential(1) : tick.toLocaleString("en", { maximumFractionDigits: Math.min(vertical.digits, 6) });
    svg.append(make("text", { class: "y-tick", x: -8, y: `${y(tick)}%`, dy: 4 }, label));
  }
  for (const tick of horizontal.ticks) {
    svg.append(make("text", { class: "tick", x: `${x(tick)}%`, y: 198 }, tick.toLocaleString("en")));
  }
  const lines = make("svg", { width: "100%", height: "100%", viewBox: "0 0 100 100", preserveAspectRatio: "none", overflow: "visible" });
  svg.append(lines);
  for (const curve of series) {
    const kind = `run${curve.index}`;
    /* Gaps where a value is not finite */
    let part = [];
    const flush = () => {
      if (part.length > 1 && !curve.isEvaluation) {
        const band = [...part.map((i) => [curve.step[i], curve.high[i]]), ...part.toReversed().map((i) => [curve.step[i], curve.low[i]])];
        lines.append(make("polygon", { class: kind, points: band.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
      }
      if (part.length > 1) {
        const style = curve.isEvaluation ? { "stroke-dasharray": "5 4" } : {};
        lines.append(make("polyline", { class: kind, "vector-effect": "non-scaling-stroke", points: part.map((i) => `${x(curve.step[i])},${y(curve.drawn[i])}`).join(" "), ...style }));
      }
      part = [];
    };
    curve.drawn.forEach((value, i) => value === null ? flush() : part.push(i));
    flush();
    const isSparse = curve.isEvaluation ? curve.step.length <= 60 : curve.step.length === 1;
    if (isSparse) {
      curve.drawn.forEach((value, i) => {
        if (value !== null) svg.append(make("circle", { class: kind, cx: `${x(curve.step[i])}%`, cy: `${y(value)}%`, r: 3.5 }));
      });
    }
  }
  const readout = make("p", { class: "readout" });
  const say = (step) => {
    const parts = series.map((curve) => {
      let best = curve.step.findIndex((value) => value >= step);
      if (best < 0) best = curve.step.length - 1;
      const kind = curve.isEvaluation ? "held out " : "";
      return make("span", {}, make("span", { class: `dot run${curve.index}` }), ` ${kind}${number(curve.mean[best])} at ${number(curve.step[best])}`);
    });
    readout.replaceChildren(...parts);
  };
  say(Infinity);
  const cursor = make("line", { class: "here", y2: "100%", visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    cursor.setAttribute("x1", `${100 * share}%`);
    cursor.setAttribute("x2", `${100 * share}%`);
    cursor.setAttribute("visibility", "visible");
    say(left + share * (right - left));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); say(Infinity); });
  return make("section", {}, make("h2", {}, unit), svg, readout);
};

const tile = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));

const drawRun = (run, index) => {
  const share = run.num_steps ? Math.min(1, (run.step ?? 0) / run.num_steps) : 0;
  const tiles = make("dl", { class: "tiles" },
    tile("step", `${number(run.step)}${run.num_steps ? ` of ${number(run.num_steps)}` : ""}`),
    tile("loss of the last step", number(run.last.loss)),
    tile("left, without evaluations", run.is_over ? "finished" : duration(run.seconds_left)),
    tile("per step, median", run.seconds_per_step === null ? "–" : run.seconds_per_step >= 1 ? `${number(run.seconds_per_step)} s` : `${number(1000 * run.seconds_per_step)} ms`));
  for (const [name, value] of Object.entries(run.settings)) {
    if (value !== null && value !== undefined) tiles.append(tile(words(name), typeof value === "number" ? number(value) : `${value}`));
  }
  if (run.digest) tiles.append(tile(`digest after step ${number(run.digest[0])}`, run.digest[1].slice(0, 16)));
  const bar = make("div", { class: "bar" }, make("div"));
  bar.firstChild.style.width = `${100 * share}%`; /* no attribute: the page's policy allows none */
  const isSilent = run.silent_seconds > Math.max(60, 20 * (run.seconds_per_step ?? 0)) && !run.is_over;
  const said = run.step === null ? "No step has been written yet." : isSilent ? `Nothing was written for ${duration(run.silent_seconds)}: it has ended, or it is evaluating.` : "";
  return make("div", { class: `run run${index}` },
    ...(data.runs.length > 1 ? [make("h2", {}, make("span", { class: "dot" }), run.name)] : []),
    ...(run.description ? [make("p", { class: "description" }, run.description)] : []), bar,
    ...(said ? [make("p", {}, said)] : []), tiles,
    ...(run.left_out.length ? [make("p", {}, "Left out, as it breaks a rule:"), make("ul", { class: "notes" }, ...run.left_out.map((text) => make("li", {}, text)))] : []));
};

const draw = () => {
  document.getElementById("runs").replaceChildren(...data.runs.map(drawRun));
  document.getElementById("panels").replaceChildren(...panels().map(drawPanel).filter((panel) => panel));
  const digests = document.getElementById("digests");
  digests.hidden = !data.digests?.num_common;
  if (!digests.hidden) {
    const { parting, last_common: last, num_common: count } = data.digests;
    const text = parting === null ? `The digests of both are the same, ${number(count)} of them, up to step ${number(last)}.` : `The digests of both part: the first that differs is that of step ${number(parting)}.`;
    digests.replaceChildren(make("h2", {}, "Digests"), make("p", {}, text));
  }
  const events = data.runs.flatMap((run) => run.events.map((event) => [data.runs.length > 1 ? `${run.name}, ` : "", event]));
  document.getElementById("events").hidden = !events.length;
  document.querySelector("#events ul").replaceChildren(...events.map(([name, { step, event, ...values }]) => {
    const details = Object.entries(values).map(([key, value]) => `${words(key)} ${value}`).join(", ");
    return make("li", {}, `${name}step ${number(step)}: ${event}${details ? ` (${details})` : ""}`);
  }));
};

const status = document.getElementById("status");
const poll = async () => {
  try {
    const answer = await fetch(`/data.json?version=${data.version.join(",")}`, { cache: "no-store" });
    if (answer.status === 200) {
      data = await answer.json();
      draw();
    }
    status.textContent = `Live, ${new Date().toLocaleTimeString()}`;
    status.classList.remove("lost");
  } catch {
    status.textContent = "The program that serves this page does not answer; what you see is its last answer.";
    status.classList.add("lost");
  }
  setTimeout(poll, 1000 * SECONDS_BETWEEN);
};

draw();
if (location.protocol.startsWith("http")) poll();
else status.textContent = "As it was when this page was written";
