"""HTML page of a report: header, key figures, sections, style sheet and script in one file."""

from collections.abc import Sequence
from string import Template

from planner import __version__
from planner.core.cost.width import tensor_parallel_profile
from planner.core.judge.certainty import Certainty, certainty_of
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes, format_us
from planner.show.html.assets import content_security_policy, read_asset, read_scripts, style_sheet
from planner.show.html.assumptions import assumptions_section
from planner.show.html.frontier import frontier_section
from planner.show.html.layers import layers_section
from planner.show.html.measured import measured_section, run_section
from planner.show.html.memory import memory_section
from planner.show.html.parts import Section, definition_list, scroll_box, section_markup, values_table
from planner.show.html.schedules import schedules_section
from planner.show.html.timeline import timeline_data, timeline_section
from planner.show.markup import element, escape_text
from planner.show.step import StepTimeline
from planner.show.views.certainty import amount_words, fit_words, peak_words, rate_words, step_words
from planner.show.views.cluster import (
    days_words,
    hours_words,
    measured_to_predicted_ratios,
    shown_run,
    tokens_per_second_text,
    training_length_words,
)
from planner.show.views.memory import device_memory, fullest_device
from planner.show.views.numbers import not_measured_warning, percent, solver_method_label
from planner.show.views.plan import gap_words, ideal_bubble_words, optimality_text, plan_headline, plan_stage_table

_MANY = 24

_Figure = tuple[str, str, str]
"""Key figure of the page: name, value, and remark."""


def plan_html(
    plan: Plan, profile: Profile | None, step: StepTimeline | None, report: RunReport | None, *, digest: str
) -> str:
    """Return the report of a plan as an HTML page.

    Args:
        plan: The plan.
        profile: Profile of the plan. If None, the page has no layers and no error ranges.
        step: One step of the plan, for the timeline. If None, the page has no timeline.
        report: Report of a run of the plan, or None.
        digest: Result of `decisions_digest` for the plan.
    """
    certainty = certainty_of(plan, profile) if profile else None
    lead = (profile.model.source if profile else "", not_measured_warning(plan.inputs.profile.how))
    sections = [
        assumptions_section(plan, profile, certainty),
        timeline_section(plan, step),
        memory_section(plan, step),
        _stages(plan),
        *([frontier_section(plan)] if plan.frontier else []),
        *filter(None, [schedules_section(plan)]),
        layers_section(tensor_parallel_profile(profile, plan.cluster) if profile else None, plan),
        *([measured_section(plan, report), run_section(report)] if report else []),
        _provenance(plan, profile, digest),
    ]
    return _page(
        title=plan_headline(plan),
        lead="; ".join(filter(None, lead)),
        figures=_marked(_figures(plan, certainty), plan.inputs.profile.how),
        sections=sections,
        data=timeline_data(plan, step) if step else "{}",
    )


def profile_html(profile: Profile) -> str:
    """Return the report of a profile as an HTML page."""
    layers, device = profile.layers, profile.device
    n = profile.micro_batch_sizes.index(max(profile.micro_batch_sizes))
    size = profile.micro_batch_sizes[n]
    parameter_bytes = sum(layer.parameter_bytes for layer in layers)
    counts = [("layers", str(len(layers)), ""), ("parameters", format_bytes(parameter_bytes), "")]
    sums = (
        ("forward", format_us(sum(layer.forward_us[n] for layer in layers))),
        ("backward", format_us(sum(layer.backward_us[n] for layer in layers))),
        ("saved", format_bytes(sum(layer.saved_bytes[n] for layer in layers))),
    )
    costs = [(name, text, f"micro-batch of {size}") for name, text in sums]
    origin = Section(anchor="provenance", title="Provenance", body=definition_list(_profile_facts(profile)))
    return _page(
        title=f"Profile of {profile.model.source or 'a chain of layers'}",
        lead=f"{device.kind} {device.name}, {not_measured_warning(device.how) or device.how}",
        figures=[*counts, *_marked(costs, device.how)],
        sections=[layers_section(profile, None), origin],
    )


def _figures(plan: Plan, certainty: Certainty | None) -> list[_Figure]:
    predicted = plan.predicted
    nearest = fullest_device(device_memory(plan.by_device()))
    return [
        ("step", step_words(plan, certainty), _certificate(plan)),
        ("samples/s", rate_words(plan, certainty), f"batch {plan.inputs.batch}"),
        ("bubble", percent(predicted.bubble), ideal_bubble_words(plan)),
        ("peak memory", peak_words(plan, certainty), f"{fit_words(plan, certainty)}; {nearest.share} of its limit"),
        ("recompute", percent(predicted.recompute_share), f"imbalance {predicted.imbalance:.2f}"),
        *_of_cluster(plan, certainty),
    ]


