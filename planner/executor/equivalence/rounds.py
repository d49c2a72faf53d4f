"""One round of the equivalence check: a plain training loop as reference, and pipelines compared with it."""

import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import Recompute
from planner.core.values.profile import Model
from planner.core.values.proof import Proof
from planner.core.values.units import pluralize
from planner.executor.equivalence.differences import (
    NUMBER,
    StageDifferences,
    compare_gradients,
    largest_unexplained_difference,
    rounding_perturbation,
)
from planner.executor.equivalence.isolation import ChildError, ChildProcess, run_in_child
from planner.executor.equivalence.stages import PipelineTrial, run_rank
from planner.executor.equivalence.subject import CheckedModel, CheckRequest
from planner.model.reference import Perturbation, ReferenceOptions, train_reference
from planner.model.reference_state import ReferenceState

_MOST_STAGES = 8
"""Largest number of ranks that run at a time."""

_FEW_STAGES = 4
"""Largest number of ranks that run at a time if the model barely fits in memory. Each further rank takes 100 MB."""

_IN_PLACE_HINT = (
    "stages run forwards of several micro-batches before the first backward, so neither `forward` nor a hook may "
    "change a parameter in place: do it after the optimizer's step; give a buffer, or a target that `loss_fn` changes, "
    "a new tensor instead"
)
_CRASH_HINT = (
    "torch crashes if code between modules assigns a tensor of another stage to `.data`, as in `self.mean.data = "
    "x.mean(0)`: move this assignment into the module that uses `self.mean`"
)
_HINTS = {"modified by an inplace operation": _IN_PLACE_HINT, "ended by SIGSEGV": _CRASH_HINT}
"""Hints, by a text that occurs in the error message of a child process."""

_DRAWS = 2  # one is not enough, because a change may or may not flip a ReLU
"""Number of random changes of all parameters, to measure how much the model amplifies rounding errors."""


