"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = document.querySelector(".live"), still = document.querySelector(".still");
  const canvas = live && live.querySelector("canvas");
  if (!data.rows || !canvas || !canvas.getContext) return;
  live.hidden = false;
  still.hidden = true;
  timeline(live).load(data);
  // Open all collapsed parts before printing.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
