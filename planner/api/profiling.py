"""`profile`: measure the costs of every layer of a model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from planner import files
from planner.api import texts
from planner.api.configuration import Configuration, configuration_of, is_for_formula, note_language_model_only
from planner.api.formula import chosen_precision, profile_by_formula, refuse_formula_options
from planner.api.keywords import model_command
from planner.api.option import ignore_arguments
from planner.api.options.profiling import ProfileOptions
from planner.api.reading import path_of, resolve_calibration
from planner.api.texts import File
from planner.core.errors import PlannerError, UsageError
from planner.core.extras import check_installed
from planner.core.judge.calibration import calibrated_executor
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import ExecutorCost
from planner.core.values.devices import TORCH_KINDS
from planner.core.values.precision import Precision
from planner.core.values.profile import Granularity, Profile

if TYPE_CHECKING:
    from planner.executor.equivalence.check import EquivalenceResult
    from planner.model import LoadedModel
    from planner.profile.task import ProfilerOptions as Measuring


@model_command(ProfileOptions)
def profile(model: File | Any | None, options: ProfileOptions) -> Profile:
    """Measure time and memory of every layer of a model, at several micro-batch sizes.

    On a CPU, two processes also measure the link between them, and the overhead of the bundled executor per action.
    These two results are cached. With `output`, Ctrl-C stores all finished measurements in a file next to `output`. The
    same call then continues from this file.

    Args:
        model: `path/to/model.py[:ENTRY]`, a Hugging Face config.json or its folder, or an `nn.Module`. None with
            `from_formula` or `preset`.
        options: Options of `profile`.

    Returns:
        The profile.

    Raises:
        MissingPackageError: torch or a package for training is not installed.
        PlannerError: The model cannot be loaded, cut into layers or run, or an option is wrong.
        InterruptedProfileError: Ctrl-C was pressed; the exception has all finished measurements.
    """
    configuration = configuration_of(model, options)
    if is_for_formula(configuration, options) if configuration else options.from_formula is not None:
        return _by_formula(model, configuration, options)
    if configuration is not None:
        model, options = configuration.name, _with_settings(configuration, options)
    return _measured(model, options)


def _measured(model: File | Any | None, options: ProfileOptions) -> Profile:
    refuse_formula_options(options)
    if model is None:
        raise UsageError(
            "the argument MODEL is missing", hint="name the model's file or its config.json, or use `--preset`"
        )
    parsed = _parsed_options(model, options)
    check_installed("tpu" if options.device.startswith("tpu") else "train")
    # Importing torch takes longer than everything else together.
    from planner.profile.profiler import InterruptedProfileError, check_optimizer_of, profile_model  # noqa: PLC0415

    unfinished = partial_profile_path(parsed.output)
    earlier = files.read_partial(str(unfinished)) if unfinished is not None and unfinished.exists() else None
    measuring = _measuring(parsed)
    loaded = _loaded(model, parsed)
    check_optimizer_of(loaded, options.device)
    loaded, checked = _checked(loaded, model, parsed)
    # First, because an interrupt after this loses no measurement.
    executor = _executor_cost(options) if options.device.startswith("cpu") and parsed.calibration is None else None
    if earlier is not None:
        options.note(f"continuing from {unfinished}")
    options.progress("", 0, 0)
    try:
        with _preferring_error_of(checked):
            measured = profile_model(
                loaded,
                measuring,
                options.progress,
                warn=options.warn,
                note=options.note,
                earlier=earlier,
            )
    except InterruptedProfileError as interrupt:
        if unfinished is not None and interrupt.partial.measurements:
            files.write(str(unfinished), interrupt.partial, header=_UNFINISHED.format(model=_name_of(model)))
        raise
    # Last, because an error of the model's is explained where it occurs in the measurement.
    if checked is not None:
        checked.raise_if_failed()
    if parsed.calibration is not None:
        executor = calibrated_executor(parsed.calibration, measured.device.kind)
    device = measured.device if executor is None else replace(measured.device, executor=executor)
    source = measured.model.source
    if parsed.output is not None:
        source = files.relocate_source(source, "", str(Path(parsed.output).parent))
    proof = None if checked is None else checked.proof
    measured = replace(measured, proof=proof, device=device, model=replace(measured.model, source=source))
    if parsed.output is not None:
        files.write(parsed.output, measured, header=profile_header(model, measured))
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)
    return measured


@contextmanager
def _preferring_error_of(checked: "EquivalenceResult | None") -> Iterator[None]:
    # An error of the equivalence check explains an exception of the model's code, and is raised instead.
    try:
        yield
    except PlannerError:
        raise
    except Exception:
        if checked is not None:
            checked.raise_if_failed()
        raise


def _by_formula(model: File | Any | None, configuration: Configuration | None, options: ProfileOptions) -> Profile:
    if model is not None and configuration is None:
        raise UsageError(f"`--from-formula {options.from_formula}` takes no model, got `{_name_of(model)}`")
    output = path_of(options.output)
    if output is not None:
        is_file = configuration is not None and configuration.kind == "configuration"
        input_path = configuration.name if configuration is not None and is_file else None
        files.check_outputs({"--output": output}, (input_path,))
        files.check_writable(output)
    profile = profile_by_formula(options, configuration)
    if output is not None:
        files.write(output, profile, header=profile_header(model, profile))
    return profile


def _with_settings(configuration: Configuration, options: ProfileOptions) -> ProfileOptions:
    note_language_model_only(configuration, options)
    if options.sequence is None:
        options.note(f"samples have {configuration.usual_sequence} tokens; change this with `--sequence`")
    own = {"sequence": options.sequence or configuration.usual_sequence, "task": options.task}
    settings = {name: str(value) for name, value in own.items() if value is not None}
    return replace(
        options,
        sequence=None,
        task=None,
        from_formula=None,
        settings={**settings, **texts.parse_settings(options.settings or {})},
    )


def profile_header(model: File | Any | None, measured: Profile) -> str:
    """Return the comment at the top of a profile's file."""
    how = measured.device.how.capitalize()
    name = _name_of(model)
    if model is None:
        settings = measured.model.settings
        name = f"--preset {settings['preset']}" if "preset" in settings else f"--from-formula {settings['formula']}"
    of = "times in microseconds, sizes in bytes, one value per micro-batch size."
    return f"{how} by `gpipe-plan profile {name}`; {of}"


