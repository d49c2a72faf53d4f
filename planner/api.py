"""The commands as functions: `planner.profile`, `planner.solve`, `planner.emit`, `planner.check`, and three more.

Options have the names and defaults that they have on the command line, and take its texts ("8GB", "25GB/s,5us") or
values (bytes, numbers, lists, a `Link`). Profiles and plans may be values or paths. Nothing is printed, and a profile
or plan is written to a file only where `output` names one. Errors are those of `planner.core.errors`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from planner import files
from planner.core.cost.calibration import Calibration, calibrated_executor
from planner.core.errors import FileError, StaleError, UsageError
from planner.core.judge.comparison import ComparedPlan, Comparison
from planner.core.judge.difference import difference_of
from planner.core.judge.figures import claimed_of
from planner.core.judge.recut import with_cuts
from planner.core.judge.verdict import Verdict, compared, judge, with_findings
from planner.core.judge.verification import Tolerance, Verification, verification_of
from planner.core.values import options
from planner.core.values.cluster import Link
from planner.core.values.devices import accelerator
from planner.core.values.findings import Finding, finding
from planner.core.values.options import Numbers, Sizes
from planner.core.values.plan import DEFAULT_SCHEDULE, Plan, ProfileReference
from planner.core.values.precision import precision_of
from planner.core.values.profile import Granularity, Profile
from planner.core.values.proof import Proof
from planner.core.values.sweep import Sweep
from planner.core.values.units import parse_us
from planner.show.notebook import plan_html

if TYPE_CHECKING:
    from planner.model import LoadedModel

__all__ = ["check", "compare", "emit", "profile", "solve", "sweep", "verify"]

File = str | os.PathLike[str]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much there is."""

# The core draws nothing; whoever uses this module may be in a notebook.
Plan._repr_html_ = plan_html  # type: ignore[attr-defined]

_PROOF_S = 30.0
"""How long `verify` holds the plan's stages against the model in one piece, about."""

_NOWHERE = "-"
"""The path of a profile that is a value, as of one that came from standard input."""


def profile(
    model: File | Any,
    *,
    output: File | None = None,
    batch_sizes: Numbers = "auto",
    batch: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    optimizer: str | None = None,
    settings: Mapping[str, object] | None = None,
    inputs: Sequence[str] = (),
    threads: int = 1,
    granularity: str = "coarse",
    repeat: int = 10,
    time_budget: str = "60s",
    proof_budget: str = "30s",
    calibration: File | Calibration | None = None,
    example_batch: Callable[[int], tuple[Any, Any]] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    progress: Progress = lambda *_: None,
) -> Profile:
    """Measures time and memory of every layer of a model, at several micro-batch sizes.

    Args:
        model: `path/to/model.py[:ENTRY]`, or an `nn.Module` itself, of which a copy is measured.
        output: Where to write the profile.
        batch_sizes: Micro-batch sizes to measure, among which the solver chooses; by default the powers of two up to
            `batch` for which memory suffices, without those too small for batch normalization.
        batch: Samples per optimizer step that sizes are wanted for; by default 8.
        device: What to measure on: `cpu` or `cuda`; or, without the device, `estimate:h100` and the like.
        dtype: `fp32`, `bf16`, `bf16-mixed` or `fp16-mixed`; by default as the model is built.
        optimizer: Its name; by default the file's `build_optimizer`, or adamw.
        settings: Arguments of the file's `build_model`.
        inputs: Shapes such as `3x224x224`, where there is no `example_batch`.
        threads: CPU threads per stage.
        granularity: `coarse`: about one layer per block, or `fine`: cuts inside blocks too.
        repeat: Timed repeats of every layer, at least.
        time_budget: More repeats than that are begun only so long after the first.
        proof_budget: About how long stages are held against the model in one piece; `0s`: not at all.
        calibration: What a run measured, as `verify` gives it, or its file: the executor's overhead and link.
        example_batch: For an `nn.Module`: from a batch size to `(inputs, targets)`.
        loss_fn: For an `nn.Module`: from output and target to a scalar; without it the output's own `.loss`, else the
            one scalar in it that carries a gradient, else its mean.
        progress: Called as layers are measured.

    Raises:
        PlannerError: The model cannot be loaded, cut into layers or run, or an option is wrong.
    """
    sizes = options.micro_batch_sizes(batch_sizes, batch)
    precision = options.precision(dtype)
    how_finely = cast("Granularity", options.choice("--granularity", granularity, Granularity))
    if threads < 1 or repeat < 2:
        raise UsageError(f"{threads} threads and {repeat} repeats: at least 1 thread and 2 repeats are needed")
    if output is not None:
        files.check_writable(os.fspath(output))

    # torch takes longer to import than everything else together.
    from planner.executor import prove  # noqa: PLC0415
    from planner.model import in_precision, load_model, model_of  # noqa: PLC0415
    from planner.profile import ProfileOptions, profile_model  # noqa: PLC0415

    if isinstance(model, (str, os.PathLike)):
        texts = {name: str(value) for name, value in (settings or {}).items()}
        path = os.fspath(model)
        loaded = load_model(path, settings=texts, inputs=inputs, optimizer=optimizer, granularity=how_finely)
    else:
        loaded = model_of(
            model,
            example_batch=example_batch,
            loss_fn=loss_fn,
            inputs=inputs,
            optimizer=optimizer,
            granularity=how_finely,
        )
    loaded = in_precision(loaded, precision)
    how = ProfileOptions(
        micro_batch_sizes=sizes,
        device=device,
        threads=threads,
        repeats=repeat,
        time_budget_s=parse_us(time_budget) / 1e6,
        until_memory_ends=batch_sizes == "auto",
    )
    budget_s = parse_us(proof_budget) / 1e6
    proven = prove(loaded, budget_s=budget_s) if budget_s else None
    measured = profile_model(loaded if proven is None else proven.loaded, how, progress)
    measured = replace(measured, proof=None if proven is None else proven.proof)
    found = _calibration(calibration)
    if found is not None:
        executor = calibrated_executor(found, measured.device.kind)
        measured = replace(measured, device=replace(measured.device, executor=executor))
    if output is not None:
        files.write(os.fspath(output), measured)
    return measured


