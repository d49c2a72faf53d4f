"""Emitter of `balance.yaml` and `train.py` for the bundled executor."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

from planner import __version__
from planner.core.errors import UsageError
from planner.core.values.balance import Balance, RunPrediction, StageBalance, balance_path_for_processes, launch_command
from planner.core.values.devices import training_device_kind
from planner.core.values.plan import Inputs, Plan, Stage
from planner.core.values.precision import precision_option_of
from planner.core.values.profile import THIS_TOOL, Device, Profile
from planner.core.values.units import format_bytes, format_speed, format_us, pluralize
from planner.emit.layout import PlanLayout, refuse_tensor_parallel_or_sharded
from planner.emit.signature import with_signature
from planner.files import digest_of, dump, reference_path, relocate_source

_HEADER = """\
Layers of each stage, written by `gpipe-plan emit`.
To change it, edit the plan and emit again. train.py rejects a model with other layers."""


RepeatOptions = Callable[[Inputs, Device], tuple[str, ...]]
"""Function (inputs of a plan, device of its profile) -> options of `solve` to compute the plan again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPaths:
    """Paths of the plans and the profile from which a script is made; `-` means standard input."""

    plan: str = "plan.yaml"
    profile: str = "profile.yaml"
    smaller: tuple[str, ...] = ()
    """Paths of the plans for fewer processes, in the given order."""


@dataclass(frozen=True, kw_only=True)
class NativeFiles:
    """Texts of `balance.yaml`, `train.py` and other files with which the bundled executor runs a plan."""

    balance: str
    script: str
    name: str
    notes: tuple[str, ...] = ()
    """Remarks about the files."""
    use: str
    """Shell command that starts the training script."""
    smaller: Mapping[str, str] = field(default_factory=dict)
    """Text of each balance configuration for fewer processes, by file name."""
    plans: tuple[Balance, ...]
    """All balance configurations, most processes first."""


def emit_native(
    plan: Plan,
    profile: Profile,
    *,
    folder: str,
    profile_folder: str,
    smaller: Sequence[Plan] = (),
    input_paths: InputPaths = InputPaths(),
    repeat_options: RepeatOptions | None = None,
) -> NativeFiles:
    """Return the balance configuration and the training script of a plan.

    Args:
        plan: Plan that the script runs.
        profile: Profile of the plan.
        folder: Folder for the emitted files.
        profile_folder: Folder of the profile. The model's path in the profile is relative to this folder.
        smaller: Plans for fewer processes. The script uses the plan for the number of started processes.
        input_paths: Paths of plans and profile, for commands that the script prints.
        repeat_options: Function that returns the `solve` options of these commands.

    Raises:
        UsageError: A plan does not match the profile, or has tensor parallelism or a sharded optimizer. Also raised if
            the profile names no model, a plan in `smaller` has another mini-batch size or more processes than `plan`,
            or two plans have equally many processes.
    """
    refuse_tensor_parallel_or_sharded("native", plan)
    layout = PlanLayout.of(plan, profile)
    source = relocate_source(profile.model.source, profile_folder, folder)
    from_here = str(Path(folder, "balance.yaml"))

    def planned(of: Plan, path: str) -> RunPrediction:
        paths = {"plan": reference_path(path, from_here), "profile": reference_path(input_paths.profile, from_here)}
        return RunPrediction(
            step_us=of.predicted.step_us,
            reserve_bytes=of.inputs.reserve_bytes,
            device="" if training_device_kind(profile.device.kind) == profile.device.kind else profile.device.kind,
            solve=() if repeat_options is None else repeat_options(of.inputs, profile.device),
            # A file from standard input has no path, so that the default name is used.
            **{name: at for name, at in paths.items() if at != "-"},
        )

    where = input_paths.smaller or ("-",) * len(smaller)
    balances = (
        replace(_balance(PlanLayout.of(other, profile), profile, source), planned=planned(other, path))
        for other, path in zip(smaller, where, strict=True)
    )
    fewer = sorted(balances, key=lambda b: -b.num_processes)
    script = Path(folder, "train.py")
    emitted = emit_from_template(
        layout,
        profile,
        source,
        template=("planner.emit", "train_template.py.txt"),
        script=script,
        start_command=launch_command(plan.num_devices * plan.replicas, str(script)),
        smaller=tuple(other.num_processes for other in fewer),
        planned=planned(plan, input_paths.plan),
    )
    plans = (*emitted.plans, *fewer)
    for larger, other in pairwise(plans):
        _check_smaller(larger, other)
    texts = {
        balance_path_for_processes(Path("balance.yaml"), b.num_processes).name: with_signature(dump(b, header=_HEADER))
        for b in fewer
    }
    return replace(emitted, smaller=texts, plans=plans)


