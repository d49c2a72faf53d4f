"""One rank of torch's runtime with a schedule table; compares its gradients with the unpartitioned model."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH = 8


def main() -> None:
    """Write the largest difference of any gradient, the number of gradients, and the largest gradient."""
    table, balance, micro_batches = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(sum(balance))]
    whole = nn.Sequential(*layers)
    inputs, targets = torch.randn(2, 2 * micro_batches, WIDTH).unbind()
    held = sorted({int(cell.partition("F")[0]) for cell in _row(table, rank) if "F" in cell})
    stages = []
    for stage in held:
        begin = sum(balance[:stage])
        module = nn.Sequential(*copy.deepcopy(layers[begin : begin + balance[stage]]))
        given: dict[str, Any] = {
            "input_args": _values(requires_grad=stage > 0),
            "output_args": _values(requires_grad=True),
        }
        stages.append(PipelineStage(module, stage, len(balance), torch.device("cpu"), **given))
    runtime = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=_loss, scale_grads=False)
    runtime._load_csv(table, format="compute_only")
    runtime.step(*[inputs] * (0 in held), **{"target": targets} if len(balance) - 1 in held else {})
    for some, wanted in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        _loss(whole(some), wanted).backward()
    pairs = [
        (ours.grad, theirs.grad)
        for stage, held_stage in zip(held, stages, strict=True)
        for layer, copied in zip(layers[sum(balance[:stage]) :], held_stage.submod, strict=False)
        for ours, theirs in zip(layer.parameters(), copied.parameters(), strict=True)
    ]
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    found = apart, len(pairs), max(float(ours.abs().max()) for ours, _ in pairs)
    Path(f"gradients{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _row(table: str, rank: int) -> list[str]:
    return Path(table).read_text(encoding="utf-8").splitlines()[rank].split(",")


def _values(*, requires_grad: bool) -> Tensor:
    return torch.zeros(2, WIDTH, requires_grad=requires_grad)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


if __name__ == "__main__":
    main()
