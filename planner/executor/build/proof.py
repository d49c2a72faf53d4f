"""Do the stages of a model compute what the model does? Found out by running both, before anything is planned.

A cut can be wrong in ways that no rule foresees: code of the model's own that reads a parameter of another stage, a
module that leaves something behind in an attribute, a forward that changes what it runs on. So the layers are run as
stages of one layer each, as the executor will build them, and held against the model in one piece: loss, every
gradient, every buffer. One micro-batch is recomputed and one is not. A cut that does not come out right is taken out.

The gradients of both runs are added up with opposite signs, so that what is left is the difference, and no second
copy of all gradients is needed.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from planner.core.errors import ModelError
from planner.core.values.plan import Recompute
from planner.core.values.precision import Precision
from planner.core.values.proof import Proof
from planner.core.values.units import format_bytes
from planner.device.machine import LARGE_BYTES, available_bytes, give_freed_memory_back, keep_freed_memory, usable_cores
from planner.executor.build.building import StageRange, build_structure, held_names
from planner.executor.build.copies import Copies
from planner.executor.build.rehearsal import Outcome, Rehearsal
from planner.executor.run.parts import tensors_of
from planner.executor.run.random_state import keeping_random_state
from planner.executor.run.shapes import shapes_of
from planner.model.autocast import layers_in
from planner.model.chain import Chain
from planner.model.load import LoadedModel

__all__ = ["LIMIT", "Proven", "prove"]

LIMIT = 1e-4
"""Relative differences above it are no rounding errors, unless the model makes as much of one (`_noise`)."""

_NOISE: Mapping[Precision, float] = {"": 1e-7, "fp32": 1e-7, "bf16": 4e-3, "bf16-mixed": 4e-3, "fp16-mixed": 5e-4}
"""By such a share parameters are changed to see what a model makes of a rounding error."""

_WORST = 1e-2
"""No rounding error is larger, as long as both sides run the same kernels."""

_BUDGET_BYTES = 1_350_000_000

_MAPPED_BYTES = 2**20
"""From so many on the system has a block back as soon as it is free."""

_FORWARDS = 13
"""What the comparison costs in forwards, where backward costs two: 2 x 3 in one piece, 3 and 4 in stages."""


_CPU = torch.device("cpu")


class Proven(NamedTuple):
    """What was found."""

    loaded: LoadedModel
    """The model, with the layers that no stage may end with."""
    proof: Proof
    warnings: tuple[str, ...]
    """Which cuts were taken out, and why."""


def prove(loaded: LoadedModel, *, budget_s: float, ends: Sequence[int] | None = None) -> Proven:
    """Holds stages of a model against the model in one piece, on the CPU.

    Args:
        loaded: The model.
        budget_s: About how long that may take on one core; then it is of so many layers, from the first one on.
        ends: The layer behind the last of each stage; by default every layer is one.

    Raises:
        ModelError: No cut is right.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    # Whole stages come and go: what is measured next would find a heap of holes, and fill them for good.
    keep_freed_memory(below=_MAPPED_BYTES)
    try:
        with keeping_random_state():
            return _proven(loaded, budget_s, ends)
    finally:
        torch.set_num_threads(threads)
        keep_freed_memory(below=LARGE_BYTES)
        give_freed_memory_back()


# Private functions


def _proven(loaded: LoadedModel, budget_s: float, ends: Sequence[int] | None) -> Proven:
    warnings: list[str] = []
    while True:
        try:
            trial = _Trial.of(loaded, budget_s)
            cuts = [end for end in (ends or range(1, trial.num_layers)) if end < trial.num_layers]
            stages = [*cuts, trial.num_layers]
            verdict = trial.compare(stages, "except-last") if cuts else None
        except (Exception, SystemExit) as error:  # the model itself: it is told better where it is measured
            if warnings:
                raise
            return Proven(loaded, Proof(layers=0, cuts=0, reason=_in_a_line(error)), ())
        if verdict is None:
            reason = trial.reason or "there is a single stage"
            return Proven(loaded, Proof(layers=0, cuts=0, reason=reason), tuple(warnings))
        # What goes wrong only where it is recomputed is no reason not to cut: the proof says it, for `solve`.
        differs = verdict.problem
        if differs:
            verdict = trial.compare(stages, "never")
        if not verdict.problem:
            proof = Proof(
                layers=trial.num_layers,
                cuts=len(cuts),
                gradients=verdict.gradients,
                buffers=verdict.buffers,
                worst=float(f"{verdict.worst:.0e}"),
                reason=trial.reason,
                differs_recomputed=differs,
            )
            return Proven(loaded, proof, tuple(warnings))
        loaded = _without_wrong_cuts(trial, loaded, verdict.problem, cuts, warnings=warnings)


