"""One rank that compares gradients of the executor with those of torch's runtime in the same order."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from planner.core.schedule import schedule_of
from planner.executor import Pipeline

_KINDS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


def main() -> None:
    """Write, for every balance, the largest difference of any gradient, and their number."""
    dist.init_process_group("gloo")
    differences = {}
    for balance in sys.argv[1:]:
        pipeline = Pipeline(balance)
        (batch,) = pipeline.batches(1)
        with pipeline.step(*batch):
            ours = {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}
        theirs = _gradients_of_torch(pipeline, *batch)
        assert set(ours) == set(theirs)
        largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
        differences[balance] = largest, len(ours), max(float(g.abs().max()) for g in ours.values())
        pipeline.close()
    Path(f"differences{dist.get_rank()}.json").write_text(json.dumps(differences), encoding="utf-8")
    dist.destroy_process_group()


def _gradients_of_torch(pipeline: Pipeline, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    balance = pipeline.balance
    model = pipeline.model.build()
    model.load_state_dict({name: p.detach().clone() for name, p in pipeline.named_parameters()}, strict=False)
    rank, num_devices, num_stages = dist.get_rank(), dist.get_world_size(), len(balance.balance)
    size = balance.batch // balance.micro_batches
    chunks = num_stages // num_devices
    stages = []
    schedule = schedule_of(balance.schedule, balance.order)
    for index in schedule.stages_on(rank, num_devices, chunks):
        module = nn.Sequential()
        for name in balance.stages[index].layers:
            module.add_module(name, model.get_submodule(name))
        received = torch.zeros(size, inputs.shape[1], requires_grad=index > 0)
        sent = torch.zeros(size, inputs.shape[1], requires_grad=True)
        given: dict[str, Any] = {"input_args": received, "output_args": sent}
        stages.append(PipelineStage(module, index, num_stages, torch.device("cpu"), **given))
    actions = schedule.actions(num_devices, balance.micro_batches, chunks)
    # What is computed when is ours; torch adds transfers of its own, of which it asks for more from release to release.
    rows: dict[int, list[_Action | None]] = {
        device: [_Action(x.stage, _KINDS[x.kind], x.micro_batch) for x in row] for device, row in enumerate(actions)
    }
    loss_fn = pipeline.model.loss_fn
    runtime = _PipelineScheduleRuntime(stages, balance.micro_batches, loss_fn=loss_fn, scale_grads=False)
    # In torch 2.8 it has another name.
    prepare = getattr(runtime, "_prepare_schedule_with_comms", None) or runtime._load_actions
    prepare(rows)
    losses: list[Tensor] = []
    first = (inputs,) if rank == 0 else ()
    last = {"target": targets, "losses": losses} if pipeline.is_last else {}
    runtime.step(*first, **last)
    return {
        name: p.grad / balance.micro_batches
        for stage in stages
        for name, p in stage.submod.named_parameters()
        if p.grad is not None
    }


if __name__ == "__main__":
    main()
