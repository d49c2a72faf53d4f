"""Random requests and edits for the explorer, with figures of the core and of the page, whose script runs in node."""

import json
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from planner.api.exploring import notes_on_missing_options, solve_command_parts
from planner.core.cost.costs import costs_at, covers_size
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.judge.recut import with_cuts
from planner.core.schedule import schedule_of
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, Plan, ProfileReference, RecomputePolicy, SolverReport, StageMemory
from planner.core.values.profile import LayerProfile, Profile, SplitMemory
from planner.show.explore import ExplorerRequest
from planner.show.explore.data import page_data
from planner.show.html.assets import read_asset
from tests.support.chains import random_profile, with_programs

__all__ = [
    "NODE",
    "Case",
    "answers_of",
    "edits_of",
    "figures_of",
    "plan_of_edit",
    "question",
    "ranges_of",
    "reached",
    "states_of_addresses",
]

NODE = shutil.which("node")

_LOOP = """
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answered = cases.map(({ data, edits }) => {
  const memo = explorer(data);
  return edits.map((state) => {
    const answer = evaluate(memo, asked(data, state));
    return {
      step_us: answer.step_us, samples_per_s: answer.samples_per_s, bubble: answer.bubble,
      recompute_share: answer.recompute_share, recompute: answer.recompute,
      forward_us: answer.forward_us, backward_us: answer.backward_us,
      bytes: answer.memory.map(total), items: answer.memory,
      memory_bytes: data.memory_bytes.map((bytes) => capOf(state.scale, bytes)),
      ...commandsOf(data, state, answer),
    };
  });
});
console.log(JSON.stringify(answered));
"""

_REACH = """
const { data, edit, moves } = JSON.parse(require("fs").readFileSync(0, "utf8")), memo = explorer(data);
console.log(JSON.stringify(moves.map(([stage, layer]) => reach(memo, edit, stage, layer))));
"""

_ADDRESSES = """
const { data, texts, edits } = JSON.parse(require("fs").readFileSync(0, "utf8")), memo = explorer(data);
console.log(JSON.stringify({
  read: texts.map((text) => stateOfText(memo, text)),
  again: edits.map((state) => stateOfText(memo, textOfState(data, state))),
}));
"""

_RANGES = """
const { data, figures } = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify([
  formatUs(figures.step_us), stepRange(data, figures.step_us), rate(figures.samples_per_s), rateRange(data, figures),
  peakBound(data, figures.bytes),
]));
"""

_LINKS = (Link(), Link(latency_us=2.0, bytes_per_s=1e8), Link(latency_us=2.0, bytes_per_s=5e7, blocking=True))
_POLICIES: tuple[RecomputePolicy, ...] = ("auto", "auto", "never", "except-last", "always")

Edit = dict[str, Any]


class Case:
    """A request, and the data of its page."""

    def __init__(self, question: ExplorerRequest) -> None:
        self.question = question
        data = page_data(question)
        self.widths = data.widths
        self.data: dict[str, Any] = json.loads(data.text)


def answers_of(cases: Sequence[tuple[Case, Sequence[Edit]]], folder: Path) -> list[list[dict[str, Any]]]:
    """Return the figures of the page for every edit."""
    asked = [{"data": case.data, "edits": edits} for case, edits in cases]
    return _run(_LOOP, asked, folder)


def reached(case: Case, edit: Edit, moves: Sequence[tuple[int, int]], folder: Path) -> list[dict[str, Any]]:
    """Return where the handle of a stage stops if it is moved to a layer, for every stage and layer."""
    return _run(_REACH, {"data": case.data, "edit": edit, "moves": moves}, folder)


def states_of_addresses(
    case: Case, texts: Sequence[str], edits: Sequence[Edit], folder: Path
) -> tuple[list[Edit | None], list[Edit | None]]:
    """Return the states of addresses, and the states after writing edits into addresses; None for a refused one."""
    found = _run(_ADDRESSES, {"data": case.data, "texts": texts, "edits": edits}, folder)
    return found["read"], found["again"]


def ranges_of(data: dict[str, Any], figures: dict[str, float], folder: Path) -> list[str]:
    """Return step time, samples per second and peak memory with their error ranges, as the page shows them."""
    return _run(_RANGES, {"data": data, "figures": figures}, folder)


