"""What pages have in common: the style sheet, scripts, and the policy that lets nothing but these very scripts run."""

import base64
import hashlib
from functools import cache
from importlib import resources
from string import Template

from planner.core.schedule.kinds import BACKWARD, FORWARD
from planner.show.views.spans import ink_rules, kind_rules


@cache
def style() -> str:
    """The style sheet of every page, with the colours of the kinds of work."""
    colours = {"forward": FORWARD.paper[0], "backward": BACKWARD.paper[0]}
    return Template(asset("report.css")).substitute(inks=ink_rules(), kinds=kind_rules(), **colours)


def policy_for(script: str) -> str:
    """The content security policy of a page with that one script: nothing is loaded, whatever names the files hold."""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"


@cache
def asset(name: str, package: str = __package__) -> str:
    """The text of a file that lies beside the modules of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def scripts(*names: str) -> str:
    """Scripts of this package as one, in their order."""
    return "\n".join(map(asset, names))
