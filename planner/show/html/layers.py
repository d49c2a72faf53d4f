"""Section about the layers, with charts and a table of their times and bytes."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.core.values.plan import Plan
from planner.core.values.profile import LayerProfile, Profile
from planner.core.values.units import format_bytes, format_us, pluralize
from planner.show.html.parts import (
    Section,
    chart_figure,
    chart_line,
    collapsible,
    legend,
    remark,
    scroll_box,
    values_table,
)
from planner.show.markup import element, escape_text, number
from planner.show.views.table import column, table

_HEIGHT = 150.0
_FEW = 20
"""Largest number of stages for which a chart marks every stage. For more, it marks every 8th (or 16th, …) stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    style_class: str
    label: str
    value_of: Callable[[LayerProfile], float]
    """Function from a layer to the microseconds or bytes of this part."""


def layers_section(profile: Profile | None, plan: Plan | None) -> Section:
    """Return charts and a table of the layers' times and bytes; a remark if `profile` is None."""
    if profile is None:
        body = remark("The profile, which has the layers, was not found: give it with --profile FILE.")
        return Section(anchor="layers", title="Layers", body=body)
    sizes = profile.micro_batch_sizes
    # Layers were measured only at these sizes; the charts show the size nearest to the plan's.
    wanted = plan.micro_batch_size if plan else max(sizes)
    n = min(range(len(sizes)), key=lambda i: (abs(sizes[i] - wanted), -sizes[i]))
    times = (
        _Part(style_class="l-f", label="forward", value_of=lambda x: x.forward_us[n]),
        _Part(style_class="l-b", label="backward", value_of=lambda x: x.backward_us[n]),
    )
    sums = (
        _Part(style_class="m-parameters", label="parameters", value_of=lambda x: x.parameter_bytes),
        _Part(
            style_class="m-optimizer",
            label="gradients and optimizer",
            value_of=lambda x: x.created_gradient_bytes + x.optimizer_bytes,
        ),
        _Part(style_class="m-in_flight", label="saved, of one micro-batch", value_of=lambda x: x.saved_bytes[n]),
    )
    cuts = tuple(accumulate(plan.balance)) if plan else ()
    charts = [
        _chart("time", profile.layers, times, cuts=cuts, text=format_us),
        _chart("bytes", profile.layers, sums, cuts=cuts, text=format_bytes),
    ]
    lead = f"One micro-batch of {sizes[n]}, {pluralize(len(profile.layers), 'layer')} from left to right"
    lead += "; dashed lines mark the starts of stages, with their numbers below." if cuts else "."
    body = "".join(charts) + collapsible("Every layer", scroll_box(_numbers(profile, n, cuts), "layers"))
    return Section(anchor="layers", title="Layers", lead=lead, body=body)


def _chart(
    title: str,
    layers: Sequence[LayerProfile],
    parts: Sequence[_Part],
    *,
    cuts: Sequence[int],
    text: Callable[[float], str],
) -> str:
    top = max((sum(part.value_of(layer) for part in parts) for layer in layers), default=0.0) or 1.0
    width = 100 / len(layers)
    drawn = [chart_line("axis", (0, 100), (_HEIGHT, _HEIGHT))]
    for place, layer in enumerate(layers):
        drawn.append(_layer(layer, parts, place * width, width, top=top, text=text))
    begin, every = 0, 1 if len(cuts) <= _FEW else 8 * -(-len(cuts) // 80)
    for stage, end in enumerate(cuts):
        if stage % every == 0 and stage:
            drawn.append(chart_line("cut", (begin * width, begin * width), (0.0, _HEIGHT + 4)))
        if stage % every == 0:
            drawn.append(
                element(
                    "text", str(stage), x=f"{number((begin + end) / 2 * width)}%", y=_HEIGHT + 15, text_anchor="middle"
                )
            )
        begin = end
    caption, label = f"{title}: the largest layer takes {text(top)}", f"{title} of every layer"
    keys = legend((part.style_class, part.label) for part in parts)
    return chart_figure(caption, *drawn, height=_HEIGHT + 20, label=label, below=keys, style_class="layers")


def _layer(
    layer: LayerProfile,
    parts: Sequence[_Part],
    x: float,
    width: float,
    *,
    top: float,
    text: Callable[[float], str],
) -> str:
    tip = f"{layer.name}: " + ", ".join(f"{part.label} {text(part.value_of(layer))}" for part in parts)
    drawn, foot = [element("title", escape_text(tip))], _HEIGHT
    for part in parts:
        tall = part.value_of(layer) / top * (_HEIGHT - 6)
        foot -= tall
        if tall > 0.05:
            place = f'x="{number(x + width * 0.06, 3)}%" width="{number(width * 0.88, 3)}%"'
            drawn.append(f'<rect class="{part.style_class}" {place} y="{number(foot, 1)}" height="{number(tall, 1)}"/>')
    return element("g", *drawn)


def _numbers(profile: Profile, n: int, cuts: Sequence[int]) -> str:
    shown = table(
        tuple(enumerate(profile.layers)),
        column("layer", "layer", lambda row: row[1].name),
        column("stage", "stage", lambda row: str(bisect_right(cuts, row[0]))),
        column("forward", "forward", lambda row: row[1].forward_us[n], "us"),
        column("backward", "backward", lambda row: row[1].backward_us[n], "us"),
        column("parameters", "parameters", lambda row: row[1].parameter_bytes, "bytes"),
        column("saved", "saved", lambda row: row[1].saved_bytes[n], "bytes"),
        column("output", "output", lambda row: row[1].output_bytes[n], "bytes"),
    )
    return values_table(shown if cuts else shown.without("stage"))
