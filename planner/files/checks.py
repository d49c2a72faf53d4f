"""Checks of a file's content, other than types."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

from planner.core.errors import UsageError
from planner.core.schedule import check_orders, parse_orders, schedule_of
from planner.core.values.limits import BANDWIDTHS, LARGEST, MOST_ACTIONS, MOST_BATCH, MOST_DEVICES, PRICES, SPEEDS
from planner.core.values.plan import Inputs, Plan, Stage
from planner.core.values.profile import LayerProfile, Profile
from planner.files.kinds import kind_in_schema_key
from planner.files.strict_yaml import KeyPath, Problem

if TYPE_CHECKING:
    from planner.core.values.balance import Balance, StageBalance
    from planner.core.values.calibration import Calibration
    from planner.core.values.links import Links
    from planner.core.values.partial import PartialProfile
    from planner.core.values.run_report import RunReport
    from planner.files.kinds import Value


def find_problems(value: "Value") -> Iterator[Problem]:
    """Yield all problems of the content of a file."""
    yield from _bad_numbers(value, ())
    yield from _PROBLEMS[kind_in_schema_key(value.schema)](value)


def _bad_numbers(value: Any, at: KeyPath) -> Iterator[Problem]:
    if is_dataclass(value):
        for field in fields(value):
            if field.name not in ("alias", "predicted", "settings"):
                yield from _bad_numbers(getattr(value, field.name), (*at, field.name))
    elif isinstance(value, tuple):
        for n, item in enumerate(value):
            yield from _bad_numbers(item, (*at, n))
    elif isinstance(value, (int, float)) and at[0] != "losses":
        if value < 0:
            yield at, f"must not be negative, got {value}", ""
        elif value > LARGEST:
            yield at, "is too large to compute with", ""


def _profile_problems(profile: Profile) -> Iterator[Problem]:
    sizes = profile.micro_batch_sizes
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        yield ("micro_batch_sizes",), f"expected different sizes of at least 1, got {list(sizes)}", ""
    if sizes and max(sizes) > MOST_BATCH:
        yield ("micro_batch_sizes",), f"at most {MOST_BATCH} samples are supported", ""
    if not profile.layers:
        yield ("layers",), "a profile needs at least one layer", ""
    if not 0 < profile.fast_round_ratio <= 1:
        yield ("fast_round_ratio",), "must be above 0 and at most 1", ""
    if profile.slow_round_ratio < 1:
        yield ("slow_round_ratio",), "must be at least 1", ""
    yield from _layers_problems(profile.layers, len(sizes), ())
    yield from _widths_problems(profile)


def _layers_problems(layers: Sequence[LayerProfile], num_sizes: int, at: KeyPath) -> Iterator[Problem]:
    numbers: dict[str, int] = {}
    for n, layer in enumerate(layers):
        here = (*at, "layers", n)
        if layer.name in numbers:
            text = f'"{layer.name}" is already layer {numbers[layer.name]}'
            yield (*here, "name"), text, "layer names are unique"
        numbers[layer.name] = n
        yield from _tie_problems(layer, here, n, numbers)
        for field in fields(layer):
            values = getattr(layer, field.name)
            if not isinstance(values, tuple) or field.name in ("tied", "tied_groups", "modules"):
                continue
            if len(values) != num_sizes and (len(values) or field.default is MISSING):
                text = f"expected {num_sizes} values, one per micro-batch size, got {len(values)}"
                yield (*here, field.name), text, ""


def _widths_problems(profile: Profile) -> Iterator[Problem]:
    seen, names = {profile.tensor_parallel}, [layer.name for layer in profile.layers]
    if profile.tensor_parallel < 1:
        yield ("tensor_parallel",), "must be at least 1", ""
    for n, width in enumerate(profile.widths):
        at = "widths", n
        if width.tensor_parallel < 1 or width.tensor_parallel in seen:
            yield (*at, "tensor_parallel"), f"expected another width, at least 1, got {width.tensor_parallel}", ""
        seen.add(width.tensor_parallel)
        if [layer.name for layer in width.layers] != names:
            yield (*at, "layers"), "expected the layers of the profile, by name and in order", ""
        yield from _layers_problems(width.layers, len(profile.micro_batch_sizes), at)


def _tie_problems(layer: LayerProfile, at: KeyPath, n: int, numbers: Mapping[str, int]) -> Iterator[Problem]:
    if layer.tied_bytes > layer.parameter_bytes:
        text = f"{layer.tied_bytes} bytes cannot be shared, because the layer has {layer.parameter_bytes}"
        yield (*at, "tied_bytes"), text, ""
    if sum(group.bytes for group in layer.tied_groups) > layer.tied_bytes:
        yield (*at, "tied_groups"), f"more than {layer.tied_bytes} bytes (`tied_bytes`) are in groups", ""
    if any(numbers.get(name, n) == n for group in layer.tied_groups for name in group.layers or [layer.name]):
        yield (*at, "tied_groups"), "expected names of earlier layers", ""


def _plan_problems(plan: Plan) -> Iterator[Problem]:
    if len(plan.stages) != len(plan.balance):
        text = f"{len(plan.stages)} stages, but the balance has {len(plan.balance)}"
        yield ("stages",), text, "keep `balance` and `stages` of equal length, or solve again"
    yield from _inputs_problems(plan.inputs)
    if plan.chunks < 1 or len(plan.balance) % plan.chunks:
        text = f"{len(plan.balance)} stages cannot be {plan.chunks} chunks on each device"
        yield ("chunks",), text, "solve again"
    yield from _order_problems(plan)
    if plan.replicas < 1:
        yield ("replicas",), "must be at least 1", ""
    if plan.tensor_parallel < 1 or plan.inputs.node_devices % plan.tensor_parallel:
        text = f"nodes of {plan.inputs.node_devices} devices do not hold whole groups of {plan.tensor_parallel}"
        yield ("tensor_parallel",), text if plan.tensor_parallel else "must be at least 1", ""
    if plan.micro_batches < 1:
        yield ("micro_batches",), "must be at least 1", ""
    elif plan.micro_batches * len(plan.balance) > MOST_ACTIONS:
        text = f"{len(plan.balance)} stages with {plan.micro_batches} micro-batches are too many to simulate"
        yield ("micro_batches",), text, f"stages times micro-batches are at most {MOST_ACTIONS}"
    elif plan.micro_batches * plan.micro_batch_size * plan.replicas != plan.inputs.batch:
        side_by_side = f" in each of {plan.replicas} replicas" if plan.replicas > 1 else ""
        text = (
            f"{plan.micro_batches} micro-batches of {plan.micro_batch_size} samples{side_by_side} are "
            f"{plan.micro_batches * plan.micro_batch_size * plan.replicas}, not the batch of {plan.inputs.batch}"
        )
        yield ("micro_batches",), text, "make micro_batches · micro_batch_size (· replicas) = inputs.batch"

    yield from _recompute_problems(plan.stages)


def _order_problems(plan: "Plan | Balance") -> Iterator[Problem]:
    if plan.chunks < 1 or not plan.balance:
        return  # reported by another check
    try:
        schedule = schedule_of(plan.schedule, plan.order)
        if plan.order and plan.schedule != schedule.name:
            text = f"is that of the schedule `{schedule.name}`, but `schedule` is `{plan.schedule}`"
            yield ("order",), text, "remove `order`, or solve again"
            return
        if plan.order:
            check_orders(parse_orders(plan.order), plan.micro_batches)
            schedule.check_supported(plan.num_devices, plan.micro_batches, plan.chunks)
        if plan.num_devices > 1 and plan.placement != schedule.placement:
            text = f"is `{plan.placement}`, but the schedule's is `{schedule.placement}`"
            yield ("placement",), text, "remove it, or solve again"
    except UsageError as error:
        yield ("order",), error.message, error.hint


def _is_speed(value: float) -> bool:
    return SPEEDS[0] <= value <= SPEEDS[1]


def _calibrated_problems(values: "Calibration | Inputs", at: KeyPath = ()) -> Iterator[Problem]:
    if not _is_speed(values.compute):
        yield (*at, "compute"), "must be from 1e-6 to 1e6", "1 means times as profiled, 2 means twice as long"
    if values.step_ratio is not None and not _is_speed(values.step_ratio):
        yield (*at, "step_ratio"), "must be from 1e-6 to 1e6", "1 means a step as predicted, 2 means twice as long"


def _inputs_problems(inputs: Inputs) -> Iterator[Problem]:
    if len(inputs.memory_bytes) != inputs.devices:
        text = f"expected {inputs.devices} memory limits, one per device, got {len(inputs.memory_bytes)}"
        yield ("inputs", "memory_bytes"), text, ""
    if inputs.devices > MOST_DEVICES or inputs.batch > MOST_BATCH:
        text = f"{inputs.devices} devices and a batch of {inputs.batch}"
        yield ("inputs",), f"{text}: at most {MOST_DEVICES} and {MOST_BATCH} are supported", ""
    yield from _calibrated_problems(inputs, ("inputs",))
    for name in ("tokens", "samples"):
        if not 0 <= getattr(inputs, name) <= LARGEST:
            yield ("inputs", name), f"must be from 0 to {LARGEST}", "0 is unknown"
    if inputs.price != 0 and not PRICES[0] <= inputs.price <= PRICES[1]:
        yield ("inputs", "price"), f"must be 0, or from {PRICES[0]:g} to {PRICES[1]:g}", "0 is unknown"
    if len(inputs.speeds) not in (0, inputs.devices) or not all(map(_is_speed, inputs.speeds)):
        text = f"expected {inputs.devices} speeds from 1e-6 to 1e6, one per device, got {list(inputs.speeds)[:20]}"
        yield ("inputs", "speeds"), text, ""
    links = [((name,), getattr(inputs, name)) for name in ("link", "inter_link", "allreduce")]
    for at, link in (*links, *((("links", n), link) for n, link in enumerate(inputs.links))):
        if link is not None and link.bytes_per_s != 0 and not BANDWIDTHS[0] <= link.bytes_per_s <= BANDWIDTHS[1]:
            yield ("inputs", *at, "bytes_per_s"), "must be from 1 to 1e18 bytes per second, or 0", "0 is unlimited"
    if inputs.links and len(inputs.links) < inputs.devices - 1:
        text = f"expected {inputs.devices - 1} links, one after every device but the last, got {len(inputs.links)}"
        yield ("inputs", "links"), text, ""


def _recompute_problems(stages: "Sequence[Stage | StageBalance]") -> Iterator[Problem]:
    for k, stage in enumerate(stages):
        if stage.recomputed and stage.recompute != "layers":
            text = f"names layers, but the stage's `recompute` is `{stage.recompute}`"
            yield ("stages", k, "recomputed"), text, "write `recompute: layers`, or remove the list"
        elif stage.recompute == "layers" and not stage.recomputed:
            yield ("stages", k, "recompute"), "`layers` needs a list of layers in `recomputed`", ""
        twice = [name for n, name in enumerate(stage.recomputed) if name in stage.recomputed[:n]]
        if twice:
            yield ("stages", k, "recomputed"), f'names "{twice[0]}" twice', ""


def _balance_problems(balance: "Balance") -> Iterator[Problem]:
    layers = [len(stage.layers) for stage in balance.stages]
    if list(balance.balance) != layers or not layers or min(layers) < 1:
        text = f"{list(balance.balance)} layers per stage, but the stages name {layers}"
        yield ("balance",), text, "run `gpipe-plan emit` again"
    if balance.micro_batches < 1 or balance.batch < 1 or balance.batch % balance.micro_batches:
        text = f"a batch of {balance.batch} cannot be split into {balance.micro_batches} equal micro-batches"
        yield ("micro_batches",), text, "run `gpipe-plan emit` again"
    if balance.smaller != tuple(sorted({*balance.smaller}, reverse=True)) or min(balance.smaller, default=1) < 1:
        text = f"{list(balance.smaller)} are not numbers of processes, in decreasing order"
        yield ("smaller",), text, "run `gpipe-plan emit` again"
    yield from _order_problems(balance)
    yield from _recompute_problems(balance.stages)
    for k, stage in enumerate(balance.stages):
        elsewhere = [name for name in stage.recomputed if name not in stage.layers]
        if elsewhere:
            text = f'"{elsewhere[0]}" is not a layer of this stage'
            yield ("stages", k, "recomputed"), text, "run `gpipe-plan emit` again"


def _links_problems(links: "Links") -> Iterator[Problem]:
    if not links.boundaries:
        yield ("boundaries",), "at least one link between neighbors is needed", "measure again"
    for n, boundary in enumerate(links.boundaries):
        if len(boundary.sample_bytes) != len(boundary.sample_us):
            text = f"expected {len(boundary.sample_bytes)} times, one per size, got {len(boundary.sample_us)}"
            yield ("boundaries", n, "sample_us"), text, ""


def _partial_problems(partial: "PartialProfile") -> Iterator[Problem]:
    for n, measurement in enumerate(partial.measurements):
        for first, second in (("forward_us", "backward_us"), ("backward_input_us", "backward_weight_us")):
            repeats, got = len(getattr(measurement, first)), len(getattr(measurement, second))
            if repeats != got:
                text = f"expected {repeats} values, one per repeat, got {got}"
                yield ("measurements", n, second), text, "delete the file to start over"


def _run_problems(report: "RunReport") -> Iterator[Problem]:
    if not report.stages:
        yield ("stages",), "a run has at least one stage", ""


_PROBLEMS: Final[Mapping[str, Callable[[Any], Iterator[Problem]]]] = {
    "profile": _profile_problems,
    "plan": _plan_problems,
    "run": _run_problems,
    "balance": _balance_problems,
    "links": _links_problems,
    "calibration": _calibrated_problems,
    "partial": _partial_problems,
}
"""Check function for each kind of file. The keys are those of `planner.files.kinds.KINDS`."""
