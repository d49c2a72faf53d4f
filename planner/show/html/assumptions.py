"""Section with the assumptions of a plan: origin of the times, precision, links, all-reduces and reserved memory."""

from collections.abc import Iterator

from planner.core.judge.certainty import Certainty
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.units import format_bytes
from planner.show.html.parts import Section, definition_list
from planner.show.views.certainty import accuracy_words
from planner.show.views.numbers import link_description, percent


def assumptions_section(plan: Plan, profile: Profile | None, certainty: Certainty | None) -> Section:
    """Return the section with the assumptions that concern a plan.

    Args:
        plan: The plan.
        profile: Profile of the plan; None if it is not known.
        certainty: Error ranges of the predictions; None if they are not known.
    """
    inputs = plan.inputs
    least, most = (format_bytes(limit(inputs.memory_bytes)) for limit in (min, max))
    spare = f"; {percent(inputs.headroom)} of the memory stays free in addition" if inputs.headroom else ""
    facts = [
        ("layer times", _origin(plan, profile)),
        ("accuracy", accuracy_words(certainty).removeprefix("accuracy: ") if certainty else ""),
        ("precision", inputs.dtype or (profile.environment.dtype if profile else "")),
        ("optimizer", _optimizer(plan)),
        *_links(plan),
        ("memory limit", f"{least if least == most else f'{least} to {most}'}{spare}"),
        ("reserve of each device", format_bytes(inputs.reserve_bytes) if inputs.reserve_bytes else "none"),
    ]
    return Section(anchor="assumptions", title="Assumptions", body=definition_list(facts))


def _origin(plan: Plan, profile: Profile | None) -> str:
    how = plan.inputs.profile.how
    device = f" for {profile.device.kind} {profile.device.name}".rstrip() if profile else ""
    scaled = f", multiplied by {plan.inputs.compute:.3g} after a calibration" if plan.inputs.compute != 1 else ""
    return f"{how}{device}{scaled}"


def _optimizer(plan: Plan) -> str:
    divided = f", divided among {plan.replicas} replicas" if plan.shards_optimizer else ""
    return f"{plan.inputs.optimizer}{divided}" if plan.inputs.optimizer else ""


def _links(plan: Plan) -> Iterator[tuple[str, str]]:
    inputs = plan.inputs
    if inputs.links:
        yield "links between devices", f"measured, {len(inputs.links)} links"
    elif inputs.node_devices:
        yield "links within a node", link_description(inputs.link)
        between = link_description(inputs.inter_link) if inputs.inter_link else "as fast as within a node"
        yield "links between nodes", between
    else:
        yield "links between devices", link_description(inputs.link)
    if plan.replicas > 1:
        yield "gradient reduction", link_description(inputs.allreduce) if inputs.allreduce else "takes no time"
