// What every page gets. Without scripts all pages work; these make them quicker to use.

import { startArena } from "./arena.js";
import { startCharts } from "./charts.js";
import { startLive } from "./live.js";
import { startPalette } from "./palette.js";

document.documentElement.classList.add("js");

const TOAST_MS = 6000;

function startTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  for (const button of document.querySelectorAll("[data-theme-switch]")) {
    button.addEventListener("click", () => {
      const now = root.dataset.theme || (system.matches ? "dark" : "light");
      const next = now === "dark" ? "light" : "dark";
      root.dataset.theme = next;
      const secure = location.protocol === "https:" ? "; Secure" : "";
      // The server writes it into the next page, so that no page flashes in the other theme.
      const kept = next === (system.matches ? "dark" : "light") ? "; Max-Age=0" : "; Max-Age=31536000";
      document.cookie = `polyhost_theme=${next}; Path=/admin; SameSite=Strict${kept}${secure}`;
    });
  }
}

function startFilters() {
  for (const form of document.querySelectorAll("[data-filter]")) {
    const send = () => {
      for (const field of form.elements) field.disabled = field.name !== "" && field.value === "";
      form.submit();
    };
    for (const select of form.querySelectorAll("select")) select.addEventListener("change", send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
  }
}

export function toast(text) {
  const box = document.querySelector(".toasts");
  const line = document.createElement("div");
  line.className = "toast";
  line.textContent = text;
  box.append(line);
  setTimeout(() => line.remove(), TOAST_MS);
}

function startToasts() {
  for (const line of document.querySelectorAll(".toast")) setTimeout(() => line.remove(), TOAST_MS);
}

function startCopies() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      toast("Copied.");
    } catch {
      toast("The browser did not allow copying. Select the text and copy it.");
    }
  });
}

// A form is sent once; what takes a while says so on its button.
function startForms() {
  for (const form of document.querySelectorAll("form[method=post]")) {
    form.addEventListener("submit", (event) => {
      const button = event.submitter ?? form.querySelector("button:not([type=button])");
      if (!button) return;
      // After the form is on its way: a button that is off already would not be sent.
      setTimeout(() => {
        for (const each of form.querySelectorAll("button")) each.disabled = true;
        if (button.dataset.busy) button.textContent = button.dataset.busy;
      });
    });
  }
  addEventListener("pageshow", (event) => {
    if (event.persisted) for (const button of document.querySelectorAll("form button")) button.disabled = false;
  });
}

// "/" goes to the page's own search field; Esc closes the menu of narrow screens.
function startKeys() {
  addEventListener("keydown", (event) => {
    const menu = document.querySelector("details.menu[open]");
    if (event.key === "Escape" && menu) {
      menu.open = false;
      menu.querySelector("summary").focus();
      return;
    }
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const field = document.querySelector("main input[type=search]");
    if (!field) return;
    event.preventDefault();
    field.focus();
  });
}

// The field to correct first. Browsers pass over autofocus where the address names a place.
document.querySelector("main [aria-invalid=true]")?.focus();

startTheme();
startFilters();
startToasts();
startCopies();
startForms();
if (document.querySelectorAll("main form[method=post]").length > 1) {
  import("./drafts.js").then((drafts) => drafts.startDrafts());
}
startKeys();
startPalette();
startArena();
startCharts();
startLive();
