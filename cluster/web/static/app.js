// Switches views and keeps the API key, which lives as long as the tab.

import { apiKey, getJson, setApiKey } from "./api.js";
import { field } from "./dom.js";
import { startFleet, wakeFleet } from "./fleet.js";
import { startPlayground } from "./playground.js";

const VIEWS = ["fleet", "playground"];

function showView() {
  const asked = location.hash.slice(1);
  const shown = VIEWS.includes(asked) ? asked : VIEWS[0];
  for (const name of VIEWS) {
    field(name).hidden = name !== shown;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  wakeFleet();
}

async function showModel() {
  try {
    const models = await getJson("v1/models");
    field("model").textContent = models.data[0].id;
  } catch {
    field("model").textContent = ""; // the views show the error
  }
}

function startKey() {
  const input = field("key");
  input.value = apiKey();
  const take = () => {
    if (input.value.trim() === apiKey()) return;
    setApiKey(input.value.trim());
    wakeFleet();
    showModel();
  };
  input.addEventListener("change", take);
  field("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    take();
  });
}

startKey();
startPlayground();
startFleet();
addEventListener("hashchange", showView);
showView();
showModel();
