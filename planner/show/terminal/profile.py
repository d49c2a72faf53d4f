"""Profile as text: model, device, and the costs of every layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.table import Table
from rich.text import Text

from planner.core.cost.width import tensor_parallel_widths
from planner.core.values.printable import printable
from planner.core.values.profile import Device, LayerProfile, Profile
from planner.core.values.units import format_bytes, pluralize
from planner.show.terminal.rendering import BLANK, heading, render, wrap_items
from planner.show.terminal.style import Style
from planner.show.terminal.tables import TextColumn, rich_table
from planner.show.views.certainty import speed_words
from planner.show.views.numbers import NOTHING, TimeUnit, format_count, layer_range, percent

_WIDE = 84
_WIDEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerFigure:
    header: str
    value_of: Callable[[LayerProfile], float]
    format_value: Callable[[float], str]
    total: bool = True
    """True if the table shows the sum of the column."""


def profile_text(profile: Profile, style: Style) -> str:
    """Return model, device and costs of every layer, at the largest micro-batch size, as text.

    Successive equal layers share a row, such as `block_0 … block_7 (8)`. The row has the costs of one layer.
    """
    title = printable(profile.model.source) or "profile"
    size = _largest(profile)
    caption = f"one micro-batch of {profile.micro_batch_sizes[size]}; a row of several layers shows the costs of one"
    return render(
        style,
        heading(title),
        *_facts(profile, style),
        BLANK,
        _layer_table(profile, style),
        Text(caption, style="dim"),
        *_notes(profile, style),
    )


def _largest(profile: Profile) -> int:
    return profile.micro_batch_sizes.index(max(profile.micro_batch_sizes))


def _reserve(device: Device) -> str:
    if device.how != "estimated":
        return f"reserve {format_bytes(device.reserve_bytes)}" if device.reserve_bytes else ""
    return f"reserve {format_bytes(device.reserve_bytes)}, assumed" if device.reserve_bytes else "no reserve"


def _facts(profile: Profile, style: Style) -> list[Text]:
    device, environment = profile.device, profile.environment
    model = [
        pluralize(len(profile.layers), "layer"),
        f"shared by {', '.join(map(str, tensor_parallel_widths(profile)))} GPUs"
        if max(tensor_parallel_widths(profile)) > 1
        else "",
        f"{profile.model.parameters:,} parameters" if profile.model.parameters else "",
        printable(f"optimizer {profile.optimizer}") if profile.optimizer else "",
        *(printable(f"{name}={value}") for name, value in profile.model.settings.items()),
    ]
    machine = [
        printable(f"{device.kind} {device.name}".strip()),
        format_bytes(device.memory_bytes) if device.memory_bytes else "",
        device.how,
        _reserve(device),
        printable(environment.dtype),
        printable(f"torch {environment.torch}") if environment.torch else "",
        pluralize(environment.threads, "thread"),
    ]
    sizes = ", ".join(map(str, profile.micro_batch_sizes))
    return [
        wrap_items(filter(None, model), style, gap=" · "),
        wrap_items(filter(None, machine), style, gap=" · "),
        Text(f"micro-batch sizes {sizes}"),
        *([] if profile.proof is None else [wrap_items([printable(str(profile.proof))], style, gap=" · ")]),
    ]


def _layer_table(profile: Profile, style: Style) -> Table:
    figures = _figures(profile, style)
    columns = [TextColumn(header="layer", footer="total", number=False)]
    columns += [
        TextColumn(header=f.header, footer=f.format_value(sum(map(f.value_of, profile.layers))) if f.total else "")
        for f in figures
    ]
    rows = []
    for group in _alike(profile.layers):
        first, last = group[0], group[-1]
        name = printable(layer_range(first.name, last.name, len(group) if len(group) > 1 else None))
        rows.append([name, *(f.format_value(f.value_of(first)) for f in figures)])
    return rich_table(columns, rows)


def _alike(layers: Sequence[LayerProfile]) -> list[list[LayerProfile]]:
    def key(numbered: tuple[int, LayerProfile]) -> tuple[object, ...]:
        n, layer = numbered
        costs = (layer.parameter_bytes, layer.forward_us, layer.backward_us, layer.saved_bytes, layer.output_bytes)
        return (layer.digest, *costs) if layer.digest else (n,)

    return [[layer for _, layer in group] for _, group in groupby(enumerate(layers), key)]


def _figures(profile: Profile, style: Style) -> list[_LayerFigure]:
    n = _largest(profile)
    layers = profile.layers
    scale = TimeUnit.fitting(time for layer in layers for time in (layer.forward_us[n], layer.backward_us[n]))
    figures = [
        _LayerFigure(header="parameters", value_of=lambda x: x.parameter_bytes, format_value=format_bytes),
        _LayerFigure(header=f"forward\n{scale.unit}", value_of=lambda x: x.forward_us[n], format_value=scale.text),
        _LayerFigure(header=f"backward\n{scale.unit}", value_of=lambda x: x.backward_us[n], format_value=scale.text),
        _LayerFigure(header="saved", value_of=lambda x: x.saved_bytes[n], format_value=format_bytes),
    ]
    if style.has_room_for(_WIDE):
        figures.append(
            _LayerFigure(header="output", value_of=lambda x: x.output_bytes[n], format_value=format_bytes, total=False)
        )
        figures.append(
            _LayerFigure(
                header="forward\nFLOP",
                value_of=lambda x: x.forward_flops[n] if x.forward_flops else 0,
                format_value=_flops,
            )
        )
    if style.has_room_for(_WIDEST) and len(profile.micro_batch_sizes) > 1:
        figures += _per_sample(profile)
    return figures


def _flops(count: float) -> str:
    return format_count(count) if count else NOTHING


def _per_sample(profile: Profile) -> list[_LayerFigure]:
    sizes = (min(profile.micro_batch_sizes), max(profile.micro_batch_sizes))
    scale = TimeUnit.fitting(_us_per_sample(profile, size, layer) for size in sizes for layer in profile.layers)
    return [
        _LayerFigure(
            header=f"{scale.unit}/sample\nat {size}",
            value_of=partial(_us_per_sample, profile, size),
            format_value=scale.text,
        )
        for size in sizes
    ]


def _us_per_sample(profile: Profile, size: int, layer: LayerProfile) -> float:
    n = profile.micro_batch_sizes.index(size)
    return (layer.forward_us[n] + layer.backward_us[n]) / size


def _notes(profile: Profile, style: Style) -> list[Text]:
    notes = [wrap_items([head, *(printable(name) for name in names)], style, gap=" ") for head, names in _ties(profile)]
    spreads = [(spread, x.name, n) for x in profile.layers for n, spread in enumerate(x.spread)]
    if spreads and max(spreads)[0] > 0:
        spread, name, n = max(spreads)
        at = f"{printable(name)} at micro-batch size {profile.micro_batch_sizes[n]}"
        notes.append(Text(f"least certain time: {at}, ±{percent(spread)}", style="dim"))
    if varied := speed_words(profile.fast_round_ratio, profile.slow_round_ratio):
        notes.append(Text(varied, style="dim"))
    return notes


def _ties(profile: Profile) -> Iterator[tuple[str, tuple[str, ...]]]:
    # A group of layers that all share parameters has one title; other layers have a title each.
    groups: dict[frozenset[str], list[LayerProfile]] = {}
    for layer in profile.layers:
        if layer.tied:
            groups.setdefault(frozenset((layer.name, *layer.tied)), []).append(layer)
    for layers in groups.values():
        if len(layers) > 1:
            yield f"{len(layers)} layers share parameters:", tuple(layer.name for layer in layers)
        else:
            yield f"{printable(layers[0].name)} shares", layers[0].tied