def _check_smaller(larger: Balance, other: Balance) -> None:
    if other.num_processes >= larger.num_processes:
        raise UsageError(
            f"a plan for {pluralize(other.num_processes, 'process', 'es')} is not smaller than the plan for "
            f"{larger.num_processes}",
            hint="give `--smaller` plans with fewer processes than PLAN, each with a different number of processes",
        )
    if other.batch != larger.batch:
        raise UsageError(
            f"the plan for {pluralize(other.num_processes, 'process', 'es')} has a batch of {other.batch}, the one "
            f"for {larger.num_processes} of {larger.batch}: training would differ",
            hint=f"solve it with `--batch {larger.batch}`",
        )


def emit_from_template(
    layout: PlanLayout,
    profile: Profile,
    source: str,
    *,
    template: tuple[str, str],
    script: Path,
    start_command: str,
    notes: tuple[str, ...] = (),
    smaller: tuple[int, ...] = (),
    planned: RunPrediction | None = None,
    **values: int,
) -> NativeFiles:
    """Return a plan's balance configuration, and a training script made from `template` (package, file name).

    Args:
        layout: Plan with the layers of each stage.
        profile: Profile of the plan.
        source: Python file and name of the model, such as `model.py:build_model`, relative to the script's folder.
        template: Package and file name of the template.
        script: Path of the script.
        start_command: Shell command that starts the training script.
        notes: Remarks about the files.
        smaller: Number of processes of each plan for fewer processes.
        planned: Predictions that a run compares with its measurements.
        **values: Values of the template's other placeholders.

    Raises:
        UsageError: The profile names no model.
    """
    if not profile.model.source:
        if "formula" not in profile.model.settings:
            raise UsageError("the profile names no model file, so there is nothing to train", hint="profile a model.py")
        raise UsageError(
            "the profile was estimated by a formula, so there is no model that a script could train",
            hint="for other engines: `--format megatron` or `--format torchtitan`; for a script, profile a model.py",
        )
    balance = replace(_balance(layout, profile, source), smaller=smaller, planned=planned)
    text = _script(template, script.as_posix(), layout, balance, **values)
    return NativeFiles(
        balance=with_signature(dump(balance, header=_HEADER)),
        script=with_signature(text),
        name=script.name,
        notes=notes,
        use=start_command,
        plans=(balance,),
    )


def decisions_digest(plan: Plan) -> str:
    """Return a digest of the plan's decisions (such as schedule and balance) and of its profile."""
    decided = {
        "profile": plan.inputs.profile.digest,
        "batch": plan.inputs.batch,
        "schedule": [plan.schedule, plan.chunks, plan.replicas, plan.micro_batches],
        "balance": plan.balance,
        "stages": [[stage.recompute, stage.recomputed] for stage in plan.stages],
        **({"order": plan.order} if plan.order else {}),
    }
    return digest_of(decided)


def _balance(layout: PlanLayout, profile: Profile, source: str) -> Balance:
    plan = layout.plan
    return Balance(
        generator=THIS_TOOL,
        plan_digest=decisions_digest(plan),
        model=replace(profile.model, source=source),
        optimizer=profile.optimizer,
        dtype=precision_option_of(profile.environment.dtype),
        device=training_device_kind(profile.device.kind),
        threads=profile.environment.threads,
        schedule=plan.schedule,
        chunks=plan.chunks,
        placement=plan.placement,
        order=plan.order,
        replicas=plan.replicas,
        batch=plan.inputs.batch,
        micro_batches=plan.micro_batches,
        balance=plan.balance,
        stages=tuple(
            StageBalance(
                index=k,
                recompute=stage.recompute,
                layers=tuple(layer.name for layer in layers),
                recomputed=tuple(layer.name for layer in layers if layer.name in stage.recomputed),
                peak_bytes=stage.memory.total,
            )
            for k, (stage, layers) in enumerate(zip(plan.stages, layout.stages, strict=True))
        ),
    )


