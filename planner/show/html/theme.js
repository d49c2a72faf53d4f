"use strict";
// Theme: that of the system, unless the reader chooses one. The choice is stored, if the browser allows storage.
const theme = (() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const themes = ["system", "light", "dark"], painted = [];
  let chosen = "system";
  try { chosen = themes.find((t) => t === localStorage.getItem("gpipe-plan-theme")) || "system"; } catch { /* storage is forbidden */ }
  const paint = () => {
    if (chosen === "system") delete root.dataset.theme; else root.dataset.theme = chosen;
    button.textContent = "theme: " + chosen;
    for (const draw of painted) draw();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
    try { localStorage.setItem("gpipe-plan-theme", chosen); } catch { /* storage is forbidden */ }
    paint();
  });
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const draw of painted) draw(); });
  return { whenPainted: (draw) => painted.push(draw) };
})();
