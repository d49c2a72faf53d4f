"""Run under torchrun: some training steps of each case, compared on rank 0 with the unpipelined model.

    torchrun --nproc-per-node K gradient_worker.py cases.json results.json

A case is a `tests.support.training.Case`. The result holds the largest differences after the last step: of the loss,
of gradients (absolute and relative), of parameters, of buffers (batch normalisation), of the norm of all gradients and
of the loss of an evaluation. "whole" is against each mini-batch at once, "split" against accumulating the same
micro-batches, replica by replica, where not even the order of a sum differs (but over more than two replicas, and over
the stages of a tied weight), and dropout draws from the same seeds.
Stages add the norm of their gradients up in another order than one model does. It is compared by itself, and "split"
clips by the pipeline's: a last bit of it would otherwise be in all gradients, and grow twenty-fold within a step where
few values are normalised.
"replicas_differ" names the parameters that are not the same to the bit in all of them, "skipped" tells which steps each
rank skipped for an overflow, "kinds" what each ran in the last one, "overflowed" by step whose gradients overflow in
the unpipelined model.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map, tree_map_only

from planner.executor import Pipeline
from planner.model.autocast import forward_context
from planner.model.calling import arguments_of
from planner.model.load import Batch, LoadedModel
from planner.model.precision import convert_in_place
from tests.support.one_piece import Drawing, Once

Calls = list[list[list[Batch]]]
"""By optimizer step: by call, the pieces of its mini-batch."""


def main() -> None:
    """Run all cases."""
    dist.init_process_group("gloo")
    results = [_run(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


def _run(case: dict[str, Any]) -> dict[str, Any]:
    pipeline = Pipeline(case["balance"], seed=case["seed"])
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case["decay"])
    evaluated: float | None = None
    norms: list[float] = []
    """Before clipping, by step."""
    gradients: dict[str, Tensor] = {}
    skipped: list[bool] = []
    for calls in _calls(case, pipeline):
        state = torch.get_rng_state()
        own = [[tuple(pipeline.own_part(*piece)) for piece in pieces] for pieces in calls]
        for pieces in own[:-1]:
            with pipeline.accumulate(pieces):
                pass
        with pipeline.accumulate(own[-1]) as loss:
            if case["clip"]:
                norms.append(pipeline.clip_gradients(case["clip"]))
            gradients = {n: p.grad.clone() for n, p in _own(pipeline) if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(pipeline.skipped)
        scheduler.step()
        assert loss is None or pipeline.last_step_samples == sum(piece.num_samples for piece in calls[-1])
        if case["evaluate"]:
            evaluated = pipeline.evaluate(*pipeline.own_part(*_to_evaluate(case, pipeline)))
            assert all(p.grad is None for _, p in pipeline.named_parameters())
        assert torch.equal(torch.get_rng_state(), state)
    kinds = {span.kind for span in pipeline._recorder.steps[-1].spans}
    parameters = {name: p.detach().clone() for name, p in _own(pipeline)}
    buffers = {name: buffer for module in pipeline.modules for name, buffer in module.named_buffers()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((gradients, parameters, buffers, skipped, kinds), gathered if pipeline.rank == 0 else None)
    pipeline.close()
    if pipeline.rank > 0:
        return {}
    assert loss is not None
    got = tuple({name: t for own in gathered for name, t in own[kind].items()} for kind in range(3))
    result = {
        "replicas_differ": sorted(
            {name for _, own, *_ in gathered for name, p in own.items() if not torch.equal(p, got[1][name])}
        ),
        "own_bytes": [sum(p.nbytes for p in params.values()) for _, params, *_ in gathered],
        "skipped": [steps for *_, steps, _ in gathered],
        "kinds": [sorted(kinds) for *_, kinds in gathered],
    }
    for name in case["compared"]:
        result |= _compare(name, pipeline, case, loss, norms, evaluated, got)
    return result


def _calls(case: dict[str, Any], pipeline: Pipeline) -> Calls:
    sizes = case["sizes"] or [pipeline.balance.batch]
    number, found = 0, []
    for step in range(case["steps"]):
        found.append([])
        for _ in range(case["calls"]):
            found[-1].append([])
            for _ in range(case["pieces"]):
                found[-1][-1].append(_first(pipeline.example_batch(number), sizes[step % len(sizes)]))
                number += 1
    return found


def _to_evaluate(case: dict[str, Any], pipeline: Pipeline) -> Batch:
    return _first(pipeline.example_batch(99), case["evaluate"])


def _compare(  # noqa: PLR0917 - one row of the report
    name: str,
    pipeline: Pipeline,
    case: dict[str, Any],
    loss: float,
    clipped_norms: Sequence[float],
    evaluated: float | None,
    got: tuple[dict[str, Tensor], ...],
) -> dict[str, Any]:
    torch.manual_seed(case["seed"])
    loaded = pipeline.model
    model = convert_in_place(loaded.build(), loaded.precision)
    optimizer = loaded.build_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case["decay"])
    scaler = GradScaler("cpu", enabled=loaded.precision == "fp16-mixed")
    overflowed: list[list[str]] = []
    drawing = Drawing(loaded, model, case["seed"]) if name == "split" else None
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training] if name == "split" else []
    expected, step = 0.0, 0
    expected_norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for calls in _calls(case, pipeline):
        for pieces in calls:
            shares = [[_whole(pieces)]] if name == "whole" else _micro_batches(pieces, pipeline)
            with Once(norms, sum(map(len, shares))):
                expected = _backward(loaded, model, shares, partial(drawing.at, step) if drawing else _anywhere, scaler)
            step += 1
        scaler.unscale_(optimizer)
        bad = {n for n, p in _named(model) if p.grad is not None and not bool(p.grad.isfinite().all())}
        overflowed.append(sorted(bad))
        if case["clip"]:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            scaled_by = torch.tensor(clipped_norms[len(expected_norms)]) if name == "split" else norm
            expected_norms.append(float(norm))
            nn.utils.clip_grads_with_norm_(model.parameters(), case["clip"], scaled_by)
        gradients = {n: p.grad.clone() for n, p in _named(model) if p.grad is not None}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    reached = {id(p) for n, p in _named(model) if n in got[0]}
    missing = {n for n, p in model.named_parameters() if p.requires_grad and id(p) not in reached}
    assert not missing & set(gradients), missing
    gradients = {name: gradient for name, gradient in gradients.items() if name in got[0]}
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point() or "num_batches" in n}
    result: dict[str, Any] = {
        "loss": abs(loss - expected),
        "loss_relative": abs(loss - expected) / max(1e-12, abs(expected)),
        "gradient": max(float((got[0][n] - g).abs().max()) for n, g in gradients.items()),
        "relative": max(float((got[0][n] - g).norm() / max(1e-12, float(g.norm()))) for n, g in gradients.items()),
        "all_relative": _norm(got[0][n] - g for n, g in gradients.items()) / _norm(gradients.values()),
        "parameter": max(float((got[1][n] - p.detach()).abs().max()) for n, p in _named(model) if n in got[1]),
        "buffer": max((_relative(got[2][n], b) for n, b in buffers.items() if n in got[2]), default=0.0),
        "norm": abs(clipped_norms[-1] / expected_norms[-1] - 1) if expected_norms else 0.0,
        "overflowed": overflowed,
    }
    first = next((n for n, m in model.named_modules() if isinstance(m, _BatchNorm)), None)
    if first is not None:
        state = {n: b for n, b in buffers.items() if n.startswith(f"{first}.")}
        result["first_norm"] = max(_relative(got[2][n], b) for n, b in state.items())
    if evaluated is not None:
        result["evaluated"] = abs(evaluated - _evaluate(loaded, model, _to_evaluate(case, pipeline)))
    return {f"{name}_{key}": value for key, value in result.items()}


def _backward(
    loaded: LoadedModel,
    model: nn.Module,
    shares: Sequence[Sequence[Batch]],
    prepare: Callable[[int], None],
    scaler: GradScaler,
) -> float:
    """Add up the gradients of each share separately, then those of the shares, because rounding counts."""
    count = loaded.loss_count or len
    pieces = [piece for share in shares for piece in share]
    counts = [float(count(piece.targets)) if piece.targets is not None else piece.num_samples for piece in pieces]
    losses = []
    numbered = iter(enumerate(zip(pieces, counts, strict=True)))
    for share in shares:
        earlier = _taken_gradients(model) if share is not shares[0] else {}
        for number, (piece, part) in islice(numbered, len(share)):
            prepare(number)
            loss = _loss(loaded, model, piece) * (part / sum(counts))
            if part:  # else all is masked, and the mean is 0 / 0
                scaler.scale(loss).backward()
                losses.append(loss.detach())
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
    return float(torch.stack(losses).sum())


def _taken_gradients(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return the gradients, and remove them from the parameters."""
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def _evaluate(loaded: LoadedModel, model: nn.Module, batch: Batch) -> float:
    model.eval()
    with torch.no_grad():
        return float(_loss(loaded, model, batch))


