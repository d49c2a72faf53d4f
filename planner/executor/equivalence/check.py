"""The equivalence check: stages in processes of their own, compared with the user's model in a plain training loop.

    the caller                forks
     └─ the check             forks the reference, finds the model's layers and its distinct cuts, forks stages
         ├─ the reference     trains the model as the user wrote it (`planner.model.reference`), writes its states
         └─ ranks 0, 1, …     train the same steps as the stages of a pipeline, and compare (`stages`)

Each group of cuts is one pipeline. Where a rank differs, its cuts are tried one by one; a wrong one, and those that are
like it, are taken out, and all is checked again. Recomputation that differs is reported and leaves the cut.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from planner.core.errors import ModelError
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import Recompute
from planner.core.values.profile import Model
from planner.core.values.proof import Proof
from planner.executor.build.building import build_structure
from planner.executor.equivalence.coverage import Coverage, coverage_of, groups_of
from planner.executor.equivalence.differences import Differences, compare_gradients, largest_problem, shaking
from planner.executor.equivalence.isolation import Child, ChildError
from planner.executor.equivalence.stages import Trial, run_rank
from planner.executor.run.shapes import shapes_of
from planner.model.chain import Chain
from planner.model.load import LoadedModel
from planner.model.recording import END
from planner.model.reference import LayerStart, ReferenceOptions, Shake, State, mini_batch, train_reference

Digests = Callable[[Chain, LoadedModel], Sequence[str]]
"""Returns a digest of the operators of every layer; none where they cannot be told."""

_STEPS = 2
_MICRO_BATCHES = 2
_MOST_STAGES = 6
"""Ranks that are alive at a time."""

_DRAWS = 2
"""How often parameters are changed to see what the model makes of rounding errors: which ReLU turns over is chance."""

_LATE = 4.0
"""A process is ended after so many times the budget."""


class Checked(NamedTuple):
    """What the check found."""

    loaded: LoadedModel
    """The model, with the layers that no stage may end with."""
    proof: Proof
    warnings: tuple[str, ...]
    """Which cuts were taken out, and why."""


def check_equivalence(
    loaded: LoadedModel,
    *,
    budget_s: float,
    digests: Digests = lambda _chain, _loaded: (),
    ends: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Checked:
    """Compare the stages of a model with the user's model in a plain training loop, on the CPU.

    Args:
        loaded: The model.
        budget_s: About how long that may take, in seconds; cuts for which it does not suffice are not compared.
        digests: Tells which layers run the same operators, so that like cuts need one comparison.
        ends: Cuts to compare, each the index of the layer after it; by default all distinct ones.
        progress: Called with what is being done.

    Raises:
        ModelError: No cut is right, or the model does not train in a plain loop.
    """
    deadline = time.monotonic() + budget_s
    warnings: list[str] = []
    while True:
        checking = _Checking(loaded=loaded, budget_s=budget_s, deadline=deadline, ends=ends, digests=digests)
        found = _in_child(checking, progress)
        if not found.wrong:
            return Checked(loaded, found.proof, tuple(warnings))
        warnings.extend(f'the model cannot be cut behind "{end}": {why}' for end, why in found.wrong.items())
        if len(found.wrong) == found.num_cuts:
            why = next(iter(found.wrong.values()))
            raise ModelError(
                f"the model cannot be cut: its stages do not train as it does in a plain loop ({why})",
                hint="hand on what later modules need in what `forward` returns, not in attributes or global variables",
            )
        loaded = replace(loaded, uncut=(*loaded.uncut, *found.wrong))


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What one round of the check found."""

    proof: Proof
    num_cuts: int = 0
    wrong: Mapping[str, str] = field(default_factory=dict)
    """By the layer that no stage may end with, why."""


