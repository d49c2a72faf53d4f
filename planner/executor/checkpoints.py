"""Checkpoints with `torch.distributed.checkpoint`, under the names of the model: any plan can read what another wrote.

    DIR/step-00000100/      one checkpoint: after 100 optimizer steps
        .metadata, *.distcp     tensors: `model.NAME`, `optimizer.state.NAME.KEY`; per rank: random state and options
        checkpoint.json         what it is a checkpoint of, for people and for `--resume`

A checkpoint is written into a hidden folder beside it and renamed when every rank has written its part, so a folder
called `step-…` is always whole (`saved`). It says which run wrote it; a folder is of one run, and of one
job at a time (`run_folder`). What several ranks hold (tied weights, replicas) is written once, by the lowest.

A stage resumes bit for bit under the plan that wrote. Under another one it finds its parameters and their optimizer
state by name; only the random state, which belongs to a rank, starts anew.
"""

import json
import shutil
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from planner.core.errors import FileError, ModelError, PlannerError, UsageError
from planner.core.values.printable import printable_lines
from planner.core.values.units import format_bytes
from planner.device.kinds import kind_of
from planner.executor.keep.description import PYTHON, description_of
from planner.executor.keep.optimizer_state import OptimizerState
from planner.executor.keep.rank_state import as_data, packed, restored
from planner.executor.keep.run_folder import RunFolder
from planner.executor.keep.saved import (
    NotWrittenError,
    check_whole,
    commit,
    latest_checkpoint,
    partial_of,
    prune,
    saved_in,
)
from planner.executor.keep.stored import first_line
from planner.executor.keep.weights import TIED, begin_with_weights
from planner.executor.pipeline import Pipeline
from planner.executor.read_checkpoint import ReadCheckpoint, read_checkpoint
from planner.executor.run.random_state import HostStates
from planner.executor.watch.failure import Stopped
from planner.executor.watch.position import ANY

if TYPE_CHECKING:
    from planner.executor.keep.writing import Writing

_NO_ROOM = "make room, then `--resume auto`"
_LONGEST = timedelta(days=1)
"""No limit: writing takes as long as the disk needs, and the watch finds ranks that make no progress."""


