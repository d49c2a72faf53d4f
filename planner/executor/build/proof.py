"""Do the stages of a model compute what the model does? Found out by running both, before anything is planned.

A cut can be wrong in ways that no rule foresees: code of the model's own that reads a parameter of another stage, a
module that leaves something behind in an attribute, a forward that changes what it runs on. So the layers are run as
stages of one layer each, as the executor will build them, and held against the model in one piece: loss, every
gradient, every buffer. One micro-batch is recomputed and one is not. A cut that does not come out right is taken out.

The gradients of both runs are added up with opposite signs, so that what is left is the difference, and no second
copy of all gradients is needed.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.plan import Recompute
from planner.core.values.precision import Precision
from planner.core.values.proof import Proof
from planner.device.machine import LARGE_BYTES, give_freed_memory_back, keep_freed_memory, usable_cores
from planner.executor.build.building import build_structure, held_names
from planner.executor.build.probe import FORWARDS, probed
from planner.executor.build.rehearsal import Outcome, Rehearsal
from planner.executor.run.gradients import dense_part
from planner.executor.run.random_state import keeping_random_state
from planner.model.load import LoadedModel

LIMIT = 1e-4
"""Relative differences above it are no rounding errors, unless the model makes as much of one (`_noise`)."""

_NOISE: Mapping[Precision, float] = {"": 1e-7, "fp32": 1e-7, "bf16": 4e-3, "bf16-mixed": 4e-3, "fp16-mixed": 5e-4}
"""By such a share parameters are changed to see what a model makes of a rounding error."""

_DRAWS = 4
"""Times that they are changed: whether a ReLU turns over is a matter of luck."""

_WORST = 1e-2
"""No rounding error is larger, as long as both sides run the same kernels."""

_MAPPED_BYTES = 2**20
"""From so many on the system has a block back as soon as it is free."""


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


def _proven(loaded: LoadedModel, budget_s: float, ends: Sequence[int] | None) -> Proven:
    warnings: list[str] = []
    # Without a wrong cut the layers are others, and reach further or less far: all is looked at anew.
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
        rehearsal, probe = probed(loaded, chain, budget_s)
        size = rehearsal.micro_batch_size
        # Time decides how much is compared: one micro-batch, two, or two of two samples each.
        if FORWARDS * probe.seconds > budget_s:
            rehearsal = replace(rehearsal, micro_batches=rehearsal.micro_batches[:1])
        elif size == 1 and 2 * FORWARDS * probe.seconds < budget_s:
            rehearsal = Rehearsal.of(loaded, chain, rehearsal.copies, samples=2)
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
        # The noise takes some more steps to find, so it is asked for only where something is suspicious. `not <=`: NaN.
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
            # The largest numbers are noted now: what runs next takes its gradients off these.
            scales = {name: _largest(p.grad) for name, p in parameters.items()}
            yield _Whole(outcome, parameters, scales)
        finally:
            for parameter in parameters.values():
                parameter.grad = None

    def _noise(self) -> dict[str, float]:
        """How much everything changes at most where all parameters change by the size of a rounding error."""
        most: dict[str, float] = {}
        for seed in range(_DRAWS):
            with self._in_one_piece() as whole:
                with _shaken(whole.parameters.values(), _NOISE[self.rehearsal.loaded.precision], seed):
                    other = self.rehearsal.in_one_piece(sign=-1.0)
                differences = whole.differences(other)
            most = {what: max(size, most.get(what, 0.0)) for what, size in differences.items()}
        return most


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
def _shaken(parameters: Collection[Tensor], share: float, seed: int) -> Iterator[None]:
    """Meanwhile every number of all parameters is larger or smaller by such a share.

    Which way is drawn for each: were all of them larger, no ReLU behind a normalisation would turn over.
    """
    before = [(parameter, parameter.detach().clone()) for parameter in parameters if parameter.is_floating_point()]
    generator = torch.Generator().manual_seed(seed)
    # Values are put back, not divided: that would leave a rounding error.
    try:
        with torch.no_grad():
            for parameter, _ in before:
                signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
                parameter.mul_(1 + share * (2 * signs - 1))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)


def _buffer_ratio(buffer: Tensor, right: Tensor) -> float:
    if buffer.shape != right.shape:
        return math.inf
    return _ratio(_largest(buffer.double() - right.double()), max(_largest(right), 1e-30))


def _ratio(difference: float, scale: float) -> float:
    ratio = difference / scale  # the scale is never zero
    return math.inf if math.isnan(ratio) else ratio


def _largest(tensor: Tensor | None) -> float:
    if tensor is None:
        return 0.0
    values = dense_part(tensor)
    if not values.is_floating_point() and not values.is_complex():
        values = values.double()
    # A norm, which makes no tensor of absolute values.
    return float(torch.linalg.vector_norm(values.detach(), math.inf)) if values.numel() else 0.0
