// What was typed into one form of a page is kept while another form of it is sent: the page that
// comes back holds it again. Passwords and hidden fields are left out; a form that was sent is not.

const KEY = `drafts:${location.pathname}`;
const FIELDS = "input:not([type=hidden], [type=password], [type=search]), textarea, select";
const isBox = (field) => field.type === "checkbox";
const held = (field) => (isBox(field) ? field.checked : field.value);

function original(field) {
  if (isBox(field)) return field.defaultChecked;
  if (field.tagName !== "SELECT") return field.defaultValue;
  return ([...field.options].find((each) => each.defaultSelected) ?? field.options[0])?.value;
}

export function startDrafts() {
  const forms = [...document.querySelectorAll("main form[method=post]")].filter((form) => form.querySelector(FIELDS));
  if (forms.length < 2) return;
  const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
  sessionStorage.removeItem(KEY);
  for (const form of forms) {
    for (const [name, value] of Object.entries(kept[form.getAttribute("action")] ?? {})) {
      const field = form.elements[name];
      if (!field || held(field) === value) continue;
      if (isBox(field)) field.checked = value;
      else field.value = value;
      field.closest("details")?.setAttribute("open", "");
    }
    form.addEventListener("submit", () => {
      const drafts = {};
      for (const other of forms.filter((each) => each !== form)) {
        const typed = [...other.querySelectorAll(FIELDS)].filter((field) => field.name && held(field) !== original(field));
        if (typed.length) drafts[other.getAttribute("action")] = Object.fromEntries(typed.map((field) => [field.name, held(field)]));
      }
      if (Object.keys(drafts).length) sessionStorage.setItem(KEY, JSON.stringify(drafts));
    });
  }
}