def _in_child(checking: "_Checking", progress: Callable[[str], None]) -> _Found:
    """Run a round of the check in a process of its own, so that this one stays as it is."""
    folder = Path(tempfile.mkdtemp(prefix="gpipe-plan-check-"))
    child = Child(partial(checking.run, folder), limit_s=_LATE * checking.budget_s)
    try:
        return cast("_Found", child.result(progress))
    except ChildError as error:
        if error.is_user_error:
            raise error.as_model_error() from None
        return _Found(proof=Proof(layers=0, cuts=0, reason=error.message))
    finally:
        child.end()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Checking:
    """One round of the check, with the model as it is cut now."""

    loaded: LoadedModel
    budget_s: float
    deadline: float
    ends: Sequence[int] | None
    digests: Digests

    def run(self, folder: Path, connection: Connection) -> _Found:
        """Run the round; `folder` is its own, and `connection` is told what is being done."""
        # Forked before anything of the model has run here, so that module-level state is as in a process of its own.
        waiting = [Child(self._reference(folder / str(size)), limit_s=_LATE * self.budget_s) for size in (1, 2)]
        try:
            return self._compared(folder, waiting, lambda text: connection.send(("progress", text)))
        finally:
            for child in waiting:
                child.end()

    def _reference(self, folder: Path) -> Callable[[Connection], Any]:
        def work(connection: Connection) -> None:
            options = connection.recv()
            folder.mkdir(exist_ok=True)
            train_reference(self.loaded, options, folder)

        return work

    def _compared(self, folder: Path, waiting: Sequence[Child], progress: Callable[[str], None]) -> _Found:
        progress("finding the layers")
        chain = build_structure(self.loaded)
        if len(chain.layers) == 1:
            return _Found(proof=Proof(layers=0, cuts=0, reason="there is a single layer"))
        first: ChildError | None = None
        for size, child in zip((1, 2), waiting, strict=True):
            try:
                round_ = _Round.of(self, chain, folder, child, size=size, progress=progress)
                return round_.compare()
            except ChildError as error:  # of batch normalization, say, which wants two samples
                first = first or error
        assert first is not None
        raise first


