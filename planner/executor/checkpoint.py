"""Checkpoints with `torch.distributed.checkpoint`, under the names of the model: any plan can read what another wrote.

    DIR/step-00000100/      one checkpoint: after 100 optimizer steps
        .metadata, *.distcp     tensors: `model.NAME`, `optimizer.state.NAME.KEY`; per rank: random state and options
        checkpoint.json         what it is a checkpoint of, for people and for `--resume`

A checkpoint is written into a hidden folder beside it and renamed when every rank has written its part, so a folder
called `step-…` is always whole, and the latest is the one with the highest number. What several ranks hold (tied
weights, replicas) is written once, by the lowest.

A stage resumes bit for bit under the plan that wrote. Under another one it finds its parameters and their optimizer
state by name; only the random state, which belongs to a rank, starts anew.
"""

import json
import os
import pickle
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from planner.core.errors import FileError, PlannerError, UsageError
from planner.core.units import format_bytes
from planner.executor.position import ANY
from planner.executor.weights import TIED, load_weights, read_into, read_metadata

if TYPE_CHECKING:
    from concurrent.futures import Future

    from planner.executor.pipeline import Pipeline

__all__ = ["CHECKPOINT_SCHEMA", "Checkpoints", "latest_checkpoint"]

CHECKPOINT_SCHEMA = "gpipe-plan/checkpoint/v1"
_DESCRIPTION = "checkpoint.json"


