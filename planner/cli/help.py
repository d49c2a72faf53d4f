"""What a command says of itself: options in sections, and what was meant by one that there is not."""

from typing import Any, Final

from typer.core import TyperCommand
from typer.exceptions import TyperException

from planner.core.errors import PlannerError

__all__ = ["Sectioned", "misused"]


_SECTIONS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "solve": {
        "Devices": ("devices", "mem", "reserve", "headroom", "speed", "nodes", "devices_any_order"),
        "Links and overhead": ("link_", "links", "inter_link", "allreduce", "overhead", "calibration"),
        "Batch and schedule": (
            *("batch", "micro_batches", "extrapolate", "schedule", "chunks", "replicas", "recompute"),
        ),
        "Cuts": ("balance", "together", "apart"),
        "Search": ("solver", "time_limit", "frontier", "explain"),
    }
}
"""By command: titles, and the options under each; any other stands at the end."""


class Sectioned(TyperCommand):
    """A command whose `--help` has sections; typer itself makes them in rich's boxes only."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options."""
        section_of = {name: title for title, names in _SECTIONS.get(self.name or "", {}).items() for name in names}
        titles = ("Arguments", *_SECTIONS.get(self.name or "", {}), "Options")
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                rest = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections[section_of.get(parameter.name or "", rest)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def misused(error: TyperException, command: str) -> PlannerError:
    """The error for a command line that cannot be read: what there is, near to what was typed, and where it is told."""
    see = f"see `gpipe-plan {command} --help`" if command else "see `gpipe-plan --help`"
    near = sorted(getattr(error, "possibilities", None) or ())
    if near and hasattr(error, "message"):
        meant = " or ".join(f"`{name}`" for name in near)
        return PlannerError(_plain(error.message), hint=f"did you mean {meant}? {see}")
    return PlannerError(_plain(error.format_message() if hasattr(error, "format_message") else str(error)), hint=see)


def _plain(message: str) -> str:
    # typer's sentences begin with a capital and end with a full stop; ours do not.
    return message[:1].lower() + message[1:].rstrip(".")
