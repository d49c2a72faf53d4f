"""Table of a plan's stages, and the names of the layers that they recompute, as text."""

from itertools import groupby
from re import fullmatch

from rich.table import Table
from rich.text import Text

from planner.core.values.plan import Plan, Stage
from planner.core.values.printable import printable
from planner.show.terminal.rendering import wrap_items
from planner.show.terminal.style import Style
from planner.show.terminal.tables import terminal_table
from planner.show.views.numbers import layer_range
from planner.show.views.plan import has_unlike_devices, plan_stage_table

_MEDIUM = 76
_WIDE = 96
_DEVICE_COLUMN = 10
_MOST_NAMES = 16
"""Largest number of names of layers, or of ranges of layers, that a terminal shows for a stage."""


def stages_table(plan: Plan, style: Style) -> Table:
    """Return a table of a plan's stages, with the slowest stage marked.

    There is a column for the device if devices have several stages, or differ in speed or memory.
    """
    with_device = plan.chunks > 1 or has_unlike_devices(plan)
    taken = _DEVICE_COLUMN if with_device else 0
    names = ["stage", *(["placed"] if with_device else []), "layers", "recompute", "forward", "backward"]
    # On narrow terminals, only the bars below the table show the memory.
    names += ["memory"] if style.has_room_for(_MEDIUM + taken) else []
    # With several chunks per device, a limit applies to all of them together, so only the bars show it.
    names += ["limit", "share"] if plan.chunks == 1 and style.has_room_for(_WIDE + taken) else []
    view = plan_stage_table(plan).pick(*names)
    if plan.chunks > 1:
        view = view.with_titles(memory="part of\npeak")
    return terminal_table(view, {"stage": (" ◀", ""), "share": (" !", "bold red")})


def recomputed_layer_names(stage: Stage, style: Style) -> Text:
    """Return the names of the layers that a stage recomputes: a few lines for a terminal, otherwise all names."""
    names = _names(stage)
    shown = names[:_MOST_NAMES] if style.wrap else names
    left = len(names) - len(shown)
    items = [*(f"{name}," for name in shown[:-1]), shown[-1], *([f"and {left} more"] if left else [])]
    return wrap_items([f"stage {stage.index} recomputes", *items], style, gap=" ", indent="  ")


def _names(stage: Stage) -> list[str]:
    names = stage.recomputed
    if len(names) == stage.layers:
        return [printable(layer_range(stage.first, stage.last, stage.layers))]
    counting = groupby(enumerate(map(_numbered, names)), key=lambda item: (*item[1][::2], item[1][1] - item[0]))
    texts: list[str] = []
    for _, group in counting:
        run = [names[place] for place, _ in group]
        texts += [layer_range(run[0], run[-1], len(run))] if len(run) > 2 else run
    return [printable(name) for name in texts]


def _numbered(name: str) -> tuple[str, int, str]:
    match = fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
    return (match[1], int(match[2]), match[3]) if match else (name, -1, "")
