"""A small profile, its plan, and a wider profile, for tests of `check`, `compare`, `sweep` and their formats."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from planner import files
from planner.core.judge.verdict import Verdict, judge, with_difference
from planner.core.values.plan import Inputs, Plan, ProfileReference
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.questions.remedy import changes_that_fit
from tests.support.chains import chain, layer


def profile(widened: int = 0) -> Profile:
    """Return six equal layers of 100 kB; `widened` is added to the parameters of the fourth."""
    values: dict[str, Any] = {
        "forward_us": 1000.0,
        "backward_us": 2000.0,
        "output_bytes": 20_000,
        "saved_bytes": 50_000,
    }
    sizes = [100_000 + (widened if n == 3 else 0) for n in range(6)]
    return chain(*(layer(f"h.{n}", parameter_bytes=size, **values) for n, size in enumerate(sizes)))


def two_sizes() -> Profile:
    """Return the profile with a second size, so that more can be extrapolated."""
    one = profile()
    lists = ("forward_us", "backward_us", "output_bytes", "saved_bytes")
    layers = tuple(
        replace(layer, **{name: (getattr(layer, name)[0], 2 * getattr(layer, name)[0]) for name in lists})
        for layer in one.layers
    )
    return replace(one, micro_batch_sizes=(1, 2), layers=layers)


def plan(of: Profile | None = None, *, cap: int = 1_000_000) -> Plan:
    """Return three stages of two layers, M = 4, which need 820, 920 and 900 kB."""
    read = profile() if of is None else of
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest=files.digest_of(read)),
        devices=3,
        memory_bytes=(cap,) * 3,
        batch=4,
        recompute="never",
    )
    return solve(read, Request(inputs=inputs, balance=(2, 2, 2)))


def over_the_cap() -> Verdict:
    """Return a verdict with every kind of finding: stale, over a limit, grown, a remedy, a difference."""
    now = profile(widened=400_000)
    verdict = judge(plan(), now, profile_digest=files.digest_of(now), headroom=0.09)
    assert verdict.plan is not None
    with_advice = Verdict(
        fits=verdict.fits,
        findings=verdict.findings,
        plan=verdict.plan,
        would_fit=changes_that_fit(verdict.plan, now, lambda _: "gpipe-plan solve …"),
    )
    return with_difference(with_advice, plan(), name_before="git:main", both_evaluated_again=True)


def write(folder: Path, *, widened: int = 0, cap: int = 1_000_000) -> None:
    """Write `profile.yaml` and `plan.yaml` into `folder`."""
    read = profile(widened)
    files.write(str(folder / "profile.yaml"), read)
    read = files.read_profile(str(folder / "profile.yaml"))
    files.write(str(folder / "plan.yaml"), plan(read, cap=cap))
