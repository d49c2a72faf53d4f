"""A plan as a small piece of HTML, for notebooks: no script, no style sheet, at home in light and dark themes."""

from html import escape

from planner.core.values.plan import Plan, Stage
from planner.core.values.units import counted, format_bytes, format_us
from planner.show.terminal.style import UNICODE
from planner.show.views.numbers import percent, rate
from planner.show.views.words import schedule_name

__all__ = ["plan_html"]

_CELL = 'style="text-align:left;padding:2px 12px 2px 0"'
_NUMBER = 'style="text-align:right;padding:2px 12px 2px 0"'


def plan_html(plan: Plan) -> str:
    """The plan's figures and a row per stage, with a bar of its memory against the cap."""
    predicted = plan.predicted
    title = (
        f"{schedule_name(plan.schedule)}, {counted(len(plan.stages), 'stage')} {UNICODE.times} "
        f"{counted(plan.micro_batches, 'micro-batch', 'es')} of {counted(plan.micro_batch_size, 'sample')}"
    )
    figures = (
        f"step {format_us(predicted.step_us)} · {rate(predicted.samples_per_s)} samples/s · "
        f"bubble {percent(predicted.bubble)} · {plan.solver.status}"
    )
    names = ("stage", "layers", "recompute", "forward", "backward", "memory", "cap", "")
    header = "".join(f"<th {_CELL}>{name}</th>" for name in names)
    rows = "".join(_row(stage) for stage in plan.stages)
    return (
        f"<div><strong>{escape(title)}</strong><br>{escape(figures)}"
        f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(stage: Stage) -> str:
    need, cap = stage.memory.total, stage.memory_bytes
    texts = [str(stage.index), f"{stage.first} … {stage.last} ({stage.layers})", stage.recompute]
    numbers = [format_us(stage.forward_us), format_us(stage.backward_us), format_bytes(need), format_bytes(cap)]
    share = need / cap if cap else 1.0
    # A meter turns red by itself above `high`, and screen readers know what it is.
    meter = f'<meter min="0" max="1" high="1" value="{min(share, 1):.3f}">{percent(share, decimals=0)}</meter>'
    over = " <strong>over</strong>" if need > cap else ""
    return (
        "<tr>"
        + "".join(f"<td {_CELL}>{escape(text)}</td>" for text in texts)
        + "".join(f"<td {_NUMBER}>{escape(text)}</td>" for text in numbers)
        + f"<td {_CELL}>{meter} {percent(share, decimals=0)}{over}</td></tr>"
    )
