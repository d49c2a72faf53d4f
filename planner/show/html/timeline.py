"""Timeline of the report: data that a script draws, and SVG for paper and browsers without scripts."""

import json

from planner.core.schedule import schedule_of
from planner.core.values.plan import Plan
from planner.core.values.printable import printable
from planner.core.values.units import format_us
from planner.show.html.parts import Section, legend, remark
from planner.show.markup import element
from planner.show.step import BY_LABEL, REDONE, Span, StepTimeline
from planner.show.svg import has_lanes, legend_entries, timeline_svg
from planner.show.views.numbers import layer_range, percent, row_noun
from planner.show.views.spans import BUBBLE_WORDS, bubbles_of, recompute_style_class

_KINDS = (*BY_LABEL, "receive", "optimizer", "send forward", "send backward")
"""Kinds of spans; in the data for the script, a kind is encoded as its index in this list."""


def timeline_section(plan: Plan, step: StepTimeline | None) -> Section:
    """Return the timeline of one step, as a canvas and as a picture without scripts; a remark if `step` is None."""
    if step is None:
        body = remark("The timeline is computed from the profile, which was not found: give it with --profile FILE.")
        return Section(anchor="timeline", title="Timeline", body=body)
    title = f"Timeline of one training step, {format_us(step.pipeline_us)} up to the last backward"
    picture = element("div", timeline_svg(step, title), class_="still")
    return Section(
        anchor="timeline",
        title="Timeline",
        lead=_lead(plan, step),
        body=picture + live_canvas(title, legend(_looks(step)), hidden=""),
    )


def live_canvas(label: str, legend_markup: str, **attributes: str) -> str:
    """Return the box in which a script draws a step, with buttons. `label` describes the picture for screen readers."""
    buttons = "".join(
        element("button", sign, type="button", data_do=action, title=tip, aria_label=tip)
        for action, sign, tip in (
            ("out", "−", "Zoom out (−)"),  # noqa: RUF001 - a minus sign on a button
            ("in", "+", "Zoom in (+)"),
            ("all", "whole step", "Show the whole step (0)"),
        )
    )
    controls = element("div", buttons, element("output", aria_live="polite"), class_="controls")
    canvas = element(
        "canvas",
        tabindex="0",
        role="img",
        aria_label=f"{label}. Arrow keys move from box to box, plus and minus zoom, 0 shows the whole step.",
    )
    keys = "Drag to move, double-click or Ctrl+wheel to zoom; or arrow keys, + and −, 0."  # noqa: RUF001
    note = element("p", keys, class_="note")
    return element("div", controls, canvas, note, legend_markup, class_="live", **attributes)


def kinds_data() -> dict[str, object]:
    """Return the properties of each kind of span, such as colors and labels, for scripts."""
    return {
        "kinds": [{"letter": kind.letter, "paper": kind.paper, "ink": kind.ink} for kind in BY_LABEL.values()],
        "labels": ["optimizer step" if kind == "optimizer" else kind for kind in _KINDS],
        "redone": [_KINDS.index(label) for label in sorted(REDONE)],
    }


def _lead(plan: Plan, step: StepTimeline) -> str:
    bubble, ideal = percent(plan.predicted.bubble), percent(plan.predicted.ideal_bubble)
    lead = f"One step, {format_us(step.pipeline_us)} up to the last backward."
    if schedule_of(plan.schedule, plan.order).splits_backward:
        every = format_us(plan.predicted.step_us)
        lead += (
            f" Each device starts the next step when it finishes: a step takes {every}, {bubble} of it idle (blank)."
        )
    else:
        lead += f" Idle time is blank: {bubble} of device time (with equal stages: {ideal})."
    return f"{lead} At the right: {BUBBLE_WORDS}."


def _looks(step: StepTimeline) -> list[tuple[str, str]]:
    # Recomputation is drawn over its backward, so its sample in the legend has the backward's style class, too.
    below = {"again": f"again {recompute_style_class(step)}"}
    return [(below.get(style_class, style_class), words) for style_class, words in legend_entries(step)]


def timeline_data(plan: Plan, step: StepTimeline) -> str:
    """Return a step as JSON for a script element. Times are in tenths of a microsecond."""
    rows: list[list[int]] = [[] for _ in range(step.num_devices)]
    free = [0] * step.num_devices
    sends = has_lanes(step)
    for span in step.spans:
        if span.kind.startswith("send") and not sends:
            continue
        free[span.device] = _append(rows[span.device], span, step, free[span.device])
    again = sorted({(span.stage, round(span.recompute_us * 10)) for span in step.spans if span.recompute_us > 0})
    last = step.micro_batches - 1
    spared = sorted(s.stage for s in step.spans if s.kind in REDONE and s.micro_batch == last and not s.recompute_us)
    places = [sorted({s.stage for s in step.spans if s.device == d}) for d in range(step.num_devices)]
    data = {
        **kinds_data(),
        "row": row_noun(step.chunks),
        "chunks": step.chunks,
        "last": last,
        "end": round(step.end_us * 10),
        "places": places,
        "bubbles": [percent(share) for share in bubbles_of(step)],
        "stages": [printable(layer_range(s.first, s.last, s.layers)) for s in plan.stages],
        "again": dict(again),
        "spared": spared,
        "rows": rows,
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _append(row: list[int], span: Span, step: StepTimeline, before: int) -> int:
    # A span is four numbers: kind and chunk, micro-batch, time since the start of the previous span, and duration.
    start, end = round(span.start_us * 10), round(span.end_us * 10)
    code = _KINDS.index(span.kind) + len(_KINDS) * (span.stage // step.num_devices)
    row += (code, span.micro_batch, start - before, end - start)
    return start
