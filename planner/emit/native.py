"""`balance.yaml` and `train.py` for the bundled executor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path

from planner import __version__
from planner.core.errors import UsageError
from planner.core.values.balance import Balance, Planned, StageBalance, beside, launch_line
from planner.core.values.devices import training_kind
from planner.core.values.plan import Inputs, Plan, Stage
from planner.core.values.precision import precision_of
from planner.core.values.profile import GENERATOR, Device, Profile
from planner.core.values.units import counted, format_bytes, format_speed, format_us
from planner.emit.layout import EngineFile, Layout
from planner.emit.signature import is_edited, refuse_edited, runs_balance, signed
from planner.files import digest_of, dump, reference_path, relocated, write_text

_HEADER = """\
Which stage runs which layers: written by `gpipe-plan emit`.
Edit the plan and emit again rather than editing here; train.py refuses a model whose layers are not these."""


AskAgain = Callable[[Inputs, Device], tuple[str, ...]]
"""Returns the options of `solve` that ask the question of a plan again."""


def no_options(_inputs: Inputs, _device: Device) -> tuple[str, ...]:
    """Return no options: the emitted files name no command that plans again."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the files stand that a script is made from; `-` where one came from standard input."""

    plan: str = "plan.yaml"
    profile: str = "profile.yaml"
    smaller: tuple[str, ...] = ()
    """The plans for fewer processes, in the order in which they are given."""


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """Texts to be written: `balance.yaml`, and the script, called `name`, which reads it."""

    balance: str
    script: str
    name: str
    notes: tuple[str, ...] = ()
    """What to know of them."""
    use: str
    """The command that runs the script."""
    smaller: Mapping[str, str] = field(default_factory=dict)
    """The cuts for fewer processes, which stand beside `balance.yaml`: texts by name."""
    plans: tuple[Balance, ...]
    """What all these texts say, most processes first."""
    launch: EngineFile | None = None
    """What starts the script on a cluster."""

    def paths(self, folder: str) -> tuple[Path, ...]:
        """What `write` writes to `folder`; the script comes last."""
        launch = () if self.launch is None else (self.launch.name,)
        return tuple(Path(folder, name) for name in ("balance.yaml", *self.smaller, *launch, self.name))

    def write(self, folder: str, *, force: bool = False) -> bool:
        """Writes all files, except a script that was edited after it was emitted: it runs the new `balance.yaml`.

        With `force` whatever was edited is overwritten. The answer is whether the script was written.

        Raises:
            FileError: A file of cuts or what starts the script was edited, the script is somebody's own, or a file
                cannot be written.
        """
        cuts = {Path(folder, "balance.yaml"): self.balance, **{Path(folder, n): t for n, t in self.smaller.items()}}
        launch = {} if self.launch is None else {Path(folder, self.launch.name): self.launch.text}
        script = Path(folder, self.name)
        if not force:
            for path in cuts:
                refuse_edited(path, hint="edit the plan instead; `--force` overwrites this file")
            for path in launch:
                refuse_edited(path, hint="leave `--launch` out to keep it, or pass `--force`")
        # An edited script reads the balance anew: it is kept, unless it would run something else beside the new file.
        is_kept = not force and is_edited(script)
        if is_kept and not runs_balance(script):
            refuse_edited(script)
        for path, text in {**cuts, **launch}.items():
            write_text(str(path), text)
        if not is_kept:
            write_text(str(script), self.script)
        return not is_kept


def emit_native(
    plan: Plan,
    profile: Profile,
    *,
    folder: str,
    profile_folder: str,
    smaller: Sequence[Plan] = (),
    places: Places = Places(),
    again: AskAgain = no_options,
) -> Emitted:
    """The balance configuration and the training script of `plan`, which was made from `profile`.

    `folder` is where the files will stand, `profile_folder` where the profile stands, which the model's path in it is
    relative to. Of the plans in `smaller` the script takes the one that is for as many processes as were started.
    `places` and the options that `again` returns are what a run names that was not as planned.

    Raises:
        UsageError: A plan does not cut the profile's chain, or the profile names no model to train; or one of `smaller`
            trains something else than `plan`, or is not smaller.
    """
    layout = Layout.of(plan, profile)
    source = relocated(profile.model.source, profile_folder, folder)
    check_source(profile)
    planned = partial(planned_of, profile, again=again, profile_path=places.profile, folder=folder)
    where = places.smaller or ("-",) * len(smaller)
    balances = (
        replace(_balance(Layout.of(other, profile), profile, source), planned=planned(other, path))
        for other, path in zip(smaller, where, strict=True)
    )
    fewer = sorted(balances, key=lambda b: -b.num_processes)
    script = Path(folder, "train.py")
    emitted = emit_with(
        layout,
        profile,
        source,
        template=("planner.emit", "train_template.py.txt"),
        script=script,
        notes=_skipped_devices(plan),
        use=launch_line(plan.num_devices * plan.replicas, str(script)),
        smaller=tuple(other.num_processes for other in fewer),
        planned=planned(plan, places.plan),
    )
    plans = (*emitted.plans, *fewer)
    for larger, other in pairwise(plans):
        _check_smaller(larger, other)
    texts = {beside(Path("balance.yaml"), b.num_processes).name: signed(dump(b, header=_HEADER)) for b in fewer}
    return replace(emitted, smaller=texts, plans=plans)


