"""Profiles an unprepared model, trains it as pipelines, and compares these with a plain loop of its own.

Everything that runs the model is in a process of its own: the profile, each rank, and the plain loop, which uses
nothing of the package but the seeds of layers (`planner.model.seeding`).
"""

import importlib.util
import itertools
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

import planner
import planner.api.profiling
import planner.executor
import planner.profile.backends.measured  # what is imported here, forked processes need not
from planner.core.errors import PlannerError
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.profile import Profile
from planner.executor.build.building import build_structure
from planner.executor.equivalence.check import layer_starts
from planner.executor.equivalence.isolation import ChildError, ChildProcess
from planner.executor.keep.weights import canonical_names
from planner.executor.pipeline import Pipeline
from planner.model.load import load_model
from planner.model.reference import LayerStart
from planner.model.seeding import layer_seed, seed_host, seed_process
from tests.zoo.unprepared import UnpreparedModel

if TYPE_CHECKING:
    from planner.core.values.plan import Recompute, ScheduleName

__all__ = ["Outcome", "Verdict", "try_model"]

Verdict = Literal["right", "refused", "wrong", "died late", "unhelpful"]

STEPS = 12
MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 4
SEED = 11

_LIMIT_S = 90.0
_ROUNDING = 1e-4
"""Relative differences below it are rounding errors, whatever the model makes of one."""
_SHAKES = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a model."""

    verdict: Verdict
    profiled: str
    """What `profile` said: verified, cuts removed, recomputation refused, or its refusal."""
    runs: tuple[str, ...] = ()
    """Pipelines that were trained, such as `2 stages, recomputed`."""
    error: float = 0.0
    """Largest relative difference of a loss, and of a parameter or buffer relative to how far it moved."""
    problem: str = ""
    """What differs, or what a rank raised."""


@dataclass(frozen=True, kw_only=True)
class _Profiled:
    """What came of `profile`."""

    profile: Profile | None = None
    warnings: tuple[str, ...] = ()
    message: str = ""
    hint: str = ""
    is_refusal: bool = True
    starts: tuple[LayerStart | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """Losses by step, and tensors by name at the end."""

    losses: list[float]
    tensors: Mapping[str, Tensor]
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    canonical_names: Mapping[str, str] = field(default_factory=dict)
    """Map from each name of a tensor to the first name of the same tensor."""


def try_model(model: UnpreparedModel, *, num_pipelines: int | None = None) -> Outcome:
    """Profile a model, train it as pipelines of two and three stages, and compare them with a plain loop.

    Args:
        model: Model to try.
        num_pipelines: Number of pipelines to train, which are the last and hardest of all; default: all.
    """
    folder = Path(tempfile.mkdtemp(prefix="unprepared-"))
    try:
        path = model.write(folder)
        profiled = _in_child(partial(_profiled, path))
        if isinstance(profiled, str):
            return Outcome(verdict="unhelpful", profiled=f"crashed: {profiled}")
        if profiled.profile is None:
            verdict: Verdict = "refused" if profiled.is_refusal and profiled.hint else "unhelpful"
            hint = f" ({profiled.hint})" if profiled.hint else ""
            message = profiled.message.replace(f"{folder}/", "")
            return Outcome(verdict=verdict, profiled=f"refused: {message}{hint}")
        balances = list(_balances(profiled.profile, path))
        return _trained_outcome(model, path, profiled, balances[-num_pipelines:] if num_pipelines else balances)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _trained_outcome(
    model: UnpreparedModel, path: Path, profiled: _Profiled, balances: Sequence[tuple[str, Balance]]
) -> Outcome:
    assert profiled.profile is not None
    said = _described(profiled.profile, profiled.warnings)
    worst, names = 0.0, []
    plain: _Trained | None = None
    for name, balance in balances:
        names.append(name)
        outcome = Outcome(verdict="died late", profiled=said, runs=tuple(names))
        try:
            trained = _train(balance, path.parent)
        except ChildError as error:
            if model.edits_the_loop and error.hint:
                return Outcome(verdict="refused", profiled=f"refused in training: {error.message} ({error.hint})")
            return replace(outcome, problem=f"{names[-1]}: {error.message}")
        start = trained.initial if model.is_unseeded else {}
        if plain is None or model.is_unseeded:
            found = _in_child(partial(_plain_loop, path, profiled.starts, start, None))
            if isinstance(found, str):
                return replace(outcome, verdict="unhelpful", problem=f"the plain loop failed: {found}")
            plain = cast("_Trained", found)
        error, what = _difference(trained, plain)
        worst = max(worst, error)
        if error > _ROUNDING and error > 10 * _noise(path, profiled.starts, plain, start, trained):
            return replace(outcome, verdict="wrong", error=error, problem=f"{names[-1]}: {what}")
    return Outcome(verdict="right", profiled=said, runs=tuple(names), error=worst)


def _in_child(work: Any) -> Any:
    """Run in a process of its own; return what it returned, or a text if it raised something."""
    child = ChildProcess(lambda _connection: work(), limit_s=_LIMIT_S)
    try:
        return child.result()
    except ChildError as error:
        return error.message
    finally:
        child.end()


def _profiled(path: Path) -> _Profiled:
    warnings: list[str] = []
    try:
        profile = planner.profile(
            str(path), batch_sizes=(2, 4), repeat=2, time_budget="0s", note=lambda _text: None, warn=warnings.append
        )
        loaded = load_model(str(path), uncut=profile.model.uncut)
        starts = layer_starts(build_structure(loaded))
    except PlannerError as error:
        return _Profiled(message=error.message, hint=error.hint)
    except Exception as error:  # whatever it is, a user would see it
        return _Profiled(message=f"{type(error).__name__}: {error}", is_refusal=False)
    return _Profiled(profile=profile, warnings=tuple(warnings), starts=starts)


def _described(profile: Profile, warnings: Sequence[str]) -> str:
    proof = profile.proof
    if not proof.cuts:
        return f"not compared: {proof.reason}"
    parts = [f"{proof.cuts} of {proof.cuts + proof.uncovered} cuts verified"]
    parts += [w for w in warnings if "cannot be cut" in w or "recomputed" in w or "loss" in w]
    return "; ".join(parts)


def _balances(profile: Profile, path: Path) -> Iterator[tuple[str, Balance]]:
    """Yield pipelines cut into about as many layers, by name: two and three stages, without and with recomputation.

    The last one is a V of two devices with two stages each, whose backwards are split.
    """
    names = [layer.name for layer in profile.layers]
    may_recompute = profile.proof is None or not profile.proof.differs_recomputed
    choices: list[Recompute] = ["never", "always"] if may_recompute else ["never"]
    for num_stages, recompute in itertools.product((2, 3), choices):
        name = f"{num_stages} stages{', recomputed' if recompute != 'never' else ''}"
        if num_stages <= len(names):
            schedule: ScheduleName = "1f1b" if recompute == "never" else "gpipe"
            yield name, replace(_balance(profile, path, num_stages, recompute), schedule=schedule)
    if len(names) >= 4:
        yield "ZB-V", replace(_balance(profile, path, 4, "never"), schedule="zbv", chunks=2, placement="v")
    elif len(names) >= 2:
        yield "ZB-H1", replace(_balance(profile, path, 2, "never"), schedule="zb-h1")


def _balance(profile: Profile, path: Path, num_stages: int, recompute: "Recompute") -> Balance:
    names = [layer.name for layer in profile.layers]
    edges = [round(k * len(names) / num_stages) for k in range(num_stages + 1)]
    spans = list(itertools.pairwise(edges))
    return Balance(
        plan_digest="",
        model=replace(profile.model, source=f"{path}:build_model"),
        optimizer=profile.optimizer,
        schedule="1f1b",
        batch=MICRO_BATCHES * MICRO_BATCH_SIZE,
        micro_batches=MICRO_BATCHES,
        balance=tuple(end - first for first, end in spans),
        stages=tuple(
            StageBalance(index=index, recompute=recompute, layers=tuple(names[first:end]))
            for index, (first, end) in enumerate(spans)
        ),
    )


def _train(balance: Balance, folder: Path) -> _Trained:
    """Train a pipeline, each rank in a process of its own.

    Raises:
        ChildError: A rank failed.
    """
    place = Path(tempfile.mkdtemp(dir=folder))
    count = balance.num_processes
    children = [ChildProcess(partial(_rank, balance, rank, place), limit_s=_LIMIT_S) for rank in range(count)]
    try:
        parts = _results(children)
    finally:
        for child in children:
            child.end()
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    initial = {name: tensor for part in parts for name, tensor in part.initial.items()}
    return _Trained(losses=parts[-1].losses, tensors=tensors, initial=initial)


def _results(children: Sequence[ChildProcess]) -> list[_Trained]:
    """Return what all ranks have; of several errors, the one that is not of a closed connection."""
    waiting = {child.connection: rank for rank, child in enumerate(children)}
    found: dict[int, _Trained] = {}
    errors: list[ChildError] = []
    while waiting:
        ready = wait(list(waiting), timeout=2.0 if errors else None)
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(cast("Connection", connection))
            try:
                found[rank] = children[rank].result()
            except ChildError as error:
                errors.append(error)
    if errors:
        raise next((e for e in errors if "onnection" not in e.message), errors[0])
    return [found[rank] for rank in range(len(children))]


def _rank(balance: Balance, rank: int, place: Path, _connection: Connection) -> _Trained:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(balance.num_processes)}
    store = dist.FileStore(str(place / "store"), balance.num_processes)
    world = balance.num_processes
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT_S))
    pipeline = Pipeline(balance, seed=SEED, device="cpu")
    initial = {name: tensor.detach().clone() for name, tensor in pipeline.named_tensors().items()}
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    file = sys.modules[f"gpipe_plan_model_{Path(balance.model.source.rpartition(':')[0]).stem}"]
    loop = getattr(file, "Loop", _Loop)(optimizer, dict(pipeline.named_parameters()))
    losses = []
    for step in range(STEPS):
        _seed_batch(step)
        inputs, targets = pipeline.own_part(*pipeline.model.example_batch(balance.batch))
        with pipeline.step(inputs, targets) as loss:
            loop.before(step, pipeline.clip_gradients)
            optimizer.step()
            optimizer.zero_grad()
        loop.after(step, loss)
        losses.append(float(loss))
    tensors = {name: tensor.detach().clone() for name, tensor in pipeline.named_tensors().items()}
    pipeline.close()
    return _Trained(losses=losses, tensors=tensors, initial=initial)


class _Loop:
    """Additions to a training loop; a model file may define its own `Loop`."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None: ...

    def before(self, step: int, clip: Callable[[float], Any]) -> None:
        """Run before the optimizer's step; `clip` clips all gradients by their norm."""

    def after(self, step: int, loss: float) -> None:
        """Run after the optimizer's step."""


