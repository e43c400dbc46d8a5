// What stands for the kernel on an offline page: a model for each view, and what one view tells reaches the others.
function pageModel(values) {
  const all = (globalThis.pagedinferModels ??= []), listeners = {}, linked = ["cursor", "selected"];
  const model = {
    get: (name) => values[name],
    set(name, value) { values[name] = value; },
    on(event, act) { (listeners[event] ??= []).push(act); },
    off(event, act) { listeners[event] = (listeners[event] ?? []).filter((other) => other !== act); },
    send({ state }) {
      for (const other of all) if (other !== model) for (const name of linked) if (name in state) other.take(name, state[name]);
    },
    take(name, value) { values[name] = value; for (const act of listeners[`change:${name}`] ?? []) act(); },
  };
  all.push(model);
  return model;
}

for (const data of document.querySelectorAll(`script[data-view="${PAGE_KIND}"]`)) {
  const { model, film } = JSON.parse(data.textContent), bytes = Uint8Array.from(atob(film), (c) => c.charCodeAt(0));
  const whole = PAGE_KIND === "sheet" ? bytes : new Uint8Array(await inflated(bytes));  // a sheet inflates it itself
  await render({ model: pageModel({ ...model, film: new DataView(whole.buffer), tail: null }), el: data.previousElementSibling });
}