@dataclass(frozen=True, kw_only=True)
class _Round:
    """A reference that trains, and the cuts to compare with it."""

    checking: _Checking
    chain: Chain
    coverage: Coverage
    options: ReferenceOptions
    folder: Path
    child: Child
    progress: Callable[[str], None]

    @classmethod
    def of(
        cls,
        checking: _Checking,
        chain: Chain,
        folder: Path,
        child: Child,
        *,
        size: int,
        progress: Callable[[str], None],
    ) -> "_Round":
        """Start the reference, with micro-batches of `size` samples, and find the distinct cuts meanwhile."""
        loaded = checking.loaded
        options = ReferenceOptions(
            seed=0, steps=_STEPS, micro_batches=_MICRO_BATCHES, micro_batch_size=size, starts=layer_starts(chain)
        )
        child.connection.send(options)
        progress("training the reference")
        try:
            inputs = mini_batch(loaded, replace(options, micro_batches=1), 0).inputs
            shapes = shapes_of(chain, inputs, precision=loaded.precision, device=torch.device("cpu"))
        except ModelError as error:
            _expect_reference(child)  # the model's own error, if that is the cause
            raise ChildError(error.message, hint=error.hint, is_user_error=True) from error
        coverage = coverage_of(chain, shapes, checking.digests(chain, loaded))
        return cls(
            checking=checking,
            chain=chain,
            coverage=coverage,
            options=options,
            folder=folder / str(size),
            child=child,
            progress=progress,
        )

    def compare(self) -> _Found:
        """Compare all cuts for which there is time."""
        num_layers, ends = len(self.chain.layers), self.checking.ends
        wanted = list(self.coverage.representatives if ends is None else (end for end in ends if end < num_layers))
        most = _MOST_STAGES - 1 if ends is None else len(wanted)
        covered, recomputed, took_s = 0, "", 0.0
        relative: dict[str, float] = {}
        wrong: dict[int, str] = {}
        for number, cuts in enumerate(groups_of(wanted, most)):
            if number and time.monotonic() + took_s > self.checking.deadline:
                break
            begin = time.monotonic()
            self.progress(f"comparing cuts {covered + 1} to {covered + len(cuts)} of {len(wanted)}")
            verdict = self._verdict(cuts)
            took_s = time.monotonic() - begin
            covered += len(cuts)
            recomputed = recomputed or verdict.differs_recomputed
            wrong |= verdict.wrong
            relative |= verdict.relative
        proof = self._proof(wanted[:covered], relative, recomputed)
        ends_of = self.chain.ends
        alike = {cut: why for first, why in wrong.items() for cut in self.coverage.like(first)}
        named = {ends_of[cut - 1]: why for cut, why in sorted(alike.items())}
        return _Found(proof=proof, num_cuts=len(ends_of), wrong=named)

    def _proof(self, compared: Sequence[int], relative: Mapping[str, float], recomputed: str) -> Proof:
        of_all = self.checking.ends is None
        cuts = {c for cut in compared for c in (self.coverage.like(cut) if of_all else (cut,))}
        missing = (len(self.chain.layers) - 1 if of_all else len(self.checking.ends or ())) - len(cuts)
        names = list(relative)
        return Proof(
            layers=len(self.chain.layers),
            cuts=len(cuts),
            uncovered=max(0, missing),
            gradients=sum(name.startswith("the gradient of") for name in names),
            buffers=sum(name.startswith("the buffer") for name in names),
            states=sum(name.startswith("the optimizer's") and " of " in name for name in names),
            worst=float(f"{max((size for size in relative.values() if math.isfinite(size)), default=0.0):.0e}"),
            reason=f"{missing} were not reached within {self.checking.budget_s:g} s" if missing > 0 else "",
            differs_recomputed=recomputed,
        )

    def _verdict(self, cuts: Sequence[int]) -> "_Verdict":
        found, problem = self._train(cuts, "except-last")
        if not problem:
            return _Verdict(found)
        again, still = self._train(cuts, "never")
        if not still:
            return _Verdict(again, differs_recomputed=problem)
        if len(cuts) == 1:
            return _Verdict(again, wrong={cuts[0]: still})
        alone = {cut: self._train([cut], "never")[1] for cut in cuts}
        wrong = {cut: why for cut, why in alone.items() if why}
        # Where none of them is wrong alone it takes several cuts at once: then all of them go.
        return _Verdict(again, wrong=wrong or dict.fromkeys(cuts, still))

    def _train(self, cuts: Sequence[int], recompute: Recompute) -> tuple[list[Differences], str]:
        """Train a pipeline with these cuts; return what its ranks found, and a problem."""
        balance = _balance(self.checking.loaded, self.chain, cuts, self.options, recompute)
        limit_s = _LATE * self.checking.budget_s
        trial = Trial(
            loaded=self.checking.loaded,
            chain=self.chain,
            balance=balance,
            options=self.options,
            reference=self.folder,
            limit_s=limit_s,
        )
        try:
            found = self._run(trial)
        except _ReferenceFailedError:
            raise
        except ChildError as error:
            if not _is_of_connection(error):
                return [], error.message
            found = self._run(trial)  # the connection was at fault, not a stage
        different = _different_copies(found)
        if different:
            return found, different
        relative = _together(found)
        return found, largest_problem(relative, self._noise)

    def _run(self, trial: Trial) -> list[Differences]:
        """Run all ranks; return what each found."""
        rendezvous = Path(tempfile.mkdtemp(dir=self.folder.parent)) / "store"
        ranks = range(trial.balance.num_processes)
        children = [Child(partial(_run_rank, trial, rank, rendezvous), limit_s=trial.limit_s) for rank in ranks]
        try:
            return self._results(children)
        finally:
            for child in children:
                child.end()

    def _results(self, children: Sequence[Child]) -> list[Differences]:
        """Return what all ranks found; the error that came first, unless it is only that a connection closed."""
        waiting = {child.connection: n for n, child in enumerate(children)}
        found: dict[int, Differences] = {}
        errors: list[ChildError] = []
        watched: list[Any] = [*waiting, *([] if self.child.is_done else [self.child.connection])]
        while waiting:
            ready = wait(watched, timeout=2.0 if errors else None)
            if not ready:
                break
            for connection in ready:
                watched.remove(connection)
                if connection is self.child.connection:
                    _expect_reference(self.child)
                    continue
                rank = waiting.pop(cast("Connection", connection))
                try:
                    found[rank] = children[rank].result()
                except ChildError as error:
                    errors.append(error)
        if errors:
            raise next((e for e in errors if not _is_of_connection(e)), errors[0])
        return [found[rank] for rank in range(len(children))]

    def _noise(self) -> Mapping[str, float]:
        """Return how far gradients, buffers and loss change where parameters change by a rounding error."""
        noise: dict[str, float] = {}
        right = State.load(self.folder / "gradients-0")
        for seed in range(_DRAWS):
            folder = Path(tempfile.mkdtemp(dir=self.folder.parent))
            options = replace(self.options, steps=1, updates=False)
            shake = shaking(self.checking.loaded.precision, seed)
            train = partial(_train_apart, self.checking.loaded, options, folder, shake)
            child = Child(train, limit_s=_LATE * self.checking.budget_s)
            try:
                child.result()
            finally:
                child.end()
            for what, size in _compared_states(State.load(folder / "gradients-0"), right).items():
                noise[what] = max(size, noise.get(what, 0.0))
        return noise


