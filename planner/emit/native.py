"""`balance.yaml` and `train.py` for the bundled executor."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from planner import __version__
from planner.core.cost.evaluate import Partition, check_partition
from planner.core.cost.planning import GENERATOR
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.core.values.balance import Balance, StageBalance, launch_line
from planner.core.values.devices import training_kind
from planner.core.values.plan import Plan, Stage
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile
from planner.core.values.units import format_bytes, format_speed, format_us
from planner.emit.signature import is_edited, refuse_edited, runs_balance, signed
from planner.files import digest_of, dump, write_text

__all__ = ["Emitted", "decisions_digest", "emit_native", "emit_with", "in_docstring", "relocated", "stage_table"]

_HEADER = """\
Which stage runs which layers: written by `gpipe-plan emit`.
Edit the plan and emit again rather than editing here; train.py refuses a model whose layers are not these."""


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """Texts to be written: `balance.yaml`, and the script, called `name`, which reads it."""

    balance: str
    script: str
    name: str
    note: str = ""
    """What is to be said of it."""

    def write(self, folder: str, *, force: bool = False) -> bool:
        """Writes both files, except a script that was edited after it was emitted: it runs the new `balance.yaml`.

        Args:
            folder: Where to, as was said when they were made.
            force: Whether to overwrite whatever was edited.

        Returns:
            Whether the script was written.

        Raises:
            FileError: `balance.yaml` was edited, the script is somebody's own, or a file cannot be written.
        """
        balance, script = Path(folder, "balance.yaml"), Path(folder, self.name)
        if not force:
            refuse_edited(balance, hint="edit the plan instead; `--force` overwrites this file")
        # An edited script reads the balance anew: it is kept, unless it would run something else beside the new file.
        is_kept = not force and is_edited(script)
        if is_kept and not runs_balance(script):
            refuse_edited(script)
        write_text(str(balance), self.balance)
        if not is_kept:
            write_text(str(script), self.script)
        return not is_kept


def emit_native(plan: Plan, profile: Profile, *, folder: str, profile_folder: str) -> Emitted:
    """The balance configuration and the training script of `plan`.

    Args:
        plan: The plan.
        profile: The profile it was made from: names of all layers, source of the model.
        folder: Where the files will stand.
        profile_folder: Where the profile stands, which the model's path in it is relative to.

    Raises:
        UsageError: The plan does not cut the profile's chain, or the profile names no model to train.
    """
    return emit_with("train_template.py.txt", "train.py", plan, profile, folder=folder, profile_folder=profile_folder)


def emit_with(
    template: str,
    name: str,
    plan: Plan,
    profile: Profile,
    *,
    folder: str,
    profile_folder: str,
    more: Mapping[str, Any] | None = None,
) -> Emitted:
    """The configuration, as `emit_native` makes it, and a script called `name` from `template`.

    Args:
        template: The file in this folder that the script is made from.
        name: What the script is called.
        plan: The plan.
        profile: The profile it was made from.
        folder: Where the files will stand.
        profile_folder: Where the profile stands.
        more: What the template needs beside what every script does.

    Raises:
        UsageError: The plan does not cut the profile's chain, or the profile names no model to train.
    """
    partition = Partition.of(plan, [layer.name for layer in profile.layers])
    check_partition(partition, num_layers=len(profile.layers), num_devices=plan.inputs.devices)
    if not profile.model.source:
        raise UsageError("the profile names no model file, so there is nothing to train", hint="profile a model.py")
    balance = _balance(plan, profile, relocated(profile.model.source, profile_folder, folder))
    script = _script(template, Path(folder, name), plan, balance, more=more or {})
    return Emitted(balance=signed(dump(balance, header=_HEADER)), script=signed(script), name=name)


def decisions_digest(plan: Plan) -> str:
    """Digest of what the plan decides (schedule, micro-batches, balance, recompute) and of the profile behind it."""
    decided = {
        "profile": plan.inputs.profile.digest,
        "batch": plan.inputs.batch,
        "schedule": [plan.schedule, plan.chunks, plan.replicas, plan.micro_batches],
        "balance": plan.balance,
        "stages": [[stage.device, stage.recompute, stage.recomputed] for stage in plan.stages],
    }
    return digest_of(decided)


def _balance(plan: Plan, profile: Profile, source: str) -> Balance:
    names = [layer.name for layer in profile.layers]
    cuts = pairwise(accumulate(plan.balance, initial=0))
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
        replicas=plan.replicas,
        batch=plan.inputs.batch,
        micro_batches=plan.micro_batches,
        balance=plan.balance,
        stages=tuple(
            StageBalance(
                index=k,
                device=stage.device,
                recompute=stage.recompute,
                layers=tuple(names[first:end]),
                recomputed=tuple(name for name in names[first:end] if name in stage.recomputed),
                peak_bytes=stage.memory.total,
            )
            for (k, stage), (first, end) in zip(enumerate(plan.stages), cuts, strict=True)
        ),
    )


def relocated(source: str, profile_folder: str, folder: str) -> str:
    """`path:entry` relative to `folder`; absolute paths stay as they are."""
    path, colon, entry = source.rpartition(":")
    if not Path(path).is_absolute():
        path = Path(os.path.relpath(Path(profile_folder, path), folder)).as_posix()
    return f"{path}{colon}{entry}"


def _script(template: str, path: Path, plan: Plan, balance: Balance, *, more: Mapping[str, Any]) -> str:
    text = resources.files(__package__).joinpath(template).read_text(encoding="utf-8")
    script = in_docstring(path.as_posix())
    how = plan.inputs.profile.how
    prediction = (
        f"{format_us(plan.predicted.step_us)} per step, {format_speed(plan.predicted.samples_per_s)}, "
        f"bubble {plan.predicted.bubble:.0%}, on {plan.inputs.profile.path}'s device"
        f"{'' if how == 'measured' else f'; {how}, not measured'}"
    )
    return text.format(
        model=in_docstring(balance.model.source.rpartition(":")[0]),
        stages=_stages(plan),
        schedule=SCHEDULES[plan.schedule].title,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        num_stages=len(plan.stages),
        script=script,
        launch=launch_line(balance.num_processes, script),
        restarting=launch_line(balance.num_processes, script).replace("torchrun", "torchrun --max-restarts 3", 1),
        several=_several_machines(plan, balance, script),
        table=stage_table(plan),
        prediction=in_docstring(prediction),
        version=__version__,
        batch=plan.inputs.batch,
        **more,
    )


def _stages(plan: Plan) -> str:
    """`4 stages`, `4 stages on 2 devices`, `4 stages on 2 devices, in 2 replicas`."""
    count, devices = len(plan.stages), plan.num_devices
    text = f"{count} stage{'s' * (count > 1)}"
    if plan.chunks > 1:
        text += f" on {devices} device{'s' * (devices > 1)}"
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
    return f"{len(stage.recomputed)} layer{'s' * (len(stage.recomputed) > 1)}"


def in_docstring(text: str) -> str:
    """Names come from files: whatever they hold, it must neither end the docstring nor be an escape in it."""
    return "".join(c if c.isprintable() and c not in '\\"' else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return '\\"' if character == '"' else character.encode("unicode_escape").decode()
