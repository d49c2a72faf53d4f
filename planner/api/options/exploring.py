"""Options of `explore`."""

from dataclasses import dataclass
from typing import Annotated

from planner.api.option import Option
from planner.api.texts import File
from planner.core.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """Options of `explore`."""

    output: Annotated[File | None, "File of the page."] = None
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
