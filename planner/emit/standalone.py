"""A training script that needs torch alone, for plans of plain GPipe or 1F1B over an `nn.Sequential`."""

from importlib import resources
from pathlib import Path
from string import Template

from planner import __version__
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE, ONE_FORWARD_ONE_BACKWARD
from planner.core.values.devices import training_kind
from planner.core.values.plan import Plan
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile
from planner.core.values.units import counted
from planner.emit.layout import Layout
from planner.emit.native import check_source, in_docstring, stage_table
from planner.emit.signature import signed
from planner.files import relocated

_NAME = "a standalone script"
_OWN = "leave out `--standalone`: gpipe-plan's own executor runs it"

OPTIMIZER_CODE = {
    "adafactor": "torch.optim.Adafactor(parameters)",
    "adam": "torch.optim.Adam(parameters, lr=1e-3)",
    "adamw": "torch.optim.AdamW(parameters, lr=1e-3)",
    "momentum": "torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=1e-3)",
    "sgd": "torch.optim.SGD(parameters, lr=1e-2)",
    "build_optimizer": "module.build_optimizer(parameters)",
}
"""What the optimizers that a profile may name are in Python; the same as when they are profiled."""


def emit_standalone(plan: Plan, profile: Profile, *, folder: str, profile_folder: str) -> str:
    """The script; arguments as for `emit_native`.

    Raises:
        UsageError: The plan or the model needs more than such a script does.
    """
    layout = Layout.of(plan, profile)
    paths = layout.sequential_paths(_NAME)
    _check(layout, profile)
    path, _, entry = relocated(profile.model.source, profile_folder, folder).rpartition(":")
    template = resources.files(__package__).joinpath("standalone_template.py.txt").read_text(encoding="utf-8")
    text = Template(template).substitute(
        model=in_docstring(path),
        stages=counted(len(plan.stages), "stage"),
        num_stages=len(plan.stages),
        schedule=layout.schedule.title,
        schedule_class=f"Schedule{layout.schedule.torch_name}",
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        script=in_docstring(Path(folder, "train.py").as_posix()),
        table=stage_table(plan),
        version=__version__,
        path=repr(path),
        entry=repr(entry),
        settings=repr(dict(profile.model.settings)),
        device=repr(training_kind(profile.device.kind)),
        threads=profile.environment.threads,
        batch=plan.inputs.batch,
        layers="[\n" + "".join(f"    {list(stage)!r},\n" for stage in paths) + "]",
        recompute=repr([stage.recompute for stage in plan.stages]),
        optimizer=OPTIMIZER_CODE[profile.optimizer or "build_optimizer"],
    )
    return signed(text)


def _check(layout: Layout, profile: Profile) -> None:
    plan = layout.plan
    check_source(profile)
    if layout.schedule not in (GPIPE, ONE_FORWARD_ONE_BACKWARD):
        raise UsageError(
            f"{_NAME} runs plain GPipe or 1F1B, and the plan is for {layout.schedule.title}",
            hint=f"solve with `--schedule 1f1b` or `gpipe`; or {_OWN}",
        )
    wanted = (
        (plan.replicas > 1, f"{plan.replicas} replicas"),
        (any(stage.recompute == "layers" for stage in plan.stages), "recomputation layer by layer"),
        (bool(precision_of(profile.environment.dtype)), f"`--dtype {profile.environment.dtype}`"),
        (bool(profile.model.inputs), "inputs from `--input` instead of an `example_batch`"),
        (any(stage.device is not None for stage in plan.stages), "devices in another order"),
    )
    for is_wanted, feature in wanted:
        if is_wanted:
            raise UsageError(f"{_NAME} does not do {feature}", hint=_OWN)
    for first, second in layout.ties_over_stages():
        together = layout.kept_together(first, second)
        raise UsageError(
            f'{_NAME} does not sum gradients over stages, and "{first}" and "{second}" share parameters in two of them',
            hint=_OWN + (f"; or solve with {together}, which keeps them in one stage" if together else ""),
        )