def _run(script: str, asked: object, folder: Path) -> Any:
    assert NODE is not None
    path = folder / "figures.js"
    # The scripts that need no elements of the page.
    scripts = ("tables.js", "evaluate.js", "units.js", "command.js", "address.js")
    figures = "\n".join(read_asset(name, "planner.show.explore") for name in scripts)
    path.write_text(figures + script, encoding="utf-8")
    done = subprocess.run(
        [NODE, path], input=json.dumps(asked), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def question(seed: int) -> Case:
    """Return a random chain on random devices with a plan of even cuts: exact records, bounds or compiled programs."""
    rng = random.Random(seed)
    kind, devices = seed % 4, rng.choice([1, 2, 2, 3, 4])
    num_layers = rng.randint(2 * devices, 3 * devices + 3)
    sizes = rng.choice([(1, 2, 4), (1, 4), (1, 2)])
    profile = random_profile(seed, num_layers, exact=kind < 2, sizes=sizes)
    if kind == 3:
        profile = with_programs(profile, seed)
    is_tied = rng.random() < 0.5
    replicas = rng.choice([1, 1, 2])
    layers = [_frozen(layer, rng) if n == 0 else layer for n, layer in enumerate(profile.layers)]
    if kind == 0:
        layers = [_with_split_backward(layer, rng, sizes) for layer in layers]
        layers = [_with_attributes(layer, rng) for layer in layers]
    if is_tied:
        _tie(layers, rng)
    profile = replace(profile, layers=tuple(layers), optimizer_peak=rng.choice(["largest", "sum"]))
    counts = tuple(m for m in (1, 2, 3, 4, 6, 12) if covers_size(profile, 12 // m, extrapolate=False))
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest="sha256:0"),
        devices=devices * replicas,
        memory_bytes=_unlike(rng, [3000, 6000, 20_000], devices) if replicas == 1 else (6000,) * devices * replicas,
        speeds=_unlike(rng, [0.5, 1.0, 2.0], devices) if replicas == 1 and rng.random() < 0.3 else (),
        batch=12 * replicas,
        link=rng.choice(_LINKS),
        inter_link=rng.choice([None, *_LINKS]),
        node_devices=rng.choice([0, 1, 2]),
        allreduce=rng.choice([None, _LINKS[1]]),
        overhead_us=rng.choice([0.0, 4.0]),
        reserve_bytes=rng.choice([0, 100]),
        recompute=rng.choice(_POLICIES),
        replicas=replicas,
        compute=rng.choice([1.0, 1.0, 1.0, 1.1]),
    )
    cuts = _cuts(rng, num_layers, devices)
    partition = Partition(
        schedule="gpipe",
        micro_batches=counts[-1],
        balance=cuts,
        recompute=("never",) * devices,
        replicas=replicas,
    )
    plan = _built(profile, partition, inputs)
    asked = ExplorerRequest(
        plan=plan,
        profile=profile,
        micro_batches=counts,
        command=tuple(solve_command_parts(plan, profile)),
        caveats=tuple(notes_on_missing_options(plan)),
    )
    return Case(asked)


def edits_of(case: Case, seed: int, number: int) -> list[Edit]:
    """Return random edits of schedule, chunks, M, cuts, memory limits and recomputation.

    Cuts differ by at most `case.widths` layers from the page's first ones.
    """
    rng, data = random.Random(seed), case.data
    edits = []
    for _ in range(number):
        at = rng.randrange(len(data["schedules"]))
        chunks = rng.choice(list(data["schedules"][at]["orders"]))
        balance = _cuts(rng, len(data["names"]), data["devices"] * int(chunks))
        width = case.widths[len(balance)]
        if width < len(data["names"]):
            balance = _moved(rng, data["balances"][str(len(balance))], width)
        edit = {
            "schedule": at,
            "chunks": int(chunks),
            "micro_batches": int(rng.choice(list(data["schedules"][at]["orders"][chunks]))),
            "balance": balance,
            "recompute": rng.choice([*_POLICIES, [rng.choice(_POLICIES[2:]) for _ in balance]]),
            "scale": rng.choice([0, 0, -20, 15]),
        }
        edits.append(edit)
    return edits


def plan_of_edit(case: Case, edit: Edit, memory_bytes: tuple[int, ...]) -> Plan:
    """Return the plan with the edit, as `check` would judge it."""
    plan, profile = case.question.plan, case.question.profile
    schedule = schedule_of(case.data["schedules"][edit["schedule"]]["name"])
    partition = Partition(
        schedule=schedule.name,
        micro_batches=edit["micro_batches"],
        balance=tuple(edit["balance"]),
        recompute=tuple(edit["recompute"])
        if isinstance(edit["recompute"], list)
        else ("never",) * len(edit["balance"]),
        chunks=edit["chunks"],
        replicas=plan.replicas,
    )
    inputs = replace(plan.inputs, memory_bytes=memory_bytes)
    if isinstance(edit["recompute"], list):
        return _built(profile, partition, inputs)
    edited = replace(
        plan,
        inputs=replace(inputs, recompute=edit["recompute"]),
        schedule=schedule.name,
        chunks=edit["chunks"],
        micro_batches=edit["micro_batches"],
        micro_batch_size=inputs.batch // plan.replicas // edit["micro_batches"],
    )
    return with_cuts(edited, profile, edit["balance"])


def figures_of(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan under the page's names."""
    predicted = plan.predicted
    return {
        "step_us": predicted.step_us,
        "samples_per_s": predicted.samples_per_s,
        "bubble": predicted.bubble,
        "recompute_share": predicted.recompute_share,
        "recompute": [stage.recompute for stage in plan.stages],
        "forward_us": [stage.forward_us for stage in plan.stages],
        "backward_us": [stage.backward_us for stage in plan.stages],
        "bytes": list(plan.peak_bytes_by_device()),
        "items": [
            {name: sum(dict(stage.memory.items())[name] for stage in stages) for name, _ in StageMemory().items()}
            for stages in plan.by_device()
        ],
    }


def _built(profile: Profile, partition: Partition, inputs: Inputs) -> Plan:

    costs = costs_at(profile, inputs.batch // partition.replicas // partition.micro_batches)
    return Evaluation(costs, partition, inputs.cluster).plan(inputs, SolverReport(method="given", status="given"))


def _unlike(rng: random.Random, choices: Sequence[Any], devices: int) -> tuple[Any, ...]:
    return tuple(rng.choice(choices) for _ in range(devices))


def _cuts(rng: random.Random, num_layers: int, stages: int) -> tuple[int, ...]:
    ends = sorted(rng.sample(range(1, num_layers), stages - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, num_layers], strict=True))


def _moved(rng: random.Random, balance: Sequence[int], width: int) -> tuple[int, ...]:
    """Return other cuts, each at most `width` layers away."""
    num_layers, cuts = sum(balance), [*accumulate(balance)]
    for n, cut in enumerate(cuts[:-1]):
        most = min(cut + width, num_layers - len(cuts) + n + 1)
        cuts[n] = rng.randint(max(cut - width, cuts[n - 1] + 1 if n else 1), most)
    return tuple(b - a for a, b in pairwise([0, *cuts]))


def _frozen(layer: LayerProfile, rng: random.Random) -> LayerProfile:
    return replace(layer, gradient_bytes=0, cast_bytes=0, optimizer_bytes=0) if rng.random() < 0.3 else layer


def _with_attributes(layer: LayerProfile, rng: random.Random) -> LayerProfile:
    size = rng.choice([0, 0, 50])
    details = tuple(replace(d, attribute_bytes=2 * size, renewed_bytes=size) for d in layer.detail)
    return replace(layer, detail=details)


def _with_split_backward(layer: LayerProfile, rng: random.Random, sizes: Sequence[int]) -> LayerProfile:
    """Return the layer with times and memory of a split backward."""
    made, held = rng.randint(0, layer.parameter_bytes), rng.randint(0, 40)
    return replace(
        layer,
        backward_input_us=tuple(0.6 * us for us in layer.backward_us),
        backward_weight_us=tuple(0.5 * us for us in layer.backward_us),
        split=tuple(
            SplitMemory(
                held_bytes=(held + 5) * s,
                held_input_bytes=held * s,
                weight_gradient_bytes=made,
                first_input_peak_bytes=(held + 60) * s,
                input_peak_bytes=(held + 50) * s,
                end_input_peak_bytes=(held + 80) * s,
                first_weight_peak_bytes=made + (held + 9) * s,
                weight_peak_bytes=(held + 30) * s,
            )
            for s in sizes
        ),
    )


def _tie(layers: list[LayerProfile], rng: random.Random) -> None:
    """Let two layers share parameters, or a part of them."""
    first, second = sorted(rng.sample(range(len(layers)), 2))
    for at, other in ((first, second), (second, first)):
        layer = layers[at]
        layers[at] = replace(
            layer,
            parameter_bytes=layer.parameter_bytes + 90,
            tied_bytes=90,
            tied_view_bytes=70,
            tied=(f"{layers[other].name}.weight",),
        )
