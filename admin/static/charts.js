// The line under a chart: the figures of the bar that is pointed at, touched, or reached with the
// arrow keys. Each chart has a table beside it; this is the same, where one looks.

function tell(box, bar) {
  let line = box.nextElementSibling;
  if (!line?.matches(".chart-told")) {
    line = document.createElement("p");
    line.className = "chart-told";
    line.role = "status";
    box.after(line);
  }
  box.querySelector(".at")?.classList.remove("at");
  bar.classList.add("at");
  line.textContent = bar.querySelector("title").textContent.replaceAll("\n", "; ");
}

export function startCharts() {
  for (const box of document.querySelectorAll(".chart-scroll")) {
    const point = (event) => {
      const bar = event.target.closest(".chart g");
      if (bar) tell(box, bar);
    };
    box.addEventListener("pointerdown", point);
    box.addEventListener("pointermove", point);
    box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const bars = [...box.querySelectorAll(".chart g")];
      if (!step || !bars.length) return;
      event.preventDefault();
      const now = bars.findIndex((bar) => bar.classList.contains("at"));
      tell(box, bars[now < 0 ? bars.length - 1 : Math.min(bars.length - 1, Math.max(0, now + step))]);
    });
  }
}
