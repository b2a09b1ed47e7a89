// Ctrl-K: any model, tenant, key or page. The server searches, so that it shows only what the user
// may see; without scripts the same is at /admin/search.

const PAUSE_MS = 90;

export function startPalette() {
  const dialog = document.getElementById("palette");
  if (!dialog) return;
  const input = dialog.querySelector("input");
  const list = dialog.querySelector("ul");
  let found = [];
  let at = 0;
  let timer = 0;
  let asked = 0;

  function show() {
    list.replaceChildren(
      ...found.map((each, index) => {
        const row = document.createElement("li");
        row.id = `palette-${index}`;
        row.role = "option";
        row.ariaSelected = String(index === at);
        for (const [part, text] of [["found-kind", each.kind], ["", each.title], ["found-hint", each.hint]]) {
          const span = document.createElement("span");
          span.className = part;
          span.textContent = text;
          row.append(span);
        }
        row.addEventListener("click", () => open(index));
        return row;
      }),
    );
    if (!found.length && input.value.trim()) {
      const row = document.createElement("li");
      row.role = "option";
      row.ariaDisabled = "true";
      row.textContent = "No results.";
      list.append(row);
    }
    input.setAttribute("aria-activedescendant", found.length ? `palette-${at}` : "");
    list.children[at]?.scrollIntoView({ block: "nearest" });
  }

  function open(index) {
    if (!found[index]) return;
    if (found[index].url !== "#theme") return location.assign(found[index].url);
    document.querySelector("[data-theme-switch]").click();
    dialog.close();
  }

  async function look() {
    const mine = ++asked;
    try {
      const answer = await fetch(`${dialog.dataset.url}?q=${encodeURIComponent(input.value)}`);
      if (answer.status === 401) return location.reload();
      const rows = answer.ok ? await answer.json() : [];
      if (mine !== asked) return;
      found = rows;
    } catch {
      found = [];
    }
    at = 0;
    show();
  }

  function start(event) {
    event.preventDefault();
    if (dialog.open) return;
    input.value = "";
    found = [];
    list.replaceChildren();
    dialog.showModal();
    look();
  }

  addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") start(event);
  });
  for (const link of document.querySelectorAll("[data-palette]")) link.addEventListener("click", start);
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(look, PAUSE_MS);
  });
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) {
      event.preventDefault();
      at = (at + step + found.length) % found.length;
      show();
    } else if (event.key === "Escape") {
      event.preventDefault(); // a search field would only be emptied
      dialog.close();
    } else if (event.key === "Enter") {
      event.preventDefault();
      open(at);
    }
  });
}