def _loss(loaded: LoadedModel, model: nn.Module, batch: Batch) -> Tensor:
    args, kwargs = arguments_of(batch.inputs) if not isinstance(model, nn.Sequential) else ((batch.inputs,), {})
    with forward_context(loaded.precision, torch.device("cpu")):
        return loaded.loss_fn(model(*args, **kwargs), batch.targets)


def _micro_batches(pieces: Sequence[Batch], pipeline: Pipeline) -> list[list[Batch]]:
    """Return the micro-batches of every replica."""
    replicas = pipeline.balance.replicas
    size = pipeline.balance.replica_batch // pipeline.balance.micro_batches
    shares: list[list[Batch]] = [[] for _ in range(replicas)]
    for replica, share in enumerate(shares):
        for batch in pieces:
            first, end = (batch.num_samples * r // replicas for r in (replica, replica + 1))
            for begin in range(first, end, size):
                behind = min(begin + size, end)
                share.append(Batch(*tree_map_only(Tensor, lambda t, b=begin, e=behind: t[b:e], tuple(batch))))
    return shares


def _first(batch: Batch, size: int) -> Batch:
    return Batch(*tree_map_only(Tensor, lambda t: t[:size], tuple(batch)))


def _whole(pieces: Sequence[Batch]) -> Batch:
    def together(*leaves: Any) -> Any:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return Batch(*tree_map(together, *(tuple(piece) for piece in pieces)))


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return tied parameters under each of their names, since a stage may use another name than the model."""
    return list(model.named_parameters(remove_duplicate=False))


def _own(pipeline: Pipeline) -> list[tuple[str, nn.Parameter]]:
    return [named for module in pipeline.modules for named in _named(module)]


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / max(1e-12, float(expected.double().norm())))


def _norm(tensors: Any) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def _anywhere(_micro_batch: int) -> None:
    """Draw nothing."""


if __name__ == "__main__":
    main()
