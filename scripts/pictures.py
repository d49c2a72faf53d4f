"""The pictures of docs/schedules.md: one step of an even chain as `gpipe-plan show --svg` draws it, by schedule.

    python scripts/pictures.py [FOLDER]       default: docs/pictures

Sixteen equal layers with F = I = W = 1 ms on four devices, eight micro-batches, cut evenly; links are free. Prints
step, bubble, and what the fullest device holds in micro-batches, as the page has them.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import planner
from planner import files
from planner.core.cost.evaluate import Evaluation
from planner.core.schedule import schedule_of
from planner.core.values.plan import Plan
from planner.core.values.profile import Device, LayerProfile, Profile
from planner.show.step import simulated_step
from planner.show.svg import timeline_svg
from planner.show.views.numbers import percent

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
DEVICES, MICRO_BATCHES, LAYERS = 4, 8, 16
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2, "v-half": 2, "v-min": 2}
DRAWN = ("1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "v-min")
SAVED_BYTES = 2**20


def even_profile() -> Profile:
    """Equal layers that keep a mebibyte of each micro-batch, all of it until W."""
    layers = [
        LayerProfile(
            name=f"block.{n}",
            parameter_bytes=0,
            forward_us=(1000.0,),
            backward_us=(2000.0,),
            backward_input_us=(1000.0,),
            backward_weight_us=(1000.0,),
            output_bytes=(0,),
            saved_bytes=(SAVED_BYTES,),
            weight_held_bytes=(SAVED_BYTES,),
        )
        for n in range(LAYERS)
    ]
    return Profile(device=Device(kind="cpu", name="made up"), micro_batch_sizes=(1,), layers=tuple(layers))


def plans(profile: str) -> dict[str, Plan]:
    """Solve a plan for each schedule; return the plans by schedule name."""
    found = {}
    for name, chunks in CHUNKS.items():
        each = LAYERS // DEVICES // chunks
        found[name] = planner.solve(
            profile,
            devices=DEVICES,
            mem="1GB",
            batch=MICRO_BATCHES,
            micro_batches=MICRO_BATCHES,
            schedule=name,
            chunks=chunks,
            balance=(each,) * (DEVICES * chunks),
        )
    return found


def pictures() -> dict[str, str]:
    """Return the text of every picture by file name, and print the figures of docs/schedules.md."""
    profile, drawn = even_profile(), {}
    with TemporaryDirectory() as folder:
        place = str(Path(folder, "profile.yaml"))
        files.write(place, profile)
        for name, plan in plans(place).items():
            predicted, held = plan.predicted, max(plan.peak_bytes_by_device()) / (SAVED_BYTES * LAYERS / DEVICES)
            print(f"| `{name}` | {predicted.step_us / 1e3:.0f} ms | {percent(predicted.bubble)} | {held:g} |")
            if name in DRAWN:
                title = f"{schedule_of(plan.schedule).title}, K = {DEVICES}, M = {MICRO_BATCHES}: one predicted step"
                drawn[f"{name}.svg"] = timeline_svg(simulated_step(Evaluation.of(plan, profile)), title)
    return drawn


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, text in pictures().items():
        (folder / file_name).write_text(text, encoding="utf-8")
