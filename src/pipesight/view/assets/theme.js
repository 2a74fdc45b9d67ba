// Light or dark: the system's setting, until the reader chooses.

import { byId } from "./dom.js";
import { palette } from "./palette.js";
import { tell } from "./state.js";

const NAME = "pipesight-theme";

export function startTheme() {
  const root = document.documentElement;
  const remembered = recall();
  if (remembered) root.dataset.theme = remembered;
  tell("theme");
  name();
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = palette.dark ? "light" : "dark";
    remember(root.dataset.theme);
    tell("theme");
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    tell("theme");
    name();
  });
}

function name() {
  const button = byId("theme");
  button.textContent = palette.dark ? "\u2600\ufe0e" : "\u263e\ufe0e";
  button.setAttribute("aria-label", palette.dark ? "Light theme" : "Dark theme");
  button.title = button.getAttribute("aria-label");
}

// A page opened as a file may have no storage.
function recall() {
  try {
    return localStorage.getItem(NAME);
  } catch {
    return null;
  }
}

function remember(theme) {
  try {
    localStorage.setItem(NAME, theme);
  } catch {
    /* then only this page knows */
  }
}
