// The check of a registration as a stream: it says what it does, the page stays in use, and
// leaving or changing a field gives it up. Without scripts the form is sent and answered whole.

const CHANGED = "A field was changed during the check: check again.";
let running = null;

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [name, data] = block.split("\n");
      yield [name.slice(7), JSON.parse(data.slice(6))];
    }
  }
}

function show(html) {
  const main = document.querySelector("main");
  const page = new DOMParser().parseFromString(html, "text/html");
  main.replaceChildren(...page.querySelector("main").childNodes); // escaped by the page's template
  (main.querySelector("[aria-invalid=true]") ?? main.querySelector("#preflight"))?.focus();
}

async function check(form) {
  const says = form.querySelector("[data-check-says]");
  const buttons = form.querySelectorAll("button");
  const mine = (running = new AbortController());
  const began = Date.now();
  let phase = "sending the form";
  const say = () => {
    says.textContent = `Checking: ${phase}, ${Math.round((Date.now() - began) / 1000)} s`;
  };
  const timer = setInterval(say, 1000);
  say();
  for (const each of buttons) each.disabled = true;
  let end = "The check broke off: try again.";
  try {
    const answer = await fetch(form.action, {
      method: "POST",
      body: new URLSearchParams(new FormData(form)),
      headers: { accept: "text/event-stream" },
      signal: mine.signal,
    });
    if (answer.status === 401) return location.reload();
    if (!answer.ok) end = `The check was refused (${answer.status}): reload the page and try again.`;
    for await (const [name, data] of answer.ok ? eventsOf(answer) : []) {
      if (name === "page") return show(data);
      phase = data;
      say();
    }
  } catch {
    if (mine.signal.aborted) end = CHANGED;
  } finally {
    clearInterval(timer);
    running = null;
    for (const each of buttons) each.disabled = false;
  }
  says.textContent = end;
}

document.addEventListener(
  "submit",
  (event) => {
    const form = event.target;
    if (!form.matches("[data-check]")) return;
    if (event.submitter?.hasAttribute("formaction")) return; // Register
    event.preventDefault();
    event.stopImmediatePropagation();
    if (!running) check(form);
  },
  { capture: true },
);
document.addEventListener("input", (event) => {
  if (event.target.closest("[data-check]")) running?.abort();
});
