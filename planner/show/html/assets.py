"""Style sheet, scripts and content security policy of all pages."""

import base64
import hashlib
from functools import cache
from importlib import resources
from string import Template

from planner.core.schedule.kinds import BACKWARD, FORWARD
from planner.show.views.spans import action_color_css


@cache
def style_sheet() -> str:
    """Return the style sheet of all pages, with the colors of the kinds of action."""
    colors = {"forward": FORWARD.paper[0], "backward": BACKWARD.paper[0]}
    return Template(read_asset("report.css")).substitute(kinds=action_color_css(), **colors)


def content_security_policy(script: str) -> str:
    """Return a page's content security policy. It allows inline styles and the given script, nothing else."""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"


@cache
def read_asset(name: str, package: str = __package__) -> str:
    """Return the text of a file in the folder of a Python package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def read_scripts(*names: str) -> str:
    """Return several script files of this package as one text."""
    return "\n".join(map(read_asset, names))
