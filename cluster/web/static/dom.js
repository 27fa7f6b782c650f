// Helpers to draw, for all views.

export const NOTHING = "-";

export const field = (id) => document.getElementById(id);

/** Make an element; children that are no nodes become text, never markup. */
export function element(tag, content) {
  const made = document.createElement(tag);
  if (content instanceof Node) made.append(content);
  else made.textContent = content;
  return made;
}

/** Show (name, figure) pairs in a description list. */
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
  if (status.textContent !== text) status.textContent = text; // unchanged text must not be read aloud again
  status.dataset.kind = kind;
}

export function percent(value) {
  return value == null ? NOTHING : `${Math.round(100 * value)} %`;
}

export function number(value, digits) {
  return value == null ? NOTHING : value.toFixed(digits);
}
