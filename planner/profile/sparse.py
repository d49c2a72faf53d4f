"""Sparse gradients of a layer, and what an optimizer's step over them costs."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.chain import Layer, tied_parameters
from planner.model.optimizers import Builder
from planner.profile.units import Unit, UnitInput


def sparse_bytes(gradient: Tensor) -> int:
    """What a sparse gradient takes, which has no storage of its own: its indices and its values."""
    return gradient._indices().nbytes + gradient._values().nbytes


def sparse_gradients(unit: Unit, received: UnitInput) -> dict[str, Tensor]:
    """The gradients of parameters that are sparse after one micro-batch, by name; the unit keeps none."""
    unit.module.zero_grad()  # a sparse gradient that is added to a dense one is dense
    outputs = unit.run(received.non_leaves(), received)
    carrying = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    torch.autograd.backward(carrying, [torch.ones_like(output) for output in carrying])
    parameters = unit.module.named_parameters()
    gradients = {name: p.grad for name, p in parameters if p.grad is not None and p.grad.is_sparse}
    unit.module.zero_grad()
    return gradients


def check_ties(layers: Sequence[Layer], sparse: Callable[[int], Collection[str]]) -> None:
    """Refuses sparse gradients of parameters that several layers share: the sum is dense, or not, as stages are cut.

    `sparse` tells which parameters of a layer have such gradients, by their names within it.

    Raises:
        ModelError: Naming the parameter.
    """
    tied = tied_parameters(layers)
    for n, layer in enumerate(layers):
        if not any(name in tied for name in layer.parameter_names()):
            continue
        by_name = dict(layer.module.named_parameters())
        parameters = {id(by_name[name]) for name in sparse(n)}
        for name, parameter in layer.parameter_names().items():
            if name in tied and id(parameter) in parameters:
                raise ModelError(
                    f'the gradient of "{name}", which several layers share, is sparse: stages could not sum it',
                    hint="build the layer with `sparse=False`, or do not share its parameters",
                )


def sparse_copy(parameter: Tensor, gradient: Tensor, rows: int) -> nn.Parameter:
    """A parameter of so many rows, or of as many as the gradient has, with such a gradient.

    Its rows are all different as far as they can be: then what an optimizer makes of them is largest.
    """
    count = gradient._nnz()
    part = parameter[: max(rows, count)].detach().clone()
    indices = gradient._indices().clone()
    indices[0] = torch.arange(count, device=indices.device) % len(part)
    copy = nn.Parameter(part)
    values = gradient._values().clone()
    # Said so, and not by the argument: with that torch 2.12 warns that nobody said anything.
    with torch.sparse.check_sparse_tensor_invariants(False):
        copy.grad = torch.sparse_coo_tensor(indices, values, part.shape)
    return copy


def check_step(build: Builder, copies: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that has stepped over sparse gradients.

    Raises:
        ModelError: It takes none, or keeps sparse state, which grows from step to step.
    """
    hint = "use an optimizer that takes sparse gradients (`--optimizer sgd`, or one such as SparseAdam or Adagrad in "
    hint += "`build_optimizer`), or build the layer with `sparse=False`"
    name = next(iter(copies))
    optimizer = build(iter(copies.values()))
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).splitlines()[0]
        raise ModelError(
            f'the gradient of "{name}" is sparse, and the optimizer fails on it: {text}', hint=hint
        ) from error
    states = (value for copy in copies.values() for value in optimizer.state[copy].values())
    if any(isinstance(state, Tensor) and state.is_sparse for state in states):
        raise ModelError(
            f'the gradient of "{name}" is sparse, and what the optimizer keeps of it grows from step to step', hint=hint
        )
    return optimizer
