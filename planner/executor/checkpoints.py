"""Checkpoints of a run. Tensors are stored by their names in the model, so any plan can resume the run.

    DIR/step-00000100/              one checkpoint: after 100 optimizer steps
        rank-00000.safetensors      tensors of a rank; its other state as JSON: options, random states, data position
        checkpoint.json             index: run and plan, the file of each tensor, and digests of the files

A checkpoint is written into a hidden folder, which is renamed when every rank has written its file (`keep.saved`).

Every rank writes a file. Parameters, buffers and optimizer state are equal in all replicas, so only ranks of the first
replica store them. A tied weight is stored by each of its stages, so that a rank need not open another stage's file.

Under the plan that wrote the checkpoint, a run resumes bit for bit. Under another plan, a stage finds its parameters
and their optimizer state by name. All other state is equal on all ranks, and is read from the first rank's file.
"""

import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.core.errors import FileError, ModelError, PlannerError, TrainingError, UsageError
from planner.core.values.printable import printable_lines
from planner.core.values.units import format_bytes, pluralize
from planner.device.kinds import kind_of
from planner.executor.keep.errors import first_line_of_error
from planner.executor.keep.exchange import ValueExchange
from planner.executor.keep.index import PYTHON, CheckpointIndex
from planner.executor.keep.json_state import to_json
from planner.executor.keep.optimizer_state import OptimizerState
from planner.executor.keep.run_folder import RunFolder
from planner.executor.keep.saved import (
    CheckpointNotWrittenError,
    checkpoints_in,
    complete_checkpoint,
    latest_checkpoint,
    partial_checkpoint_path,
    remove_old_checkpoints,
)
from planner.executor.keep.stored import name_in_rank_file
from planner.executor.keep.unsaved import UnsavedState, other_objects_with_state
from planner.executor.keep.weights import load_weights
from planner.executor.keep.writing import CheckpointWriter, RankState, WrittenFile
from planner.executor.pipeline import Pipeline
from planner.executor.read_checkpoint import CheckpointState, read_checkpoint
from planner.executor.run.random_state import HostRandomStates
from planner.executor.watch.activity import STORE
from planner.executor.watch.failure import StoppedBySignal

_MOST_NAMES = 4
_NO_ROOM = "free space, then use `--resume auto`"


