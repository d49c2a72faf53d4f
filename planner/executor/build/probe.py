"""How much of a model can be run as stages within a budget of time and memory: its forward is run once to see."""

import time
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from planner.core.errors import ModelError
from planner.core.values.units import format_bytes
from planner.device.machine import available_bytes
from planner.executor.build.building import StageRange, held_names
from planner.executor.build.copies import Copies
from planner.executor.build.rehearsal import Rehearsal
from planner.executor.run.parts import tensors_of
from planner.model.autocast import layers_in
from planner.model.chain import Chain
from planner.model.load import LoadedModel

FORWARDS = 13
"""What the comparison costs in forwards, where backward costs two: 2 x 3 in one piece, 3 and 4 in stages."""

_BUDGET_BYTES = 1_350_000_000

_CPU = torch.device("cpu")


class Probe(NamedTuple):
    """How much can be run."""

    num_layers: int
    seconds: float
    """What a forward of them takes."""
    reason: str
    """Why there are no more."""
    has_failed: bool = False
    """Whether a stage raised an error."""


def probed(loaded: LoadedModel, chain: Chain, budget_s: float) -> tuple[Rehearsal, Probe]:
    """What can be run: with parameters that are made for it if that will do, and of one sample if that will do.

    Some modules look at the values of their parameters while they are made. Some layers want two samples: batch
    normalisation behind the last pooling.
    """
    lean = Copies(loaded, lean=True)
    # Values, gradients, and other instances of the model that come and go while it is built.
    fits_whole = 4 * lean.num_bytes(held_names(chain, 0, len(chain.layers)))[0] <= _budget_bytes()
    rehearsal, probe = _tried_with(lean, loaded, chain, budget_s)
    if probe.has_failed and fits_whole:
        return _tried_with(Copies(loaded, lean=False), loaded, chain, budget_s)
    return rehearsal, probe  # what fails in stages and not in one piece is what is looked for


def _tried_with(copies: Copies, loaded: LoadedModel, chain: Chain, budget_s: float) -> tuple[Rehearsal, Probe]:
    try:
        rehearsal = Rehearsal.of(loaded, chain, copies, samples=1)
    except ModelError:
        pass
    else:
        probe = _run(rehearsal, budget_s)
        if not probe.has_failed:
            return rehearsal, probe
    rehearsal = Rehearsal.of(loaded, chain, copies, samples=2)
    return rehearsal, _run(rehearsal, budget_s)


def _budget_bytes() -> int:
    return min(_BUDGET_BYTES, available_bytes() // 4)


def _run(rehearsal: Rehearsal, budget_s: float) -> Probe:
    """How many layers, from the first one on, can be compared within the budget of time and memory."""
    budget_bytes, names = _budget_bytes(), rehearsal.chain.names
    saved_bytes: dict[int, int] = {}

    def note(tensor: Tensor) -> None:  # what a forward keeps for backward, of which nothing is kept
        storage = tensor.untyped_storage()
        # An address may come again once its tensor is gone: then less is counted than is kept.
        if not isinstance(tensor, nn.Parameter):
            saved_bytes.setdefault(storage._cdata, storage.nbytes())

    begin = time.process_time()
    seconds = 0.0
    received = tensors_of(rehearsal.micro_batches[0].inputs)
    for layer, name in enumerate(names):
        # Parameters, their gradients, the largest of these once more before it is added; and what one micro-batch
        # keeps, which may be twice as much of two samples.
        parameter_bytes, largest_bytes = rehearsal.copies.num_bytes(held_names(rehearsal.chain, 0, layer + 1))
        wanted_bytes = 2 * parameter_bytes + largest_bytes + 2 * sum(saved_bytes.values())
        if wanted_bytes > budget_bytes:
            reason = f'from "{name}" on it takes more than {format_bytes(budget_bytes)} of memory here'
            return Probe(layer, seconds, reason)
        # A first run of a layer may take much longer than the next one, so that what was spent counts as well.
        spent = max(time.process_time() - begin, FORWARDS / 2 * seconds)
        if spent > budget_s:
            return Probe(layer, seconds, f'from "{name}" on it takes more than {budget_s:g} s here')
        started = time.process_time()
        try:
            module = rehearsal.stage(StageRange(layer, layer + 1))
            with layers_in(rehearsal.loaded.precision, _CPU), saved_tensors_hooks(note, _nothing):
                outputs = tensors_of(module(*received))
        except (Exception, SystemExit):  # of what kind is told when stages are compared
            return Probe(len(names), seconds, "", has_failed=True)
        seconds += time.process_time() - started
        received = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
    return Probe(len(names), seconds, "")


def _nothing(_kept: Any) -> NoReturn:
    raise AssertionError("there is no backward")
