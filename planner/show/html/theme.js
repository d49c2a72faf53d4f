"use strict";
// Theme: the system's, unless the reader chooses. Where storage is forbidden (file:// in some browsers), not kept.
const theme = (() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const themes = ["system", "light", "dark"], painted = [];
  let chosen = "system";
  try { chosen = themes.find((t) => t === localStorage.getItem("gpipe-plan-theme")) || "system"; } catch { /* not kept */ }
  const paint = () => {
    if (chosen === "system") delete root.dataset.theme; else root.dataset.theme = chosen;
    button.textContent = "theme: " + chosen;
    for (const draw of painted) draw();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
    try { localStorage.setItem("gpipe-plan-theme", chosen); } catch { /* not kept */ }
    paint();
  });
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const draw of painted) draw(); });
  return { whenPainted: (draw) => painted.push(draw) };
})();