class Checkpoints:
    """Writer of a run's checkpoints.

    Every rank creates one writer, after the optimizer. Creating the writer resumes the run, or loads `weights`.

    Args:
        pipeline: Pipeline of this rank.
        optimizer: Optimizer of this rank's parameters.
        folder: Folder of the checkpoints; None to save nothing.
        every: Steps between two checkpoints. The last step is saved as well.
        keep: Number of newest checkpoints to keep.
        resume: A checkpoint, a folder of checkpoints, or `auto` for `folder`. In a folder, the latest readable
            checkpoint is resumed. With `auto`, a new run begins if the folder has no checkpoint.
        weights: File of a state dict from which a new run starts (`planner.executor.keep.weights.load_weights`).
        steps: Number of steps of the whole run.
        stateful: Additional objects to save and restore by name, such as a learning-rate schedule. Each has
            `state_dict` and `load_state_dict`. Every rank passes the same objects.

    Raises:
        UsageError: The checkpoint or the weights do not fit the model, `folder` has checkpoints of another run, or
            another job writes into `folder`.
        FileError: The checkpoint or the weights cannot be read.
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
        **stateful: Any,
    ) -> None:
        self._pipeline = pipeline
        self._optimizer = OptimizerState(optimizer, dict(pipeline.named_parameters()), pipeline.canonical_names)
        self._every, self._keep, self._steps = every, keep, steps
        self._watch = pipeline.watch
        self._others = {**stateful, **other_objects_with_state(pipeline._meta_model, pipeline.modules, optimizer)}
        self._saved_step = -1
        self._is_checked = self._is_warned = False
        self._failed: PlannerError | None = None
        self._is_end = False
        self._pending: CheckpointWriter | None = None
        pipeline.activity.begin("opening the checkpoints", waits_for=STORE)
        self._exchange = ValueExchange(pipeline.rank, dist.get_world_size())
        # On a GPU, a thread saves from a copy in host memory. On a CPU, the copy would take memory that the plan needs.
        self._is_async = kind_of(pipeline.device).has_own_memory
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="prune")
        self._pruning: Future[None] | None = None
        self._place = RunFolder(folder, rank=pipeline.rank, exchange=self._exchange, tell=self._tell)
        self._folder = self._place.path
        if self._folder is not None:
            self._own_state()  # raise an error now if some state cannot be saved; checked again after the first step
            named = [optimizer, *stateful.values()]
            self._unsaved_state = UnsavedState(
                pipeline.modules,
                optimizer,
                lambda: (other for other in pipeline.optimizers if all(other is not held for held in named)),
            )
            _ = pipeline.code_digests  # of variables as they are now, before the script changes some between steps
        pipeline.at_close.append(self._release)
        candidates = self._place.resumable_checkpoints(resume)
        pipeline.activity.begin("reading a checkpoint")
        if candidates:
            self._resume_first_readable(candidates)
        elif weights is not None:
            self._load_initial_weights(weights)
        pipeline.at_end.append(self.close)
        if self._watch is not None:
            self._watch.saves_on_stop = self._folder is not None
        pipeline.activity.begin("between steps")

    def step_done(self) -> None:
        """Save a checkpoint if one is due. Call this method after every step.

        If a signal requested the end of the run, save a checkpoint and end the script.
        """
        if self._folder is None:
            return
        if not self._is_checked:  # loaders and optimizers have no state before the first step
            self._own_state()
            self._unsaved_state.changed()
        step, signalled = self._pipeline.step_index, 0
        if self._watch is not None:
            # Replicas synchronize only at the end of a step, so a replica may begin the next step before another one.
            signalled = self._watch.stop_signal(step, steps_ahead=2 if self._pipeline.place.num_replicas > 1 else 1)
        is_end = bool(signalled) or step == self._steps
        if is_end or step % self._every == 0:
            self._begin_checkpoint()
            self._is_end = is_end
            if self._is_checked:
                self._warn_of_unsaved_state()
            self.save()
        elif self._pending is not None and self._pending.is_done:
            self.wait_until_written()
        self._is_checked = True
        if not is_end:
            return
        self._end_writes()
        if signalled:
            name = signal.Signals(signalled).name
            self._tell(f"stopped by {name} after {step} steps; continue with `--resume auto`")
            raise StoppedBySignal(128 + signalled)

    def close(self) -> None:
        """Save the state after the training loop, unless it is already saved. The loop may have ended early.

        `pipeline_script` calls this method at the end of its block. Other scripts must call it after their last step.
        """
        step = self._pipeline.step_index
        if self._folder is None:
            return
        self.wait_until_written()
        if step not in {0, self._saved_step}:
            self._is_end = True
            self.save()
            if self._steps is not None and step < self._steps:
                self._tell(f"the loop ended after {step} of {self._steps} steps")
        self._end_writes()

    def save(self) -> None:
        """Save a checkpoint of the current step. If this fails, print a warning and continue the run."""
        assert self._folder is not None
        self.wait_until_written()
        step = self._pipeline.step_index
        if step == self._saved_step:
            return
        self._pipeline.activity.begin("a checkpoint", waits_for=STORE)
        self._saved_step = step
        folder = partial_checkpoint_path(self._folder, step)
        self._pending = CheckpointWriter(
            self._own_state(),
            folder,
            exchange=self._exchange,
            in_thread=self._is_async,
            activity=self._pipeline.activity,
            rank=self._pipeline.rank,
            publish=partial(self._publish, folder, self._pipeline.code_digests),
        )
        if not self._is_async:
            self.wait_until_written()
        self._pipeline.activity.begin("between steps")

    def wait_until_written(self) -> None:
        """Wait until all ranks have written the pending checkpoint."""
        if self._pending is None:
            return
        assert self._folder is not None
        self._pipeline.activity.begin("a checkpoint", waits_for=STORE)
        pending, self._pending = self._pending, None
        try:
            pending.wait_until_written()
        except CheckpointNotWrittenError as error:
            self._save_failed(error)
            return
        self._failed = None
        if self._pipeline.rank == 0:
            # In a thread, because a checkpoint has a file per rank, and removing it may take seconds.
            self._pruning = self._pruner.submit(remove_old_checkpoints, self._folder, self._keep)

    # Private methods: saving

    def _begin_checkpoint(self) -> None:
        try:
            self._pipeline.check_all_ranks_save()
        except TrainingError:
            step = self._pipeline.step_index
            self._tell(f"the checkpoint of step {step} is not written; {self._latest_left()}", is_warning=True)
            raise

    def _latest_left(self) -> str:
        kept = latest_checkpoint(str(self._folder))
        return f"{kept.name} remains the latest" if kept is not None else "there is none yet"

    def _own_state(self) -> RankState:
        pipeline = self._pipeline
        names, of_device = pipeline.canonical_names, kind_of(pipeline.device).generator
        tensors: dict[str, Tensor] = {}
        optimizer = {}
        if pipeline.place.replica == 0:
            for name, tensor in pipeline.named_tensors().items():
                to_json(tensor, name_in_rank_file(names[name]), tensors)
            for name, state in self._optimizer.state_by_name().items():
                optimizer[name] = to_json(state, f"optimizer[{name!r}]", tensors)
        parts = {
            "groups": self._optimizer.parameter_groups(),
            "random": HostRandomStates.current().plain(),
            "device_random": None if of_device is None else of_device.get_state(),
            "pipeline": pipeline.state_dict(),
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }
        return RankState(
            {"optimizer": optimizer, **{part: to_json(value, part, tensors) for part, value in parts.items()}}, tensors
        )

    def _warn_of_unsaved_state(self) -> None:
        """Warn about state that changes in training and is not in the checkpoints.

        Only the first call looks for changed state. Every call looks for parameters and persistent buffers that layers
        have registered since the previous call.
        """
        own = [*self._unsaved_state.late_tensors(), *([] if self._is_warned else self._unsaved_state.changed())]
        self._is_warned = True
        self.wait_until_written()  # no other thread may exchange values now
        changed = self._exchange.decide(own, lambda names: sorted(set(chain(*names))))
        if changed:
            more = f" and {len(changed) - _MOST_NAMES} more" if len(changed) > _MOST_NAMES else ""
            names = f"{', '.join(changed[:_MOST_NAMES])}{more}"
            self._tell(
                f"checkpoints do not contain state that changes in training: {names}; a resumed run begins with its "
                "first values (keep it in persistent buffers of `__init__`, or in the `state` of the optimizer)",
                True,
            )

    def _end_writes(self) -> None:
        self.wait_until_written()
        if self._pruning is not None:
            self._pruning.result()
        self._exchange.close()
        if self._failed is not None:
            raise self._failed

    def _release(self) -> None:
        if sys.exc_info()[0] is None:
            self._exchange.close()
        self._place.release_lock()

    def _publish(self, folder: Path, computation: dict[str, str], files: Sequence[WrittenFile]) -> None:
        holders: dict[str, int] = {}
        for rank, written in enumerate(files):
            for stored in written.names:
                holders.setdefault(stored, rank)
        firsts, balance = self._pipeline.canonical_names, self._pipeline.balance
        lost = next((first for first in firsts.values() if name_in_rank_file(first) not in holders), None)
        if lost is not None:
            raise CheckpointNotWrittenError(f'the script has removed or renamed "{lost}", which `build_model` returns')
        index = CheckpointIndex(
            step=self._saved_step,
            seed=self._pipeline.seed,
            plan_digest=balance.plan_digest,
            balance=balance.balance,
            torch=str(torch.__version__),
            python=PYTHON,
            computation=computation,
            files=tuple(written.entry for written in files),
            tensors={n: holders[name_in_rank_file(n)] if n == first else first for n, first in firsts.items()},
        )
        complete_checkpoint(folder, index)

    def _save_failed(self, error: Exception) -> None:
        assert self._folder is not None
        step, self._saved_step = self._saved_step, -1
        free = shutil.disk_usage(self._folder).free
        message = f"the checkpoint of step {step} was not written: {error} ({format_bytes(free)} free)"
        message += f"; {self._latest_left()}"
        self._failed = FileError(message, path=str(self._folder), hint=_NO_ROOM)
        if not self._is_end:
            self._tell(f"{self._failed.message}; training continues", True)

    def _tell(self, text: str, is_warning: bool = False) -> None:  # noqa: FBT001, FBT002 - as `print` has its stream
        if self._pipeline.rank == 0:
            line = printable_lines(f"warning: {text}" if is_warning else text)
            print(line, file=sys.stderr if is_warning else sys.stdout, flush=True)

    # Private methods: resuming

    def _load_initial_weights(self, weights: str) -> None:
        pipeline = self._pipeline
        own = load_weights(weights, pipeline.named_tensors(), pipeline.canonical_names, pipeline._meta_model)
        cast = self._exchange.decide(own, lambda casts: sorted(set(chain.from_iterable(casts))))
        if cast:
            self._tell(f"cast on loading {weights}: {', '.join(cast)}")

    def _resume_first_readable(self, candidates: list[Path]) -> None:
        problems: list[tuple[str, str]] = []
        """Message and hint for each checkpoint that a rank cannot read."""
        for source in candidates:
            problem: tuple[str, str] | None = None
            checkpoint: CheckpointState | None = None
            try:
                checkpoint = read_checkpoint(source, self._pipeline, self._optimizer)
            except (UsageError, ModelError):
                raise
            except PlannerError as error:
                problem = error.message, error.hint
            except Exception as error:  # of any kind: an older checkpoint may be readable
                why = f"{type(error).__name__}: {first_line_of_error(error)[:200]}"
                problem = f"{source}: cannot be read ({why})", ""
            first_problem = self._exchange.decide(problem, lambda of_ranks: next(filter(None, of_ranks), None))
            if first_problem is None:
                assert checkpoint is not None
                self._restore(source, checkpoint)
                return
            problems.append(first_problem)
            if source is not candidates[-1]:
                self._tell(f"{first_problem[0]}; trying the previous checkpoint", True)
        message, hint = problems[0]
        older = "" if len(problems) > 1 else _older_hint(candidates[0])
        more = f" (nor can {pluralize(len(problems) - 1, 'older one')})" if len(problems) > 1 else ""
        raise FileError(f"cannot be resumed{more}: {message}", path=str(candidates[0]), hint=older or hint)

    def _restore(self, source: Path, checkpoint: CheckpointState) -> None:
        pipeline, index, state = self._pipeline, checkpoint.index, checkpoint.state
        restore = partial(_restore_object, str(source))
        restore("the optimizer", partial(self._optimizer.restore, checkpoint.optimizer_state), checkpoint.groups)
        self._check_same_objects(state["others"])
        for name, other in self._others.items():
            restore(f'"{name}"', other.load_state_dict, state["others"][name])
        restore("the pipeline", pipeline.load_state_dict, state["pipeline"])
        # Outside of steps, all ranks draw the same random numbers under any plan.
        restore("the random numbers", lambda s: HostRandomStates.from_plain(s).restore(), state["random"])
        of_device = kind_of(pipeline.device).generator
        if state["device_random"] is not None and of_device is not None:
            restore("the device's random numbers", of_device.set_state, state["device_random"])
        self._place.continue_from(source, index.step)
        self._saved_step = index.step
        how = (
            "" if checkpoint.is_same_plan else f" (written by {len(index.files)} ranks, balance {list(index.balance)})"
        )
        self._tell(f"resumed {source} after {index.step} steps{how}")

    def _check_same_objects(self, saved: Mapping[str, Any]) -> None:
        if set(saved) != set(self._others):
            raise UsageError(
                f"the checkpoint has the state of {sorted(saved) or 'no further objects'}, "
                f"but the script passes {sorted(self._others) or 'no further objects'} to `checkpoints`",
                hint="pass the same objects under the same names",
            )


def _restore_object(path: str, name: str, restore: Callable[[Any], Any], state: Any) -> None:
    try:
        restore(state)
    except Exception as error:
        raise FileError(
            f"the state of {name} cannot be restored: {type(error).__name__}: {first_line_of_error(error)}",
            path=path,
            hint="use another checkpoint, or start from its weights only with `--weights`",
        ) from error


def _older_hint(checkpoint: Path) -> str:
    older = [path for path in checkpoints_in(checkpoint.parent) if path.name < checkpoint.name]
    return f"the previous one is {older[-1]}: pass it to `--resume`" if older else ""