class Checkpoints:
    """Restores a run when made, and saves it from then on; every rank makes one, when the optimizer exists.

    Args:
        pipeline: The pipeline.
        optimizer: Of this stage's parameters.
        folder: Where to save; None to save nothing.
        every: Steps between two checkpoints; besides, the last step is saved.
        keep: How many of the newest stay.
        resume: A checkpoint, a folder of them, or `auto`: the latest in `folder`, if there is any.
        weights: A state dict to start from, where nothing is resumed (`planner.executor.weights.load_weights`).
        steps: Of the whole run.
        others: What else must go on as it was, by name: anything with `state_dict` and `load_state_dict`, such as a
            learning-rate schedule. The same on every rank.

    Raises:
        UsageError: What is to be resumed or loaded does not fit the model.
        FileError: It cannot be read.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
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
        self._optimizer = optimizer
        self._every, self._keep, self._steps = every, keep, steps
        self._watch = pipeline.watch
        self._others = others
        self._saved_step = -1
        self._failed: PlannerError | None = None
        self._is_end = False
        self._pending: Future[Any] | None = None
        self._partial: Path | None = None
        pipeline.position.at("opening the checkpoints", waits_for=ANY)
        # On CUDA too: what is agreed on here are paths and errors, and files are written from a thread of their own.
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        # In a thread, from a copy in the host's memory. On the CPU the copy would take memory that the plan counts on.
        self._is_async = pipeline.device.type == "cuda" and self._group is not None
        self._folder = self._opened(folder) if folder is not None else None
        source = self._source(resume)
        pipeline.position.at("reading a checkpoint")
        if source is not None:
            self._restore(source)
        elif weights is not None:
            load_weights(weights, pipeline.named_tensors(), pipeline.first_names)
        if self._watch is not None:
            self._watch.saves_on_stop = self._folder is not None
        pipeline.position.at("between steps")

    def step_done(self) -> None:
        """Call it after every step: saves when it is time, and ends the script after a step in which it was told to."""
        if self._folder is None:
            return
        step, signalled = self._pipeline.step_index, 0
        if self._watch is not None:
            # Replicas meet at the end of each step only, so one may have begun the next when another has not.
            signalled = self._watch.stops_after(step, ahead=2 if self._pipeline.place.num_replicas > 1 else 1)
        is_end = bool(signalled) or step == self._steps
        if is_end or step % self._every == 0:
            self._is_end = is_end
            self.save()
        elif self._pending is not None and self._pending.done():
            self.finish()
        if not is_end:
            return
        self.finish()
        if self._failed is not None:
            raise self._failed
        if signalled:
            name = signal.Signals(signalled).name
            self._tell(f"stopped by {name} after {step} steps; go on with `--resume auto`")
            sys.exit(128 + signalled)

    def save(self) -> None:
        """Saves now. Where that fails the run goes on, is told so, and keeps the checkpoints it has."""
        assert self._folder is not None
        self.finish()
        step = self._pipeline.step_index
        if step == self._saved_step:
            return
        self._pipeline.position.at("a checkpoint", waits_for=ANY)
        target = self._folder / f"step-{step:08d}"
        self._partial = target.with_name(f".{target.name}.partial")
        self._saved_step = step
        write: Callable[..., Any] = async_save if self._is_async else save
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a group for the CPU beside NCCL, and of one process alone
                saved = write(
                    self._state(),
                    storage_writer=FileSystemWriter(self._partial),
                    planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except CheckpointException as error:
            self._save_failed(error)
        else:
            if self._is_async:
                self._pending = saved
            else:
                self._commit()
        self._pipeline.position.at("between steps")

    def finish(self) -> None:
        """Waits until what is being saved is written."""
        if self._pending is None:
            return
        self._pipeline.position.at("a checkpoint", waits_for=ANY)
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except CheckpointException as error:
            self._save_failed(error)
        else:
            self._commit()

    # Private methods: saving

    def _state(self) -> dict[str, Any]:
        pipeline = self._pipeline
        names = pipeline.first_names
        tensors = {names[name]: tensor.detach() for name, tensor in pipeline.named_tensors().items()}
        mine = {
            "groups": self._groups(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(pipeline.device) if pipeline.device.type == "cuda" else None,
            "pipeline": pipeline.state_dict(),
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }
        state = {name: dict(self._optimizer.state[p]) for name, p in self._trained() if p in self._optimizer.state}
        return {
            "model": tensors,
            "optimizer": {"state": state},
            "ranks": {str(pipeline.rank): pickle.dumps(mine)},
            TIED: pickle.dumps(names),
        }

    def _trained(self) -> list[tuple[str, Tensor]]:
        """The optimizer's parameters by the first of their names."""
        named = dict(self._pipeline.named_parameters())
        names = {id(parameter): self._pipeline.first_names.get(name, name) for name, parameter in named.items()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(names[id(p)], p) for p in held if id(p) in names]

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Options of every parameter group, beside the names of its parameters."""
        names = {id(p): name for name, p in self._trained()}
        return [
            (
                [names[id(p)] for p in group["params"] if id(p) in names],
                {key: value for key, value in group.items() if key != "params"},
            )
            for group in self._optimizer.param_groups
        ]

    def _commit(self) -> None:
        """Makes what all ranks have written a checkpoint, and removes the oldest."""
        partial, self._failed = self._partial, None
        if self._pipeline.rank != 0 or partial is None:
            return
        target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        try:
            (partial / _DESCRIPTION).write_text(json.dumps(self._description(), indent=1) + "\n")
            old = partial.with_suffix(".old")
            if target.is_dir():  # of a run that was resumed from an earlier step
                target.rename(old)
            partial.rename(target)
            _sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            self._save_failed(error)
            return
        for older in _checkpoints(target.parent)[: -self._keep]:
            shutil.rmtree(older, ignore_errors=True)

    def _description(self) -> dict[str, Any]:
        balance = self._pipeline.balance
        return {
            "schema": CHECKPOINT_SCHEMA,
            "step": self._saved_step,
            "seed": self._pipeline.seed,
            "plan_digest": balance.plan_digest,
            "balance": list(balance.balance),
            "ranks": dist.get_world_size(),
            "torch": str(torch.__version__),
        }

    def _save_failed(self, error: BaseException) -> None:
        assert self._folder is not None
        assert self._partial is not None
        step, self._saved_step = self._saved_step, -1
        cause = next((e for e, _ in getattr(error, "failures", {}).values()), error)
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if self._pipeline.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        kept = latest_checkpoint(str(self._folder))
        left = f"{kept.name} stays the latest" if kept is not None else "there is none yet"
        free = shutil.disk_usage(self._folder).free
        message = f"the checkpoint of step {step} was not written: {cause} ({format_bytes(free)} free); {left}"
        self._failed = FileError(message, path=str(self._folder), hint="make room, then `--resume auto`")
        if self._pipeline.rank == 0 and not self._is_end:
            print(f"warning: {self._failed.message}; training goes on", file=sys.stderr, flush=True)

    def _tell(self, text: str) -> None:
        if self._pipeline.rank == 0:
            print(text, flush=True)

    # Private methods: resuming

    def _opened(self, folder: str) -> Path:
        """The folder, made if need be, free of what an earlier run left half-written."""
        path = Path(folder)
        problem = None
        if self._pipeline.rank == 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
                for leftover in path.glob(".step-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            except OSError as error:
                problem = f"cannot be made: {error.strerror}"
        problem = self._agreed(problem)
        if problem is not None:
            raise FileError(problem, path=folder)
        self._check_shared(path)
        return path

    def _check_shared(self, path: Path) -> None:
        mark = path / ".shared"
        if self._pipeline.rank == 0:
            mark.touch()
        self._agreed(None)
        seen: list[Any] = [None] * dist.get_world_size()
        if self._group is not None:
            dist.all_gather_object(seen, mark.exists(), group=self._group)
            if not all(seen):
                raise UsageError(
                    f"rank {seen.index(False)} does not see the checkpoint folder of rank 0 ({path})",
                    hint="it must lie on a file system that all machines share",
                )
        if self._pipeline.rank == 0:
            mark.unlink()

    def _source(self, resume: str | None) -> Path | None:
        """The checkpoint to resume, the same on every rank."""
        if resume is None:
            return None
        if resume == "auto" and self._folder is None:
            raise UsageError("`--resume auto` needs the folder to look in", hint="add `--checkpoint DIR`")
        folder = str(self._folder) if resume == "auto" else resume
        found = self._agreed(str(latest_checkpoint(folder) or "") if self._pipeline.rank == 0 else None)
        if not found and resume != "auto":
            raise FileError("there is no checkpoint in it", path=resume)
        return Path(found) if found else None

    def _agreed(self, value: str | None) -> str | None:
        """The first rank's value, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _restore(self, source: Path) -> None:
        pipeline = self._pipeline
        description = _description_of(source)
        metadata = read_metadata(str(source))
        load_weights(str(source), pipeline.named_tensors(), pipeline.first_names)
        state = {"optimizer": {"state": self._stored_state(metadata)}, "ranks": _rank_keys(metadata)}
        read_into(str(source), state)
        ranks = {int(rank): pickle.loads(held) for rank, held in state["ranks"].items()}  # noqa: S301 - our own
        same_plan = (description["balance"], description["ranks"]) == (
            list(pipeline.balance.balance),
            dist.get_world_size(),
        )
        mine = ranks[pipeline.rank if same_plan else 0]
        for name, parameter in self._trained():
            if name in state["optimizer"]["state"]:
                self._optimizer.state[parameter] = state["optimizer"]["state"][name]
        self._restore_options([group for held in ranks.values() for group in held["groups"]])
        self._restore_others(mine["others"])
        pipeline.load_state_dict(mine["pipeline"])
        # Outside of steps every rank draws the same, whatever the plan.
        torch.set_rng_state(mine["random"])
        if mine["cuda_random"] is not None and pipeline.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda_random"], pipeline.device)
        self._saved_step = description["step"]
        how = "" if same_plan else f" (written by {description['ranks']} ranks, balance {description['balance']})"
        self._tell(f"resumed {source} after {description['step']} steps{how}")

    def _stored_state(self, metadata: Metadata) -> dict[str, dict[str, Any]]:
        """Empty tensors for the optimizer state of this stage's parameters, and None for what is none."""
        trained = dict(self._trained())
        fused = {id(p) for g in self._optimizer.param_groups if _steps_on_device(g) for p in g["params"]}
        found: dict[str, dict[str, Any]] = {}
        for key, path in metadata.planner_data.items():
            if path[:2] != ("optimizer", "state") or path[2] not in trained:
                continue
            stored, parameter = metadata.state_dict_metadata[key], trained[path[2]]
            value = None
            if isinstance(stored, TensorStorageMetadata):
                # As torch's optimizers keep it: the count of steps on the CPU unless told otherwise.
                on_cpu = path[3] == "step" and id(parameter) not in fused
                device = "cpu" if on_cpu else parameter.device
                value = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
            found.setdefault(path[2], {})[path[3]] = value
        return found

    def _restore_options(self, saved: list[tuple[list[str], dict[str, Any]]]) -> None:
        options = {name: options for names, options in saved for name in names}
        by_position = [options for _, options in saved]
        names = {id(p): name for name, p in self._trained()}
        for number, group in enumerate(self._optimizer.param_groups):
            known = [options[names[id(p)]] for p in group["params"] if names.get(id(p)) in options]
            if known or number < len(by_position):
                group.update(known[0] if known else by_position[number])

    def _restore_others(self, saved: Mapping[str, Any]) -> None:
        if set(saved) != set(self._others):
            raise UsageError(
                f"the checkpoint holds the state of {sorted(saved) or 'nothing else'}, "
                f"the script keeps that of {sorted(self._others) or 'nothing else'}",
                hint="give `checkpoints` the same objects under the same names",
            )
        for name, other in self._others.items():
            other.load_state_dict(saved[name])


def latest_checkpoint(folder: str) -> Path | None:
    """`folder` if it is a checkpoint itself, else the latest in it; None if there is none."""
    path = Path(folder)
    if (path / ".metadata").is_file():
        return path
    found = _checkpoints(path)
    return found[-1] if found else None


# Private functions


def _checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{_DESCRIPTION}") if path.parent.name[5:].isdigit())


def _description_of(source: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((source / _DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        raise FileError(
            f"is no checkpoint of a run (no readable {_DESCRIPTION})",
            path=str(source),
            hint="to start from weights alone pass `--weights`",
        ) from error
    if description.get("schema") != CHECKPOINT_SCHEMA:
        raise FileError(f"has schema {description.get('schema')}, not {CHECKPOINT_SCHEMA}", path=str(source))
    return description


def _rank_keys(metadata: Metadata) -> dict[str, Any]:
    return {path[1]: None for path in metadata.planner_data.values() if path[0] == "ranks"}


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _sync(folder: Path) -> None:
    """Makes a rename in `folder` last through a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
