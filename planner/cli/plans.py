"""One step of a plan as its profile predicts it, to be drawn."""

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Partition, timeline
from planner.core.cost.planning import cluster_of
from planner.core.cost.simulate import Event
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.show.step import Step, step_of


def events_of(plan: Plan, profile: Profile) -> tuple[Event, ...]:
    """Simulated events of one step of the plan."""
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    return timeline(costs, Partition.of(plan, costs.names), cluster_of(plan.inputs))


def step_of_plan(plan: Plan, profile: Profile) -> Step:
    """One step of the plan drawn out, for pictures and traces."""
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    return step_of(costs, Partition.of(plan, costs.names), cluster_of(plan.inputs))
