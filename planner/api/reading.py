"""Profiles, plans and cuts as the verbs take them: values, or the files that hold them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from planner import files
from planner.api import texts
from planner.api.texts import File, Numbers
from planner.core.errors import StaleError, UsageError
from planner.core.judge.verdict import Verdict, judge
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import Link
from planner.core.values.plan import Plan, ProfileReference
from planner.core.values.profile import Profile

NOWHERE = "-"
"""The path of a profile or plan that is a value, as of one that came from standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProfile:
    """A profile that was read, and where from: standard input cannot be read twice."""

    profile: Profile
    path: str


AnyProfile = File | Profile | ReadProfile


def profile_of(profile: AnyProfile) -> ReadProfile:
    """A profile, and where it stands; raises `FileError` if it cannot be read."""
    if isinstance(profile, ReadProfile):
        return profile
    if isinstance(profile, Profile):
        return ReadProfile(profile=profile, path=NOWHERE)
    path = os.fspath(profile)
    return ReadProfile(profile=files.read_profile(path), path=path)


def load_plan(plan: File = "plan.yaml") -> Plan:
    """Read a plan from its file, which `check` compares with the profile.

    Args:
        plan: The file.

    Raises:
        FileError: It cannot be read, or is no plan.
    """
    return files.read_plan(os.fspath(plan))


def plan_of(plan: File | Plan) -> tuple[Plan, str]:
    """A plan, and where it stands: a value stands in the working directory."""
    if isinstance(plan, Plan):
        return plan, NOWHERE
    path = os.fspath(plan)
    return files.read_plan(path), path


def profile_for(plan: Plan, place: str, profile: File | Profile | None = None) -> ReadProfile:
    """The profile of a plan that stands at `place`: as it is handed in, else the one that the plan names."""
    if isinstance(profile, Profile):
        return ReadProfile(profile=profile, path="profile.yaml")
    path = files.profile_path(plan, place, path_of(profile))
    return ReadProfile(profile=files.read_profile(path), path=path)


def path_of(value: object) -> str | None:
    """The path, where a file is named; None for values, and for nothing."""
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else None


def reference(source: ReadProfile, plan_path: str) -> ProfileReference:
    """How a plan that will stand at `plan_path` refers to its profile."""
    where = files.reference_path(source.path, plan_path)
    return ProfileReference(path=where, digest=files.digest_of(source.profile), how=source.profile.device.how)


def fresh_verdict(plan: Plan, profile: Profile, place: str) -> Verdict:
    """The verdict on a plan that was made from this profile; raises `StaleError` for any other plan."""
    verdict = judge(plan, profile, profile_digest=files.digest_of(profile))
    for finding in verdict.findings:
        if finding.code in ("GP201", "GP202"):
            raise StaleError(finding.message, path=place, hint=finding.hint)
    return verdict


def calibration_of(calibration: File | Calibration | None) -> Calibration | None:
    """What a run measured of a machine; raises `FileError` if its file cannot be read."""
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    return files.read_calibration(os.fspath(calibration))


def links_of(links: File | Sequence[Link] | None, **said_otherwise: object) -> tuple[Link, ...]:
    """The link behind each device, from its file or as values; empty where there are none.

    `said_otherwise` is what else says what the links are, by the name of its option; None where nothing does.

    Raises:
        UsageError: Two options say what the links are.
        FileError: The file cannot be read.
    """
    if links is None:
        return ()
    shown = os.fspath(links) if isinstance(links, (str, os.PathLike)) else "…"
    for name, value in said_otherwise.items():
        if value is not None:
            option = name.replace("_", "-")
            raise UsageError(
                f"`--links {shown}` and `--{option} {value}`: both say what the links are", hint="give one"
            )
    if isinstance(links, (str, os.PathLike)):
        return tuple(boundary.link for boundary in files.read_links(os.fspath(links)).boundaries)
    return tuple(links)


def cuts_of(balance: Numbers | File, profile: Profile) -> tuple[int, ...]:
    """`6,6,6,6`, the numbers, or a file that holds the cuts, of ours or of another engine."""
    from planner.emit import SUFFIXES, read_balance_list  # noqa: PLC0415 - seldom needed

    if isinstance(balance, os.PathLike) or (isinstance(balance, str) and balance.endswith(SUFFIXES)):
        return read_balance_list(os.fspath(balance), profile.layers)
    return texts.integers("--balance", balance)
