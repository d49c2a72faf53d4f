"""`compare`: compare several plans, or a plan with an earlier one."""

from collections.abc import Callable

from planner import files
from planner.api.notebooks import enable_notebook_display
from planner.api.reading import NOWHERE, path_of, plan_of, profile_for
from planner.api.texts import File
from planner.core.errors import FileError, UsageError
from planner.core.judge.difference import ComparedPlan, Comparison, difference_of
from planner.core.judge.verdict import judge
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

enable_notebook_display(Comparison)


def compare(*plans: File | Plan) -> Comparison:
    """Compare plans; each is recomputed from its profile if possible.

    Args:
        plans: Two or more plans, or their files.

    Returns:
        The compared plans; for two plans also their differences.

    Raises:
        UsageError: There are fewer than two plans, or a plan is invalid for its profile.
        FileError: A file cannot be read or is invalid.
    """
    if len(plans) < 2:
        raise UsageError("two or more plans are needed", hint="`gpipe-plan compare a.yaml b.yaml`")
    rows = [_compared(plan, n) for n, plan in enumerate(plans)]
    difference = None
    if len(rows) == 2:
        first, second = rows
        both = first.recomputed and second.recomputed
        difference = difference_of(first.plan, second.plan, name_before=first.path, both_evaluated_again=both)
    return Comparison(plans=tuple(rows), difference=difference)


def read_plan_for_comparison(against: File | Plan, plan_path: str) -> tuple[Plan, bool, str]:
    """Return the plan of `check --against`, True if it was recomputed from its profile, and its name for messages.

    Args:
        against: A plan, its file, or `git:REVISION`. For `git:REVISION`, the plan is read from the version of the file
            `plan_path` at this git revision.
        plan_path: Path of the checked plan's file.

    Returns:
        The plan of `against`; True if its figures were recomputed from its profile; and its name for messages.

    Raises:
        UsageError: `against` is a git revision, but the checked plan is not in a file.
        FileError: The file or its revision cannot be read.
    """
    path = path_of(against)
    if path is None or not path.startswith("git:"):
        plan, other_path = plan_of(against)
        return *_recomputed_from_profile(plan, lambda: profile_for(plan, other_path).profile), path or "the other plan"
    if plan_path == NOWHERE:
        raise UsageError(f"`--against {path}` needs a plan in a file, to find it in git", hint="name the file")
    revision = path.removeprefix("git:")
    committed = files.read_plan(f"{path}:{plan_path}", files.read_revision(plan_path, revision))

    def its_profile() -> Profile:
        profile_place = files.profile_path(committed, plan_path)
        return files.read_profile(f"{path}:{profile_place}", files.read_revision(profile_place, revision))

    return *_recomputed_from_profile(committed, its_profile), path


def _recomputed_from_profile(plan: Plan, read_profile: Callable[[], Profile]) -> tuple[Plan, bool]:
    try:
        profile = read_profile()
    except (FileError, UsageError):
        return plan, False
    digest = files.digest_of(profile)
    if digest != plan.inputs.profile.digest:
        return plan, False
    return judge(plan, profile, profile_digest=digest).plan or plan, True


def _compared(file: File | Plan, index: int) -> ComparedPlan:
    plan, place = plan_of(file)
    now, recomputed = _recomputed_from_profile(plan, lambda: profile_for(plan, place).profile)
    limits = (now.stages[d].memory_bytes for d in range(now.num_devices))
    fits = all(need <= limit for need, limit in zip(now.peak_bytes_by_device(), limits, strict=True))
    name = f"plan {index + 1}" if isinstance(file, Plan) else place
    return ComparedPlan(path=name, recomputed=recomputed, fits=fits, plan=now)
