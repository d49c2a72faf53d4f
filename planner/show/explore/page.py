"""HTML page of the interactive report, which scripts fill in."""

from string import Template

from planner import __version__
from planner.core.values.units import pluralize
from planner.show.explore.data import PageData, page_data
from planner.show.explore.request import ExplorerRequest
from planner.show.html.assets import content_security_policy, read_asset, read_scripts, style_sheet
from planner.show.html.parts import Section, legend, scroll_box, section_markup
from planner.show.html.timeline import live_canvas
from planner.show.markup import element, escape_text
from planner.show.views.memory import COMPONENTS, component_title
from planner.show.views.numbers import not_measured_warning
from planner.show.views.plan import plan_headline

_SCRIPTS = ("tables.js", "evaluate.js", "units.js", "command.js", "address.js", "drawing.js", "explore.js")
"""Scripts, each after the scripts that it depends on; the last two access the elements of the HTML page."""

_BEGIN = "starting from the plan"

_NO_SCRIPT = "The controls need JavaScript, which is disabled in this browser."

_FIGURES = ("step", "samples/s", "bubble", "peak memory")


def explore_html(request: ExplorerRequest) -> str:
    """Return the interactive report as one HTML page without external resources."""
    plan, profile = request.plan, request.profile
    script, data = page_script(), page_data(request)
    sections = (_handles(request, data), _timeline(), _memory(), _stages(), _command())
    links = [element("a", escape_text(section.title), href=f"#{section.anchor}") for section in sections]
    return Template(read_asset("report.html.txt")).substitute(
        title=escape_text(plan_headline(plan)),
        brand="gpipe-plan explore",
        content="controls",
        lead=escape_text(
            "; ".join(filter(None, (profile.model.source, not_measured_warning(plan.inputs.profile.how), _BEGIN)))
        ),
        warning=f"\n<noscript>{element('p', _NO_SCRIPT, class_='over')}</noscript>",
        policy=content_security_policy(script),
        style=style_sheet() + read_asset("explore.css", __package__),
        script=script,
        data=data.text,
        figures=_figures(),
        links="".join(links),
        sections="".join(map(section_markup, sections)),
        version=escape_text(__version__),
        origin=": the figures of <code>gpipe-plan check</code>",
    )


def page_script() -> str:
    """Return all scripts of the interactive report as one text."""
    laws_and_page = "\n".join(read_asset(name, __package__) for name in _SCRIPTS)
    return f"{read_scripts('timeline.js')}\n{laws_and_page}"


def _figures() -> str:
    cards = [
        element("div", element("dt", escape_text(name)), element("dd", element("span"), element("small")))
        for name in _FIGURES
    ]
    return element("dl", *cards, class_="figures live-figures", id="figures")


def _knob(name: str, words: str, control: str) -> str:
    return element("label", element("span", escape_text(words)), control, element("b", id=f"{name}-words"))


def _handles(request: ExplorerRequest, data: PageData) -> Section:
    knobs = [
        _knob("schedule", "schedule", element("select", id="schedule")),
        _knob("chunks", "stages per device", element("select", id="chunks")),
        _knob("micro-batches", "micro-batches", '<input type="range" id="micro-batches" min="0" step="1">'),
        _knob("recompute", "recompute", element("select", id="recompute")),
        _knob("cap", "memory of each device", '<input type="range" id="cap" min="-100" max="100" step="1" value="0">'),
    ]
    chain = element("div", id="chain", class_="chain")
    undo = element("button", "undo", type="button", id="undo", disabled="")
    reset = element("button", "reset to the plan", type="button", id="reset")
    remarks = element("ul", *(element("li", escape_text(text)) for text in _remarks(request, data)), class_="remarks")
    return Section(
        anchor="handles",
        title="Cuts and schedule",
        lead="Drag a cut, or select it with Tab and move it with the arrow keys. Columns show the times of layers.",
        body=element("div", *knobs, class_="knobs")
        + element(
            "div", chain, class_="wide", tabindex="0", role="group", aria_label="the chain of layers and its cuts"
        )
        + legend((("l-f", "forward of a layer"), ("l-b", "backward")))
        + element("div", undo, reset, element("output", id="said", aria_live="polite"), class_="controls")
        + remarks,
    )


def _remarks(request: ExplorerRequest, data: PageData) -> list[str]:
    plan = request.plan
    remarks = []
    if any(stage.recomputed for stage in plan.stages):
        remarks.append("The plan recomputes some layers of a stage; this page recomputes whole stages only.")
    elif plan.inputs.recompute == "layers":
        remarks.append("`solve` may recompute some layers of a stage; this page recomputes whole stages only.")
    if not request.may_recompute:
        remarks.append("Recomputed stages of this model give different results, so this page does not recompute.")
    if not data.is_complete:
        remarks.append("Very long action orders are left out: with many micro-batches, some schedules are missing.")
    width = data.widths[len(plan.stages)]
    if min(data.widths.values()) < len(request.profile.layers):
        remarks.append(
            f"The page cannot hold all stages of so many layers: each cut of the plan moves by at most "
            f"{pluralize(width, 'layer')}, and cuts into more stages move by fewer layers. "
            "`gpipe-plan check --balance` takes any cuts."
        )
    return remarks


def _timeline() -> Section:
    label = "Timeline of one training step"
    return Section(
        anchor="timeline",
        title="Timeline",
        lead="One step; blank is idle. At the right: bubble, from a row's first box to its last.",
        body=live_canvas(label, element("ul", class_="legend", id="kinds")),
    )


def _memory() -> Section:
    return Section(
        anchor="memory",
        title="Memory",
        lead="Predicted peak of every device by component; the line is its memory limit.",
        body=scroll_box(element("div", class_="bars", id="bars"), "memory of every device")
        + element("div", legend((f"m-{kind}", component_title(kind)) for kind in COMPONENTS), id="items"),
    )


def _stages() -> Section:
    table = element("table", element("thead"), element("tbody"), id="table")
    return Section(
        anchor="stages",
        title="Stages",
        lead="Times are for one micro-batch; backward includes recomputation. ◀ marks the slowest.",
        body=scroll_box(element("div", table, class_="wide"), "stages"),
    )


def _command() -> Section:
    copy = element("button", "copy", type="button", id="copy")
    return Section(
        anchor="command",
        title="Command",
        lead="Run this to make a plan of the selected state.",
        body=element("pre", id="words", tabindex="0") + copy + element("ul", class_="remarks", id="caveats"),
    )