def solve(
    profile: File | Profile = "profile.yaml",
    *,
    devices: int | None = None,
    mem: Sizes | None = None,
    batch: int | None = None,
    micro_batches: str | int = "auto",
    speed: str | float | Sequence[float] | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    chunks: str | int = "auto",
    replicas: str | int = "1",
    recompute: str = "auto",
    link: str | Link | None = None,
    links: File | Sequence[Link] | None = None,
    nodes: str | None = None,
    inter_link: str | Link | None = None,
    allreduce: str | Link | None = None,
    overhead: str | None = None,
    reserve: str | int | None = None,
    calibration: File | Calibration | None = None,
    headroom: str | float = "0%",
    balance: Numbers | File | None = None,
    together: Sequence[str | Sequence[str]] | None = None,
    apart: Sequence[str | Sequence[str]] | None = None,
    solver: str = "auto",
    time_limit: str | None = None,
    output: File | None = None,
    devices_any_order: bool = False,
    frontier: bool = False,
    explain: bool = False,
    extrapolate: bool = False,
) -> Plan:
    """Finds the plan with the smallest step time that fits: cuts, micro-batches, recomputation.

    Args:
        profile: A profile, or its file.
        devices: Devices there are; the plan may use fewer.
        mem: Memory cap of each: `8GB`, a number of bytes, or one for each device; by default the profiled device's.
        batch: Samples per optimizer step; by default the largest profiled size.
        micro_batches: How many micro-batches, or `auto`.
        speed: How many times faster than the profiled device each device is.
        schedule: `gpipe`, `1f1b`, `interleaved`, or `auto` for the fastest of them.
        chunks: Stages per device of the interleaved schedule, or `auto`.
        replicas: Pipelines side by side, or `auto`.
        recompute: `auto`, `never`, `except-last`, `always`, or `layers`: layer by layer where that is better.
        link: Between neighbours: `25GB/s,5us`, with `,blocking` if it does not overlap; by default the profile's.
        links: Behind each device, as `gpipe-plan profile-links` measured them: its file, or the links.
        nodes: `4x8`: 4 nodes of 8 devices.
        inter_link: Between nodes; `link` is then within a node.
        allreduce: What replicas sum their gradients over.
        overhead: The executor's time per micro-batch, stage and direction, such as `1ms`.
        reserve: Kept free on every device; by default what `calibration` says, or nothing.
        calibration: What a run measured, as `verify` gives it, or its file: instead of the profile's link and overhead.
        headroom: Share of every cap kept free: `5%`, or 0.05.
        balance: Layers per stage, or a file that gives the cuts; then these are judged, none searched.
        together: Groups of layers that must be in one stage.
        apart: Groups of layers of which no two may be in one stage.
        solver: `auto`, `dp` or `milp`.
        time_limit: `60s`; after it the best plan found is given, with its proven gap.
        output: Where to write the plan.
        devices_any_order: Whether unlike devices may take any place in the pipeline.
        frontier: Whether to add the best plan for every M.
        explain: Whether to add what binds, what would help, and what noise does to the plan.
        extrapolate: Whether unprofiled micro-batch sizes are allowed.

    Raises:
        InfeasibleError: Nothing fits; the hint says what would.
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or the plan not written.
        SolverError: No plan was found in time.
    """
    from planner.solve import frontier_of, insight_of, request_of  # noqa: PLC0415 - `check` seldom needs it
    from planner.solve import solve as solve_plan  # noqa: PLC0415

    read, path = _profile(profile)
    place = reference(read, path, _NOWHERE if output is None else os.fspath(output))
    request = request_of(
        read,
        place,
        devices=devices,
        mem=mem,
        batch=batch,
        micro_batches=micro_batches,
        speed=speed,
        schedule=schedule,
        chunks=chunks,
        replicas=replicas,
        recompute=recompute,
        link=link,
        links=_links(links, link, nodes, inter_link),
        nodes=nodes,
        inter_link=inter_link,
        allreduce=allreduce,
        overhead=overhead,
        reserve=reserve,
        calibration=_calibration(calibration),
        headroom=headroom,
        balance=None if balance is None else _cuts(balance, read),
        together=together,
        apart=apart,
        solver=solver,
        time_limit=time_limit,
        devices_any_order=devices_any_order,
        extrapolate=extrapolate,
    )
    plan = solve_plan(read, request)
    if frontier:
        plan = replace(plan, frontier=frontier_of(read, request))
    if explain:
        plan = replace(plan, insight=insight_of(read, request, plan))
    if output is not None:
        files.write(os.fspath(output), plan, header=PLAN_HEADER)
    return plan


