"""What a device does, in pictures: which look a span has, and what each look means.

A look is a class of the style sheets: the small letter of a kind with the hue of its chunk (`f0`), or `r` and `s` for
transfers, `o` for the optimizer, `again` for recomputation, which is drawn over its backward.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from planner.core.schedule.kinds import KINDS, ActionKind
from planner.show.step import Span, Step

BY_LABEL: Final[Mapping[str, ActionKind]] = {kind.label: kind for kind in KINDS.values()}
"""The kinds that devices compute, by what spans call them."""

HUES: Final = min(len(kind.paper) for kind in KINDS.values())
"""Looks that chunks take turns in."""


BUBBLE_WORDS: Final = "bubble, from a row's first box to its last"
REDONE: Final = frozenset(kind.label for kind in KINDS.values() if kind.direction < 0)
"""The kinds within which activations are computed again."""


def bubble_of(busy_us: Iterable[tuple[float, float]]) -> float:
    """Share of a device's time, from the start of the first of its actions to the end of the last, without any.

    Args:
        busy_us: Start and end of each action, in microseconds.
    """
    spans = tuple(busy_us)
    if not spans:
        return 0.0
    starts, ends = zip(*spans, strict=True)
    whole_us = max(ends) - min(starts)
    return max(0.0, 1 - (sum(ends) - sum(starts)) / whole_us) if whole_us > 0 else 0.0


def bubbles_of(step: Step) -> list[float]:
    """The bubble of each device."""
    busy: list[list[tuple[float, float]]] = [[] for _ in range(step.num_devices)]
    for span in step.spans:
        if span.kind in BY_LABEL:
            busy[span.device].append((span.start_us, span.end_us))
    return [bubble_of(spans) for spans in busy]


def redone_look(step: Step) -> str:
    """The look of what recomputation is drawn over, on a device's first chunk."""
    there = {span.kind for span in step.spans if span.recompute_us > 0}
    return next((_look(kind, 0) for label, kind in BY_LABEL.items() if label in there), "")


def look_of(span: Span, num_devices: int) -> str:
    """The look of a span on one of K = `num_devices` devices."""
    kind = BY_LABEL.get(span.kind)
    return span.kind[0] if kind is None else _look(kind, span.stage // num_devices)


def number_of(span: Span, step: Step) -> str:
    """The span's micro-batch as `3`, on chunk 1 of several as `3.1`."""
    return f"{span.micro_batch}.{span.stage // step.num_devices}" if step.chunks > 1 else str(span.micro_batch)


def legend_looks(step: Step, *, has_lanes: bool) -> list[tuple[str, str]]:
    """Look and words of everything there is in a picture of the step; sends where there is room for lanes."""
    there = {span.kind for span in step.spans}
    chunks = min(step.chunks, HUES)
    looks = [
        (_look(kind, chunk), kind.label + (f", chunk {chunk}" if chunks > 1 else ""))
        for label, kind in BY_LABEL.items()
        if label in there
        for chunk in range(chunks)
    ]
    if any(span.recompute_us > 0 for span in step.spans):
        looks.append(("again", "recompute, within its backward"))
    if has_lanes and there & {"send forward", "send backward"}:
        looks.append(("s", "transfer, at the edge towards its receiver"))
    if "receive" in there:
        looks.append(("r", "transfer that keeps its receiver busy"))
    if "optimizer" in there:
        looks.append(("o", "optimizer"))
    return looks


def kind_rules(prefix: str = "") -> str:
    """A line of style rules per kind, one rule for each of its hues; `prefix` stands before every class."""
    return "\n".join(
        "".join(f"{prefix}.{_look(kind, hue)}{{color:{kind.paper[hue]}}}" for hue in range(HUES))
        for kind in KINDS.values()
    )


def ink_rules() -> str:
    """The style rules of what is written on boxes of each kind."""
    return "".join(f".timeline .on-{kind.letter.lower()}{{fill:{kind.ink}}}" for kind in KINDS.values())


def _look(kind: ActionKind, chunk: int) -> str:
    return f"{kind.letter.lower()}{chunk % HUES}"
