// Settings on one side, what they come to on the other: a change is a run.
"use strict";
(() => {
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const WAIT_MS = 70; // a hand that moves on is waited for so long
  const SLIDER_STEPS = 400;
  const MOST_COMPARED = 2;
  const TRAFFIC = "traffic";
  const sets = new Map(); // name of traffic -> the controls while it is chosen
  let given = ""; // name of the traffic of the configuration
  let controls = new Map(); // key -> what the server says of it
  const widgets = new Map(); // key -> { show(value), note }
  let settings = {}; // what differs from the configuration, by key
  let pinned = null; // settings of the run that is kept behind the others
  let compared = []; // settings of other runs that are shown beside this one
  const tried = []; // settings and numbers of every run of this page
  let curveKey = null; // the control whose curve is open
  let curving = null; // aborts that curve
  let latest = null; // what was shown last
  let going = null; // aborts the question that is open
  let waiting = 0;
  let asked = 0;

  const make = (name, own = {}, ...children) => {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(own)) {
      if (key in found && key !== "list" && key !== "style") found[key] = value;
      else found.setAttribute(key, value);
    }
    found.append(...children.filter((each) => each !== null));
    return found;
  };
  const canonical = (value) =>
    value && typeof value === "object" ? JSON.stringify(Object.entries(value).sort()) : JSON.stringify(value);
  const same = (one, other) => canonical(one) === canonical(other);
  // Long names may break behind an underscore.
  const broken = (name) => name.split(/(?<=[_.])/).flatMap((part, place) => (place ? [make("wbr"), part] : [part]));
  const number = (value) =>
    Math.abs(value) >= 1000 || Number.isInteger(value)
      ? value.toLocaleString("en-US", { maximumFractionDigits: 0 })
      : String(+value.toPrecision(4));
  const words = (value) => {
    if (value === null || value === undefined) return "default";
    if (typeof value === "boolean") return value ? "on" : "off";
    return typeof value === "number" ? number(value) : String(value);
  };
  const setOf = (some) => sets.get(some[TRAFFIC]) ?? sets.get(given);
  const valueOf = (key) => (key in settings ? settings[key] : controls.get(key).value);

  // -- the address: what is set, so that a reload sees the same ----------------------

  const toAddress = () => {
    const told = new URLSearchParams();
    for (const [key, value] of Object.entries(settings)) told.set(key, JSON.stringify(value));
    if (pinned !== null) told.set("pin", JSON.stringify(pinned));
    if (compared.length) told.set("with", JSON.stringify(compared));
    const text = told.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname);
  };
  const parsed = (text) => {
    try {
      return JSON.parse(text);
    } catch {
      return undefined;
    }
  };
  const known = (table) => {
    const own = setOf(table ?? {});
    return Object.fromEntries(
      Object.entries(table ?? {}).filter(
        ([key, value]) => own.has(key) && value !== undefined && !same(value, own.get(key).value),
      ),
    );
  };
  const fromAddress = () => {
    const told = new URLSearchParams(location.hash.slice(1));
    const [pin, others] = ["pin", "with"].map((name) => told.get(name));
    told.delete("pin");
    told.delete("with");
    settings = known(Object.fromEntries([...told].map(([key, text]) => [key, parsed(text)])));
    const kept = pin === null ? null : parsed(pin);
    pinned = kept && typeof kept === "object" ? known(kept) : null;
    const listed = parsed(others ?? "[]");
    compared = Array.isArray(listed) ? listed.slice(0, MOST_COMPARED).map(known) : [];
  };

  // -- settings ----------------------------------------------------------------------

  const set = (key, value, isMoving = false) => {
    // Other traffic begins as it is.
    if (key === TRAFFIC) for (const each of Object.keys(settings)) if (each.startsWith("workload.") && !each.startsWith("workload.acceptance.")) delete settings[each];
    if (same(value, controls.get(key).value)) delete settings[key];
    else settings[key] = value;
    widgets.get(key).show(value);
    changed(isMoving);
  };
  // Each traffic has controls of its own.
  const follow = () => {
    if (setOf(settings) === controls) return;
    const focused = document.activeElement?.id;
    if (!setOf(settings).has(curveKey)) openCurve(null);
    controls = setOf(settings);
    build();
    find();
    if (focused) at(focused)?.focus();
  };
  const changed = (isMoving = false) => {
    follow();
    toAddress();
    showAll();
    clearTimeout(waiting);
    waiting = setTimeout(run, isMoving ? WAIT_MS : 0);
  };
  const showAll = () => {
    const scheduler = controls.has("engine.scheduler") ? valueOf("engine.scheduler") : null;
    for (const [key, widget] of widgets) {
      const control = controls.get(key);
      const isLacking = control.lacking.includes(scheduler);
      widget.place.classList.toggle("changed", key in settings);
      widget.place.classList.toggle("lacking", isLacking);
      widget.show(valueOf(key));
      const given = key in settings ? `given: ${words(control.value)}. ` : "";
      const lack = isLacking ? `Not of ${scheduler}. ` : "";
      widget.note.textContent = `${given}${lack}${widget.facts?.() ?? ""}${control.meaning}`;
    }
    at("reset").disabled = Object.keys(settings).length === 0;
  };

  // A slider without a step is logarithmic; its numbers are round.
  const scaleOf = ({ low, high, step }, isWhole) => {
    if (step) return { low, high, step, to: (x) => x, from: (v) => v };
    const span = Math.log(high / low);
    const to = (x) => {
      const exact = low * Math.exp((span * x) / SLIDER_STEPS);
      const rounded = +exact.toPrecision(exact < 100 ? 2 : 3);
      return isWhole ? Math.round(rounded) : rounded;
    };
    const from = (v) => (SLIDER_STEPS * Math.log(Math.max(v, low) / low)) / span;
    return { low: 0, high: SLIDER_STEPS, step: 1, to, from };
  };
  const fallback = (control) => latest?.resolved[control.key] ?? null;

  const numberWidget = (control, id) => {
    const isWhole = control.what === "whole";
    const input = make("input", { type: "number", id, step: isWhole ? 1 : "any" });
    if (control.low !== null) input.min = control.low;
    if (control.high !== null) input.max = control.high;
    input.addEventListener("change", () => {
      if (input.value === "" && control.isOptional) return set(control.key, null);
      if (input.value === "" || !Number.isFinite(input.valueAsNumber)) return showAll();
      return set(control.key, input.valueAsNumber);
    });
    if (!control.slider) return { parts: [input], show: (value) => showNumber(control, input, value) };
    const scale = scaleOf(control.slider, isWhole);
    const slider = make("input", { type: "range", min: scale.low, max: scale.high, step: scale.step });
    slider.setAttribute("aria-label", control.label);
    const moved = (isMoving) => {
      const value = +scale.to(slider.valueAsNumber).toPrecision(12);
      slider.setAttribute("aria-valuetext", `${words(value)} ${control.unit}`);
      set(control.key, value, isMoving);
    };
    slider.addEventListener("input", () => moved(true));
    const show = (value) => {
      showNumber(control, input, value);
      const shown = value ?? fallback(control);
      slider.classList.toggle("is-default", value === null);
      if (document.activeElement !== slider || value === null || scale.to(slider.valueAsNumber) !== value) {
        slider.value = shown === null ? scale.low : scale.from(shown);
      }
      slider.setAttribute("aria-valuetext", `${words(value ?? shown)} ${control.unit}`);
    };
    return { parts: [slider, input], show, scale };
  };
  const showNumber = (control, place, value) => {
    if (document.activeElement !== place || place.value !== String(value)) place.value = value ?? "";
    const taken = fallback(control);
    place.placeholder = taken === null ? "default" : number(taken);
  };
  const select = (control, id, choices) => {
    const options = choices.map(([value, text]) => make("option", { value }, text));
    const place = make("select", { id }, ...options);
    place.addEventListener("change", () => set(control.key, parsed(place.value)));
    return { parts: [place], show: (value) => (place.value = JSON.stringify(value)) };
  };
  const switchWidget = (control, id) => {
    const choices = [["true", "on"], ["false", "off"]];
    if (control.isOptional) choices.unshift(["null", "default"]);
    return select(control, id, choices);
  };
  const MANY = 30;
  const choiceWidget = (control, id) => {
    const facts = () => {
      const found = control.choices.find(({ value }) => value === valueOf(control.key));
      return found?.facts ? `${found.facts}. ` : "";
    };
    if (control.choices.length <= MANY || control.choices.some(({ brief }) => brief)) {
      const choices = control.choices.map(({ value, brief }) => [JSON.stringify(value), brief ? `${value}: ${brief}` : value]);
      if (control.isOptional) choices.unshift(["null", "default"]);
      return { ...select(control, id, choices), facts };
    }
    const list = make("datalist", { id: `${id}-list` }, ...control.choices.map(({ value, facts: told }) => make("option", { value }, told)));
    const input = make("input", { id, type: "text", list: list.id, spellcheck: false });
    input.addEventListener("change", () => {
      const text = input.value.trim();
      const found = control.choices.find(({ value }) => value.toLowerCase() === text.toLowerCase());
      if (found) set(control.key, found.value);
      else if (text === "" && control.isOptional) set(control.key, null);
      else {
        tell(`${control.label}: '${text}' is not in the list; nothing is changed`);
        input.value = valueOf(control.key) ?? "";
      }
    });
    input.addEventListener("focus", () => input.select());
    return { parts: [input, list], show: (value) => (input.value = value ?? ""), facts, isWide: true };
  };
  const build = () => {
    const form = at("controls");
    const isOpen = at("others")?.open;
    form.replaceChildren();
    widgets.clear();
    const all = [...controls.values()];
    for (const each of all.filter(({ rank }) => rank !== null)) form.append(widgetOf(each));
    const others = all.filter(({ rank }) => rank === null);
    const folded = make("details", { id: "others" }, make("summary", {}, `All other settings (${others.length})`));
    let group = null;
    for (const control of others) {
      if (control.group !== group) folded.append(make("h2", {}, (group = control.group)));
      folded.append(widgetOf(control));
    }
    folded.open = isOpen || others.some(({ key }) => key in settings);
    form.append(folded);
  };
  const widgetOf = (control) => {
    const id = `set-${control.key.replaceAll(".", "-")}`;
    const kinds = { switch: switchWidget, choice: choiceWidget };
    const widget = (kinds[control.what] ?? numberWidget)(control, id);
    const undo = make("button", { type: "button", className: "undo", title: `Back to ${words(control.value)}` }, "undo");
    undo.addEventListener("click", () => set(control.key, control.value));
    const unit = control.unit ? make("span", { className: "unit" }, control.unit) : null;
    const curve = canCurve(control) ? make("button", { type: "button", className: "curve", title: "Eight runs over its range, in the background" }, "curve") : null;
    curve?.addEventListener("click", () => openCurve(curveKey === control.key ? null : control.key));
    curve?.setAttribute("aria-label", `Curve over ${control.label}`);
    const name = make("div", { className: "name" }, make("label", { htmlFor: id }, ...broken(control.label)), unit, undo, curve);
    const row = make("div", { className: widget.parts.length > 1 && !widget.isWide ? "row" : "row alone" }, ...widget.parts);
    const note = make("p", { id: `${id}-note` });
    widget.parts[0].setAttribute("aria-describedby", note.id);
    const drawn = make("div", { className: "drawn", hidden: true });
    const place = make("div", { className: "control" }, name, row, drawn, note);
    place.dataset.key = control.key;
    place.dataset.words = `${control.group} ${control.key} ${control.meaning} ${control.unit}`.toLowerCase();
    widgets.set(control.key, { ...widget, place, note, drawn });
    return place;
  };
  const find = () => {
    const wanted = at("find").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    for (const { place } of widgets.values()) {
      place.hidden = !wanted.every((word) => place.dataset.words.includes(word));
    }
    if (wanted.length) at("others").open = true;
    for (const heading of at("controls").querySelectorAll("h2")) {
      let next = heading.nextElementSibling;
      let some = false;
      for (; next && next.tagName !== "H2"; next = next.nextElementSibling) some ||= !next.hidden;
      heading.hidden = !some;
    }
  };

  // -- a run -------------------------------------------------------------------------

  const tell = (line) => {
    at("trouble").textContent = line;
    at("trouble").hidden = line === "";
  };
  const say = (line) => {
    at("state").textContent = line;
  };
  const progress = (share) => {
    // Not its width, for which the page would be laid out at every frame.
    at("done").style.transform = `scaleX(${share === null ? 0 : Math.max(0.02, share)})`;
  };
  async function* linesOf(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      held += value ?? "";
      const lines = held.split("\n");
      held = lines.pop();
      for (const line of lines) if (line) yield JSON.parse(line);
      if (done) return;
    }
  }
  const run = async () => {
    going?.abort();
    const mine = (going = new AbortController());
    const place = ++asked;
    const began = performance.now();
    at("found").classList.add("running");
    say("Running...");
    progress(0);
    const beside = pinned === null || same(pinned, settings) ? [] : [{ name: "pinned", settings: pinned }];
    for (const each of compared) {
      if (!same(each, settings) && !same(each, pinned)) beside.push({ name: nameOf(each), settings: each });
    }
    curving?.abort();
    try {
      const response = await fetch("run", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ settings, beside }),
        signal: mine.signal,
      });
      for await (const event of response.ok ? linesOf(response) : [await response.json()]) {
        if (place !== asked) return;
        if (event.progress !== undefined) {
          progress(event.progress);
          say(`Running${event.of ? ` ${event.of}` : ""}: ${Math.round(100 * event.progress)} %, ${number(event.now_s)} s simulated`);
        } else if (event.error !== undefined) failed(event.error);
        else if (event.result) show(event.result, began);
      }
    } catch (error) {
      if (error.name === "AbortError" || place !== asked) return;
      failed("The server does not answer any more; start kvsim explore again.");
    } finally {
      if (place === asked) {
        at("found").classList.remove("running");
        progress(null);
      }
    }
  };
  const failed = (line) => {
    tell(line);
    say("No result for these settings; below is the last one.");
    at("found").classList.add("stale");
    root.dataset.answer = String(asked);
  };
  const show = (result, began) => {
    latest = result;
    tell("");
    at("found").classList.remove("stale");
    showTiles(result.tiles);
    at("said").innerHTML = result.said;
    for (const [key, html] of Object.entries(result.html)) fill(at(`in-${key}`), html);
    draw(result.figures);
    at("command").textContent = result.command;
    at("serve").textContent = result.serve;
    at("unserved").textContent = result.notServed.length ? `The command does not say: ${result.notServed.join(", ")}` : "";
    at("yaml").textContent = result.yaml;
    for (const id of ["pin", "download", "report", "results"]) at(id).disabled = false;
    note(result);
    const isPinned = pinned !== null && same(pinned, settings);
    at("pin").setAttribute("aria-pressed", String(isPinned));
    at("pin").textContent = isPinned ? "Pinned" : "Pin";
    at("unpin").disabled = pinned === null;
    showAll();
    const ms = performance.now() - began;
    const [first] = result.warnings;
    say(`${result.summary.title}: ${number(result.summary.num_steps)} steps in ${(ms / 1e3).toFixed(2)} s.${first ? ` ${first}` : ""}`);
    root.dataset.answerMs = ms.toFixed(0);
    root.dataset.answer = String(asked);
    if (curveKey !== null) drawCurve();
  };
  // The first figure at once, the others one by one, so that the page is never blocked.
  let drawing = 0;
  const draw = (figures) => {
    clearTimeout(drawing);
    const left = Object.entries(figures).map(([key, spec]) => {
      const place = at(`plot-${key}`);
      place.spec = spec;
      return place;
    });
    root.dataset.drawn = "";
    const next = () => {
      const place = left.shift();
      if (place === undefined) {
        root.dataset.drawn = root.dataset.answer;
        return;
      }
      kvsimFigures.draw(place, place.spec);
      drawing = setTimeout(next);
    };
    next();
  };
  // Places of figures stay as they are, so that a zoom survives and nothing flickers.
  const fill = (place, html) => {
    const held = new Map([...place.querySelectorAll(".plot")].map((each) => [each.id, each]));
    const folded = [...place.querySelectorAll("details")].map(({ open }) => open);
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    for (const each of fresh.content.querySelectorAll(".plot")) {
      if (!held.has(each.id)) continue;
      each.replaceWith(held.get(each.id));
      held.delete(each.id);
    }
    for (const each of held.values()) Plotly.purge(each);
    fresh.content.querySelectorAll("details").forEach((each, number_) => (each.open = folded[number_] ?? each.open));
    place.replaceChildren(fresh.content);
  };
  const showTiles = (tiles) => {
    at("tiles").replaceChildren(
      ...tiles.map((tile) => {
        const parts = [
          make("span", { className: "what" }, tile.label),
          make("b", {}, tile.value),
          make("span", {}, tile.under),
        ];
        if (tile.before) parts.push(make("span", { className: tile.change }, tile.before));
        const place = make("div", { className: `tile ${tile.state} ${tile.key === "verdict" ? "verdict" : ""}` }, ...parts);
        place.dataset.key = tile.key;
        return place;
      }),
    );
  };

  // -- what was tried ------------------------------------------------------------------

  const nameOf = (some) => {
    const place = tried.findIndex((each) => same(each.settings, some));
    return place < 0 ? differing(some).slice(0, 40) || "as given" : `run ${place + 1}`;
  };
  const differing = (some) =>
    Object.entries(some)
      .map(([key, value]) => `${setOf(some).get(key).label} ${words(value)}`)
      .join(", ") || "as given";
  const COLUMNS = ["num_preemptions", "kv_cache_usage_max", "p95_ttft_ms", "p95_tpot_ms", "output_throughput"];
  const note = (result) => {
    const own = { ...result.settings };
    if (!tried.some((each) => same(each.settings, own))) {
      tried.push({ settings: own, tiles: Object.fromEntries(result.tiles.map((tile) => [tile.key, tile])) });
    }
    showTried();
  };
  const showTried = () => {
    at("tried").hidden = tried.length < 2;
    const names = Object.values(tried[0].tiles).filter(({ key }) => COLUMNS.includes(key)).map(({ label }) => label);
    const head = ["", "what differs from the configuration", "verdict", ...names, "", ""];
    const rows = tried.map((each, place) => {
      const isNow = same(each.settings, settings);
      const back = make("button", { type: "button", disabled: isNow }, isNow ? "shown" : "Go back");
      back.addEventListener("click", () => {
        settings = { ...each.settings };
        changed();
      });
      const box = make("input", { type: "checkbox", checked: compared.some((some) => same(some, each.settings)) });
      box.addEventListener("change", () => {
        const others = compared.filter((some) => !same(some, each.settings));
        compared = box.checked ? [...others, { ...each.settings }].slice(-MOST_COMPARED) : others;
        changed();
      });
      const numbers = COLUMNS.map((key) => make("td", {}, each.tiles[key]?.value ?? "-"));
      const row = make("tr", {}, make("th", { scope: "row" }, `run ${place + 1}`),
        make("td", { className: "left" }, differing(each.settings)), make("td", { className: "left" }, each.tiles.verdict?.value ?? "-"),
        ...numbers, make("td", {}, make("label", {}, box, " compare")), make("td", {}, back));
      if (isNow) row.className = "is-now";
      return row;
    });
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", className: /differs|verdict/.test(text) ? "left" : "" }, text)))), make("tbody", {}, ...rows.reverse()));
    at("in-tried").replaceChildren(make("div", { className: "scroll tall", tabIndex: 0, role: "region", ariaLabel: "Runs of this page" }, table));
  };

  // -- a curve under a control ---------------------------------------------------------

  const MOST_NAMES = 16;
  const WIDE = 284, HIGH = 76, EDGE = 8;
  const canCurve = ({ what, slider, choices }) =>
    what === "switch" || (what === "choice" ? choices.length > 1 && choices.length <= MOST_NAMES : slider !== null);
  const openCurve = (key) => {
    curving?.abort();
    if (curveKey !== null) widgets.get(curveKey).drawn.hidden = true;
    curveKey = key;
    if (key !== null) drawCurve();
  };
  const drawCurve = async () => {
    curving?.abort();
    const mine = (curving = new AbortController());
    const key = curveKey;
    const { drawn } = widgets.get(key);
    drawn.hidden = false;
    const points = new Map();
    let values = [];
    try {
      const response = await fetch("curve", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ settings, key }),
        signal: mine.signal,
      });
      for await (const event of response.ok ? linesOf(response) : [await response.json()]) {
        if (mine !== curving) return;
        if (event.values) values = event.values;
        else if (event.place !== undefined) points.set(event.place, event);
        else if (event.error) drawn.textContent = event.error;
        if (values.length) showCurve(key, values, points);
      }
      drawn.dataset.done = String(points.size);
    } catch (error) {
      if (error.name !== "AbortError") drawn.textContent = "The server does not answer any more.";
    }
  };
  const milliseconds = (value) => (value < 999.5 ? `${+value.toPrecision(3)} ms` : `${+(value / 1e3).toPrecision(3)} s`);
  const metricOf = () => {
    const name = [...controls.keys()].find((each) => each.startsWith("objectives.") && valueOf(each) !== null);
    return name ? { key: name.slice("objectives.".length), limit: valueOf(name) } : { key: "p95_ttft_ms", limit: null };
  };
  const svg = (name, own, text = "") => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(own)) found.setAttribute(key, value);
    if (text) found.append(text);
    return found;
  };
  const showCurve = (key, values, points) => {
    const { drawn, scale } = widgets.get(key);
    const { key: metric, limit } = metricOf();
    const said = (value) => (value === null || value === undefined ? "-" : metric.endsWith("_ms") ? milliseconds(value) : number(value));
    const along = values.map((value, place) => (scale ? scale.from(value) : place));
    const [left, right] = [along[0], along.at(-1)];
    const x = (where) => EDGE + ((WIDE - 2 * EDGE) * (where - left)) / (right - left || 1);
    const known = [...points.values()].filter(({ numbers }) => numbers && numbers[metric] > 0).sort((a, b) => a.place - b.place);
    const heights = known.map(({ numbers }) => Math.log(numbers[metric]));
    if (limit) heights.push(Math.log(limit));
    const low = Math.min(...heights) - 0.1, high = Math.max(...heights) + 0.1;
    const y = (value) => HIGH - EDGE - ((HIGH - 2 * EDGE) * (Math.log(value) - low)) / (high - low);
    const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img" });
    if (limit) picture.append(svg("line", { x1: 0, x2: WIDE, y1: y(limit), y2: y(limit), class: "limit" }));
    const now = valueOf(key);
    const here = scale ? (typeof now === "number" ? scale.from(now) : null) : values.indexOf(now);
    if (here !== null && here >= left && here <= right) picture.append(svg("line", { x1: x(here), x2: x(here), y1: 0, y2: HIGH, class: "here" }));
    const path = known.map(({ place, numbers }) => `${x(along[place])},${y(numbers[metric])}`).join(" ");
    picture.append(svg("polyline", { points: path }));
    for (const { place, value, numbers, holds } of known) {
      const dot = svg("circle", { cx: x(along[place]), cy: y(numbers[metric]), r: 4.5, class: holds === null ? "" : holds ? "holds" : "fails" });
      dot.append(svg("title", {}, `${words(value)}: ${said(numbers[metric])}, ${number(numbers.num_preemptions)} preemptions`));
      dot.addEventListener("click", () => set(key, value));
      picture.append(dot);
    }
    const ends = known.length ? [known[0], known.at(-1)] : [];
    const failed = [...points.values()].filter(({ error }) => error);
    const told = [
      `${metric}${limit ? ` (limit ${said(limit)})` : ""}: `,
      ends.map(({ value, numbers }) => `${said(numbers[metric])} at ${words(value)}`).join(" to ") || "running",
      known.length && known.some(({ numbers }) => numbers.num_preemptions) ? `; most preemptions ${number(Math.max(...known.map(({ numbers }) => numbers.num_preemptions)))}` : "",
      points.size < values.length ? ` (${points.size} of ${values.length} runs)` : "",
      failed.length ? ` ${failed.length} without a result: ${failed[0].error}` : "",
    ].join("");
    picture.setAttribute("aria-label", told);
    drawn.replaceChildren(picture, make("p", {}, told));
  };

  // -- what the reader does ----------------------------------------------------------

  const pin = () => {
    if (latest === null) return;
    pinned = { ...settings };
    changed();
  };
  const unpin = () => {
    pinned = null;
    changed();
  };
  const reset = () => {
    settings = {};
    changed();
  };
  const download = () => {
    save(new Blob([latest.yaml], { type: "text/yaml" }), "explored.yaml");
  };
  const save = (blob, name) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const fetched = async (what) => {
    say(`Making the ${what}...`);
    const response = await fetch("file", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ settings, what }),
    });
    if (!response.ok) return tell((await response.json()).error);
    const name = /filename="([\w.]+)"/.exec(response.headers.get("content-disposition"))[1];
    save(await response.blob(), name);
    return say(`${name} is made.`);
  };
  const copy = async (button) => {
    await navigator.clipboard.writeText(at(button.dataset.from).textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const KEYS = { p: pin, u: unpin, r: reset, "/": () => at("find").focus() };
  const listen = () => {
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("pin").addEventListener("click", pin);
    at("unpin").addEventListener("click", unpin);
    at("reset").addEventListener("click", reset);
    at("download").addEventListener("click", download);
    for (const what of ["report", "results"]) at(what).addEventListener("click", () => fetched(what));
    at("find").addEventListener("input", find);
    for (const each of document.querySelectorAll(".copy")) each.addEventListener("click", () => copy(each));
    addEventListener("keydown", (event) => {
      const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range";
      if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
      event.preventDefault();
      KEYS[event.key]();
    });
    const redraw = () => {
      for (const place of document.querySelectorAll(".plot")) if (place.spec) kvsimFigures.draw(place, place.spec);
    };
    addEventListener("themechange", redraw);
    kvsimFigures.narrow.addEventListener("change", redraw);
    addEventListener("hashchange", () => {
      fromAddress();
      changed();
    });
    // Folded where they would push all else down; wide, nothing could unfold them.
    const narrow = matchMedia("(max-width: 900px)");
    const fold = () => (at("settings").open = !narrow.matches);
    narrow.addEventListener("change", fold);
    fold();
  };

  const begin = async () => {
    const response = await fetch("start.json");
    const told = await response.json();
    const place = ({ rank, group }) => (rank ?? told.controls.length) * told.groups.length + told.groups.indexOf(group);
    const others = told.controls.filter(({ key, group }) => key === TRAFFIC || group !== TRAFFIC);
    for (const [name, own] of Object.entries(told.traffic)) {
      const all = [...others, ...own].sort((one, other) => place(one) - place(other));
      const renamed = all.map(({ is_optional: isOptional, ...each }) => [each.key, { ...each, isOptional }]);
      sets.set(name, new Map(renamed));
    }
    given = others.find(({ key }) => key === TRAFFIC).value;
    fromAddress();
    controls = setOf(settings);
    build();
    listen();
    showAll();
    run();
  };
  begin().catch((error) => tell(`The page could not start: ${error.message}`));
})();