PLAN_HEADER = """\
Made by `gpipe-plan solve`. You may edit balance, stages[].recompute, and micro_batches with micro_batch_size by hand:
then run `gpipe-plan check`, which recomputes everything else from the profile."""


def emit(
    plan: File | Plan = "plan.yaml",
    *,
    output: File = ".",
    profile: File | Profile | None = None,
    engine: str = "native",
    standalone: bool = False,
    force: bool = False,
) -> tuple[Path, ...]:
    """Writes what runs a plan, by default `balance.yaml` and the script `train.py`, and says where it stands.

    A `train.py` that was edited stays as it is: it runs whatever `balance.yaml` says.

    Args:
        plan: A plan, or its file.
        output: Folder to write to.
        profile: The plan's profile, if it is a value or its file was moved.
        engine: For which engine, as `--format` says it.
        standalone: Whether to write a `train.py` alone, which needs torch alone: plain GPipe or 1F1B, `nn.Sequential`.
        force: Whether to overwrite what was edited.

    Raises:
        StaleError: The plan was made from another profile.
        UsageError: The executor cannot run such a plan, or the profile names no model file.
        FileError: A file cannot be read or written; balance.yaml, or a standalone train.py, was edited.
    """
    from planner.emit import write_emitted  # noqa: PLC0415 - only here

    read, place = _plan(plan)
    measured, profile_place = _profile_for(read, place, profile)
    folder = str(Path(profile_place).parent)
    return write_emitted(
        _fresh(read, measured, place),
        measured,
        engine=engine,
        standalone=standalone,
        folder=os.fspath(output),
        profile_folder=folder,
        read=(place, profile_place, files.model_path(measured, folder)),
        force=force,
    )


