"""The equivalence check: stages in processes of their own, compared with the user's model in a plain training loop.

    the caller                forks
     └─ the check             forks the reference, finds the model's layers and its distinct cuts, forks stages
         ├─ the reference     trains the model as the user wrote it (`planner.model.reference`), writes its states
         └─ ranks 0, 1, …     train the same steps as the stages of a pipeline, and compare (`stages`)

Each group of cuts is one pipeline. If a rank differs, the cuts of its group are tried one by one. A wrong cut and all
equivalent cuts are removed, and the check starts again. If only recomputation differs, the check reports it and keeps
the cut.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from planner.core.values.units import counted, format_bytes
from planner.executor.build.building import build_structure
from planner.executor.equivalence.coverage import Coverage, coverage_of, groups_of
from planner.executor.equivalence.differences import NUMBER, Differences, compare_gradients, largest_problem, shaking
from planner.executor.equivalence.isolation import Child, ChildError
from planner.executor.equivalence.stages import Trial, run_rank
from planner.executor.run.shapes import shapes_of
from planner.model.chain import Chain
from planner.model.load import LoadedModel
from planner.model.recording import END
from planner.model.reference import LayerStart, ReferenceOptions, Shake, State, mini_batch, train_reference
from planner.model.shortened import repeated_layers, shortened, skipped_modules

Digests = Callable[[Chain, LoadedModel], Sequence[str]]
"""Returns a digest of the operators of every layer; none where they cannot be told."""

_STEPS = 2
_MICRO_BATCHES = 2
_MOST_STAGES = 8
"""Ranks that are alive at a time."""

_MANY_PARAMETERS = 20_000_000
"""Models with more parameters are compared without most of their repeated layers."""

_MOST_BYTES = 1_600_000_000
"""Parameters, gradients and optimizer state of the reference, or of all ranks, take at most so much."""

_LEAN_BYTES = 600_000_000
"""Models with more bytes of parameters are built without them."""

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
                subject = _Subject.of(self, chain, size)
                return _Round.of(self, subject, folder, child, progress=progress).compare()
            except ChildError as error:  # of batch normalization, say, which wants two samples
                first = first or error
        assert first is not None
        raise first


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """Model that the check trains: the full model, or a shortened one with a cut of every distinct class."""

    loaded: LoadedModel
    chain: Chain
    """Of what is trained."""
    whole: Chain
    """Of the model."""
    coverage: Coverage
    """Of the whole model's cuts."""
    options: ReferenceOptions
    one_by_one: bool = False
    """Whether the reference is over before ranks begin, since both do not fit."""
    reason: str = ""
    """Why the optimizer does not take part."""

    @classmethod
    def of(cls, checking: _Checking, whole: Chain, size: int) -> "_Subject":
        """Choose it, with micro-batches of `size` samples.

        Raises:
            ChildError: What crosses the cuts cannot be told.
        """
        loaded = checking.loaded
        options = ReferenceOptions(
            seed=0, steps=_STEPS, micro_batches=_MICRO_BATCHES, micro_batch_size=size, starts=layer_starts(whole)
        )
        try:
            inputs = mini_batch(loaded, replace(options, micro_batches=1), 0).inputs
            shapes = shapes_of(whole, inputs, precision=loaded.precision, device=torch.device("cpu"))
        except ModelError as error:
            raise ChildError(error.message, hint=error.hint, is_user_error=True) from error
        subject = cls(
            loaded=loaded,
            chain=whole,
            whole=whole,
            coverage=coverage_of(whole, shapes, checking.digests(whole, loaded)),
            options=options,
        )
        if sum(p.numel() for p in whole.model.parameters()) <= _MANY_PARAMETERS or checking.ends is not None:
            return subject
        return subject._shortened()._within_memory()

    def _shortened(self) -> "_Subject":
        skipped = skipped_modules(self.whole, repeated_layers(self.coverage.keys))
        if not skipped:
            return self
        loaded = shortened(self.loaded, skipped)
        chain = build_structure(loaded)
        is_lean = sum(p.nbytes for p in self.whole.model.parameters()) > _LEAN_BYTES
        options = replace(self.options, skipped=skipped, lean=is_lean, starts=layer_starts(chain))
        return replace(self, loaded=loaded, chain=chain, options=options)

    def _within_memory(self) -> "_Subject":
        """Leave out what does not fit.

        Raises:
            ChildError: Not even one step does.
        """
        parameters = list(self.chain.model.parameters())
        own_bytes = sum(p.nbytes for p in parameters)
        # Every rank that shares a parameter holds a copy.
        copies_bytes = sum(p.nbytes for layer in self.chain.layers for p in layer.module.parameters())
        most_bytes = max(own_bytes, copies_bytes)
        if 4 * (own_bytes + copies_bytes) <= _MOST_BYTES:
            return self
        if 4 * most_bytes <= _MOST_BYTES:
            return replace(self, one_by_one=True)
        if 2 * own_bytes > _MOST_BYTES:
            wanted = format_bytes(2 * own_bytes)
            raise ChildError(f"{len(parameters)} parameters and their gradients take {wanted} even without repeats")
        reason = f"the optimizer was not compared: with its state it takes {format_bytes(4 * most_bytes)}"
        return replace(self, one_by_one=True, reason=reason, options=replace(self.options, steps=1, updates=False))

    @property
    def cuts(self) -> dict[int, int]:
        """Mapping from each representative cut of the whole model to the equivalent cut of the trained model."""
        if self.chain is self.whole:
            return {cut: cut for cut in self.coverage.representatives}
        places = {end: cut for cut, end in enumerate(self.chain.ends, start=1)}
        kept = {name: index for index, name in enumerate(self.whole.names)}
        shown: dict[int, int] = {}
        for first, *others in self.coverage.classes:
            for cut in (first, *others):
                place = places.get(self.whole.ends[cut - 1])
                if place is None or place >= len(self.chain.names):
                    continue
                following = kept.get(self.chain.names[place])
                if following is not None and self.coverage.keys[following] == self.coverage.keys[cut]:
                    shown[first] = place
                    break
        return shown


