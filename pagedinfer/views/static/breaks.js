// Breakpoints: a box for a condition, the list of conditions, and marks on the timeline where they came true.
function breaksBar(view, model) {
  const input = make("input", { type: "text", class: "pi-input", autocomplete: "off", spellcheck: "false", placeholder: "r3 preempted or free blocks < 4", "aria-label": "Stop when" });
  const add = make("button", { type: "submit", class: "pi-button pi-wide" }, "Add"), next = make("button", { type: "button", class: "pi-button pi-wide" }, "Next stop");
  const list = make("ul", { class: "pi-break-list", "aria-label": "Conditions that stop the run" }), wrong = make("p", { class: "pi-wrong", role: "alert", hidden: true });
  const node = make("form", { class: "pi-breaks", "aria-label": "Breakpoints" }, make("span", { class: "pi-sub", "aria-hidden": "true" }, "Stop when"), input, add, next, list, wrong);
  const say = (text) => { wrong.textContent = text; wrong.hidden = !text; input.setAttribute("aria-invalid", !!text); };
  const send = (event) => {
    event.preventDefault(); event.stopPropagation();
    const text = input.value.trim();
    if (text) view.request({ watch: text });
  };
  node.addEventListener("submit", send, { signal: view.signal });
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") send(event); }, { signal: view.signal });  // where a page takes Enter away from forms
  next.addEventListener("click", () => { const mark = marksOf(model).find(([step]) => step > view.state.frame.step); if (mark) view.go(mark[0]); }, { signal: view.signal });
  list.addEventListener("click", (event) => {
    const button = event.target.closest("[data-text]");
    if (button) view.request({ unwatch: button.dataset.text });
  }, { signal: view.signal });
  let drawn = "";
  return {
    node,
    // What the kernel said of the text sent last.
    answered(told) {
      if (!told) return;
      say(told.ok ? "" : told.message);
      if (told.ok && told.text === input.value.trim()) input.value = "";
    },
    draw() {
      const breaks = model.get("breaks") ?? [], key = JSON.stringify(breaks);
      node.hidden = !model.get("watching");
      disable(view.root, next, !marksOf(model).some(([step]) => step > view.state.frame.step));
      if (key === drawn) return;
      drawn = key;
      list.replaceChildren(...breaks.filter((known) => !known.past).map(({ text, marks }) => make("li", {}, make("code", {}, text), make("span", { class: "pi-sub" }, marks.length ? ` ${plural(marks.length, "stop")}` : ""),
        make("button", { type: "button", class: "pi-drop", "data-text": text, "aria-label": `Remove ${text}`, title: "Remove" }, "×"))));
    },
  };
}

// All marks, [step, cause], in order of steps.
const marksOf = (model) => (model.get("breaks") ?? []).flatMap((b) => b.marks).sort((a, b) => a[0] - b[0]);