def _of_cluster(plan: Plan, certainty: Certainty | None) -> list[_Figure]:
    predicted, figures = plan.predicted, list[_Figure]()
    if predicted.tokens_per_s:
        figures.append(("tokens/s", tokens_per_second_text(plan, certainty), ""))
    if predicted.flops_utilization:
        figures.append(("model FLOPs utilization", percent(predicted.flops_utilization), "of the peak rate"))
    shown, ratios = shown_run(plan), measured_to_predicted_ratios(plan, certainty)
    if shown is None:
        return figures
    run, inputs = shown
    figures.append((training_length_words(inputs), days_words(run, ratios), hours_words(run, None)))
    if run.cost is not None:
        figures.append(("cost", amount_words(run.cost, ratios), f"{inputs.price:g} per GPU-hour"))
    return figures


def _marked(figures: Sequence[_Figure], how: str) -> list[_Figure]:
    # Every figure gets a remark about the origin of the profile, because readers may copy a single figure.
    if how == "measured":
        return list(figures)
    return [(name, value, f"{how}; {remark}" if remark else how) for name, value, remark in figures]


def _certificate(plan: Plan) -> str:
    if plan.solver.status == "optimal":
        return f"optimal: {optimality_text(plan)}"
    if plan.solver.status == "feasible":
        return f"{optimality_text(plan)} ({gap_words(plan)})"
    return "these cuts were given, not optimized"


def _stages(plan: Plan) -> Section:
    columns = ("stage", "layers", "recompute", "device", "forward", "backward", "memory", "limit", "share")
    body = values_table(plan_stage_table(plan).pick(*columns), num_text_columns=3, marks={"stage": " ◀"})
    lead = "Times are for one micro-batch; backward includes recomputation."
    lead += " ◀ marks the slowest." if len(plan.stages) > 1 else ""
    if plan.tensor_parallel > 1:
        lead += f" Each device is a group of {plan.tensor_parallel} GPUs that share its layers; memory is of one GPU."
    return Section(
        anchor="stages",
        title="Stages",
        lead=lead,
        body=scroll_box(body, "stages") if len(plan.stages) > _MANY else body,
    )


def _provenance(plan: Plan, profile: Profile | None, digest: str) -> Section:
    inputs, written = plan.inputs, plan.generator
    facts = [
        ("plan digest", digest),
        ("planned by", f"{written.name} {written.version}" if written else ""),
        ("certificate", f"{_certificate(plan)}; {solver_method_label(plan.solver.method)}"),
        ("GPUs that share each layer", str(plan.tensor_parallel) if plan.tensor_parallel > 1 else ""),
        ("devices", str(inputs.devices)),
        ("batch", str(inputs.batch)),
        ("requested schedule", inputs.schedule),
        ("requested recomputation", inputs.recompute),
        ("balance", ", ".join(map(str, plan.balance))),
        ("profile", inputs.profile.path),
        ("profile digest", inputs.profile.digest),
        ("model digest", inputs.model_digest),
    ]
    facts += _profile_facts(profile) if profile else []
    return Section(anchor="provenance", title="Provenance", body=definition_list(facts))


def _profile_facts(profile: Profile) -> list[tuple[str, str]]:
    device, environment, written = profile.device, profile.environment, profile.generator
    return [
        ("model", profile.model.source),
        ("settings", ", ".join(f"{name}={value}" for name, value in profile.model.settings.items())),
        ("profiled on", f"{device.kind} {device.name} ({device.how})"),
        ("profiled by", f"{written.name} {written.version}" if written else ""),
        ("environment", _versions(environment.torch, environment.python, environment.dtype)),
        ("optimizer", profile.optimizer),
        ("micro-batch sizes", ", ".join(map(str, profile.micro_batch_sizes))),
    ]


def _versions(torch: str, python: str, dtype: str) -> str:
    named = [f"torch {torch}" if torch else "", f"python {python}" if python else "", dtype]
    return ", ".join(filter(None, named))


def _card(name: str, value: str, remark: str) -> str:
    # A card's line is too short for a value with its range, as `530 ms (500 to 590)`; the range is on the next line.
    figure, bracket, range_ = value.partition(" (")
    below = element("small", escape_text(f"({range_}"), class_="range") if bracket else ""
    card = element("dd", escape_text(figure), below, element("small", escape_text(remark)))
    return element("div", element("dt", escape_text(name)), card)


def _page(*, title: str, lead: str, figures: Sequence[_Figure], sections: Sequence[Section], data: str = "{}") -> str:
    script = read_scripts("timeline.js", "report.js")
    cards = [_card(*figure) for figure in figures]
    links = [element("a", escape_text(section.title), href=f"#{section.anchor}") for section in sections]
    return Template(read_asset("report.html.txt")).substitute(
        title=escape_text(title),
        brand="gpipe-plan",
        content="report",
        lead=escape_text(lead),
        warning="",
        policy=content_security_policy(script),
        style=style_sheet(),
        script=script,
        data=data,
        figures=element("dl", *cards, class_="figures") if cards else "",
        links="".join(links),
        sections="".join(map(section_markup, sections)),
        version=escape_text(__version__),
        origin=", unless it says measured",
    )