def partial_profile_path(output: File | None) -> Path | None:
    """Return the path for an unfinished profile, next to the file `output`; None if `output` is not a file."""
    return None if output in (None, "-") else Path(f"{output}.partial")


_UNFINISHED = (
    "Measurements of `gpipe-plan profile {model}` until it was interrupted. The same command continues from here.\n"
    "Delete this file to start over."
)


@dataclass(frozen=True, kw_only=True)
class _ParsedOptions:
    options: ProfileOptions
    output: str | None
    sizes: tuple[int, ...]
    precision: Precision
    granularity: Granularity
    time_budget_s: float
    proof_budget_s: float
    settings: dict[str, str]
    calibration: Calibration | None


def _parsed_options(model: File | Any, options: ProfileOptions) -> _ParsedOptions:
    parsed = _ParsedOptions(
        options=options,
        output=path_of(options.output),
        sizes=texts.parse_micro_batch_sizes(options.batch_sizes, options.batch),
        time_budget_s=texts.parse_duration_s("--time-budget", options.time_budget),
        proof_budget_s=texts.parse_duration_s("--proof-budget", options.proof_budget),
        precision=chosen_precision(options),
        granularity=cast("Granularity", texts.parse_choice("--granularity", options.granularity, Granularity)),
        settings=texts.parse_settings(options.settings or {}),
        calibration=resolve_calibration(options.calibration),
    )
    if options.threads < 1 or options.repeat < 2:
        shown = f"`--threads {options.threads} --repeat {options.repeat}`"
        raise UsageError(f"{shown}: at least 1 thread and 2 repeats are needed")
    if parsed.output is not None:
        # A path that is not a Python file is rejected before anything is written.
        path = path_of(model) or ""
        sources = [source for source in (path, path.rpartition(":")[0]) if source.endswith((".py", ".json"))]
        files.check_outputs({"--output": parsed.output}, (*sources, path_of(options.calibration)))
        files.check_writable(parsed.output)
    if parsed.calibration is not None and options.device in TORCH_KINDS:
        calibrated_executor(parsed.calibration, options.device)  # before anything is measured
    return parsed


