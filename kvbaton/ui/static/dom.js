// Changing the document as little as it takes: what did not change keeps its focus, selection and place.
// Text only ever goes in as text.

export function element(name, { text, cls, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, cls) {
  if (node.className !== cls) node.className = cls;
}

// One child of `parent` for each item, in order. `make(item)` builds one and returns it with an `update(item)`.
export function sync(parent, items, key, make) {
  const old = parent.kept ?? new Map();
  const kept = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    const entry = old.get(name) ?? make(item);
    old.delete(name);
    kept.set(name, entry);
    entry.update(item);
    if (entry.node === place) place = place.nextSibling;
    else parent.insertBefore(entry.node, place);
  }
  for (const entry of old.values()) entry.node.remove();
  parent.kept = kept;
}

// A table row. `cells` are [header, class, fill(td, item)]; the header is what a narrow screen shows before the value.
export function row(cells) {
  const node = element("tr");
  const nodes = cells.map(([label, cls], i) => {
    const cell = i === 0 ? element("th", { scope: "row", cls }) : element("td", { cls });
    cell.dataset.label = label;
    node.append(cell);
    return cell;
  });
  return { node, update: (item) => cells.forEach(([, , fill], i) => fill(nodes[i], item)) };
}

export const text = (read) => (cell, item) => setText(cell, read(item));

// Blocks in use, the pinned among them first, of all there are.
export function blocksBar(holder, blocks) {
  let bar = holder.querySelector(".bar");
  if (!bar) {
    bar = element("div", { cls: "bar", role: "img" }, element("span", { cls: "pinned" }), element("span", { cls: "used" }));
    holder.append(element("div", {}, bar, element("div", { cls: "under" })));
  }
  const of = (part) => `${blocks.total ? (100 * part) / blocks.total : 0}%`;
  bar.children[0].style.width = of(blocks.pinned);
  bar.children[1].style.width = of(Math.max(0, blocks.used - blocks.pinned));
  const label = blocks.total ? `${blocks.used} of ${blocks.total} used` : "not told";
  bar.setAttribute("aria-label", `${label}, ${blocks.pinned} pinned`);
  setText(holder.querySelector(".under"), label);
}
