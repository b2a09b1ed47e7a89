// Parts of a page that follow the server: [data-part=NAME] is replaced by what the stream sends.

const STALE_MS = 5000;

function say(line, kind, text) {
  line.classList.toggle("on", kind === "on");
  line.classList.toggle("lost", kind === "lost");
  const place = line.querySelector("[data-live-text]");
  if (place.textContent !== text) place.textContent = text;
}

function put(name, html) {
  for (const place of document.querySelectorAll(`[data-part="${CSS.escape(name)}"]`)) {
    // Whoever is in there with the keyboard stays where they are.
    if (place.contains(document.activeElement) && document.activeElement !== document.body) {
      const id = document.activeElement.id;
      place.innerHTML = html;
      if (id) document.getElementById(id)?.focus();
    } else {
      place.innerHTML = html;
    }
  }
}

function follow(line) {
  let last = 0;
  let lost = 0;
  const source = new EventSource(line.dataset.liveUrl);
  source.addEventListener("parts", (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      if (name === "@reload") location.reload();
      else put(name, html);
    }
    document.dispatchEvent(new Event("parts"));
  });
  source.addEventListener("tick", () => {
    last = Date.now();
    lost = 0;
    say(line, "on", "Live");
  });
  source.addEventListener("signed-out", () => {
    source.close();
    clearInterval(timer);
    say(line, "lost", "Signed out, or gone: load the page again");
  });
  source.addEventListener("error", () => {
    lost ||= Date.now();
    if (source.readyState === EventSource.CLOSED) {
      // Refused for now; the browser itself tries again only after a broken connection.
      source.close();
      clearInterval(timer);
      setTimeout(() => follow(line), STALE_MS);
      say(line, "lost", "Connection lost: trying again");
    }
  });
  const timer = setInterval(() => {
    const age = Math.round((Date.now() - last) / 1000);
    if (lost) say(line, "lost", last ? `Connection lost: as of ${age} s ago` : "No connection");
    else if (last && age > STALE_MS / 1000) say(line, "lost", `No news for ${age} s`);
  }, 1000);
}

export function startLive() {
  for (const line of document.querySelectorAll("[data-live-url]")) follow(line);
}