def _check_smaller(larger: Balance, other: Balance) -> None:
    """Raises `UsageError` unless `other` trains what `larger` trains, in fewer processes."""
    if other.num_processes >= larger.num_processes:
        raise UsageError(
            f"a plan for {counted(other.num_processes, 'process', 'es')} is no smaller one beside a plan for "
            f"{larger.num_processes}",
            hint="give `--smaller` plans with fewer processes than PLAN, each with another number of them",
        )
    if other.batch != larger.batch:
        raise UsageError(
            f"the plan for {counted(other.num_processes, 'process', 'es')} is for a batch of {other.batch}, the one "
            f"for {larger.num_processes} for {larger.batch}: it would not train the same",
            hint=f"solve it with `--batch {larger.batch}`",
        )


def emit_with(
    layout: Layout,
    profile: Profile,
    source: str,
    *,
    template: tuple[str, str],
    script: Path,
    notes: tuple[str, ...],
    use: str,
    smaller: tuple[int, ...] = (),
    planned: Planned | None = None,
    **more: int,
) -> Emitted:
    """The configuration, as `emit_native` makes it, and a script from a template.

    `source` is the model's file and entry, from the folder of the script; `template` is a package and a file in it;
    `smaller` are the numbers of processes that there are other plans for; `planned` is what a run is held against;
    `more` is what the template needs beside what every script does.

    Raises:
        UsageError: The profile names no model to train.
    """
    check_source(profile)
    balance = replace(_balance(layout, profile, source), smaller=smaller, planned=planned)
    text = _script(template, script.as_posix(), layout, balance, **more)
    return Emitted(
        balance=signed(dump(balance, header=_HEADER)),
        script=signed(text),
        name=script.name,
        notes=notes,
        use=use,
        plans=(balance,),
    )


def _skipped_devices(plan: Plan) -> tuple[str, ...]:
    used = sorted({plan.device_of(stage) for stage in plan.stages})
    if used[-1] < len(used):
        return ()
    places = ",".join(map(str, used))
    return (f"the stages are planned for devices {places} (CUDA_VISIBLE_DEVICES={places})",)


def check_source(profile: Profile) -> None:
    """Raises `UsageError` where the profile is not of a model's file."""
    if not profile.model.source:
        raise UsageError("the profile names no model file, so there is nothing to train", hint="profile a model.py")


def decisions_digest(plan: Plan) -> str:
    """Digest of what the plan decides (schedule, micro-batches, balance, recompute) and of the profile behind it."""
    decided = {
        "profile": plan.inputs.profile.digest,
        "batch": plan.inputs.batch,
        "schedule": [plan.schedule, plan.chunks, plan.replicas, plan.micro_batches],
        "balance": plan.balance,
        "stages": [[stage.device, stage.recompute, stage.recomputed] for stage in plan.stages],
        **({"order": plan.order} if plan.order else {}),
    }
    return digest_of(decided)


def planned_of(
    profile: Profile,
    plan: Plan,
    path: str,
    *,
    again: AskAgain,
    profile_path: str,
    folder: str,
) -> Planned:
    """What the plan at `path` predicts, as it stands beside its cuts in `folder`; `again` are options of `solve`."""
    from_here = str(Path(folder, "balance.yaml"))
    where = {"plan": reference_path(path, from_here), "profile": reference_path(profile_path, from_here)}
    return Planned(
        step_us=plan.predicted.step_us,
        reserve_bytes=plan.inputs.reserve_bytes,
        device="" if training_kind(profile.device.kind) == profile.device.kind else profile.device.kind,
        solve=again(plan.inputs, profile.device),
        # What came from standard input may be anywhere: the usual name says what is meant.
        **{name: at for name, at in where.items() if at != "-"},
    )


