"""Reading of arguments that are values or files: profiles, plans, links, calibrations and cuts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from planner import files
from planner.api import texts
from planner.api.option import option_name
from planner.api.texts import File, Numbers
from planner.core.cost.width import merge_tensor_parallel_profiles
from planner.core.errors import StaleError, UsageError
from planner.core.judge.verdict import Verdict, judge
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import Link
from planner.core.values.plan import Plan, ProfileReference
from planner.core.values.profile import Profile

NOWHERE = "-"
"""Path of a profile or plan that was passed as a value or read from standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSource:
    """Profile and the path from which it was read."""

    profile: Profile
    path: str
    merged: tuple[str, ...] = ()
    """Files of a merged profile, one per tensor-parallel size; empty without a merge."""


AnyProfile = File | Profile | ProfileSource | Sequence[File]


def profile_of(profile: AnyProfile) -> ProfileSource:
    """Return a profile with its path. Files for several tensor-parallel sizes are merged.

    Raises:
        FileError: A file cannot be read.
        UsageError: The files are not of the same model.
    """
    if isinstance(profile, ProfileSource):
        return profile
    if isinstance(profile, Sequence) and not isinstance(profile, str):
        paths = tuple(os.fspath(path) for path in profile)
        if len(paths) == 1:
            return profile_of(paths[0])
        return ProfileSource(
            profile=merge_tensor_parallel_profiles({path: files.read_profile(path) for path in paths}),
            path=NOWHERE,
            merged=paths,
        )
    if isinstance(profile, Profile):
        return ProfileSource(profile=profile, path=NOWHERE)
    path = os.fspath(profile)
    return ProfileSource(profile=files.read_profile(path), path=path)


def load_plan(plan: File = "plan.yaml") -> Plan:
    """Return the plan in a file. The plan is not compared with its profile (see `check`).

    Args:
        plan: The file.

    Raises:
        FileError: The file cannot be read, or is not a plan.
    """
    return files.read_plan(os.fspath(plan))


def plan_of(plan: File | Plan) -> tuple[Plan, str]:
    """Return a plan and its path, which is `NOWHERE` for a plan that was passed as a value."""
    if isinstance(plan, Plan):
        return plan, NOWHERE
    path = os.fspath(plan)
    return files.read_plan(path), path


def profile_for(plan: Plan, plan_path: str, profile: File | Profile | None = None) -> ProfileSource:
    """Return `profile`, read from its file if it is a path; by default, the profile that `plan` names.

    Args:
        plan: The plan.
        plan_path: Path of the plan.
        profile: Profile to use instead of the one that the plan names.
    """
    if isinstance(profile, Profile):
        return ProfileSource(profile=profile, path="profile.yaml")
    path = files.profile_path(plan, plan_path, path_of(profile))
    return ProfileSource(profile=files.read_profile(path), path=path)


def path_of(value: object) -> str | None:
    """Return `value` as a text if it is a path or a text, else None."""
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else None


def profile_reference(source: ProfileSource, plan_path: str) -> ProfileReference:
    """Return the profile's entry in a plan: its path relative to the plan's file `plan_path`, and its digest."""
    path = files.reference_path(source.path, plan_path)
    return ProfileReference(path=path, digest=files.digest_of(source.profile), how=source.profile.device.how)


def judge_again_from_profile(plan: Plan, profile: Profile, plan_path: str) -> Verdict:
    """Return the verdict of `check` on a plan. The verdict contains the plan, recomputed from `profile`.

    Args:
        plan: The plan.
        profile: Its profile.
        plan_path: Path of the plan, for the error message.

    Raises:
        StaleError: The profile differs from the one that the plan was made from.
    """
    verdict = judge(plan, profile, profile_digest=files.digest_of(profile))
    for finding in verdict.findings:
        if finding.code in ("GP201", "GP202"):
            raise StaleError(finding.message, path=plan_path, hint=finding.hint)
    return verdict


def resolve_calibration(calibration: File | Calibration | None) -> Calibration | None:
    """Return the calibration, read from its file if it is a path.

    Raises:
        FileError: The file cannot be read.
    """
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    return files.read_calibration(os.fspath(calibration))


def links_of(links: File | Sequence[Link] | None, **other_options: object) -> tuple[Link, ...]:
    """Return the link from each device to the next. Raise `UsageError` if one of `other_options` also defines links.

    The result is empty without links. The keywords `other_options` are options such as `inter_link`; the value of an
    unset option is None.

    Raises:
        UsageError: Two options define the links.
        FileError: The file cannot be read.
    """
    if links is None:
        return ()
    shown = os.fspath(links) if isinstance(links, (str, os.PathLike)) else "…"
    for name, value in other_options.items():
        if value is not None:
            raise UsageError(
                f"`--links {shown}` and `{option_name(name)} {value}`: both define the links", hint="remove one of them"
            )
    if isinstance(links, (str, os.PathLike)):
        return tuple(boundary.link for boundary in files.read_links(os.fspath(links)).boundaries)
    return tuple(links)


def resolve_balance(balance: Numbers | File, profile: Profile) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    `balance` is a text such as `6,6,6,6`, a sequence of numbers, or a file: a plan, a `balance.yaml` or the file of
    another engine.
    """
    from planner.emit.reading import SUFFIXES, read_balance_list  # noqa: PLC0415 - rarely needed

    if isinstance(balance, os.PathLike) or (isinstance(balance, str) and balance.endswith(SUFFIXES)):
        return read_balance_list(os.fspath(balance), profile.layers)
    return texts.parse_integers("--balance", balance)
