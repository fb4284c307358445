// Building the page. Whatever comes from outside goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a string becomes a text node. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set a text, but only where it changes: screen readers repeat what is set again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Terms and their values, for a `dl`; long values get room for it. */
export function pairs(entries) {
  return entries.map(([name, value]) =>
    make("div", value.length > 24 ? { class: "long" } : {}, make("dt", {}, name), make("dd", {}, value)),
  );
}

/**
 * Keep the children of a list in step with items, an element a key, so that focus survives a refresh.
 * `create(item)` makes the element; `update(element, item)` is called for every one.
 */
export function keep(list, items, keyOf, create, update = () => {}) {
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    const key = String(keyOf(item));
    let element = known.get(key);
    if (element === undefined) {
      element = create(item);
      element.dataset.key = key;
    }
    known.delete(key);
    update(element, item);
    if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
  });
  for (const gone of known.values()) gone.remove();
}