def _without_wrong_cuts(
    trial: "_Trial", loaded: LoadedModel, problem: str, cuts: Sequence[int], *, warnings: list[str]
) -> LoadedModel:
    """The model without the cuts whose stages differ, each tried alone.

    Raises:
        ModelError: There is no other cut.
    """
    ends = trial.rehearsal.chain.ends
    # Two stages at a time. Where none of these pairs differs it takes several cuts at once: then all of them go.
    problems = {cut: trial.compare([cut, trial.num_layers], "never").problem for cut in cuts}
    wrong = {cut: why for cut, why in problems.items() if why} or dict.fromkeys(cuts, problem)
    warnings.extend(f'the model cannot be cut behind "{ends[cut - 1]}": {why}' for cut, why in wrong.items())
    if len(wrong) == len(ends):
        raise ModelError(
            f"the model cannot be cut: its stages do not compute what it does in one piece ({problem})",
            hint="hand on what later modules need in what `forward` returns, not in attributes or global variables",
        )
    return replace(loaded, uncut=(*loaded.uncut, *(ends[cut - 1] for cut in wrong)))


def _in_a_line(error: BaseException) -> str:
    """What was raised, in a line."""
    first = str(error).partition("\n")[0]
    return first if isinstance(error, ModelError) else f"{type(error).__name__}: {first}"


class _Verdict(NamedTuple):
    """What a comparison of stages with the model in one piece came to."""

    worst: float
    gradients: int
    buffers: int
    problem: str
    differences: Mapping[str, float]
    """By what differs."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A model, as much of it as fits, and what it does in one piece."""

    rehearsal: Rehearsal
    reason: str
    """Why not all layers take part."""

    @property
    def num_layers(self) -> int:
        return self.rehearsal.num_layers

    @classmethod
    def of(cls, loaded: LoadedModel, budget_s: float) -> "_Trial":
        """The trial that the budget allows."""
        chain = build_structure(loaded)
        rehearsal, probe = _tried(loaded, chain, budget_s)
        size = rehearsal.micro_batch_size
        # Time decides how much is compared: one micro-batch, two, or two of two samples each.
        if _FORWARDS * probe.seconds > budget_s:
            rehearsal = replace(rehearsal, micro_batches=rehearsal.micro_batches[:1])
        elif size == 1 and 2 * _FORWARDS * probe.seconds < budget_s:
            rehearsal = _rehearsal(loaded, chain, rehearsal.copies, 2)
        return cls(rehearsal=replace(rehearsal, num_layers=probe.num_layers), reason=probe.reason)

    def compare(self, ends: Sequence[int], recompute: Recompute) -> _Verdict:
        """The model in stages against the model in one piece."""
        # A single micro-batch is the last one, too, and nothing would be recomputed.
        if len(self.rehearsal.micro_batches) == 1 and recompute == "except-last":
            recompute = "always"
        # First as the executor runs it; an error, or a difference without recomputation, needs no second look.
        verdict = self._compared(ends, recompute, as_trained=False)
        if not verdict.problem or recompute == "never" or math.isinf(verdict.worst):
            return verdict
        # Is it the kernels that torch takes where there is no graph? Then it is no larger than a rounding error of
        # this model, and with a graph there is nothing.
        as_trained = self._compared(ends, recompute, as_trained=True)
        if as_trained.problem or self._problem(verdict.differences, most=math.inf):
            return verdict
        return as_trained

    # Private methods

    def _compared(self, ends: Sequence[int], recompute: Recompute, *, as_trained: bool) -> _Verdict:
        with self._in_one_piece() as whole:
            try:
                cut = self.rehearsal.run(ends, recompute, sign=-1.0, as_trained=as_trained)
            except (Exception, SystemExit) as error:  # whatever a stage raises that the model does not
                return _Verdict(math.inf, 0, 0, _in_a_line(error), {})
            differences = whole.differences(cut)
        trained = sum(p.requires_grad for p in whole.parameters.values())
        problem = self._problem(differences, most=_WORST)
        return _Verdict(max(differences.values()), trained, len(cut.buffers), problem, differences)

    def _problem(self, differences: Mapping[str, float], *, most: float) -> str:
        """The largest difference that is no rounding error, nor, up to `most`, what the model makes of one."""
        # The noise takes two more steps to find, so it is asked for only where something is suspicious. `not <=`: NaN.
        large = {what: size for what, size in differences.items() if not size <= LIMIT}
        noise = self._noise() if large else {}
        wrong = {what: size for what, size in large.items() if not size <= min(most, 10 * noise.get(what, 0.0))}
        what = max(wrong, key=wrong.__getitem__, default="")
        return what and f"{what} differs by {wrong[what]:.1e}"

    @contextmanager
    def _in_one_piece(self) -> Iterator["_Whole"]:
        """A step of the model in one piece, whose gradients lie in the parameters until the block ends."""
        names = held_names(self.rehearsal.chain, 0, self.num_layers)
        named = self.rehearsal.copies.parameters(sorted(names))
        once = {id(parameter): name for name, parameter in reversed(named.items())}
        parameters = {name: named[name] for name in once.values()}
        try:
            outcome = self.rehearsal.in_one_piece()
            scales = {name: _largest(p.grad) for name, p in parameters.items()}
            yield _Whole(outcome, parameters, scales)
        finally:
            for parameter in parameters.values():
                parameter.grad = None

    def _noise(self) -> dict[str, float]:
        """How much everything changes where all parameters change by the size of a rounding error."""
        with self._in_one_piece() as whole:
            with _scaled(whole.parameters.values(), 1 + _NOISE[self.rehearsal.loaded.precision]):
                other = self.rehearsal.in_one_piece(sign=-1.0)
            return whole.differences(other)