@dataclass(frozen=True, kw_only=True)
class _Round:
    """A reference that trains, and the cuts to compare with it."""

    checking: _Checking
    subject: _Subject
    folder: Path
    child: Child
    progress: Callable[[str], None]

    @classmethod
    def of(
        cls, checking: _Checking, subject: _Subject, folder: Path, child: Child, *, progress: Callable[[str], None]
    ) -> "_Round":
        """Start the reference."""
        child.connection.send(subject.options)
        progress("training the reference")
        if subject.one_by_one:
            _expect_reference(child)
            child.end()
        size = subject.options.micro_batch_size
        return cls(checking=checking, subject=subject, folder=folder / str(size), child=child, progress=progress)

    def compare(self) -> _Found:
        """Compare all cuts for which there is time."""
        ends, shown = self.checking.ends, self.subject.cuts
        num_layers = len(self.subject.whole.layers)
        wanted = list(shown.values() if ends is None else (end for end in ends if end < num_layers))
        standing_for = {place: cut for cut, place in shown.items()}
        most = _MOST_STAGES - 1 if ends is None else len(wanted)
        compared: list[int] = []
        recomputed, took_s = "", 0.0
        relative: dict[str, float] = {}
        wrong: dict[int, str] = {}
        for number, cuts in enumerate(groups_of(wanted, most)):
            if number and time.monotonic() + took_s > self.checking.deadline:
                break
            begin = time.monotonic()
            self.progress(f"comparing cuts {len(compared) + 1} to {len(compared) + len(cuts)} of {len(wanted)}")
            verdict = self._verdict(cuts)
            took_s = time.monotonic() - begin
            compared += cuts
            recomputed = recomputed or verdict.differs_recomputed
            wrong |= verdict.wrong
            relative |= verdict.relative
        alike = {place: self._alike(standing_for, place) for place in compared}
        named = {self.subject.whole.ends[cut - 1]: why for place, why in sorted(wrong.items()) for cut in alike[place]}
        proof = self._proof({cut for cuts in alike.values() for cut in cuts}, relative, recomputed)
        return _Found(proof=proof, num_cuts=len(self.subject.whole.ends), wrong=named)

    def _alike(self, standing_for: Mapping[int, int], place: int) -> tuple[int, ...]:
        """Return the cuts of the whole model that a compared one stands for."""
        return self.subject.coverage.like(standing_for[place]) if self.checking.ends is None else (place,)

    def _proof(self, cuts: Collection[int], relative: Mapping[str, float], recomputed: str) -> Proof:
        ends, num_layers = self.checking.ends, len(self.subject.whole.layers)
        missing = (num_layers - 1 if ends is None else len([end for end in ends if end < num_layers])) - len(cuts)
        late = [f"{counted(missing, 'cut')} not compared within {self.checking.budget_s:g} s"] if missing else []
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

    def _verdict(self, cuts: Sequence[int]) -> "_Verdict":
        found, problem = self._train(cuts, "except-last")
        if not problem:
            return _Verdict(found)
        again, still = self._train(cuts, "never")
        if not still:
            return _Verdict(again, differs_recomputed=problem)
        if len(cuts) == 1:
            return _Verdict(again, wrong={cuts[0]: still})
        alone: dict[int, str] = {}
        for cut in cuts:
            # What there is no time to try alone is as suspicious as the others.
            is_late = time.monotonic() > self.checking.deadline + self.checking.budget_s
            alone[cut] = still if is_late else self._train([cut], "never")[1]
        wrong = {cut: why for cut, why in alone.items() if why}
        # Where none of them is wrong alone it takes several cuts at once: then all of them go.
        return _Verdict(again, wrong=wrong or dict.fromkeys(cuts, still))

    def _train(self, cuts: Sequence[int], recompute: Recompute) -> tuple[list[Differences], str]:
        """Train a pipeline with these cuts; return what its ranks found, and a problem."""
        balance = _balance(self.subject.loaded, self.subject.chain, cuts, self.subject.options, recompute)
        limit_s = _LATE * self.checking.budget_s
        trial = Trial(
            loaded=self.subject.loaded,
            chain=self.subject.chain,
            balance=balance,
            options=self.subject.options,
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
            options = replace(self.subject.options, steps=1, updates=False)
            shake = shaking(self.subject.loaded.precision, seed)
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


def reference_losses(loaded: LoadedModel, *, micro_batches: int, micro_batch_size: int, limit_s: float) -> list[float]:
    """Train the unpartitioned model for two steps in a plain loop, in a process of its own; return the losses.

    Args:
        loaded: The model.
        micro_batches: Micro-batches of a step, over all replicas.
        micro_batch_size: Samples of each.
        limit_s: Seconds after which the process is ended.

    Raises:
        ModelError: It does not train, or not within that time.
    """

    def work(_connection: Connection) -> list[float]:
        starts = layer_starts(build_structure(loaded))
        options = ReferenceOptions(
            seed=0, steps=_STEPS, micro_batches=micro_batches, micro_batch_size=micro_batch_size, starts=starts
        )
        return train_reference(loaded, options, None)

    child = Child(work, limit_s=limit_s)
    try:
        losses: list[float] = child.result()
    except ChildError as error:
        raise error.as_model_error() from None
    finally:
        child.end()
    return losses


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
    """Return the module call that ends at a recording time. If no call ends then, return the next that starts."""
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
    """Return the relative differences between the states of two references, by name."""
    found = Differences()
    found.compare_number("the loss", state.loss, right.loss)
    gradients = {n.partition(":")[2]: t for n, t in state.tensors.items() if n.startswith("gradient:")}
    compare_gradients(found, gradients, right)
    for name, number in state.numbers.items():
        found.compare_number(f'{NUMBER} "{name}"', number, right.numbers.get(name, number))
    for name, tensor in state.tensors.items():
        if name.startswith("buffer:"):
            found.compare_tensor(f'the buffer "{name.partition(":")[2]}"', tensor, right.tensors[name])
    return found.relative


def _is_of_connection(error: ChildError) -> bool:
    """Return True if a rank failed only because another rank had exited."""
    return any(text in error.message for text in ("onnection closed", "gloo", "SIGABRT", "Broken pipe"))