def _seed_batch(step: int) -> None:
    seed_process(1000 + step)


def _plain_loop(
    path: Path, starts: Sequence[LayerStart | None], initial: Mapping[str, Tensor], shake: int | None
) -> _Trained:
    """Train the model as its user would."""
    seed_process(SEED)
    file = _imported(path)
    seed_process(SEED)  # as a pipeline does: what the file draws when it is imported shifts no initial values
    model = file.build_model()
    begun = {name: tensor for name, tensor in initial.items() if name in model.state_dict()}
    model.load_state_dict(begun, strict=False)
    if shake is not None:
        _shake(model, shake)
    optimizer = file.build_optimizer(model.parameters())
    loop = getattr(file, "Loop", _Loop)(optimizer, dict(model.named_parameters()))
    losses = []
    with _planted(model, starts) as plant:
        for step in range(STEPS):
            _seed_batch(step)
            batch = file.example_batch(MICRO_BATCHES * MICRO_BATCH_SIZE)
            parts = [tree_map_only(Tensor, partial(_part, number=n), tuple(batch)) for n in range(MICRO_BATCHES)]
            total = 0.0
            for number, ((inputs, targets), weight) in enumerate(zip(parts, _weights(file, parts), strict=True)):
                plant(step, number)
                loss = file.loss_fn(_output(model, inputs), targets) * weight
                if loss.requires_grad:
                    loss.backward()
                total += float(loss.detach())
            losses.append(total)
            loop.before(step, partial(nn.utils.clip_grad_norm_, list(model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
            loop.after(step, total)
    tensors = {n: t.detach().clone() for n, t in _compared(model).items()}
    return _Trained(losses=losses, tensors=tensors, canonical_names=canonical_names(model))


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_model"] = module
    spec.loader.exec_module(module)
    return module


def _output(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _part(tensor: Tensor, number: int) -> Tensor:
    return tensor[number * MICRO_BATCH_SIZE : (number + 1) * MICRO_BATCH_SIZE]


def _weights(file: ModuleType, parts: Sequence[Any]) -> list[float]:
    """Return the weights of micro-batches: by `loss_count`, by labels that are not -100 among the inputs, or equal."""
    counts = [1.0] * len(parts)
    if hasattr(file, "loss_count"):
        counts = [float(file.loss_count(targets)) for _, targets in parts]
    elif isinstance(parts[0][0], dict) and "labels" in parts[0][0]:
        counts = [float((inputs["labels"] != -100).sum()) for inputs, _ in parts]
    return [count / sum(counts) for count in counts]


def _compared(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors without statistics of batch normalization, which a pipeline takes of mini-batches."""
    norms = tuple(f"{path}." for path, m in model.named_modules() if isinstance(m, _BatchNorm))
    names = ("running_mean", "running_var", "num_batches_tracked")
    tensors = dict(model.named_parameters(remove_duplicate=False))
    # Hooks may rename or leave out entries of the state dict, which may also have other objects (`get_extra_state`).
    tensors |= {n: t for n, t in model.named_buffers(remove_duplicate=False) if n in model.state_dict()}
    return {n: t for n, t in tensors.items() if not (n.startswith(norms) and n.endswith(names))}


@contextmanager
def _planted(model: nn.Module, starts: Sequence[LayerStart | None]) -> Iterator[Any]:
    """Seed all generators where a layer begins, as pipelines do; yields what to call before each micro-batch."""
    layers = {
        (id(model.get_submodule(start.path)), start.call, start.at_end): index
        for index, start in enumerate(starts, start=1)
        if start is not None
    }
    calls: Counter[tuple[int, bool]] = Counter()
    now = [0, 0]

    def begin(step: int, micro_batch: int) -> None:
        calls.clear()
        now[:] = step, micro_batch
        seed_host(layer_seed(SEED, step, 0, micro_batch))

    def passed(module: nn.Module, *_: Any, at_end: bool) -> None:
        if torch.compiler.is_compiling():
            return
        calls[id(module), at_end] += 1
        layer = layers.get((id(module), calls[id(module), at_end], at_end))
        if layer is not None:
            seed_host(layer_seed(SEED, now[0], layer, now[1]))

    hooks = [
        register_module_forward_pre_hook(partial(passed, at_end=False)),
        register_module_forward_hook(partial(passed, at_end=True)),
    ]

    def run_compiled(module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        passed(module, at_end=False)
        result = compiled(*args, **kwargs)
        passed(module, at_end=True)
        return result

    for module in model.modules():
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = partial(run_compiled, module, module._compiled_call_impl)
    try:
        yield begin
    finally:
        for hook in hooks:
            hook.remove()


def _shake(model: nn.Module, seed: int) -> None:
    """Change every parameter by a rounding error."""
    signs = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.from_numpy(signs.choice([-1.0, 1.0], tuple(parameter.shape))))


def _noise(
    path: Path,
    starts: Sequence[LayerStart | None],
    plain: _Trained,
    start: Mapping[str, Tensor],
    trained: _Trained,
) -> float:
    """Return how far the plain loop goes from itself where parameters begin with a rounding error."""
    found = [_in_child(partial(_plain_loop, path, starts, start, seed)) for seed in range(_SHAKES)]
    return max(_difference(replace(other, initial=trained.initial), plain)[0] for other in found)


def _difference(trained: _Trained, plain: _Trained) -> tuple[float, str]:
    """Return the largest relative difference, and what it is of."""
    worst = (0.0, "")
    for step, (one, other) in enumerate(zip(trained.losses, plain.losses, strict=True)):
        error = abs(one - other) / max(abs(other), 1e-6)
        error = math.inf if math.isnan(error) else error
        worst = max(worst, (error, f"loss of step {step}: {one:.6g} for {other:.6g}"))
    for name, expected in plain.tensors.items():
        if name not in trained.tensors and plain.canonical_names.get(name) in trained.tensors:
            continue
        if name not in trained.tensors:
            worst = max(worst, (float("inf"), f"`{name}` is on no stage"))
            continue
        ours, right, start = (_wide(t) for t in (trained.tensors[name], expected, trained.initial.get(name, expected)))
        if not right.numel():
            continue
        if ours.shape != right.shape:
            worst = max(worst, (math.inf, f"`{name}` has another shape"))
            continue
        start = start if start.shape == right.shape else torch.zeros_like(right)  # observers resize theirs
        moved = max(float((right - start).abs().max()), 1e-4 * float(right.abs().max()), 1e-9)
        error = float((ours - right).abs().nan_to_num(0.0).max()) / moved
        worst = max(worst, (error, f"`{name}` ends {error:.1e} of its way apart"))
    return worst


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
