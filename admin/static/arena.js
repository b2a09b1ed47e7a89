// The line under the arena's picture: all about the model that is pointed at, or has the focus.

let told = "";

function tell(part) {
  const line = document.querySelector("[data-told-text]");
  if (!line || !part) return;
  told = part.id;
  const text = part.getAttribute("aria-label");
  if (line.textContent !== text) line.textContent = text;
}

export function startArena() {
  const segment = (event) => event.target.closest?.(".strip a.seg");
  document.addEventListener("pointerover", (event) => tell(segment(event)));
  document.addEventListener("focusin", (event) => tell(segment(event)));
  // What was told stays true: the picture is replaced when something has changed.
  document.addEventListener("parts", () => {
    if (told) tell(document.getElementById(told));
  });
}
