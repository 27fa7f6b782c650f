// What all views draw with.

export const NOTHING = "-";

export const field = (id) => document.getElementById(id);

/** Make an element; whatever it holds that is no node is shown as text, never read as markup. */
export function element(tag, content) {
  const made = document.createElement(tag);
  if (content instanceof Node) made.append(content);
  else made.textContent = content;
  return made;
}

/** Show pairs of a name and a figure in a description list. */
export function showFigures(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }),
  );
}

/** Show a state in words; the kind is "good", "warn" or "bad". */
export function showStatus(status, text, kind) {
  if (status.textContent !== text) status.textContent = text; // or what did not change is read aloud again
  status.dataset.kind = kind;
}

export function percent(value) {
  return value == null ? NOTHING : `${Math.round(100 * value)} %`;
}

export function number(value, digits) {
  return value == null ? NOTHING : value.toFixed(digits);
}