class _Whole(NamedTuple):
    """What a step of the model in one piece left behind."""

    outcome: Outcome
    parameters: Mapping[str, nn.Parameter]
    """By name, each once; their gradients are those of the step."""
    scales: Mapping[str, float]
    """The largest number in each gradient."""

    def differences(self, other: Outcome) -> dict[str, float]:
        """Relative differences to another step, by what differs; its gradients were added with the opposite sign."""
        # A gradient that is nothing but rounding errors is compared with the largest of all.
        least = max(1e-5 * max(self.scales.values(), default=0.0), 1e-30)
        loss = self.outcome.loss
        differences = {"the loss": abs(loss - other.loss) / max(abs(loss), 1e-30)}
        for name, parameter in self.parameters.items():
            ratio = _ratio(_largest(parameter.grad), max(self.scales[name], least))
            differences[f'the gradient of "{name}"'] = ratio
        for name, buffers in other.buffers.items():
            right = self.outcome.buffers[name][0]
            # Several stages may hold a buffer: each must come out right.
            differences[f'the buffer "{name}"'] = max(_buffer_ratio(buffer, right) for buffer in buffers)
        return differences


@contextmanager
def _scaled(parameters: Collection[Tensor], factor: float) -> Iterator[None]:
    before = [(parameter, parameter.detach().clone()) for parameter in parameters if parameter.is_floating_point()]
    # Values are put back, not divided: that would leave a rounding error.
    try:
        with torch.no_grad():
            for parameter, _ in before:
                parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)


def _tried(loaded: LoadedModel, chain: Chain, budget_s: float) -> "tuple[Rehearsal, _Probe]":
    """What can be run: with parameters that are made for it if that will do, and of one sample if that will do.

    Some modules look at the values of their parameters while they are made. Some layers want two samples: batch
    normalisation behind the last pooling.
    """
    lean = Copies(loaded, lean=True)
    # Values, gradients, and other instances of the model that come and go while it is built.
    fits_whole = 4 * lean.num_bytes(held_names(chain, 0, len(chain.layers)))[0] <= _budget_bytes()
    rehearsal, probe = _tried_with(lean, loaded, chain, budget_s)
    if probe.has_failed and fits_whole:
        return _tried_with(Copies(loaded, lean=False), loaded, chain, budget_s)
    return rehearsal, probe  # what fails in stages and not in one piece is what is looked for


