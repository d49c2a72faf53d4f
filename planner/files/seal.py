"""Seal of a plan: a digest that shows if the plan was changed after this version of the tool returned it.

`check` does not solve the request of a sealed plan again. A seal does not protect against forgery.
"""

from dataclasses import replace

from planner.core.values.plan import Plan
from planner.core.values.profile import THIS_TOOL
from planner.files.canonical import digest_of, to_plain
from planner.files.writing import rounded


def with_seal(plan: Plan) -> Plan:
    """Return the plan with a seal: a digest of its values and of the tool's version."""
    plan = replace(plan, generator=THIS_TOOL)
    return replace(plan, seal=_seal(plan))


def has_valid_seal(plan: Plan) -> bool:
    """Return True if this version of the tool sealed the plan, and the plan was not changed afterwards."""
    return plan.generator == THIS_TOOL and plan.seal == _seal(plan)


def _seal(plan: Plan) -> str:
    # Values are rounded as in a file, so that a plan has the same seal before it is written and after it is read.
    values = rounded(to_plain(replace(plan, seal="")))
    return digest_of({"plan": values})