class _ReferenceFailedError(ChildError):
    """The plain loop raised an error."""


def _expect_reference(child: Child) -> None:
    """Wait for the reference; raise `_ReferenceFailedError` if it failed."""
    try:
        if not child.is_done:
            child.result()
    except ChildError as error:
        raise _ReferenceFailedError(error.message, hint=error.hint, is_user_error=error.is_user_error) from None


class _Verdict(NamedTuple):
    """What was found of one group of cuts."""

    found: Sequence[Differences]
    wrong: Mapping[int, str] = {}
    differs_recomputed: str = ""

    @property
    def relative(self) -> dict[str, float]:
        """Differences by name, over all ranks."""
        return _together(self.found)


def _run_rank(trial: Trial, rank: int, rendezvous: Path, _connection: Connection) -> Differences:
    return run_rank(trial, rank, rendezvous)


def _train_apart(
    loaded: LoadedModel, options: ReferenceOptions, folder: Path, shake: Shake, _connection: Connection
) -> None:
    train_reference(loaded, options, folder, shake)


def layer_starts(chain: Chain) -> tuple[LayerStart | None, ...]:
    """Return where each layer from the second on begins, as calls of modules."""
    if chain.outline is None:
        seen: list[int] = []
        starts: list[LayerStart | None] = []
        for layer in chain.layers:
            seen.append(id(layer.module))
            starts.append(LayerStart(path=layer.name, call=seen.count(seen[-1]), at_end=False))
        return tuple(starts[1:])
    calls = chain.outline.recording.calls
    return tuple(_start_at(calls, cut) for cut in chain.outline.cuts)


def _start_at(calls: Sequence[Any], cut: int) -> LayerStart | None:
    """Return the call whose end is a time of the recording; else the next call that begins."""
    for call in calls:
        if call.exit + 1 == cut and call.exit != END:
            number = sum(other.path == call.path and other.exit <= call.exit for other in calls)
            return LayerStart(path=call.path, call=number, at_end=True)
    following = min((call for call in calls if call.enter >= cut), key=lambda call: call.enter, default=None)
    if following is None:
        return None
    number = sum(other.path == following.path and other.enter <= following.enter for other in calls)
    return LayerStart(path=following.path, call=number, at_end=False)


def _balance(
    loaded: LoadedModel, chain: Chain, cuts: Sequence[int], options: ReferenceOptions, recompute: Recompute
) -> Balance:
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


def _different_copies(found: Sequence[Differences]) -> str:
    """Describe a tensor that several ranks hold and that begins with other values on each; empty if there is none."""
    digests: dict[str, set[str]] = {}
    for rank in found:
        for name, digest in rank.own_values.items():
            digests.setdefault(name, set()).add(digest)
    name = next((name for name, values in digests.items() if len(values) > 1), "")
    return name and f'"{name}" begins with other values on every stage that holds it'


def _together(found: Sequence[Differences]) -> dict[str, float]:
    relative: dict[str, float] = {}
    for rank in found:
        for what, size in rank.relative.items():
            relative[what] = max(size, relative.get(what, 0.0))
    return relative


def _compared_states(state: State, right: State) -> dict[str, float]:
    """Return how far a reference's state is from another's, by what it is."""
    found = Differences()
    found.compare_number("the loss", state.loss, right.loss)
    gradients = {n.partition(":")[2]: t for n, t in state.tensors.items() if n.startswith("gradient:")}
    compare_gradients(found, gradients, right)
    for name, tensor in state.tensors.items():
        if name.startswith("buffer:"):
            found.compare_tensor(f'the buffer "{name.partition(":")[2]}"', tensor, right.tensors[name])
    return found.relative


def _is_of_connection(error: ChildError) -> bool:
    """Return True if a rank failed only since another one was gone."""
    return any(text in error.message for text in ("onnection closed", "gloo", "SIGABRT", "Broken pipe"))
