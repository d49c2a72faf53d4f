"""Settings of one process of a training job, and its process group."""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# This module must be imported before `init_process_group`, because default arguments of its functions refer to the
# group of all processes at import time. A later import, which much of torch does, would keep the group forever. Threads
# of the group would then outlive the interpreter, and occasionally abort the process at its end.
import torch.distributed.nn.functional

from planner.core.errors import UsageError
from planner.core.values.balance import Balance, balance_path_for_processes
from planner.device.kinds import DEVICE_KINDS, kind_of
from planner.executor.model_file import ModelFile
from planner.executor.run.placement import ProcessPlace, gather_from_all_ranks, process_place
from planner.executor.watch.activity import ANY, RankActivity
from planner.executor.watch.failure import FailureWatch
from planner.executor.watch.store import job_store, rank_and_world_size
from planner.files import digest_of, read_balance
from planner.model.load import LoadedModel
from planner.model.precision import reload_model


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """Settings of one process: its balance configuration, its device, and its place in the pipeline."""

    balance: Balance
    seed: int
    place: ProcessPlace
    device: torch.device
    activity: RankActivity
    """Record of what this process is doing and waiting for, for error messages."""
    watch: FailureWatch | None
    check_nan: bool = False
    """True if every output and gradient must be finite, not only the loss."""

    @property
    def micro_batch_size(self) -> int:
        """Planned number of samples in a micro-batch."""
        return self.balance.replica_batch // self.balance.micro_batches


def make_rank_job(
    source: str | Path | Balance, *, seed: int, device: str | None, watch: FailureWatch | None, check_nan: bool = False
) -> RankJob:
    """Return the settings of this process, for the rank that `torchrun` or an existing process group sets.

    Args:
        source: Balance configuration, or the path of its file.
        seed: Seed of the run.
        device: Name of the device to use; None for the device of the plan.
        watch: FailureWatch of this process; None if other ranks are not watched.
        check_nan: If true, check that every output and gradient is finite, in addition to the loss.

    Raises:
        UsageError: The plan needs another number of processes, or the device is missing.
    """
    rank, num_processes = rank_and_world_size()
    balance = source if isinstance(source, Balance) else _read_balance_for(Path(source), num_processes)
    place = process_place(balance, rank, num_processes)
    activity = watch.activity if watch is not None else RankActivity()
    activity.names = {stage: _stage_name(balance, stage) for stage in range(balance.num_stages)}
    activity.stages, activity.replica = place.stages, place.replica
    places = [process_place(balance, other, num_processes) for other in range(num_processes)]
    activity.rank_names = {p.rank: activity.name_of(p.stages, p.replica) for p in places}
    activity.predicted_bytes = {stage.index: stage.peak_bytes for stage in balance.stages}
    where = _device_of_rank(device or balance.device)
    return RankJob(
        balance=balance, seed=seed, place=place, device=where, activity=activity, watch=watch, check_nan=check_nan
    )


def _read_balance_for(path: Path, num_processes: int) -> Balance:
    balance = read_balance(str(path))
    return (
        read_balance(str(balance_path_for_processes(path, num_processes)))
        if num_processes in balance.smaller
        else balance
    )


def load_planned_model(balance: Balance, folder: Path) -> LoadedModel:
    """Load the model file that a balance configuration in `folder` names, in the planned precision."""
    path, colon, entry = balance.model.source.rpartition(":")
    source, file = f"{os.path.relpath(folder / path)}{colon}{entry}", ModelFile(folder / path)
    return file.load(lambda: reload_model(source, balance.model, balance.dtype, optimizer=balance.optimizer))


def join_process_group(job: RankJob, timeout_s: float) -> bool:
    """Wait for the other processes, and initialize the default process group unless it exists.

    Returns:
        True if this call initialized the group. The caller must then destroy the group.

    Raises:
        UsageError: A process has another plan, seed, device or torch version than the first process.
    """
    job.activity.begin("joining the others", waits_for=ANY)
    backend = kind_of(job.device).communication
    is_made_here = not dist.is_initialized()
    if is_made_here and "RANK" not in os.environ:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        return True
    if is_made_here:
        # Longer than the watch's timeout, because the watch has better messages.
        timeout = timedelta(seconds=timeout_s + 30)
        rank, world = rank_and_world_size()
        dist.init_process_group(backend, timeout=timeout, store=job_store(timeout), rank=rank, world_size=world)
    try:
        _check_agreement(
            {
                "balance.yaml": digest_of(job.balance),
                "--seed": job.seed,
                "--device": job.device.type,
                "torch": str(torch.__version__),
            }
        )
    except UsageError:
        if is_made_here:
            dist.destroy_process_group()
        raise
    return is_made_here


def _stage_name(balance: Balance, stage: int) -> str:
    layers = balance.stages[stage].layers
    return f"stage {stage} (layer{f's {layers[0]} to' * (len(layers) > 1)} {layers[-1]})"


def _device_of_rank(name: str) -> torch.device:
    if name not in DEVICE_KINDS:  # a device with an index, such as `cuda:1`
        return torch.device(name)
    kind, local = DEVICE_KINDS[name], int(os.environ.get("LOCAL_RANK", "0"))
    if kind.device_count() <= local:
        raise UsageError(
            f"the plan is for {kind.title}, "
            f"but this machine has {kind.device_count()} {kind.title} devices for rank {local}",
            hint="run on the machine for which the plan was made, or pass `--device cpu` to try the script",
        )
    return kind.select_device_of_rank(local)


def _check_agreement(must_agree: dict[str, str | int]) -> None:
    first, *others = gather_from_all_ranks(must_agree)
    for what, value in first.items():
        for rank, other in enumerate(others, start=1):
            if other[what] != value:
                raise UsageError(
                    f"rank {rank} has another {what} ({other[what]}) than rank 0 ({value})",
                    hint="give every process the same files and the same command line, also on other machines",
                )