def _tried_with(copies: Copies, loaded: LoadedModel, chain: Chain, budget_s: float) -> "tuple[Rehearsal, _Probe]":
    try:
        rehearsal = _rehearsal(loaded, chain, copies, 1)
    except ModelError:
        pass
    else:
        probe = _probed(rehearsal, budget_s)
        if not probe.has_failed:
            return rehearsal, probe
    rehearsal = _rehearsal(loaded, chain, copies, 2)
    return rehearsal, _probed(rehearsal, budget_s)


def _rehearsal(loaded: LoadedModel, chain: Chain, copies: Copies, size: int) -> Rehearsal:
    torch.manual_seed(1)
    batches = [loaded.example_batch(size) for _ in range(2)]
    shapes = shapes_of(chain, batches[0].inputs, precision=loaded.precision, device=_CPU)
    return Rehearsal(
        loaded=loaded,
        chain=chain,
        shapes=shapes,
        copies=copies,
        micro_batches=tuple(batches),
        micro_batch_size=size,
        num_layers=len(chain.layers),
    )


class _Probe(NamedTuple):
    num_layers: int
    seconds: float
    """What a forward of them takes."""
    reason: str
    """Why there are no more."""
    has_failed: bool = False
    """Whether a stage raised an error."""


def _budget_bytes() -> int:
    return min(_BUDGET_BYTES, available_bytes() // 4)


def _probed(rehearsal: Rehearsal, budget_s: float) -> _Probe:
    """How many layers, from the first one on, can be compared within the budget of time and memory."""
    budget_bytes, names = _budget_bytes(), rehearsal.chain.names
    saved = _Saved()
    begin = time.process_time()
    seconds = 0.0
    received = tensors_of(rehearsal.micro_batches[0].inputs)
    for layer, name in enumerate(names):
        # Parameters, their gradients, the largest of these once more before it is added; and what one micro-batch
        # keeps, which may be twice as much of two samples.
        parameter_bytes, largest_bytes = rehearsal.copies.num_bytes(held_names(rehearsal.chain, 0, layer + 1))
        wanted_bytes = 2 * parameter_bytes + largest_bytes + 2 * saved.num_bytes
        if wanted_bytes > budget_bytes:
            reason = f'from "{name}" on it takes more than {format_bytes(budget_bytes)} of memory here'
            return _Probe(layer, seconds, reason)
        # A first run of a layer may take much longer than the next one, so that what was spent counts as well.
        spent = max(time.process_time() - begin, _FORWARDS / 2 * seconds)
        if spent > budget_s:
            return _Probe(layer, seconds, f'from "{name}" on it takes more than {budget_s:g} s here')
        started = time.process_time()
        try:
            module = rehearsal.stage(StageRange(layer, layer + 1))
            with saved_tensors_hooks(saved.note, saved.nothing), layers_in(rehearsal.loaded.precision, _CPU):
                outputs = tensors_of(module(*received))
        except (Exception, SystemExit):
            return _Probe(len(names), seconds, "", has_failed=True)
        seconds += time.process_time() - started
        received = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
    return _Probe(len(names), seconds, "")


class _Saved:
    """Counts what a forward keeps for backward, and keeps none of it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # An address may come again once its tensor is gone: then less is counted than is kept.
        if not isinstance(tensor, nn.Parameter) and storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.num_bytes += storage.nbytes()

    def nothing(self, _kept: Any) -> NoReturn:
        raise AssertionError("there is no backward")


def _buffer_ratio(buffer: Tensor, right: Tensor) -> float:
    if buffer.shape != right.shape:
        return math.inf
    return _ratio(_largest(buffer.double() - right.double()), max(_largest(right), 1e-30))


def _ratio(difference: float, scale: float) -> float:
    ratio = difference / scale
    return math.inf if math.isnan(ratio) else ratio


def _largest(tensor: Tensor | None) -> float:
    if tensor is None:
        return 0.0
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if not values.is_floating_point() and not values.is_complex():
        values = values.double()
    # A norm, which makes no tensor of absolute values.
    return float(torch.linalg.vector_norm(values.detach(), math.inf)) if values.numel() else 0.0
