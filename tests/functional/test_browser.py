"""The HTML report in a real browser: no error on the console, nothing overlaps or runs over, the keyboard works.

Needs chromium (Debian: `apt-get install chromium`). Set SCREENSHOTS to a folder to keep the pictures.
"""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from planner.core.values.units import format_us
from planner.show.explore import ExplorerRequest, explore_html
from planner.show.html import plan_html, profile_html
from tests.unit.show.samples import (
    AWKWARD,
    compared_schedules,
    explained,
    in_a_v,
    interleaved,
    plan,
    profile,
    report,
    step_of_sample,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]

REPORTS = {
    "plan": lambda: plan_html(explained(), profile(), step_of_sample(explained()), report(plan()), digest="sha256:1"),
    "interleaved": lambda: plan_html(interleaved(), profile(), step_of_sample(interleaved()), None, digest="sha256:1"),
    "split backward in a V": lambda: plan_html(
        compared_schedules(), profile(), step_of_sample(in_a_v()), report(in_a_v()), digest="sha256:1"
    ),
    "profile": lambda: profile_html(profile()),
}

# What is looked for in every page: parts that lie over each other, or out of sight.
LOOK = """
function looked(page, width) {
  const inView = (e) => e.getClientRects().length && !e.closest(".wide, .tall, .live[hidden], .still[hidden]");
  const box = (e) => e.getBoundingClientRect();
  const named = "h1, h2, p, button, a, dt, dd, li, label, figcaption, .bar > *, canvas, figure svg";
  const parts = [...page.querySelectorAll(named)]
    .filter((e) => inView(e) && !e.classList.contains("skip"));
  const overlaps = [];
  for (const a of parts) for (const b of parts) {
    if (a === b || a.contains(b) || b.contains(a)) continue;
    const p = box(a), q = box(b);
    const over = Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
      && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 2;
    if (over) overlaps.push(a.outerHTML.slice(0, 60) + " | " + b.outerHTML.slice(0, 60));
  }
  const isOutside = (e) => box(e).right > width + 1 || box(e).left < -1;
  const outside = parts.filter(isOutside).map((e) => e.outerHTML.slice(0, 80));
  return { wide: page.documentElement.scrollWidth > width, overlaps, outside };
}
"""

