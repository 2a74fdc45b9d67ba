// Makes elements. Whatever a run holds, such as the name of a layer, only ever becomes text.

export const byId = (id) => document.getElementById(id);

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open"]);

/** Make an element: `make("td", {class: "number", onclick: f}, "text", child)`. `vars` are CSS variables. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an element of an SVG drawing. */
export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars")
      for (const [key, entry] of Object.entries(value)) element.style.setProperty(`--${key}`, entry);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return put(element, children);
}

/** Replace the children of an element; missing ones are skipped. */
export function put(element, ...children) {
  element.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** The head of a table. Columns from `firstNumber` on are numbers, aligned to the right. */
export function tableHead(titles, firstNumber = titles.length) {
  const cells = titles.map((title, column) =>
    make("th", { scope: "col", class: column >= firstNumber ? "number" : null }, title),
  );
  return make("thead", {}, make("tr", {}, cells));
}

/** A button for each choice, the chosen one pressed. Choosing another moves the focus to it. */
export function choices(group, names, chosen, choose) {
  return names.map(([name, text]) =>
    make(
      "button",
      {
        type: "button",
        "aria-pressed": `${name === chosen}`,
        onclick: () => {
          choose(name);
          byId(group).querySelector('[aria-pressed="true"]').focus();
        },
      },
      text,
    ),
  );
}

/** Text with the matches of a search marked. */
export function marked(text, pattern) {
  if (!pattern) return [text];
  const pieces = [];
  let done = 0;
  for (const found of text.matchAll(pattern)) {
    if (!found[0]) continue;
    pieces.push(text.slice(done, found.index), make("mark", {}, found[0]));
    done = found.index + found[0].length;
  }
  return [...pieces, text.slice(done)];
}
