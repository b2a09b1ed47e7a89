// The playground with scripts: each model is a stream of its own, and a talk has many turns.
// Without them the form is sent as it is and answered by the same page.

const RECEIPT_TRIES = 12;
const RECEIPT_PAUSE_MS = 250;

const form = document.querySelector("[data-playground]");
const base = form.dataset.playground;
const place = form.querySelector("[data-talks]");
const sendButton = form.querySelector("[data-send]");
const stopButton = form.querySelector("[data-stop]");
let talks = [];
let stopper = null;

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

function turnOf(talk, who, text, kind = "") {
  const turn = element("p", `turn ${kind}`.trim());
  const words = document.createElement("span");
  words.textContent = text;
  turn.append(element("span", "turn-who", who), words);
  talk.box.append(turn);
  return words;
}

function newTalk(model) {
  const box = element("section", "talk");
  box.ariaLabel = model;
  box.append(element("h2", "", model));
  place.append(box);
  return { model, box, said: [] };
}

// A side keeps its talk as long as its model is the same.
function arrange(models) {
  if (talks.length === models.length && talks.every((talk, n) => talk.model === models[n])) return;
  place.replaceChildren();
  talks = models.map(newTalk);
}

// Server-sent events of a POST, which EventSource cannot do. Lines end with \n here.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

function refuse(talk, prompt, text) {
  const notice = element("div", "notice bad");
  notice.role = "alert";
  const again = element("button", "button small", "Try again");
  again.type = "button";
  again.addEventListener("click", () => {
    if (stopper) return;
    while (notice.previousElementSibling?.matches(".turn:not(.user)")) notice.previousElementSibling.remove();
    notice.previousElementSibling?.remove(); // the prompt: it is shown again
    notice.remove();
    run([talk], prompt);
  });
  notice.append(element("p", "", text), again);
  talk.box.append(notice);
  return false;
}

async function receipt(talk, id, box) {
  for (let n = 0; n < RECEIPT_TRIES; n++) {
    await new Promise((go) => setTimeout(go, RECEIPT_PAUSE_MS));
    const answer = await fetch(`${base}/receipt/${encodeURIComponent(id)}`).catch(() => null);
    if (answer?.status === 200) {
      box.innerHTML = await answer.text(); // escaped by the page's own template
      return;
    }
    if (answer && answer.status !== 204) return;
  }
}

async function ask(talk, prompt, signal) {
  turnOf(talk, "You", prompt, "user");
  const fields = new URLSearchParams(new FormData(form));
  fields.set("model", talk.model);
  fields.set("beside", "");
  fields.set("prompt", prompt);
  fields.set("history", JSON.stringify(talk.said));
  let id = "";
  let text = "";
  let words = null;
  let failed = false;
  const figures = element("div", "talk-note");
  try {
    const answer = await fetch(`${base}/stream`, { method: "POST", body: fields, signal });
    if (answer.status === 401) return location.reload();
    if (!answer.ok) {
      const told = answer.headers.get("content-type")?.startsWith("text/plain");
      return refuse(talk, prompt, told ? await answer.text() : `The request was refused (${answer.status}).`);
    }
    words = turnOf(talk, talk.model, "");
    words.parentElement.ariaBusy = "true";
    for await (const data of events(answer)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) {
        failed = true;
        refuse(talk, prompt, `${event.error.message} (${event.error.code ?? event.error.type})`);
        break;
      }
      id = event.id ?? id;
      const delta = event.choices?.[0]?.delta ?? {};
      text += delta.reasoning_content ?? "";
      text += delta.content ?? "";
      words.textContent = text;
      if (event.usage) {
        figures.textContent = `${event.usage.prompt_tokens} input tokens, ${event.usage.completion_tokens} output tokens`;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") figures.textContent = "Stopped.";
    else failed = !refuse(talk, prompt, "The connection was lost.");
  } finally {
    if (words) {
      words.parentElement.removeAttribute("aria-busy");
      if (!text) words.parentElement.remove();
    }
  }
  talk.box.append(figures);
  if (text) talk.said.push({ role: "user", content: prompt }, { role: "assistant", content: text });
  if (id) receipt(talk, id, figures);
  figures.scrollIntoView({ block: "nearest" });
  return !failed || Boolean(text);
}

async function send() {
  const field = form.elements.prompt;
  const prompt = field.value.trim();
  const models = [form.elements.model.value.trim(), form.elements.beside.value.trim()].filter(Boolean);
  if (!prompt || !models.length || stopper) return field.focus();
  if (!form.elements.key.value.trim()) {
    form.elements.key.setAttribute("aria-invalid", "true");
    return form.elements.key.focus();
  }
  form.elements.key.removeAttribute("aria-invalid");
  arrange(models);
  field.value = "";
  const went = await run(talks, prompt);
  if (!went.includes(true) && !field.value) field.value = prompt;
  field.focus();
}

async function run(asked, prompt) {
  stopper = new AbortController();
  sendButton.disabled = true;
  stopButton.disabled = false;
  const went = await Promise.all(asked.map((talk) => ask(talk, prompt, stopper.signal)));
  stopper = null;
  sendButton.disabled = false;
  stopButton.disabled = true;
  return went;
}

form.addEventListener(
  "submit",
  (event) => {
    event.preventDefault();
    event.stopImmediatePropagation();
    send();
  },
  { capture: true },
);
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
stopButton.addEventListener("click", () => stopper?.abort());
form.querySelector("[data-anew]").addEventListener("click", () => {
  stopper?.abort();
  talks = [];
  place.replaceChildren();
  form.elements.prompt.focus();
});