def check(
    plan: File | Plan = "plan.yaml",
    *,
    mem: Sizes | None = None,
    device: str | None = None,
    headroom: str | float = "0%",
    balance: Numbers | File | None = None,
    model: File | None = None,
    strict: bool = False,
    against: File | Plan | None = None,
    profile: File | Profile | None = None,
) -> Verdict:
    """Whether a plan still fits, recomputed from its profile; `fits`, `findings`, and the plan as it is now.

    Args:
        plan: A plan, or its file.
        mem: Judge against this cap instead of the plan's.
        device: Judge against the memory of a known accelerator, such as `h100`.
        headroom: Warn if less than this share of a cap stays free.
        balance: Judge these cuts instead of the plan's: layers per stage, or a file that gives them.
        model: `model.py[:ENTRY]`, to tell whether it still is the model that was profiled.
        strict: Whether warnings make the answer no.
        against: Another plan (or its file, or `git:REVISION` for this one as committed) to set this one beside.
        profile: The plan's profile, if it is a value or its file was moved.

    Raises:
        FileError: A file cannot be read or is invalid.
        UsageError: An option is wrong, or the plan is none: layers lost, an empty stage.
    """
    if mem is not None and device is not None:
        raise UsageError("`--mem` and `--device` both say what the cap is", hint="give one of them")
    share = options.share(headroom)
    known = accelerator(device) if device is not None else None
    read, place = _plan(plan)
    measured, _ = _profile_for(read, place, profile)
    memory_bytes = options.caps(mem, read.inputs.devices) if mem is not None else None
    if balance is not None:
        read = with_cuts(read, measured, _cuts(balance, measured), memory_bytes=memory_bytes)
    verdict = judge(
        read,
        measured,
        profile_digest=files.digest_of(measured),
        memory_bytes=memory_bytes,
        device=known,
        headroom=share,
        strict=strict,
    )
    if claimed_of(read, verdict) is not None:
        from planner.solve import certified  # noqa: PLC0415 - of cuts that were given there is no certificate

        verdict = certified(read, verdict, measured)
    if model is not None:
        verdict = with_findings(verdict, _changes(os.fspath(model), measured))
    if verdict.is_over and verdict.plan is not None:
        from planner.solve import what_would_fit  # noqa: PLC0415 - a plan that fits is told so without the solver

        verdict = replace(verdict, would_fit=what_would_fit(verdict.plan, measured))
    if against is not None:
        before, recomputed, called = _before(against, place)
        verdict = compared(verdict, before, against=called, recomputed=recomputed)
    return verdict


def verify(
    plan: File | Plan = "plan.yaml",
    *,
    profile: File | Profile | None = None,
    steps: int = 12,
    tolerance_time: str | float = "10%",
    tolerance_memory: str | Sequence[str | float] = "1%,5%",
    calibration: File | None = None,
    progress: Progress = lambda *_: None,
) -> Verification:
    """Runs a plan for a few steps on this machine and sets what it took beside what was predicted.

    Starts torchrun with a process for every device of the plan, on the bundled executor.

    Args:
        plan: A plan, or its file.
        profile: The plan's profile, if it is a value or its file was moved.
        steps: Optimizer steps; the first two warm up.
        tolerance_time: How far the step time may be off.
        tolerance_memory: How far a predicted peak may lie below the measured one, and how far above it; 64 KiB are
            allowed in any case.
        calibration: Where to write what the run says of the machine, for `solve`.
        progress: Called after every step.

    Raises:
        StaleError: The plan was made from another profile.
        UsageError: The executor cannot run such a plan, or an option is wrong.
        MeasurementError: The run failed.
        FileError: A file cannot be read or written.
    """
    from planner.emit.trial import crowding, run_plan  # noqa: PLC0415 - only here

    below, above = options.two_shares("--tolerance-memory", tolerance_memory)
    tolerance = Tolerance(step=options.share(tolerance_time), memory_below=below, memory_above=above)
    if steps < 3:
        raise UsageError(f"`--steps {steps}`: the first 2 steps warm up, so at least 3 are needed")
    if calibration is not None:
        files.check_writable(os.fspath(calibration))
    read, place = _plan(plan)
    measured, profile_place = _profile_for(read, place, profile)
    now = _fresh(read, measured, place)
    folder = str(Path(profile_place).parent)
    report = run_plan(now, measured, profile_folder=folder, steps=steps, progress=progress)
    proof, wrong = _proof(now, measured, folder)
    found = verification_of(now, measured, report, tolerance, crowded=crowding(now, measured), proof=proof, wrong=wrong)
    if calibration is not None:
        files.write(os.fspath(calibration), found.calibration, header=CALIBRATION_HEADER)
    return found


CALIBRATION_HEADER = """\
Measured by `gpipe-plan verify` in a run of a plan; what a person knows better may be edited."""


def compare(*plans: File | Plan) -> Comparison:
    """Plans beside each other, each recomputed from its profile where that can be.

    Args:
        plans: Two or more plans, or their files.

    Raises:
        UsageError: Fewer than two, or one is no plan of its profile.
        FileError: A file cannot be read or is invalid.
    """
    if len(plans) < 2:
        raise UsageError("two or more plans are needed", hint="`gpipe-plan compare a.yaml b.yaml`")
    rows = [_compared(plan, n) for n, plan in enumerate(plans)]
    difference = None
    if len(rows) == 2:
        first, second = rows
        both = first.recomputed and second.recomputed
        difference = difference_of(first.plan, second.plan, against=first.path, recomputed=both)
    return Comparison(plans=tuple(rows), difference=difference)


