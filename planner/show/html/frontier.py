"""Section with the best plan for each number of micro-batches: step time, bubble and peak memory."""

from planner.core.values.plan import Plan
from planner.show.html.parts import Section, values_table
from planner.show.views.plan import frontier_has_replicas, frontier_table

_COLUMNS = ("micro_batch_size", "step", "samples", "bubble", "peak", "recompute", "devices")


def frontier_section(plan: Plan) -> Section:
    """Return a table of the plans in `plan.frontier`, which must not be empty."""
    replicas = ("replicas",) if frontier_has_replicas(plan) else ()
    shown = frontier_table(plan).pick("micro_batches", *replicas, *_COLUMNS)
    lead = "The best plan for each number of micro-batches M; the diamond marks this plan."
    body = values_table(shown.with_titles(micro_batch_size="samples each"), marks={"micro_batches": " ◆"})
    return Section(anchor="trade-off", title="Trade-off over M", lead=lead, body=body)
