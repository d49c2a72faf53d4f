"""Plan with its layers grouped by stage, and functions that several emitters share."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from planner import __version__
from planner.core.cost.partition import Partition, check_partition
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Schedule, schedule_of
from planner.core.values.plan import Plan
from planner.core.values.printable import escape_unprintable
from planner.core.values.profile import LayerProfile, Profile
from planner.core.values.units import pluralize
from planner.emit.signature import with_signature

_PATH = re.compile(r"\w+(\.\w+)*")
_BLOCK = re.compile(r"(?P<kind>block|encoder|decoder)_\d+")
"""Pattern of block names in the formulas of GPT and encoder-decoders; others use the module names of torchtitan."""

_WIDTH = 110

_SHARDING_ENGINES: Final = ("megatron", "torchtitan", "automodel")
"""Engines that support tensor parallelism and a sharded optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """Text of a file for another engine, with its name and instructions for its use."""

    name: str
    text: str
    notes: tuple[str, ...]
    """Remarks about parts of the plan that the format cannot express. The text contains these remarks."""
    use: str
    """Call or command that uses the file."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Texts, by file name, of other files that the engine needs in the same folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLayout:
    """Plan, with its layers from the profile grouped by stage."""

    plan: Plan
    stages: tuple[tuple[LayerProfile, ...], ...]
    expert_parallel: int = 1
    """Number of replicas among which the experts of each layer are divided."""
    sequence_parallel: bool = False
    """True if tensor parallelism also divides activations along the sequence (sequence parallelism)."""
    recompute_attention: bool = False
    """True if the backward recomputes only attention."""
    formula: str = ""
    """Name of the formula that computed the profile; empty for the profile of a model."""

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> "PlanLayout":
        """Return the layout of `plan`, with layers from `profile`.

        Raises:
            UsageError: The plan does not match the layers of the profile.
        """
        partition = Partition.of(plan, [layer.name for layer in profile.layers])
        check_partition(partition, num_layers=len(profile.layers), num_devices=plan.cluster.num_devices)
        settings = profile.model.settings
        # Settings of measured models can have any names, so only settings of formulas have a known meaning.
        assumed = settings if "formula" in settings else {}
        return cls(
            plan=plan,
            stages=tuple(profile.layers[first:end] for first, end in partition.intervals()),
            expert_parallel=profile.expert_parallel,
            sequence_parallel=bool(assumed.get("sequence_parallel")) and plan.tensor_parallel > 1,
            recompute_attention=bool(assumed.get("recompute_attention")),
            formula=str(assumed.get("formula", "")),
        )

    @property
    def schedule(self) -> Schedule:
        return schedule_of(self.plan.schedule, self.plan.order)

    @property
    def schedule_name(self) -> str:
        """Name of the schedule in torch; if torch lacks the schedule, its usual name."""
        return self.schedule.torch_name or self.schedule.title

    @property
    def placement_schedule_name(self) -> str:
        """Name of a torch schedule with the plan's placement of stages; empty if torch has none."""
        several = self.plan.chunks > 1
        alike = (
            schedule.torch_name
            for schedule in SCHEDULES.values()
            if schedule.placement == self.plan.placement
            and schedule.is_chunked == several
            and schedule.exact_chunks in (None, self.plan.chunks)
            and schedule.torch_name
        )
        return self.schedule.torch_name or next(alike, "")

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        return tuple(layer for stage in self.stages for layer in stage)

    @property
    def devices_of_stages(self) -> tuple[int, ...]:
        """Index of each stage's device."""
        return tuple(self.plan.device_of(stage) for stage in self.plan.stages)

    def module_paths(self, engine: str) -> tuple[tuple[str, ...], ...]:
        """Return the module paths of each stage.

        Raises:
            UsageError: A layer has no module path.
        """
        self.refuse_formula(engine)
        for layer in self.layers:
            if not all(_PATH.fullmatch(path) for path in module_paths_of(layer)):
                raise UsageError(
                    f'{engine} cuts between modules, but the layer "{layer.name}" is not a module with a path',
                    hint="profile the model in whole blocks, or emit for the bundled executor: `--format native`",
                )
        return tuple(tuple(path for layer in stage for path in module_paths_of(layer)) for stage in self.stages)

    def sequential_paths(self, engine: str) -> tuple[tuple[str, ...], ...]:
        """Return the module paths of each stage, for engines that run modules in sequence.

        Raises:
            UsageError: A layer has no module path, or has several modules.
        """
        for layer in self.layers:
            if len(module_paths_of(layer)) > 1:
                raise UsageError(
                    f"{engine} runs modules one after the other, but the layer "
                    f'"{layer.name}" is {len(layer.modules)} modules that the model\'s own code connects',
                    hint="write the model as an `nn.Sequential`, or use another `--format`",
                )
        return self.module_paths(engine)

    def tied_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of names of layers that share parameters."""
        layer_of = {path: n for n, layer in enumerate(self.layers) for path in module_paths_of(layer)}
        pairs: dict[tuple[int, int], None] = {}
        for n, layer in enumerate(self.layers):
            others = (layer_of.get(path) for name in layer.tied for path in paths_above(name))
            pairs |= dict.fromkeys((other, n) for other in others if other is not None and other < n)
        return tuple((self.layers[first].name, self.layers[second].name) for first, second in pairs)

    def tied_pairs_across_stages(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of names of layers in different stages that share parameters."""
        stage_of = {layer.name: k for k, stage in enumerate(self.stages) for layer in stage}
        return tuple(pair for pair in self.tied_pairs() if stage_of[pair[0]] != stage_of[pair[1]])

    def together_option(self, first: str, second: str) -> str | None:
        """Return the `solve` option that keeps two layers in one stage; None if this stage would have all layers."""
        names = [layer.name for layer in self.layers]
        num_layers = names.index(second) - names.index(first) + 1
        return None if num_layers == len(names) else f"`--together {first},{second}`"

    def refuse_formula(self, engine: str, *, block_kind: str = "") -> None:
        """Raise UsageError if a formula named the profile's layers, and the engine has no modules for these names.

        Formulas of GPT and of encoder-decoders give blocks names such as `block_3`, `encoder_3` or `decoder_3`, which
        are no module paths. An engine can find such blocks only if its own model has the same kind of blocks. No error
        is raised for the other formulas, which use the module names of torchtitan.

        Args:
            engine: Name of the engine, for the message.
            block_kind: Kind of block in the engine's own model, such as `block`; empty if the engine has no model.
        """
        kinds = {match["kind"] for layer in self.layers if (match := _BLOCK.fullmatch(layer.name))}
        if self.formula and kinds - {block_kind}:
            raise UsageError(
                f"{engine} has no model of the formula `{self.formula}`, so its modules have no names to cut at",
                hint="emit `--format csv`, the schedule alone; or profile the model itself: `--from-formula never`",
            )

    def refuse_chunks(self, engine: str) -> None:
        """Raise UsageError if a device of the plan runs several stages."""
        if self.plan.chunks > 1:
            title = self.schedule.title
            raise UsageError(
                f"{engine} runs one stage on each device, but the plan's schedule has {self.plan.chunks} ({title})",
                hint="solve with `--schedule 1f1b` or `gpipe`; or emit `--format torch` or `torchtitan`",
            )

    def refuse_placement(self, engine: str) -> None:
        """Raise UsageError if no schedule of torch has the plan's placement of stages."""
        if not self.placement_schedule_name:
            raise UsageError(
                f"{engine} does not place {self.plan.chunks} stages on each device as a {self.plan.placement.upper()}",
                hint="emit for the bundled executor: `--format native`",
            )

    def schedule_notes(self, engine: str, *supported: Schedule) -> list[str]:
        """Return a note if the plan's schedule is not among the schedules that the engine supports."""
        if self.schedule in supported:
            return []
        planned = f"{'a ' * (self.plan.schedule == 'search')}{self.schedule_name}"
        text = f"the plan uses {planned}, but {engine} runs {supported[0].torch_name}"
        return [f"{text}: step time and memory will differ; solve with `--schedule {supported[0].name}`"]

    def split_backward_notes(self) -> list[str]:
        """Return a note about torch's additional memory if the schedule has split backward passes."""
        if not self.schedule.splits_backward:
            return []
        return ["torch splits backwards differently, and needs more memory than planned between I and W"]

    def recompute_notes(self, text: str) -> list[str]:
        """Return a note with `text` and the recompute choices of the stages; no note if no stage recomputes."""
        runs = [(choice, [s.index for s in run]) for choice, run in groupby(self.plan.stages, lambda s: s.recompute)]
        if [choice for choice, _ in runs] == ["never"]:
            return []
        places = (f"stages {run[0]} to {run[-1]}" if len(run) > 1 else f"stage {run[0]}" for _, run in runs)
        planned = ", ".join(f"{choice} on {place}" for (choice, _), place in zip(runs, places, strict=True))
        return [f"{text} (planned: {planned})"]

    def assumption_notes(
        self, *, sequence_option: str = "", expert_option: str = "", attention_option: str = ""
    ) -> list[str]:
        """Return a note for each engine option that the predicted memory assumes to be set.

        Args:
            sequence_option: Name of the option for sequence parallelism; empty if not needed.
            expert_option: Name of the option for expert parallelism, which sets the number of replicas among which the
                experts are divided; empty if not needed.
            attention_option: Name of the option for recomputation of attention; empty if not needed.
        """
        assumed = {
            "division along the sequence": sequence_option if self.sequence_parallel else "",
            f"experts divided among {self.expert_parallel} replicas": expert_option if self.expert_parallel > 1 else "",
            "recomputed attention": attention_option if self.recompute_attention else "",
        }
        return [f"the memory assumes {what}: set `{option}`" for what, option in assumed.items() if option]

    def replica_notes(self, engine: str) -> list[str]:
        """Return a note if the plan has several replicas, which the engine's format cannot express."""
        count = self.plan.replicas
        if count == 1:
            return []
        return [f"{engine}'s format has one pipeline: start {count} of them and sum their gradients yourself"]


