"""Run under torchrun: one training step of each case, compared on rank 0 with the unpipelined model.

    torchrun --nproc-per-node K gradient_worker.py cases.json results.json

A case is {"balance": path, "seed": S, "steps": n}. The result holds, per case, the largest absolute difference of loss,
gradients and (after n optimizer steps) parameters, and the largest relative one of a gradient: "whole" against the
whole mini-batch at once, "split" against accumulating the same micro-batches, where not even the order of a sum
differs (but over replicas). "replicas_differ" names the parameters that are not the same to the bit in all of them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.executor import Pipeline
from planner.model.autocast import layers_in
from planner.model.load import Batch, LoadedModel
from planner.model.precision import convert
from planner.model.recording import arguments_of


def main() -> None:
    """Runs all cases."""
    dist.init_process_group("gloo")
    results = [_run(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


def _run(case: dict[str, Any]) -> dict[str, Any]:
    pipeline = Pipeline(case["balance"], seed=case["seed"])
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    losses: list[float | None] = []
    gradients: dict[str, Tensor] = {}
    for step in range(case["steps"]):
        batch = pipeline.own_part(*pipeline.example_batch(step))
        with pipeline.step(*batch) as loss:
            losses.append(loss)
            gradients = {n: p.grad.clone() for n, p in pipeline.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    parameters = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((gradients, parameters), gathered if pipeline.rank == 0 else None)
    pipeline.close()
    if pipeline.rank > 0:
        return {}
    loss = losses[-1]
    assert loss is not None
    got = {name: g for grads, _ in gathered for name, g in grads.items()}
    final = {name: p for _, params in gathered for name, p in params.items()}
    pieces = pipeline.balance.micro_batches * pipeline.balance.replicas
    return {
        "replicas_differ": sorted(
            {name for _, params in gathered for name, p in params.items() if not torch.equal(p, final[name])}
        ),
        "own_bytes": [sum(p.nbytes for p in params.values()) for _, params in gathered],
        **_compare("whole", pipeline, case, 1, loss, got, final),
        **_compare("split", pipeline, case, pieces, loss, got, final),
    }


def _compare(  # noqa: PLR0917 - one row of the report
    name: str,
    pipeline: Pipeline,
    case: dict[str, Any],
    pieces: int,
    loss: float,
    got: dict[str, Tensor],
    final: dict[str, Tensor],
) -> dict[str, float]:
    torch.manual_seed(case["seed"])
    model = convert(pipeline.model.build(), pipeline.model.precision)
    optimizer = pipeline.model.build_optimizer(model.parameters())
    expected = 0.0
    gradients: dict[str, Tensor] = {}
    for step in range(case["steps"]):
        expected = _backward(pipeline.model, model, pipeline.example_batch(step), pieces)
        gradients = {n: p.grad.clone() for n, p in _named(model) if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    missing = set(gradients) - set(got)
    assert not missing, missing
    return {
        f"{name}_loss": abs(loss - expected),
        f"{name}_loss_relative": abs(loss - expected) / max(1e-12, abs(expected)),
        f"{name}_gradient": max(float((got[n] - g).abs().max()) for n, g in gradients.items()),
        f"{name}_relative": max(float((got[n] - g).norm() / max(1e-12, float(g.norm()))) for n, g in gradients.items()),
        f"{name}_parameter": max(float((final[n] - p.detach()).abs().max()) for n, p in _named(model)),
    }


def _backward(loaded: LoadedModel, model: nn.Module, batch: Batch, pieces: int) -> float:
    losses = []
    for piece in _pieces(batch, pieces):
        args, kwargs = arguments_of(piece.inputs) if not isinstance(model, nn.Sequential) else ((piece.inputs,), {})
        with layers_in(loaded.precision, torch.device("cpu")):
            loss = loaded.loss_fn(model(*args, **kwargs), piece.targets)
        loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None and pieces > 1:
            parameter.grad.div_(pieces)  # as the engine does it: sum first, then divide
    return float(torch.stack(losses).mean())


def _pieces(batch: Batch, pieces: int) -> Iterator[Batch]:
    size = batch.num_samples // pieces
    for i in range(pieces):
        yield Batch(*tree_map_only(Tensor, lambda t, i=i: t[i * size : (i + 1) * size], tuple(batch)))


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters()


if __name__ == "__main__":
    main()
