"""Section that compares schedules in a table."""

from planner.core.values.plan import Plan
from planner.show.html.parts import Section, remark, values_table
from planner.show.views.plan import SHORT_MARK, schedules_table, short_search_note, untried_schedules_note


def schedules_section(plan: Plan) -> Section | None:
    """Return the comparison of schedules; None if the plan has none."""
    if not any(point.fits for point in plan.schedules):
        return None
    lead = "The best plan found under each schedule; the diamond marks this plan."
    body = values_table(schedules_table(plan), marks={"schedule": " ◆", "step": SHORT_MARK})
    words = "; ".join(filter(None, (short_search_note(plan), untried_schedules_note(plan))))
    return Section(
        anchor="schedules", title="Trade-off over schedules", lead=lead, body=body + (remark(words) if words else "")
    )