def sweep(
    profile: File | Profile = "profile.yaml",
    *,
    devices: Numbers = "1,2,4,8",
    mem: Sizes | None = None,
    batch: int | None = None,
    micro_batches: str | int = "auto",
    schedule: str = DEFAULT_SCHEDULE,
    recompute: str = "auto",
    link: str | Link | None = None,
    overhead: str | None = None,
    reserve: str | int | None = None,
    headroom: str | float = "0%",
    time_limit: str | None = None,
    output: File | None = None,
    extrapolate: bool = False,
    progress: Progress = lambda *_: None,
) -> Sweep:
    """The best plan for every number of devices and every cap: the smallest cluster that trains, and what others bring.

    Args:
        profile: A profile, or its file.
        devices: How many devices: `1,2,4,8`, or the numbers.
        mem: Caps of each of them: `16GB,80GB`, or each as text or bytes; by default the profiled device's.
        batch: Samples per optimizer step; by default the largest profiled size.
        micro_batches: As for `solve`, and so are the next.
        schedule: `gpipe`, `1f1b`, `interleaved`, or `auto`.
        recompute: `auto`, `never`, `except-last`, `always` or `layers`.
        link: Between neighbours.
        overhead: The executor's time per micro-batch, stage and direction.
        reserve: Kept free on every device; None: what the profile says of its own, or nothing.
        headroom: Share of every cap kept free.
        time_limit: For each cell.
        output: A folder, into which the plan of every cell is written.
        extrapolate: Whether unprofiled micro-batch sizes are allowed.
        progress: Called before every cell.

    Raises:
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or a plan not written.
    """
    from planner.solve import request_of, sweep_of  # noqa: PLC0415 - `check` seldom needs it

    counts = options.integers("--devices", devices)
    read, path = _profile(profile)
    place = reference(read, path, _NOWHERE if output is None else str(Path(output, "plan.yaml")))
    request = request_of(
        read,
        place,
        devices=max(counts),
        mem=None if mem is None else max(options.sizes(mem)),
        batch=batch,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        link=link,
        overhead=overhead,
        reserve=reserve,
        time_limit=time_limit,
        extrapolate=extrapolate,
    )
    caps = request.inputs.memory_bytes[:1] if mem is None else options.sizes(mem)
    share = options.share(headroom)
    found = sweep_of(read, request, devices=counts, memory_bytes=caps, headroom=share, progress=progress)
    if output is not None:
        plans = {str(Path(output, cell.file_name)): cell.plan for cell in found.cells if cell.plan is not None}
        files.check_outputs({name: name for name in plans}, (path,))
        for name, plan in plans.items():
            files.write(name, plan, header=PLAN_HEADER)
    return found


def reference(profile: Profile, path: str, plan_path: str) -> ProfileReference:
    """How a plan that will stand at `plan_path` refers to its profile."""
    where = files.reference_path(path, plan_path)
    return ProfileReference(path=where, digest=files.digest_of(profile), how=profile.device.how)


# Private functions


def _profile(given: File | Profile) -> tuple[Profile, str]:
    if isinstance(given, Profile):
        return given, _NOWHERE
    path = os.fspath(given)
    return files.read_profile(path), path


def _plan(given: File | Plan) -> tuple[Plan, str]:
    """The plan, and where it stands: a value stands in the working directory."""
    if isinstance(given, Plan):
        return given, _NOWHERE
    path = os.fspath(given)
    return files.read_plan(path), path


def _profile_for(plan: Plan, place: str, given: File | Profile | None) -> tuple[Profile, str]:
    if isinstance(given, Profile):
        return given, "profile.yaml"
    path = files.profile_path(plan, place, None if given is None else os.fspath(given))
    return files.read_profile(path), path


def _fresh(plan: Plan, profile: Profile, place: str) -> Plan:
    """The plan as its profile predicts it now; raises `StaleError` where that is another one."""
    verdict = judge(plan, profile, profile_digest=files.digest_of(profile))
    for found in verdict.findings:
        if found.code in ("GP201", "GP202"):
            raise StaleError(found.message, path=place, hint=found.hint)
    return verdict.plan or plan