# The report forbids all scripts but its own, so it is looked at from outside, through a frame.
PROBE = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe src="report.html" style="width:WIDTHpx;height:9000px;border:0"></iframe><pre id="found"></pre><script>LOOK
const frame = document.querySelector("iframe");
const found = { errors: [] };
frame.addEventListener("load", () => setTimeout(async () => {
  const page = frame.contentDocument;
  Object.assign(found, looked(page, WIDTH));
  const canvas = page.querySelector("canvas");
  if (canvas) {
    const output = page.querySelector("output");
    const press = (key) => {
      canvas.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", { key, bubbles: true }));
      return output.textContent;
    };
    found.keys = ["ArrowRight", "ArrowRight", "ArrowDown", "End", "+", "0"].map(press);
    // It is drawn with the next frame, whenever a headless browser has one.
    for (let n = 0; n < 30 && !canvas.style.height; n++) await new Promise((go) => setTimeout(go, 100));
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colors = new Set();
    for (let n = 0; n < pixels.length; n += 4) colors.add([pixels[n], pixels[n + 1], pixels[n + 2]].join());
    found.forward = colors.has("42,109,176");
    found.backward = colors.has("242,166,90") || colors.has("207,69,32") && colors.has("169,219,230");
  }
  document.getElementById("found").textContent = JSON.stringify(found);
}, 300));
</script>"""


# The explorer wide and narrow: handles by keyboard and pointer, and what follows.
EXPLORED = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe src="explore.html" style="width:1280px;height:4000px;border:0"></iframe>
<iframe src="explore.html" style="width:400px;height:4000px;border:0"></iframe>
<pre id="found"></pre><script>LOOK
const frames = [...document.querySelectorAll("iframe")], found = [];
addEventListener("load", async () => {
  for (const { contentDocument: page, contentWindow: own } of frames) {
    const byId = (id) => page.getElementById(id), seen = { cuts: [], steps: [], words: "" };
    const note = async () => {
      // It is drawn with the next frame, whenever a headless browser has one.
      for (let n = 0; n < 9 && byId("words").textContent === seen.words; n++) {
        await new Promise((go) => setTimeout(go, 100));
      }
      seen.words = byId("words").textContent;
      seen.cuts.push(byId("said").textContent);
      seen.steps.push(page.querySelector("#figures span").textContent);
    };
    const press = (part, key) => part.dispatchEvent(new own.KeyboardEvent("keydown", { key, bubbles: true }));
    const drag = (part, name, clientX) => part.dispatchEvent(new own.PointerEvent(name, { clientX, bubbles: true }));
    const set = (id, value) => { byId(id).value = value; byId(id).dispatchEvent(new own.Event("input")); };
    await note();
    press(page.querySelector(".handle"), "ArrowRight");
    await note();
    const chain = byId("chain").getBoundingClientRect(), handle = page.querySelectorAll(".handle")[1];
    drag(handle, "pointerdown", 0);
    drag(page.body, "pointermove", chain.left + chain.width * 5 / 6);
    drag(page.body, "pointerup", 0);
    drag(page.body, "pointermove", chain.left);
    await note();
    seen.valueText = handle.getAttribute("aria-valuetext");
    set("micro-batches", 0);
    await note();
    seen.fewer = seen.words;
    set("cap", -100);
    await note();
    seen.over = page.querySelectorAll("#bars .over").length;
    byId("reset").click();
    await note();
    byId("schedule").value = [...byId("schedule").options].find((o) => o.text === "ZB-V").value;
    byId("schedule").dispatchEvent(new own.Event("input"));
    await note();
    found.push({ ...seen, ...looked(page, own.innerWidth) });
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


def browse(folder: Path, page: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    words += [f"--user-data-dir={folder / 'browser'}", "--allow-file-access-from-files", "--virtual-time-budget=9000"]
    words += [*options, (folder / page).as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", REPORTS)
def test_the_report_works_in_a_browser(name, width, tmp_path):
    """Check for console messages, overlapping or hidden elements, and keyboard navigation."""
    (tmp_path / "report.html").write_text(REPORTS[name](), encoding="utf-8")
    (tmp_path / "probe.html").write_text(PROBE.replace("LOOK", LOOK).replace("WIDTH", str(width)), encoding="utf-8")
    done = browse(tmp_path, "probe.html", "--dump-dom", f"--window-size={max(width, 500)},9000")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert not found["wide"]
    assert found["overlaps"] == []
    assert found["outside"] == []
    if name != "profile":
        assert found["forward"]
        assert found["backward"]
        first, second, below, last, *_ = found["keys"]
        assert first.startswith("forward, micro-batch 0 · stage 0")
        assert second.startswith("forward, micro-batch 1 · stage 0")
        assert below.startswith("forward, micro-batch 1 · stage 1")
        assert last.startswith("weight backward" if "split" in name else "backward, micro-batch ")
    if folder := os.environ.get("SCREENSHOTS"):
        picture = Path(folder, f"{name}-{width}.png").resolve()
        browse(tmp_path, "probe.html", f"--screenshot={picture}", f"--window-size={max(width, 500)},4200")


def test_the_explorer_works_in_a_browser(tmp_path):
    """Check narrow and wide windows for console messages and overlaps, and the values of controls."""
    (tmp_path / "explore.html").write_text(
        explore_html(
            ExplorerRequest(plan=plan(), profile=profile(), micro_batches=(2, 4), command=("gpipe-plan solve",))
        ),
        encoding="utf-8",
    )
    (tmp_path / "probe.html").write_text(EXPLORED.replace("LOOK", LOOK), encoding="utf-8")
    done = browse(tmp_path, "probe.html", "--dump-dom", "--window-size=1700,4000")
    assert "CONSOLE" not in done.stderr, done.stderr
    both = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    for found in both:
        assert (found["wide"], found["overlaps"], found["outside"]) == (False, [], [])
        moved = ["2, 2, 2", "3, 1, 2", "3, 2, 1", "3, 2, 1", "3, 2, 1", "2, 2, 2", "1, 1, 1, 1, 1, 1"]
        assert found["cuts"] == [f"cuts {cuts}" for cuts in moved]
        assert found["valueText"] == f"stage 2 begins with layer 5, {AWKWARD[5]}"
        begun, one, two, fewer, _, again, _ = found["steps"]
        assert begun == again == format_us(plan().predicted.step_us)
        assert len({begun, one, fewer}) == 3
        assert one == two  # its slowest stage is the same
        assert found["fewer"].endswith("--chunks 1 --micro-batches 2 --recompute never --balance 3,2,1")
        assert found["over"] == 3
    if folder := os.environ.get("SCREENSHOTS"):
        for width in (1280, 400):
            picture = Path(folder, f"explore-{width}.png").resolve()
            # No window is as narrow as a phone.
            style = f"width:{width}px;height:2600px;border:0"
            frame = f'<!doctype html><iframe src="explore.html" style="{style}"></iframe>'
            (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
            browse(tmp_path, "frame.html", f"--screenshot={picture}", f"--window-size={max(width, 500)},2600")
