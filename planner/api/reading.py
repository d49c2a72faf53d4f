"""Reading of profiles, plans and cuts, which may be passed as values or files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from planner import files
from planner.api import texts
from planner.api.texts import File, Numbers
from planner.core.cost.width import merge_widths
from planner.core.errors import StaleError, UsageError
from planner.core.judge.verdict import Verdict, judge
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import Link
from planner.core.values.plan import Plan, ProfileReference
from planner.core.values.profile import Profile

NOWHERE = "-"
"""Path of a profile or plan that was passed as a value or read from standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProfile:
    """Profile with the path that it was read from; standard input cannot be read twice."""

    profile: Profile
    path: str
    merged: tuple[str, ...] = ()
    """Files of several widths that it was merged from; it has no file of its own."""


AnyProfile = File | Profile | ReadProfile | Sequence[File]


def profile_of(profile: AnyProfile) -> ReadProfile:
    """Return a profile with its path; files of several widths are merged.

    Raises:
        FileError: A file cannot be read.
        UsageError: The files are not of the same model.
    """
    if isinstance(profile, ReadProfile):
        return profile
    if isinstance(profile, Sequence) and not isinstance(profile, str):
        paths = tuple(os.fspath(path) for path in profile)
        if len(paths) == 1:
            return profile_of(paths[0])
        return ReadProfile(
            profile=merge_widths({path: files.read_profile(path) for path in paths}), path=NOWHERE, merged=paths
        )
    if isinstance(profile, Profile):
        return ReadProfile(profile=profile, path=NOWHERE)
    path = os.fspath(profile)
    return ReadProfile(profile=files.read_profile(path), path=path)


def load_plan(plan: File = "plan.yaml") -> Plan:
    """Read a plan from its file. Use `check` to compare it with its profile.

    Args:
        plan: The file.

    Returns:
        The plan.

    Raises:
        FileError: The file cannot be read, or is not a plan.
    """
    return files.read_plan(os.fspath(plan))


def plan_of(plan: File | Plan) -> tuple[Plan, str]:
    """Return a plan and its path; the path of a value is `NOWHERE`, as if in the working directory."""
    if isinstance(plan, Plan):
        return plan, NOWHERE
    path = os.fspath(plan)
    return files.read_plan(path), path


def profile_for(plan: Plan, place: str, profile: File | Profile | None = None) -> ReadProfile:
    """Return the profile of a plan.

    Args:
        plan: The plan.
        place: Path of the plan.
        profile: Profile to use instead of the one that the plan names.

    Returns:
        The profile with its path.
    """
    if isinstance(profile, Profile):
        return ReadProfile(profile=profile, path="profile.yaml")
    path = files.profile_path(plan, place, path_of(profile))
    return ReadProfile(profile=files.read_profile(path), path=path)


def path_of(value: object) -> str | None:
    """Return the path if `value` names a file; None for other values."""
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else None


def reference(source: ReadProfile, plan_path: str) -> ProfileReference:
    """Return the reference to a profile for a plan that will be written to `plan_path`."""
    where = files.reference_path(source.path, plan_path)
    return ProfileReference(path=where, digest=files.digest_of(source.profile), how=source.profile.device.how)


def fresh_verdict(plan: Plan, profile: Profile, place: str) -> Verdict:
    """Return the verdict on a plan.

    Args:
        plan: The plan.
        profile: Its profile.
        place: Path of the plan, for the error.

    Returns:
        The verdict, with the recomputed plan.

    Raises:
        StaleError: The plan was made from another profile.
    """
    verdict = judge(plan, profile, profile_digest=files.digest_of(profile))
    for finding in verdict.findings:
        if finding.code in ("GP201", "GP202"):
            raise StaleError(finding.message, path=place, hint=finding.hint)
    return verdict


def calibration_of(calibration: File | Calibration | None) -> Calibration | None:
    """Return the calibration, or None; raises `FileError` if its file cannot be read."""
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    return files.read_calibration(os.fspath(calibration))


def links_of(links: File | Sequence[Link] | None, **said_otherwise: object) -> tuple[Link, ...]:
    """Return the link from each device to the next; empty without links.

    Args:
        links: Links, or a file that has them.
        **said_otherwise: Values of other options that also define links, by option name; None if not set.

    Returns:
        One link per boundary.

    Raises:
        UsageError: Two options define the links.
        FileError: The file cannot be read.
    """
    if links is None:
        return ()
    shown = os.fspath(links) if isinstance(links, (str, os.PathLike)) else "…"
    for name, value in said_otherwise.items():
        if value is not None:
            option = name.replace("_", "-")
            raise UsageError(
                f"`--links {shown}` and `--{option} {value}`: both define the links", hint="remove one of them"
            )
    if isinstance(links, (str, os.PathLike)):
        return tuple(boundary.link for boundary in files.read_links(os.fspath(links)).boundaries)
    return tuple(links)


def cuts_of(balance: Numbers | File, profile: Profile) -> tuple[int, ...]:
    """Return the cuts from `6,6,6,6`, from numbers, or from a file of gpipe-plan or another engine."""
    from planner.emit import SUFFIXES, read_balance_list  # noqa: PLC0415 - seldom needed

    if isinstance(balance, os.PathLike) or (isinstance(balance, str) and balance.endswith(SUFFIXES)):
        return read_balance_list(os.fspath(balance), profile.layers)
    return texts.integers("--balance", balance)