def _measuring(parsed: _ParsedOptions) -> "Measuring":
    from planner.profile.task import ProfilerOptions as Measuring  # noqa: PLC0415 - torch

    options = parsed.options
    return Measuring(
        micro_batch_sizes=parsed.sizes,
        device=options.device,
        threads=options.threads,
        repeats=options.repeat,
        time_budget_s=parsed.time_budget_s,
        skip_failing_sizes=options.batch_sizes == "auto",
    )


def _loaded(model: File | Any, parsed: _ParsedOptions) -> "LoadedModel":
    from planner.model import in_precision, load_model, load_module  # noqa: PLC0415 - torch

    options, inputs = parsed.options, parsed.options.inputs or ()
    path = path_of(model)
    if path is None:
        loaded = load_module(
            model,
            example_batch=options.example_batch,
            loss_fn=options.loss_fn,
            inputs=inputs,
            optimizer=options.optimizer,
            granularity=parsed.granularity,
        )
    else:
        loaded = load_model(
            path, settings=parsed.settings, inputs=inputs, optimizer=options.optimizer, granularity=parsed.granularity
        )
    return in_precision(_with_checked_loss(loaded, parsed), parsed.precision)


def _with_checked_loss(loaded: "LoadedModel", parsed: _ParsedOptions) -> "LoadedModel":
    from planner.executor.build.loss_check import check_loss  # noqa: PLC0415 - torch

    checked = check_loss(loaded)
    for warning in checked.warnings:
        parsed.options.warn(warning)
    for note in checked.notes:
        parsed.options.note(note)
    return checked.loaded


def _checked(
    loaded: "LoadedModel", model: File | Any, parsed: _ParsedOptions
) -> "tuple[LoadedModel, EquivalenceResult | None]":
    from planner.executor.build.building import check_buildable  # noqa: PLC0415 - torch
    from planner.executor.equivalence.new_process import check_equivalence_on_cpu  # noqa: PLC0415 - torch
    from planner.profile.units import layer_digests  # noqa: PLC0415 - torch

    options = parsed.options
    if not parsed.proof_budget_s:
        check_buildable(loaded)
        return loaded, None
    silenced = replace(options, progress=ignore_arguments, note=ignore_arguments, warn=ignore_arguments)
    checked = check_equivalence_on_cpu(
        loaded,
        partial(_loaded, model, replace(parsed, options=silenced)),
        lambda text: options.progress(f"equivalence check: {text}", 0, 0),
        budget_s=parsed.proof_budget_s,
        digests=layer_digests,
    )
    if not checked.proof.layers:  # no stage was built, so it is not known if the ranks of a run can build theirs
        check_buildable(checked.loaded)
    for warning in checked.warnings:
        options.warn(warning)
    if checked.proof.differs_recomputed:
        options.warn(f"recomputed stages train differently: {checked.proof.differs_recomputed}")
    options.note(str(checked.proof))
    return checked.loaded, checked


def _executor_cost(options: ProfileOptions) -> ExecutorCost | None:
    from planner.executor.measure.calibrate import executor_cost  # noqa: PLC0415 - torch

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpipe-plan")
    try:
        return executor_cost(folder / "executor.json", warn=options.warn)
    except Exception as error:  # a failure here must not prevent the measurement of the profile
        options.warn(f"links are assumed to cost nothing, because two processes could not be run: {error}")
        return None


def _name_of(model: File | Any) -> str:
    return path_of(model) or type(model).__name__