def _balance(layout: Layout, profile: Profile, source: str) -> Balance:
    plan = layout.plan
    return Balance(
        generator=GENERATOR,
        plan_digest=decisions_digest(plan),
        model=replace(profile.model, source=source),
        optimizer=profile.optimizer,
        dtype=precision_of(profile.environment.dtype),
        device=training_kind(profile.device.kind),
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
                device=stage.device,
                recompute=stage.recompute,
                layers=tuple(layer.name for layer in layers),
                recomputed=tuple(layer.name for layer in layers if layer.name in stage.recomputed),
                peak_bytes=stage.memory.total,
            )
            for k, (stage, layers) in enumerate(zip(plan.stages, layout.stages, strict=True))
        ),
    )


def _script(template: tuple[str, str], path: str, layout: Layout, balance: Balance, **more: int) -> str:
    plan, script = layout.plan, in_docstring(path)
    package, name = template
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    launch = launch_line(balance.num_processes, script)
    how = plan.inputs.profile.how
    prediction = (
        f"{format_us(plan.predicted.step_us)} per step, {format_speed(plan.predicted.samples_per_s)}, "
        f"bubble {plan.predicted.bubble:.0%}, on {plan.inputs.profile.path}'s device"
        f"{'' if how == 'measured' else f'; {how}, not measured'}"
    )
    return text.format(
        model=in_docstring(balance.model.source.rpartition(":")[0]),
        stages=_stages(plan),
        schedule=layout.schedule.title,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        num_stages=len(plan.stages),
        script=script,
        launch=launch,
        restarting=launch.replace("torchrun", "torchrun --max-restarts 3", 1),
        several=_several_machines(plan, balance, script) + _with_fewer(balance),
        table=stage_table(plan),
        prediction=in_docstring(prediction),
        version=__version__,
        batch=plan.inputs.batch,
        **more,
    )


def _stages(plan: Plan) -> str:
    """`4 stages`, `4 stages on 2 devices`, `4 stages on 2 devices, in 2 replicas`."""
    text = counted(len(plan.stages), "stage")
    if plan.chunks > 1:
        text += f" on {counted(plan.num_devices, 'device')}"
    return text + (f", in {plan.replicas} replicas" if plan.replicas > 1 else "")


def _several_machines(plan: Plan, balance: Balance, script: str) -> str:
    """How to start the script on several machines; nothing where there is but one process."""
    count, per_node = balance.num_processes, plan.inputs.node_devices
    if count == 1:
        return ""
    if not per_node or per_node >= count or count % per_node:
        per_node = count // 2 if count % 2 == 0 else 1
    line = launch_line(count, script, nodes=count // per_node)
    return f"""
On several machines, this on each; ranks run through one pipeline, then through the next replica:

    {line}
"""


def _with_fewer(balance: Balance) -> str:
    """Which other plans the script takes; nothing where there is none."""
    if not balance.smaller:
        return ""
    plans = ", ".join(f"{count} ({beside(Path('balance.yaml'), count)})" for count in balance.smaller)
    return f"\nStarted in fewer processes it takes another plan, and goes on from the same checkpoints: {plans}.\n"


def stage_table(plan: Plan) -> str:
    """The stages, a line each, as a docstring shows them."""
    lines = [
        f"stage {s.index}: {s.layers} layers, {in_docstring(s.first)} to {in_docstring(s.last)}, "
        f"recompute {_recomputed(s)}, {format_bytes(s.memory.total)} of {format_bytes(s.memory_bytes)}"
        for s in plan.stages
    ]
    shown = lines if len(lines) <= 16 else [*lines[:15], f"… and {len(lines) - 15} more stages"]
    return "\n".join(f"    {line}" for line in shown)


def _recomputed(stage: Stage) -> str:
    if stage.recompute != "layers":
        return stage.recompute
    return counted(len(stage.recomputed), "layer")


def in_docstring(text: str) -> str:
    """Names come from files: whatever they hold, it must neither end the docstring nor be an escape in it."""
    return "".join(c if c.isprintable() and c not in '\\"' else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return '\\"' if character == '"' else character.encode("unicode_escape").decode()