class CutFailure(NamedTuple):
    """Reason why a cut fails the check, and a hint for the user. Both are empty if the cut does not fail."""

    text: str = ""
    hint: str = ""

    def __str__(self) -> str:
        """Return text and hint in one line."""
        return "; ".join(filter(None, self))


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Record of one round of the equivalence check, and the cuts that failed it."""

    proof: Proof
    num_cuts: int = 0
    wrong: Mapping[str, CutFailure] = field(default_factory=dict)
    """Problem of each cut that failed, by the name of the layer before the cut."""
    is_failure: bool = False
    """True if an error prevented the comparison. Lack of time or memory is no error."""
    random: str = ""
    """Text about the difference between two plain training loops, if all cuts failed; empty without a difference."""


@dataclass(frozen=True, kw_only=True)
class EquivalenceRound:
    """Round of the equivalence check: a plain training loop (the reference), and pipelines to compare with it."""

    request: CheckRequest
    subject: CheckedModel
    folder: Path
    """Folder in which the reference writes its states."""
    child: ChildProcess
    """Process that trains the reference when `compare` is called."""
    progress: Callable[[str], None]
    """Function that is called with a text about the current activity."""

    def compare(self) -> RoundResult:
        """Train the reference, compare as many cuts as the time limit allows, and return the result."""
        self.child.connection.send(self.subject.options)
        self.progress("training the reference")
        if self.subject.one_by_one:
            _wait_for_reference(self.child)
            self.child.end()
        requested, shown = self.request.cuts, self.subject.compared_cuts
        num_layers = len(self.subject.whole.layers)
        wanted = list(shown.values() if requested is None else (cut for cut in requested if cut < num_layers))
        standing_for = {place: cut for cut, place in shown.items()}
        most = (_MOST_STAGES if self.subject.options.updates else _FEW_STAGES) - 1 if requested is None else len(wanted)
        compared: list[int] = []
        recomputed, took_s = "", 0.0
        relative: dict[str, float] = {}
        wrong: dict[int, CutFailure] = {}
        num_groups = -(-len(wanted) // max(1, most))
        groups = [wanted[n::num_groups] for n in range(num_groups)]  # the cuts of a group are far apart
        for number, cuts in enumerate(groups):
            if number and time.monotonic() + took_s > self.request.deadline:
                break
            begin = time.monotonic()
            self.progress(f"comparing cuts {len(compared) + 1} to {len(compared) + len(cuts)} of {len(wanted)}")
            verdict = self._group_result(cuts)
            took_s = time.monotonic() - begin
            compared += cuts
            recomputed = recomputed or verdict.differs_recomputed
            wrong |= verdict.wrong
            relative |= verdict.relative
        recomputed = recomputed or self._writes_of_backwards()
        alike = {place: self._represented_cuts(standing_for, place) for place in compared}
        named = {
            self.subject.whole.boundary_names[cut - 1]: why
            for place, why in sorted(wrong.items())
            for cut in alike[place]
        }
        proof = self._proof({cut for cuts in alike.values() for cut in cuts}, relative, recomputed)
        num_cuts = len(self.subject.whole.boundary_names)
        random = self._difference_of_references() if len(named) == num_cuts else ""
        return RoundResult(proof=proof, num_cuts=num_cuts, wrong=named, random=random)

    def _writes_of_backwards(self) -> str:
        # The compared pipelines recompute no micro-batch after a backward, so they would not show the difference.
        name = next(filter(None, (state.changed_by_backward for state in self._reference_states())), "")
        return name and f'a backward changes "{name}"'

    def _reference_states(self) -> Iterator[ReferenceState]:
        """Yield the states of the reference after the backwards of each step."""
        options = self.subject.options
        paths = (self.folder / f"gradients-{step}" for step in range(options.steps + options.late_steps))
        return (ReferenceState.load(path) for path in paths if path.exists())

    def _difference_of_references(self) -> str:
        """Train the reference again, and describe how the second training differs from the first."""
        folder = self._train_another_reference(self.subject.options, None)
        begun, expected = (ReferenceState.load(each / "initial").tensors for each in (folder, self.folder))
        pairs = [(tensor, expected[name]) for name, tensor in begun.items()]
        if any(one is not None and other is not None and not torch.equal(one, other) for one, other in pairs):
            return ""  # trainings with different initial values cannot be compared
        again, first = (ReferenceState.load(each / "gradients-0") for each in (folder, self.folder))
        # Ignore numbers: the forwards that found the layers may have changed them in this process.
        relative = {
            what: size for what, size in _differences_of_states(again, first).items() if not what.startswith(NUMBER)
        }
        return largest_unexplained_difference(relative, dict)

    def _represented_cuts(self, standing_for: Mapping[int, int], place: int) -> tuple[int, ...]:
        return self.subject.cut_classes.equivalent_cuts(standing_for[place]) if self.request.cuts is None else (place,)

    def _proof(self, cuts: Collection[int], relative: Mapping[str, float], recomputed: str) -> Proof:
        requested, num_layers = self.request.cuts, len(self.subject.whole.layers)
        missing = (num_layers - 1 if requested is None else sum(cut < num_layers for cut in requested)) - len(cuts)
        late = [f"{pluralize(missing, 'cut')} not compared within {self.request.budget_s:g} s"] if missing else []
        names = list(relative)
        sizes = [size for what, size in relative.items() if math.isfinite(size) and not what.startswith(NUMBER)]
        return Proof(
            layers=num_layers,
            cuts=len(cuts),
            uncovered=missing,
            gradients=sum(name.startswith("the gradient of") for name in names),
            buffers=sum(name.startswith("the buffer") for name in names),
            states=sum(name.startswith("the optimizer's") and " of " in name for name in names),
            worst=float(f"{max(sizes, default=0.0):.0e}"),
            reason="; ".join([*late, *filter(None, [self.subject.reason])]),
            differs_recomputed=recomputed,
        )

    def _group_result(self, cuts: Sequence[int]) -> "_GroupResult":
        differences, problem = self._compare_pipeline(cuts, "except-last")
        # If forwards write into state, also compare without recomputation: recomputed layers keep no graph, which the
        # forward of another micro-batch could damage by writing into it. Likewise if a backward runs code of the model,
        # which could read an attribute that the forward of another micro-batch has replaced.
        is_sensitive = any(rank.writes_state for rank in differences) or any(
            state.backward_runs_model_code for state in self._reference_states()
        )
        differs = str(problem if problem.text else self._problem_of_merged_stages(cuts, differences))
        if not problem.text and not is_sensitive:
            return _GroupResult(differences, differs_recomputed=differs)
        without_recomputation, still = self._compare_pipeline(cuts, "never")
        if not still.text:
            return _GroupResult(without_recomputation, differs_recomputed=differs)
        if len(cuts) == 1:
            return _GroupResult(without_recomputation, wrong={cuts[0]: still})
        alone: dict[int, CutFailure] = {}
        for cut in cuts:
            # A cut for which there is no more time counts as wrong.
            is_late = time.monotonic() > self.request.deadline + self.request.budget_s
            alone[cut] = still if is_late else self._compare_pipeline([cut], "never")[1]
        wrong = {cut: why for cut, why in alone.items() if why.text}
        # If no cut is wrong alone, only several cuts at once cause the problem, and all of them are removed.
        return _GroupResult(without_recomputation, wrong=wrong or dict.fromkeys(cuts, still))

    def _problem_of_merged_stages(self, cuts: Sequence[int], differences: Sequence[StageDifferences]) -> CutFailure:
        """Merge each stage that no backward reaches into its next stage, and compare again.

        A stage that no backward reaches is not recomputed. Its layers are recomputed only in a stage with later layers.

        Returns:
            Problem with the remaining cuts; empty if there is none, or if a backward reaches every stage.
        """
        reached = [cut for cut, rank in zip(cuts, differences, strict=False) if rank.receives_gradients]
        return CutFailure() if len(reached) == len(cuts) else self._compare_pipeline(reached, "except-last")[1]

    def _compare_pipeline(self, cuts: Sequence[int], recompute: Recompute) -> tuple[list[StageDifferences], CutFailure]:
        """Train a pipeline with these cuts, and compare it with the reference.

        Returns:
            Differences of each rank, and the problem with the cuts; empty if rounding errors explain all differences.
        """
        trial = PipelineTrial(
            loaded=self.subject.loaded,
            chain=self.subject.chain,
            balance=_balance(self.subject, cuts, recompute),
            options=self.subject.options,
            reference=self.folder,
            limit_s=self.request.time_limit_s,
        )
        try:
            differences = self._run_ranks(trial)
        except _ReferenceFailedError:
            raise
        except ChildError as error:
            if not _is_lost_connection(error):
                hint = next((hint for text, hint in _HINTS.items() if text in error.message), "")
                # Hints about a training that diverges are wrong here, because the plain loop does not diverge.
                return [], CutFailure(error.message, error.hint if error.is_user_error else hint)
            differences = self._run_ranks(trial)  # try again, because a connection failed, not a stage
        different = _name_unequal_copies(differences)
        if different:
            return differences, CutFailure(different)
        relative = _merged_differences(differences)
        return differences, CutFailure(largest_unexplained_difference(relative, lambda: self._rounding_noise))

    def _run_ranks(self, trial: PipelineTrial) -> list[StageDifferences]:
        rendezvous = Path(tempfile.mkdtemp(dir=self.folder.parent)) / "store"
        ranks = range(trial.balance.num_processes)
        children = [ChildProcess(partial(run_rank, trial, rank, rendezvous), limit_s=trial.limit_s) for rank in ranks]
        try:
            return self._results_of_ranks(children)
        finally:
            for child in children:
                child.end()

    def _results_of_ranks(self, children: Sequence[ChildProcess]) -> list[StageDifferences]:
        waiting = {child.connection: n for n, child in enumerate(children)}
        by_rank: dict[int, StageDifferences] = {}
        errors: list[ChildError] = []
        watched: list[Any] = [*waiting, *([] if self.child.is_done else [self.child.connection])]
        while waiting:
            ready = wait(watched, timeout=2.0 if errors else None)
            if not ready:
                break
            for connection in ready:
                watched.remove(connection)
                if connection is self.child.connection:
                    _wait_for_reference(self.child)
                    continue
                rank = waiting.pop(cast("Connection", connection))
                try:
                    by_rank[rank] = children[rank].result()
                except ChildError as error:
                    errors.append(error)
        if errors:
            raise next((e for e in errors if not _is_lost_connection(e)), errors[0])
        return [by_rank[rank] for rank in range(len(children))]

    @cached_property
    def _rounding_noise(self) -> Mapping[str, float]:
        """Largest relative changes of gradients, buffers and loss due to rounding errors in parameters."""
        noise: dict[str, float] = {}
        # The first step is not enough: if the last layer is initialized with zeros, earlier layers get no gradients.
        for steps in range(1, self.subject.options.steps + 1):
            reference = ReferenceState.load(self.folder / f"gradients-{steps - 1}")
            for seed in range(_DRAWS):
                for what, size in _differences_of_states(self._perturbed_reference(steps, seed), reference).items():
                    noise[what] = max(size, noise.get(what, 0.0))
        return noise

    def _perturbed_reference(self, steps: int, seed: int) -> ReferenceState:
        options = replace(self.subject.options, steps=steps, late_steps=0, updates=steps > 1)
        folder = self._train_another_reference(options, rounding_perturbation(self.subject.loaded.precision, seed))
        return ReferenceState.load(folder / f"gradients-{steps - 1}")

    def _train_another_reference(self, options: ReferenceOptions, perturb: Perturbation | None) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.folder.parent))
        request = self.request
        run_in_child(lambda: train_reference(request.loaded, options, folder, perturb), limit_s=request.time_limit_s)
        return folder


class _ReferenceFailedError(ChildError):
    pass


def _wait_for_reference(child: ChildProcess) -> None:
    try:
        if not child.is_done:
            child.result()
    except ChildError as error:
        raise _ReferenceFailedError(**vars(error)) from None


class _GroupResult(NamedTuple):
    """Result of the comparison of one pipeline with the reference."""

    differences: Sequence[StageDifferences]
    """Differences of each rank."""
    wrong: Mapping[int, CutFailure] = {}
    """Problem of each cut that failed."""
    differs_recomputed: str = ""
    """Text about a difference that occurs only with recomputation; empty if there is none."""

    @property
    def relative(self) -> dict[str, float]:
        return _merged_differences(self.differences)


def _balance(subject: CheckedModel, cuts: Sequence[int], recompute: Recompute) -> Balance:
    loaded, chain, options = subject.loaded, subject.chain, subject.options
    edges = list(pairwise([0, *cuts, len(chain.layers)]))
    return Balance(
        plan_digest="",
        model=Model(source=loaded.source, settings=loaded.settings, inputs=loaded.inputs),
        optimizer=loaded.optimizer_name,
        dtype=loaded.precision,
        schedule="gpipe",
        batch=options.micro_batches * options.micro_batch_size,
        micro_batches=options.micro_batches,
        balance=tuple(end - first for first, end in edges),
        stages=tuple(
            StageBalance(index=index, recompute=recompute, layers=chain.names[first:end])
            for index, (first, end) in enumerate(edges)
        ),
    )


def _name_unequal_copies(differences: Sequence[StageDifferences]) -> str:
    digests: dict[str, set[str]] = {}
    for rank in differences:
        for name, digest in rank.own_values.items():
            digests.setdefault(name, set()).add(digest)
    name = next((name for name, values in digests.items() if len(values) > 1), "")
    return name and f'"{name}" has different initial values on the stages that share it'


def _merged_differences(differences: Sequence[StageDifferences]) -> dict[str, float]:
    relative: dict[str, float] = {}
    for rank in differences:
        for what, size in rank.relative.items():
            relative[what] = max(size, relative.get(what, 0.0))
    return relative


def _differences_of_states(state: ReferenceState, reference: ReferenceState) -> dict[str, float]:
    differences = StageDifferences()
    differences.compare_number("the loss", state.loss, reference.loss)
    gradients = {n.partition(":")[2]: t for n, t in state.tensors.items() if n.startswith("gradient:")}
    compare_gradients(differences, gradients, reference)
    for name, number in state.numbers.items():
        differences.compare_number(f'{NUMBER} "{name}"', number, reference.numbers.get(name, number))
    for name, tensor in state.tensors.items():
        if name.startswith("buffer:"):
            differences.compare_tensor(f'the buffer "{name.partition(":")[2]}"', tensor, reference.tensors[name])
    return differences.relative


def _is_lost_connection(error: ChildError) -> bool:
    return any(text in error.message for text in ("onnection closed", "gloo", "SIGABRT", "Broken pipe"))
