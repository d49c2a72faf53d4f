"""Style classes of the boxes in pictures of a step, and the labels of the legend.

The class of an action is the lower-case letter of its kind and the number of a hue, such as `f0`. Chunks have different
hues. `r` and `s` are transfers, `o` is the optimizer step, and `again` is recomputation.
"""

from collections.abc import Iterable
from typing import Final

from planner.core.schedule.kinds import KINDS, ActionKind
from planner.show.step import BY_LABEL, Span, StepTimeline

HUES: Final = min(len(kind.paper) for kind in KINDS.values())
"""Number of hues per kind of action; chunks use them in turn."""

BUBBLE_WORDS: Final = "bubble, from a row's first box to its last"


def bubble_of(busy_us: Iterable[tuple[float, float]]) -> float:
    """Return a device's idle share from its first to its last action; `busy_us` has starts and ends of actions."""
    spans = tuple(busy_us)
    if not spans:
        return 0.0
    starts, ends = zip(*spans, strict=True)
    whole_us = max(ends) - min(starts)
    return max(0.0, 1 - (sum(ends) - sum(starts)) / whole_us) if whole_us > 0 else 0.0


def bubbles_of(step: StepTimeline) -> list[float]:
    """Return the bubble (idle share) of each device."""
    busy: list[list[tuple[float, float]]] = [[] for _ in range(step.num_devices)]
    for span in step.spans:
        if span.kind in BY_LABEL:
            busy[span.device].append((span.start_us, span.end_us))
    return [bubble_of(spans) for spans in busy]


def recompute_style_class(step: StepTimeline) -> str:
    """Return the style class of a backward with recomputation; empty if nothing is recomputed."""
    recomputed = {span.kind for span in step.spans if span.recompute_us > 0}
    return next((_look(kind, 0) for label, kind in BY_LABEL.items() if label in recomputed), "")


def span_style_class(span: Span, num_devices: int) -> str:
    """Return the style class of a span, which depends on its chunk."""
    kind = BY_LABEL.get(span.kind)
    return span.kind[0] if kind is None else _look(kind, span.stage // num_devices)


def micro_batch_text(span: Span, step: StepTimeline) -> str:
    """Return a span's micro-batch as text: `3`, or `3.1` for chunk 1 if devices have several chunks."""
    return f"{span.micro_batch}.{span.stage // step.num_devices}" if step.chunks > 1 else str(span.micro_batch)


def legend_classes(step: StepTimeline, *, has_sends: bool) -> list[tuple[str, str]]:
    """Return the legend of a picture of a step, as pairs of style class and label."""
    kinds = {span.kind for span in step.spans}
    chunks = min(step.chunks, HUES)
    looks = [
        (_look(kind, chunk), kind.label + (f", chunk {chunk}" if chunks > 1 else ""))
        for label, kind in BY_LABEL.items()
        if label in kinds
        for chunk in range(chunks)
    ]
    if any(span.recompute_us > 0 for span in step.spans):
        looks.append(("again", "recompute, within its backward"))
    if has_sends and kinds & {"send forward", "send backward"}:
        looks.append(("s", "transfer, at the edge towards its receiver"))
    if "receive" in kinds:
        looks.append(("r", "transfer that keeps its receiver busy"))
    if "optimizer" in kinds:
        looks.append(("o", "optimizer"))
    return looks


def action_color_css(prefix: str = "") -> str:
    """Return the CSS rules for the colors of actions. The selectors begin with `prefix`."""
    return "\n".join(
        "".join(f"{prefix}.{_look(kind, hue)}{{color:{kind.paper[hue]}}}" for hue in range(HUES))
        for kind in KINDS.values()
    )


def box_text_css() -> str:
    """Return the CSS rules for the color of text on the boxes of actions."""
    return "".join(f".timeline .on-{kind.letter.lower()}{{fill:{kind.ink}}}" for kind in KINDS.values())


def _look(kind: ActionKind, chunk: int) -> str:
    return f"{kind.letter.lower()}{chunk % HUES}"
