// Parts of a page that follow the server: [data-part=NAME] becomes what the stream sends. Only what
// differs is changed, so that focus and a selection elsewhere stay; a part in which something is
// selected or typed waits until that is over.

const STALE_MS = 5000;
const STATUS_MS = 10000;
const waiting = new Map();

function say(line, kind, text) {
  line.classList.toggle("on", kind === "on");
  line.classList.toggle("lost", kind === "lost");
  document.documentElement.classList.toggle("stale", kind === "lost");
  const place = line.querySelector("[data-live-text]");
  if (place.textContent !== text) place.textContent = text;
}

function isHeld(place) {
  const marked = getSelection();
  if (marked && !marked.isCollapsed && marked.rangeCount && marked.getRangeAt(0).intersectsNode(place)) return true;
  const field = document.activeElement;
  return field?.matches("input, textarea, select") && place.contains(field);
}

// Makes `old` what `fresh` is, node by node.
function morph(old, fresh) {
  const target = [...fresh.childNodes];
  for (const [n, want] of target.entries()) {
    const have = old.childNodes[n];
    if (!have) old.append(want);
    else if (have.nodeType !== want.nodeType || have.nodeName !== want.nodeName || have.id !== want.id) have.replaceWith(want);
    else if (have.nodeType !== Node.ELEMENT_NODE) {
      if (have.data !== want.data) have.data = want.data;
    } else if (!have.isEqualNode(want)) {
      for (const { name } of [...have.attributes]) if (!want.hasAttribute(name) && name !== "open") have.removeAttribute(name);
      for (const { name, value } of want.attributes) if (have.getAttribute(name) !== value) have.setAttribute(name, value);
      morph(have, want);
    }
  }
  while (old.childNodes.length > target.length) old.lastChild.remove();
}

function put(name, html) {
  for (const place of document.querySelectorAll(`[data-part="${CSS.escape(name)}"]`)) {
    if (isHeld(place)) {
      waiting.set(name, html);
      continue;
    }
    waiting.delete(name);
    const active = document.activeElement;
    const id = place.contains(active) ? active.id : "";
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    morph(place, fresh.content);
    if (id && document.activeElement !== active) document.getElementById(id)?.focus();
  }
  if (name === "banner") showState();
}

// The tab says it too.
function showState() {
  const icon = document.querySelector("link[rel=icon]");
  const href = document.querySelector(".banner .bad") ? icon.dataset.down : icon.dataset.up;
  if (icon.getAttribute("href") !== href) icon.setAttribute("href", href);
}

function isTyping() {
  const fields = document.querySelectorAll("main textarea, main input:not([type=hidden])");
  return [...fields].some((field) => field.value !== field.defaultValue);
}

function reload(line) {
  if (!isTyping()) location.reload();
  else say(line, "on", "This page has changed: reload it when you are done");
}

function follow(line) {
  let last = 0;
  let lost = 0;
  let isChanged = false;
  const source = new EventSource(line.dataset.liveUrl);
  source.addEventListener("parts", (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      if (name === "@reload") isChanged = true;
      else put(name, html);
    }
    if (isChanged) reload(line);
    document.dispatchEvent(new Event("parts"));
  });
  source.addEventListener("tick", () => {
    last = Date.now();
    lost = 0;
    if (!isChanged) say(line, "on", "Live");
  });
  source.addEventListener("signed-out", () => {
    source.close();
    clearInterval(timer);
    say(line, "lost", "Signed out, or the page no longer exists: reload");
  });
  source.addEventListener("error", () => {
    lost ||= Date.now();
    if (source.readyState === EventSource.CLOSED) {
      // Refused; the browser itself tries again only after a broken connection.
      source.close();
      clearInterval(timer);
      setTimeout(() => follow(line), STALE_MS);
      say(line, "lost", "Connection lost: reconnecting");
    }
  });
  const timer = setInterval(() => {
    const age = Math.round((Date.now() - last) / 1000);
    if (lost) say(line, "lost", last ? `Connection lost: last update ${age} s ago` : "No connection");
    else if (last && age > STALE_MS / 1000) say(line, "lost", `No update for ${age} s`);
  }, 1000);
}

// A page without a stream asks for the banner; not while nobody looks at it.
async function ask(place) {
  if (document.hidden) return;
  const answer = await fetch(place.dataset.statusUrl).catch(() => null);
  if (answer?.ok && !answer.redirected) put("banner", await answer.text());
}

export function startLive() {
  const lines = document.querySelectorAll("[data-live-url]");
  for (const line of lines) follow(line);
  const banner = document.querySelector("[data-status-url]");
  if (banner && !lines.length) setInterval(() => ask(banner), STATUS_MS);
  document.addEventListener("selectionchange", () => {
    for (const [name, html] of waiting) put(name, html);
  });
  document.addEventListener("focusout", () => {
    setTimeout(() => {
      for (const [name, html] of waiting) put(name, html);
    });
  });
}
