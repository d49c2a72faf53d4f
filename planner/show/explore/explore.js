// Controls of the page: their state, the effect of changes, and the command that makes a plan of the state.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const memo = explorer(data), byId = (id) => document.getElementById(id), L = data.names.length;
  const step = timeline(document.querySelector(".live"));
  const policies = [
    ["auto", "as needed, by device"], ["never", "never"], ["except-last", "all but the last"],
    ["always", "every micro-batch"],
  ];
  // For each number of stages, the cuts shown last, and true if no cut was moved.
  const seen = Object.fromEntries(Object.entries(data.balances).map(([S, balance]) => [S, [balance, true]]));
  seen[data.start.balance.length] = [data.start.balance, false];
  const initial = () =>
    ({ ...data.start, balance: [...data.start.balance], recompute: data.policy, scale: 0, isEven: false, isEnd: false });
  const state = initial();
  let answer = null, begun = null, queued = false, isWaiting = true;

  const schedule = () => data.schedules[state.schedule];
  const counts = () => Object.keys(schedule().orders[state.chunks]).map(Number).sort((a, b) => a - b);
  const placeWord = () => (state.chunks === 1 ? "stage" : "device");
  const caps = () => capsOf(data, state);

  // ---- options

  const options = (select, items, chosen) => {
    select.replaceChildren(...items.map(([value, words]) => make("option", { value }, words)));
    select.value = String(chosen);
    select.disabled = items.length < 2;
  };

  function refreshOptions() {
    options(byId("schedule"), data.schedules.map((one, n) => [n, one.title]), state.schedule);
    options(byId("chunks"), Object.keys(schedule().orders).map((v) => [v, v]), state.chunks);
    const hasOwn = state.balance.length === data.recompute.length && !data.recompute.includes("layers");
    if (!hasOwn && state.recompute === OWN) state.recompute = data.policy;
    const able = data.may_recompute ? policies : [["never", "never"]];
    options(byId("recompute"), hasOwn ? [...able, [OWN, OWN]] : able, state.recompute);
    const range = byId("micro-batches");
    range.max = counts().length - 1;
    range.value = counts().indexOf(state.micro_batches);
    range.disabled = counts().length < 2;
    byId("cap").value = state.scale;
  }

  // After a change, keep the nearest possible M, and the cuts shown last for this number of stages.
  function adjust() {
    if (!schedule().orders[state.chunks]) state.chunks = Number(Object.keys(schedule().orders)[0]);
    const nearest = (a, b) => (Math.abs(b - state.micro_batches) < Math.abs(a - state.micro_batches) ? b : a);
    state.micro_batches = counts().reduce(nearest);
    const S = data.devices * state.chunks;
    if (state.balance.length !== S) {
      seen[state.balance.length] = [state.balance, state.isEven];
      [state.balance, state.isEven] = [[...seen[S][0]], seen[S][1]];
      state.isEnd = false;
      isWaiting = true;
    }
    refreshOptions();
    show();
  }

  // ---- the chain and its cuts

  function moveCut(k, layer) {
    const cuts = cutsOf(state.balance), { at, isEnd } = reach(memo, asked(data, state), k, layer);
    if (at === cuts[k] && isEnd === state.isEnd) return;
    state.isEnd = isEnd;
    state.isEven &&= at === cuts[k];
    state.balance[k - 1] = at - cuts[k - 1];
    state.balance[k] = cuts[k + 1] - at;
    show();
  }

  function handle(k) {
    const made = make("button", { type: "button", class: "handle", role: "slider", "aria-orientation": "horizontal",
      "aria-label": `cut between stages ${k - 1} and ${k}` });
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -5, PageUp: 5, Home: -L, End: L };
    made.addEventListener("keydown", (event) => {
      if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      moveCut(k, cutsOf(state.balance)[k] + steps[event.key]);
    });
    made.addEventListener("pointerdown", (event) => {
      const move = ({ clientX }) => {
        const box = byId("chain").getBoundingClientRect();
        moveCut(k, Math.round(((clientX - box.left) / box.width) * L));
      };
      const leave = () => {
        made.classList.remove("held");
        document.removeEventListener("pointermove", move);
      };
      made.classList.add("held");
      document.addEventListener("pointermove", move);
      for (const name of ["pointerup", "pointercancel"]) document.addEventListener(name, leave, { once: true });
    });
    return made;
  }

  function drawChain(slowest) {
    const chain = byId("chain"), S = state.balance.length, { cuts } = answer;
    if (isWaiting) {
      const stages = state.balance.map(() => make("div", { class: "stage" }));
      chain.replaceChildren(make("div", {}), ...stages, ...state.balance.slice(1).map((_, k) => handle(k + 1)));
      chain.classList.toggle("dense", S > MANY);
      chain.style.minWidth = Math.max(S * 13, L * 3) + "px";
      isWaiting = false;
    }
    chain.firstElementChild.replaceWith(columns(data.sizes[state.micro_batches].columns));
    chain.querySelectorAll(".stage").forEach((stage, k) => {
      const device = answer.orders.layout.devices[k], isOver = total(answer.memory[device]) > caps()[device];
      stage.style.left = share(cuts[k] / L);
      stage.style.width = share(state.balance[k] / L);
      stage.className = "stage" + (k === slowest && S > 1 ? " slow" : "") + (isOver ? " over" : "");
      stage.textContent = S > MANY && k % 8 ? "" : k;
      stage.title = `stage ${k}: ${layerRange(data.names, cuts[k], cuts[k + 1])}`;
    });
    chain.querySelectorAll(".handle").forEach((made, n) => {
      const k = n + 1;
      made.style.left = share(cuts[k] / L);
      for (const [name, value] of Object.entries({ min: cuts[k - 1] + 1, max: cuts[k + 1] - 1, now: cuts[k],
        text: `stage ${k} begins with layer ${cuts[k]}, ${data.names[cuts[k]]}` })) made.setAttribute("aria-value" + name, value);
    });
  }

  // ---- figures and words

  function drawFigures() {
    const needs = answer.memory.map(total), most = needs.indexOf(Math.max(...needs));
    const fullest = needs.map((need, k) => need / caps()[k]), top = fullest.indexOf(Math.max(...fullest));
    const change = answer.step_us / data.step_us - 1;
    const against = Math.abs(change) < 5e-5 ? "as the plan" : `plan ${formatUs(data.step_us)}, ${change > 0 ? "+" : "−"}${percent(Math.abs(change))}`;
    const cards = [
      [formatUs(answer.step_us), [stepRange(data, answer.step_us), against]],
      [rate(answer.samples_per_s), [rateRange(data, answer), `recompute ${percent(answer.recompute_share)}`]],
      [percent(answer.bubble), [`${counted(data.devices, "device")}, M = ${state.micro_batches}`]],
      [formatBytes(needs[most]), [peakBound(data, needs[most]), `${placeWord()} ${top}: ${percent(fullest[top], 0)} of its limit`],
        fullest[top] > 1],
    ];
    byId("figures").querySelectorAll("dd").forEach((card, n) => {
      const [value, remarks, isWorse] = cards[n];
      card.className = isWorse ? "worse" : "";
      card.firstElementChild.textContent = value;
      card.lastElementChild.textContent = remarks.filter(Boolean).join(" ");
    });
  }

  function drawWords() {
    const { size } = data.sizes[state.micro_batches], uniform = new Set(caps()), M = state.micro_batches;
    byId("schedule-words").textContent = schedule().splits && data.halves_assumed
      ? "split backwards were not measured: each pass is assumed to take half of the backward" : "";
    byId("chunks-words").textContent = counted(state.balance.length, "stage");
    byId("micro-batches-words").textContent = `${counted(M, "micro-batch", "es")} of ${counted(size, "sample")}`;
    const used = [...new Set(answer.recompute)];
    byId("recompute-words").textContent = used.length === 1 ? used[0] : used.join(" or ") + ", by stage";
    byId("cap-words").textContent = uniform.size === 1
      ? `${bytesOption(caps()[0])} (${formatBytes(caps()[0])})` : `${formatBytes(Math.min(...uniform))} to ${formatBytes(Math.max(...uniform))}`;
    byId("micro-batches").setAttribute("aria-valuetext", byId("micro-batches-words").textContent);
    byId("cap").setAttribute("aria-valuetext", byId("cap-words").textContent);
    const cuts = `cuts ${state.balance.join(", ")}`;
    byId("said").textContent = state.isEnd ? `${cuts} - the page has no figures for cuts further away; use \`gpipe-plan check --balance\`` : cuts;
  }

  function drawCommand() {
    const { lines, caveats } = commandsOf(data, state, answer);
    byId("words").textContent = lines.join("\n");
    byId("words").hidden = byId("copy").hidden = !lines.length;
    byId("caveats").replaceChildren(...caveats.map((text) => make("li", {}, text)));
  }

  // ---- drawing

  function draw() {
    queued = false;
    answer = begun || evaluate(memo, asked(data, state));
    begun = null;
    clearTimeout(timer);
    timer = setTimeout(remember, 300);
    const slowest = stageTable(byId("table"), data, answer);
    drawChain(slowest);
    drawFigures();
    drawWords();
    drawCommand();
    memoryBars(byId("bars"), answer.memory, caps(), placeWord());
    byId("items").querySelectorAll("li").forEach((item) => {
      const kind = item.querySelector("i").className.split("m-")[1];
      item.hidden = !answer.memory.some((items) => items[kind]);
    });
    step.load(stepOf(data, answer));
    byId("kinds").replaceChildren(...timelineLegend(data, answer));
  }
  const show = () => {
    begun = null;
    if (!queued) { queued = true; setTimeout(draw); }
  };

  // ---- changes of the controls

  const onChange = (id, change) => byId(id).addEventListener("input", (event) => { change(event.target.value); adjust(); });
  onChange("schedule", (value) => { state.schedule = Number(value); });
  onChange("chunks", (value) => { state.chunks = Number(value); });
  onChange("micro-batches", (value) => { state.micro_batches = counts()[Number(value)]; });
  onChange("recompute", (value) => { state.recompute = value; });
  onChange("cap", (value) => { state.scale = Number(value); });
  byId("reset").addEventListener("click", () => {
    Object.assign(state, initial());
    isWaiting = true;
    begin();
  });
  byId("undo").addEventListener("click", () => {
    if (timer) remember();
    past.pop();
    load(past.pop());
  });
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== past[past.length - 1]) load(location.hash.slice(1)); });
  // The address holds the state, so that links within the page must not change it.
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView();
  }));
  byId("copy").addEventListener("click", async () => {
    getSelection().selectAllChildren(byId("words"));
    try { await navigator.clipboard.writeText(byId("words").textContent); } catch { document.execCommand("copy"); }
  });

  // ---- history of states, as texts; the last one is shown

  const past = [];
  let timer = 0;

  // Record the state when it has not changed for a moment: a dragged cut is one change.
  function remember() {
    clearTimeout(timer);
    timer = 0;
    const text = textOfState(data, state);
    if (past[past.length - 1] !== text) past.push(text);
    byId("undo").disabled = past.length < 2;
    try { history.replaceState(null, "", "#" + text); } catch { /* not allowed here */ }
  }

  // Show the state of a text; without effect if the page cannot show it.
  function load(text) {
    const loaded = stateOfText(memo, text);
    if (!loaded) return false;
    Object.assign(state, loaded, { isEven: false, isEnd: false });
    isWaiting = true;
    adjust();
    return true;
  }

  // Offer the plan's own recomputation, if the policy would choose another one.
  function begin() {
    adjust();
    begun = evaluate(memo, asked(data, state));
    if (data.recompute.includes("layers") || begun.recompute.join() === data.recompute.join()) return;
    [state.recompute, begun] = [OWN, null];
    adjust();
  }
  begin();
  const sent = location.hash.slice(1);
  remember();
  load(sent);
})();