def _script(template: tuple[str, str], path: str, layout: PlanLayout, balance: Balance, **more: int) -> str:
    plan, script = layout.plan, escape_for_docstring(path)
    package, name = template
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    launch = launch_command(balance.num_processes, script)
    how = plan.inputs.profile.how
    prediction = (
        f"{format_us(plan.predicted.step_us)} per step, {format_speed(plan.predicted.samples_per_s)}, "
        f"bubble {plan.predicted.bubble:.0%}, on {plan.inputs.profile.path}'s device"
        f"{'' if how == 'measured' else f'; {how}, not measured'}"
    )
    return text.format(
        model=escape_for_docstring(balance.model.source.rpartition(":")[0]),
        stages=_stage_summary(plan),
        schedule=layout.schedule.title,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        num_stages=len(plan.stages),
        script=script,
        launch=launch,
        restarting=launch.replace("torchrun", "torchrun --max-restarts 3", 1),
        several=_several_machines_paragraph(plan, balance, script) + _fewer_processes_paragraph(balance),
        table=stage_lines(plan),
        prediction=escape_for_docstring(prediction),
        version=__version__,
        batch=plan.inputs.batch,
        **more,
    )


def _stage_summary(plan: Plan) -> str:
    text = pluralize(len(plan.stages), "stage")
    if plan.chunks > 1:
        text += f" on {pluralize(plan.num_devices, 'device')}"
    return text + (f", in {plan.replicas} replicas" if plan.replicas > 1 else "")


def _several_machines_paragraph(plan: Plan, balance: Balance, script: str) -> str:
    count, per_node = balance.num_processes, plan.inputs.node_devices
    if count == 1:
        return ""
    if not per_node or per_node >= count or count % per_node:
        per_node = count // 2 if count % 2 == 0 else 1
    line = launch_command(count, script, nodes=count // per_node)
    return f"""
On several machines, run this on each. Ranks follow one pipeline, then the next replica:

    {line}
"""


def _fewer_processes_paragraph(balance: Balance) -> str:
    if not balance.smaller:
        return ""
    plans = ", ".join(
        f"{count} ({balance_path_for_processes(Path('balance.yaml'), count)})" for count in balance.smaller
    )
    return f"\nWith fewer processes it uses another plan and continues from the same checkpoints: {plans}.\n"


def stage_lines(plan: Plan) -> str:
    """Return text for a docstring: a line for each device with several stages, then a line for each stage."""
    stages = [
        f"stage {s.index}: {pluralize(s.layers, 'layer')}, {escape_for_docstring(s.first)} to "
        f"{escape_for_docstring(s.last)}, recompute {_recomputed(s)}"
        for s in plan.stages
    ]
    memory = [
        f"{format_bytes(used)} of {format_bytes(chunks[0].memory_bytes)}"
        for used, chunks in zip(plan.peak_bytes_by_device(), plan.by_device(), strict=True)
    ]
    if plan.chunks == 1:
        return _shown_lines([f"{stage}, {of}" for stage, of in zip(stages, memory, strict=True)], "stages")
    devices = [
        f"device {d}: stages {', '.join(str(s.index) for s in chunks)}, {of}"
        for d, (chunks, of) in enumerate(zip(plan.by_device(), memory, strict=True))
    ]
    return f"{_shown_lines(devices, 'devices')}\n\n{_shown_lines(stages, 'stages')}"


def _shown_lines(lines: list[str], noun: str) -> str:
    shown = lines if len(lines) <= 16 else [*lines[:15], f"… and {len(lines) - 15} more {noun}"]
    return "\n".join(f"    {line}" for line in shown)


def _recomputed(stage: Stage) -> str:
    if stage.recompute != "layers":
        return stage.recompute
    return pluralize(len(stage.recomputed), "layer")


def escape_for_docstring(text: str) -> str:
    """Return `text` with escapes for characters that would end or change a docstring."""
    return "".join(c if c.isprintable() and c not in '\\"' else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return '\\"' if character == '"' else character.encode("unicode_escape").decode()


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process that imports this copy of `planner`, with the variables `more`."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}