def _proof(plan: Plan, profile: Profile, folder: str) -> tuple[Proof, tuple[str, ...]]:
    """What the plan's stages compute, held against the model in one piece; and what they do not compute as it does."""
    from planner.executor import prove  # noqa: PLC0415 - torch

    ends = tuple(accumulate(plan.balance))[:-1]
    found = prove(_loaded(str(Path(folder, profile.model.source)), profile), budget_s=_PROOF_S, ends=ends)
    recomputes = any(stage.recompute != "never" for stage in plan.stages)
    differs = found.proof.differs_recomputed
    return found.proof, (*found.warnings, *([f"recomputed, {differs}"] if recomputes and differs else []))


def _loaded(model: str, profile: Profile) -> "LoadedModel":
    """A model's file of today, with the settings of the model that was profiled."""
    from planner.model import in_precision, load_model  # noqa: PLC0415 - torch

    known = profile.model
    loaded = load_model(
        model,
        settings={name: str(value) for name, value in known.settings.items()},
        inputs=known.inputs,
        granularity=known.granularity,
        uncut=known.uncut,
    )
    return in_precision(loaded, precision_of(profile.environment.dtype))


def _changes(model: str, profile: Profile) -> tuple[Finding, ...]:
    """A finding for every difference between a model's file of today and the model that was profiled."""
    from planner.profile import model_changes  # noqa: PLC0415 - torch

    return tuple(
        finding("GP301", f'layer "{change.layer}" {change.message}' if change.layer else change.message)
        for change in model_changes(_loaded(model, profile), profile)
    )


def _links(given: File | Sequence[Link] | None, *others: object) -> Sequence[Link]:
    if given is None:
        return ()
    called = os.fspath(given) if isinstance(given, (str, os.PathLike)) else "…"
    for option, value in zip(("--link", "--nodes", "--inter-link"), others, strict=True):
        if value is not None:
            raise UsageError(f"`--links {called}` and `{option} {value}`: both say what the links are", hint="give one")
    if isinstance(given, (str, os.PathLike)):
        return tuple(boundary.link for boundary in files.read_links(os.fspath(given)).boundaries)
    return given


def _calibration(given: File | Calibration | None) -> Calibration | None:
    return files.read_calibration(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else given


def _cuts(given: Numbers | File, profile: Profile) -> tuple[int, ...]:
    """`6,6,6,6`, the numbers, or a file that gives the cuts, of ours or of another engine."""
    from planner.emit import SUFFIXES, read_balance_list  # noqa: PLC0415 - seldom needed

    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(SUFFIXES)):
        return read_balance_list(os.fspath(given), profile.layers)
    return options.integers("--balance", given)


def _before(against: File | Plan, place: str) -> tuple[Plan, bool, str]:
    """The plan to compare with, whether it was recomputed, and what it is called."""
    if isinstance(against, Plan):
        return _as_its_profile_says(against, lambda: _profile_for(against, _NOWHERE, None)[0], "the other plan")
    path = os.fspath(against)
    if not path.startswith("git:"):
        plan = files.read_plan(path)
        return _as_its_profile_says(plan, lambda: files.profile_for(plan, path, None), path)
    if place == _NOWHERE:
        raise UsageError(f"`--against {path}` needs the plan's file, to look it up in git", hint="name the file")
    revision = path.removeprefix("git:")
    committed = files.read_plan(f"{path}:{place}", files.at_revision(place, revision))

    def its_profile() -> Profile:
        profile_place = files.profile_path(committed, place, None)
        return files.read_profile(f"{path}:{profile_place}", files.at_revision(profile_place, revision))

    return _as_its_profile_says(committed, its_profile, path)


def _as_its_profile_says(plan: Plan, read: Callable[[], Profile], called: str) -> tuple[Plan, bool, str]:
    """`plan` recomputed, if the very profile that it was made from is at hand; else as it was written."""
    try:
        profile = read()
    except (FileError, UsageError):
        return plan, False, called
    digest = files.digest_of(profile)
    if digest != plan.inputs.profile.digest:
        return plan, False, called
    return judge(plan, profile, profile_digest=digest).plan or plan, True, called


def _compared(given: File | Plan, index: int) -> ComparedPlan:
    plan, place = _plan(given)
    called = f"plan {index + 1}" if isinstance(given, Plan) else place
    now, recomputed, _ = _as_its_profile_says(plan, lambda: _profile_for(plan, place, None)[0], called)
    caps = (now.stages[d].memory_bytes for d in range(now.num_devices))
    fits = all(need <= cap for need, cap in zip(now.device_bytes(), caps, strict=True))
    return ComparedPlan(path=called, recomputed=recomputed, fits=fits, plan=now)