class Checkpoints:
    """Restores a run when made, and saves it from then on; every rank makes one, when the optimizer exists.

    Args:
        pipeline: The pipeline.
        optimizer: Of this stage's parameters.
        folder: Where to save; None to save nothing.
        every: Steps between two checkpoints; besides, the last step is saved.
        keep: How many of the newest stay.
        resume: A checkpoint, a folder of them, or `auto`: the latest in `folder`, if there is any. Of a folder, the
            latest that can be read.
        weights: A state dict to start from, where nothing is resumed (`planner.executor.keep.weights.load_weights`).
        steps: Of the whole run.
        others: What else must go on as it was, by name: anything with `state_dict` and `load_state_dict`, such as a
            learning-rate schedule. The same on every rank.

    Raises:
        UsageError: What is to be resumed or loaded does not fit the model; or `folder` is another run's or job's.
        FileError: It cannot be read.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        folder: str | None = None,
        every: int = 100,
        keep: int = 3,
        resume: str | None = None,
        weights: str | None = None,
        steps: int | None = None,
        **others: Any,
    ) -> None:
        self._pipeline = pipeline
        self._optimizer = OptimizerState(optimizer, dict(pipeline.named_parameters()), pipeline.first_names)
        self._every, self._keep, self._steps = every, keep, steps
        self._watch = pipeline.watch
        self._others = others
        for name, other in others.items():
            as_data(other.state_dict(), f'the state of "{name}"')
        self._saved_step = -1
        self._is_checked = False
        self._failed: PlannerError | None = None
        self._is_end = self._is_unsettled = False
        self._pending: Writing | None = None
        self._partial: Path | None = None
        pipeline.position.at("opening the checkpoints", waits_for=ANY)
        # On GPUs too: what is agreed on here are paths and errors, and files are written from a thread of their own.
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST) if dist.get_world_size() > 1 else None
        # In a thread, from a copy in the host's memory. On the CPU the copy would take memory that the plan counts on.
        self._is_async = kind_of(pipeline.device).has_own_memory and self._group is not None
        self._place = RunFolder(folder, rank=pipeline.rank, group=self._group, tell=self._tell)
        self._folder = self._place.path
        if self._folder is not None:
            _writing()
        pipeline.at_close.append(self._place.release)
        candidates = self._place.candidates(resume)
        pipeline.position.at("reading a checkpoint")
        if candidates:
            self._resume(candidates)
        elif weights is not None:
            self._begin_with(weights)
        pipeline.at_end.append(self.close)
        if self._watch is not None:
            self._watch.saves_on_stop = self._folder is not None
        pipeline.position.at("between steps")

    def step_done(self) -> None:
        """Call it after every step: saves when it is time, and ends the script after a step in which it was told to."""
        if self._folder is None:
            return
        if not self._is_checked:  # a loader has no state before its first batch
            as_data(self._pipeline.state_dict(), "the state of the run")
            self._is_checked = True
        step, signalled = self._pipeline.step_index, 0
        if self._watch is not None:
            # Replicas meet at the end of each step only, so one may have begun the next when another has not.
            signalled = self._watch.stops_after(step, ahead=2 if self._pipeline.place.num_replicas > 1 else 1)
        is_end = bool(signalled) or step == self._steps
        if is_end or step % self._every == 0:
            self._pipeline.begin_checkpoint()
            self._is_end = is_end
            self.save()
        elif self._pending is not None and self._pending.is_done:
            self.finish()
        if not is_end:
            return
        self._settle()
        if self._failed is not None:
            raise self._failed
        if signalled:
            name = signal.Signals(signalled).name
            self._tell(f"stopped by {name} after {step} steps; go on with `--resume auto`")
            raise Stopped(128 + signalled)

    def close(self) -> None:
        """Saves the end of a run, where its loop ended before `steps` steps were done (early stopping, say).

        `pipeline_script` does so at the end of its block. A loop of your own calls it behind its last step.
        """
        step = self._pipeline.step_index
        if self._folder is None:
            return
        self._settle()
        if step not in {0, self._saved_step}:
            self._is_end = True
            self.save()
            if self._steps is not None and step < self._steps:
                self._tell(f"the loop ended after {step} of {self._steps} steps")
        self._settle()
        if self._failed is not None:
            raise self._failed

    def save(self) -> None:
        """Saves now. Where that fails the run goes on, is told so, and keeps the checkpoints it has."""
        assert self._folder is not None
        self._settle()
        step = self._pipeline.step_index
        if step == self._saved_step:
            return
        self._pipeline.position.at("a checkpoint", waits_for=ANY)
        self._partial = partial_of(self._folder, step)
        self._saved_step = step
        try:
            self._pending = _writing()(
                self._state(),
                self._partial,
                group=self._group,
                in_thread=self._is_async,
                position=self._pipeline.position,
            )
        except NotWrittenError as error:
            self._save_failed(error)
        else:
            self._is_unsettled = True
            if not self._is_async:
                self._settle()
        self._pipeline.position.at("between steps")

    def finish(self) -> None:
        """Waits until what is being saved is written."""
        if self._pending is None:
            return
        self._pipeline.position.at("a checkpoint", waits_for=ANY)
        pending, self._pending = self._pending, None
        try:
            pending.finish()
        except NotWrittenError as error:
            self._save_failed(error)
        else:
            self._commit()

    # Private methods: saving

    def _state(self) -> dict[str, Any]:
        pipeline = self._pipeline
        names, of_device = pipeline.first_names, kind_of(pipeline.device).generator
        tensors = {names[name]: tensor.detach() for name, tensor in pipeline.named_tensors().items()}
        rank_state = {
            "groups": self._optimizer.groups(),
            "random": HostStates.now().plain(),
            "cuda_random": None if of_device is None else of_device.get_state(),
            "pipeline": pipeline.state_dict(),
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }
        return {
            "model": tensors,
            "optimizer": {"state": self._optimizer.by_name()},
            "ranks": {str(pipeline.rank): packed(rank_state)},
            TIED: json.dumps(names),
        }

    def _settle(self) -> None:
        """Finish the last checkpoint, and agree on whether it was committed; every rank must call it.

        The first rank commits alone, while the others may train on. Its failure (a full disk) is all ranks' failure:
        else they would not agree on which step is saved.
        """
        self.finish()
        if not self._is_unsettled:
            return
        self._is_unsettled = False
        if self._group is None:
            return
        self._pipeline.position.at("a checkpoint", waits_for=ANY)
        box = [self._failed.message if self._failed is not None else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        if box[0] is not None and self._pipeline.rank != 0:
            self._saved_step = -1
            self._failed = FileError(box[0], path=str(self._folder), hint=_NO_ROOM)

    def _commit(self) -> None:
        """Makes what all ranks have written a checkpoint, and removes the oldest."""
        partial, self._failed = self._partial, None
        if self._pipeline.rank != 0 or partial is None:
            return
        try:
            commit(partial, self._description())
        except OSError as error:
            self._save_failed(error)
            return
        prune(partial.parent, self._place.lineage, self._keep)

    def _description(self) -> dict[str, Any]:
        balance = self._pipeline.balance
        return {
            "branches": self._place.lineage.branches,
            "step": self._saved_step,
            "seed": self._pipeline.seed,
            "plan_digest": balance.plan_digest,
            "balance": list(balance.balance),
            "ranks": dist.get_world_size(),
            "torch": str(torch.__version__),
            "python": PYTHON,
            "computation": self._pipeline.computation,
        }

    def _save_failed(self, error: Exception) -> None:
        assert self._folder is not None
        assert self._partial is not None
        step, self._saved_step = self._saved_step, -1
        if self._pipeline.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        kept = latest_checkpoint(str(self._folder))
        left = f"{kept.name} stays the latest" if kept is not None else "there is none yet"
        free = shutil.disk_usage(self._folder).free
        message = f"the checkpoint of step {step} was not written: {error} ({format_bytes(free)} free); {left}"
        self._failed = FileError(message, path=str(self._folder), hint=_NO_ROOM)
        if not self._is_end:
            self._tell(f"{self._failed.message}; training goes on", True)

    def _tell(self, text: str, is_warning: bool = False) -> None:  # noqa: FBT001, FBT002 - as `print` has its stream
        if self._pipeline.rank == 0:
            line = printable_lines(f"warning: {text}" if is_warning else text)
            print(line, file=sys.stderr if is_warning else sys.stdout, flush=True)

    # Private methods: resuming

    def _begin_with(self, weights: str) -> None:
        """Load weights, and report casts on any rank."""
        pipeline = self._pipeline
        casts = [begin_with_weights(weights, pipeline.named_tensors(), pipeline.first_names)]
        if self._group is not None:
            casts *= dist.get_world_size()
            dist.all_gather_object(casts, casts[pipeline.rank], group=self._group)
        cast = sorted(set().union(*casts))
        if cast:
            self._tell(f"cast on loading {weights}: {', '.join(cast)}")

    def _resume(self, candidates: list[Path]) -> None:
        """Goes on from the first of the candidates that every rank can read."""
        problems: list[_Problem] = []
        for source in candidates:
            problem, held = None, None
            try:
                held = read_checkpoint(source, self._described(source), self._pipeline, self._optimizer)
            except (UsageError, ModelError):
                raise
            except Exception as error:  # whatever it is: there may be an older one that is whole
                problem = _problem(error, source)
            everybody: list[_Problem | None] = [problem]
            if self._group is not None:
                everybody = [None] * dist.get_world_size()
                dist.all_gather_object(everybody, problem, group=self._group)
            bad = next(filter(None, everybody), None)
            if bad is None:
                assert held is not None
                self._restore(source, held)
                return
            problems.append(bad)
            if source is not candidates[-1]:
                self._tell(f"{bad.message}; trying the checkpoint before", True)
        older = "" if len(problems) > 1 else _older_hint(candidates[0])
        more = f" (nor can the {len(problems) - 1} before it)" if len(problems) > 1 else ""
        message = f"cannot be resumed{more}: {problems[0].message}"
        raise FileError(message, path=str(candidates[0]), hint=older or problems[0].hint)

    def _described(self, source: Path) -> dict[str, Any]:
        """Return the description of a whole checkpoint, which the first rank reads for all."""
        found: dict[str, Any] = {}
        if self._pipeline.rank == 0:
            try:
                check_whole(source)
                found = {"description": {**description_of(source), "files": {}}}
            except Exception as error:  # reported as what any rank may find
                found = {"problem": _problem(error, source)}
        found = json.loads(self._place.agreed(json.dumps(found)))
        if "problem" in found:
            message, hint = found["problem"]
            raise PlannerError(message, hint=hint)
        return dict(found["description"])

    def _restore(self, source: Path, held: ReadCheckpoint) -> None:
        pipeline, state = self._pipeline, held.state
        self._optimizer.restore(held.optimizer_state, held.groups)
        self._restore_others(state["others"], str(source))
        restored("the pipeline", pipeline.load_state_dict, state["pipeline"], str(source))
        # Outside of steps every rank draws the same, whatever the plan.
        restored("the random numbers", lambda s: HostStates.from_plain(s).restore(), state["random"], str(source))
        of_device = kind_of(pipeline.device).generator
        if state.get("cuda_random") is not None and of_device is not None:
            restored("the device's random numbers", of_device.set_state, state["cuda_random"], str(source))
        description = held.description
        self._place.begin_behind(source, description)
        self._saved_step = description["step"]
        how = (
            "" if held.is_same_plan else f" (written by {description['ranks']} ranks, balance {description['balance']})"
        )
        self._tell(f"resumed {source} after {description['step']} steps{how}")

    def _restore_others(self, saved: Mapping[str, Any], path: str) -> None:
        if set(saved) != set(self._others):
            raise UsageError(
                f"the checkpoint holds the state of {sorted(saved) or 'nothing else'}, "
                f"the script keeps that of {sorted(self._others) or 'nothing else'}",
                hint="give `checkpoints` the same objects under the same names",
            )
        for name, other in self._others.items():
            restored(f'"{name}"', other.load_state_dict, saved[name], path)


class _Problem(NamedTuple):
    """Why a checkpoint cannot be read."""

    message: str
    hint: str


def _writing() -> "type[Writing]":
    from planner.executor.keep.writing import Writing  # noqa: PLC0415 - a second that runs without it need not wait

    return Writing


def _problem(error: BaseException, source: Path) -> _Problem:
    if isinstance(error, PlannerError):
        return _Problem(error.message, error.hint)
    return _Problem(f"{source}: cannot be read ({type(error).__name__}: {first_line(error)[:200]})", "")


def _older_hint(checkpoint: Path) -> str:
    older = [path for path in saved_in(checkpoint.parent) if path.name < checkpoint.name]
    return f"the one before is {older[-1]}: give that to `--resume`" if older else ""