def refuse_tensor_parallel_or_sharded(engine: str, plan: Plan) -> None:
    """Raise UsageError if the engine does not support the plan's tensor parallelism or sharded optimizer."""
    if engine in (*_SHARDING_ENGINES, "csv"):
        return
    if plan.tensor_parallel > 1:
        what, otherwise = f"{plan.tensor_parallel} GPUs share each layer", "with `--tensor-parallel 1`"
    elif plan.shards_optimizer:
        what, otherwise = f"{plan.replicas} replicas divide the optimizer", "without `--shard-optimizer`"
    else:
        return
    name = "the bundled executor" if engine == "native" else f"`--format {engine}`"
    raise UsageError(
        f"in the plan, {what}, which {name} does not support",
        hint=f"emit `--format {'`, `'.join(_SHARDING_ENGINES)}`; or solve {otherwise}",
    )


def module_paths_of(layer: LayerProfile) -> tuple[str, ...]:
    """Return the paths of a layer's modules."""
    return layer.modules or (layer.name,)


def paths_above(path: str) -> list[str]:
    """Return the paths of a module's parents, nearest parent first: `a.b` and `a` for `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def signed_text(
    layout: PlanLayout, body: str, *, engine: str, option: str, notes: Sequence[str], docstring: str = ""
) -> str:
    """Return the text of an engine's file: comments that begin with `#`, then `body`, then a digest to detect edits.

    Args:
        layout: Plan with the layers of each stage.
        body: Text of the file without the comments at its beginning.
        engine: Name of the engine, as shown to people.
        option: Name of the engine as a value of `emit --format`.
        notes: Remarks about parts of the plan that are not in the file.
        docstring: Further comment, about the use of the file.
    """
    plan = layout.plan
    lines = [
        f"For {engine}: written by `gpipe-plan emit --format {option}` (gpipe-plan {__version__}).",
        f"Plan: {pluralize(len(layout.stages), 'stage')}, {layout.schedule_name}, M = {plan.micro_batches} "
        f"micro-batches of {pluralize(plan.micro_batch_size, 'sample')}"
        + (f", {plan.replicas} replicas" if plan.replicas > 1 else "")
        + (f", {plan.tensor_parallel} GPUs per stage." if plan.tensor_parallel > 1 else "."),
    ]
    lines += ["", *docstring.splitlines()] if docstring else []
    if notes:
        lines += ["", "Not included:"]
        lines += [line for note in notes for line in textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")]
    # Names come from files and must not be able to end a comment.
    header = "".join(f"# {escape_unprintable(line)}".rstrip() + "\n" for line in lines)
    return with_signature(f"{header}\n{body}")


def python_assignments(**values: Any) -> str:
    """Return Python assignments. Each entry of a mapping or of a long list has its own line."""
    return "".join(f"{name} = {_python(value, '')}\n" for name, value in values.items())


def _python(value: Any, indent: str) -> str:
    flat = json.dumps(value)
    inner = indent + "    "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_python(item, inner)}" for key, item in value.items()]
    elif isinstance(value, list) and len(flat) > _WIDTH - 20:
        entries = [_python(item, inner) for item in value]
    else:
        return flat
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "".join([f"{opening}\n", *(f"{inner}{entry},\n" for entry in entries), indent, closing])
