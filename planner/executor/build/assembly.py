"""Objects with which one process trains: stage modules, engines, and objects that sum gradients over processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.core.schedule import schedule_of
from planner.executor.build.building import StageRange, build_stages, build_structure, check_same_model
from planner.executor.build.initial_values import can_be_equalized, equalize_copies
from planner.executor.job import RankJob
from planner.executor.keep.weights import canonical_names
from planner.executor.measure.recorder import RunRecorder
from planner.executor.run.engine import Engine, EngineStage
from planner.executor.run.parts import MiniBatchPart
from planner.executor.run.placement import ProcessGroups
from planner.executor.run.replicas import ReplicaGradients
from planner.executor.run.shapes import ChainShapes, chain_shapes
from planner.executor.run.shared_values import SharedValues
from planner.executor.run.stage_module import StageModule, evaluation_mode
from planner.executor.run.ties import TiedGradients
from planner.model.batch_norm import BatchStatistics
from planner.model.chain import Chain, Layer, shared_parameters
from planner.model.computation import code_digests
from planner.model.ghosts import memory_key
from planner.model.load import LoadedModel, to_device
from planner.model.module_tensors import named_tensors
from planner.model.seeding import example_mini_batch


class ProcessStages:
    """Stages that one process runs.

    Raises:
        ModelError: The model is not the planned one, or cannot be built or trained in micro-batches.
    """

    def __init__(
        self,
        job: RankJob,
        model: LoadedModel,
        groups: ProcessGroups,
        recorder: RunRecorder,
        *,
        structure: Chain | None = None,
    ) -> None:
        self._job, self._model, self.groups, self.recorder = job, model, groups, recorder
        balance, place = job.balance, job.place
        # Keep shapes only: the planned memory does not include an example mini-batch.
        self._example_inputs = to_device(
            example_mini_batch(model, balance.batch, seed=job.seed, step=0).inputs, torch.device("meta")
        )
        self._chain = structure or build_structure(model)
        check_same_model(balance, model, self._chain)
        self.canonical_names = canonical_names(self._chain.model)
        """Map from each name in the state dict to the first name of the same tensor, which may be tied."""
        cuts = list(accumulate(balance.balance, initial=0))
        self._ranges = [StageRange(cuts[k], cuts[k + 1], bool(balance.stages[k].recomputed)) for k in place.stages]
        # Shapes and engine of a smaller last mini-batch are made when it occurs.
        self._shapes: Callable[..., ChainShapes] = cache(self._shapes_for)
        self.engine: Callable[[int, int], Engine] = cache(self._engine_for)
        """Function that returns the engine for a number of micro-batches and their number of samples."""
        self.statistics = BatchStatistics()
        shapes = self._shapes(job.micro_batch_size, training=True)
        # Only the equivalence check passes a structure. It measures no memory.
        built = build_stages(
            model,
            self._chain,
            self._ranges,
            seed=job.seed,
            device=job.device,
            may_build_whole=structure is not None,
        )
        stages = zip(place.stages, self._ranges, built, strict=True)
        self.modules = [self._module(shapes, *stage) for stage in stages]
        stage_of = [k for k, count in enumerate(balance.balance) for _ in range(count)]
        named = {name: p for module in self.modules for name, p in module.named_parameters(remove_duplicate=False)}
        layers = self._chain.layers
        trained = {name for layer in layers for name, p in layer.parameters_by_name().items() if p.requires_grad}
        shared = shared_parameters(layers)
        several = (owners for owners in shared if len({stage_of[layer] for layer, _ in owners}) > 1)
        self.shared_names = {name for owners in several for _, name in owners}
        """Names of parameters that layers of several stages share."""
        self.tied = TiedGradients(shared, named, place, stage_of, trained=trained)
        with recorder.paused():  # a thread of gloo may release the sent tensors later than this process does
            equalize_copies(self._tensors_by_first_name())
        self.replicas = self._replica_gradients()
        self.shared_values: SharedValues | None = None
        """Check of Python values that several ranks use; None in a pipeline of one rank or in the equivalence check."""
        self.is_equivalence_check = structure is not None
        if place.num_devices > 1 and not self.is_equivalence_check:  # which compares them itself
            loss_fn = model.loss_fn if place.is_last else None
            self.shared_values = SharedValues(
                self._chain.model, self.modules, loss_fn, group=groups.pipeline, device=job.device
            )
        self.engine(balance.micro_batches, job.micro_batch_size)

    @cached_property
    def code_digests(self) -> dict[str, str]:
        """Digests of the code of the loss (key `loss`) and of the layers (key `layers`)."""
        return code_digests(self._chain.model, self._model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process once each, with their names in `named_parameters()` of the model."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                named.setdefault(id(parameter), (self._first_names.get(name, name), parameter))
        return iter(named.values())

    @cached_property
    def _first_names(self) -> dict[str, str]:
        """Map from each parameter name in the whole model to the first name of the same parameter."""
        first: dict[int, str] = {}
        parameters = self._chain.model.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(parameter), name) for name, parameter in parameters}

    @property
    def whole_model(self) -> nn.Module:
        """The whole model. Its tensors have shapes, but no values."""
        return self._chain.model

    def parameter_pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return, for each parameter of this process, its meta tensor in `whole_model` and the parameter itself."""
        whole = dict(self._chain.model.named_parameters(remove_duplicate=False))
        return [(whole[name], parameter) for name, parameter in self.named_parameters()]

    def named_tensors(self) -> dict[str, Tensor]:
        """Return this process's part of the model's state dict: parameters and persistent buffers by name."""
        held = (pair for module in self.modules for pair in named_tensors(module))
        return {name: tensor for name, tensor in held if name in self.canonical_names}

    def set_shapes(self, part: MiniBatchPart, *, training: bool) -> None:
        """Set the shapes of received and sent tensors for the micro-batches of `part`, in training or evaluation."""
        boundaries = self._shapes(part.micro_batch_size, training=training).boundaries
        for module, layers in zip(self.modules, self._ranges, strict=True):
            module.received = boundaries[layers.first]
            module.sent = None if module.sent is None else boundaries[layers.end]

    def _tensors_by_first_name(self) -> dict[str, Tensor]:
        first: dict[tuple[object, ...], str] = {}
        whole = ((name, tensor) for name, tensor in named_tensors(self._chain.model) if can_be_equalized(tensor))
        names = {name: first.setdefault(memory_key(tensor), name) for name, tensor in whole}
        held = (pair for module in self.modules for pair in named_tensors(module))
        return {names[name]: tensor for name, tensor in held if name in names}

    def _shapes_for(self, size: int, *, training: bool) -> ChainShapes:
        inputs = tree_map_only(Tensor, lambda tensor: tensor[:size], self._example_inputs)
        with nullcontext() if training else evaluation_mode(self._chain.model):
            return chain_shapes(self._chain, inputs, precision=self._job.balance.dtype, device=self._job.device)

    def _module(self, shapes: ChainShapes, index: int, layers: StageRange, built: Sequence[Layer]) -> StageModule:
        stage, (first, end, _) = self._job.balance.stages[index], layers
        is_last, sent = index == self._job.place.num_stages - 1, shapes.boundaries[end]
        recomputed = [stage.layers.index(name) for name in stage.recomputed]
        module = StageModule(
            built,
            received=shapes.boundaries[first],
            sent=None if is_last else sent,
            recompute=stage.recompute,
            micro_batches=self._job.balance.micro_batches,
            loss_fn=self._model.loss_fn if is_last else None,
            # A first layer that is recomputed copies its input itself, and keeps the received tensor.
            copies_input=shapes.stage_writes_input(first, end) and 0 not in recomputed,
            carries=() if is_last else [tensor.requires_grad for tensor in sent.tensors],
            recomputed={n: shapes.recomputed_layer(first + n, end) for n in recomputed},
            first_layer=first,
            statistics=self.statistics,
        )
        module.timed_recomputation = partial(self.recorder.timed_recomputation, stage=index)
        return module

    def _replica_gradients(self) -> ReplicaGradients | None:
        if self.groups.replicas is None:
            return None
        tied = set(self.tied.parameters)  # `TiedGradients` sums these over the replicas as well
        untied = [[p for p in module.parameters() if p.requires_grad and p not in tied] for module in self.modules]
        return ReplicaGradients(untied, self.groups.replicas, keeps_earlier=self._job.place.replica == 0)

    def _engine_for(self, micro_batches: int, size: int) -> Engine:
        shapes = self._shapes(size, training=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        job, place, last = self._job, self._job.place, self._job.place.num_stages - 1
        stages = [
            EngineStage(
                module=module,
                index=index,
                received=shapes.boundaries[layers.first].tensors,
                sent=(loss,) if index == last else shapes.boundaries[layers.end].tensors,
                timer=partial(self.recorder.timed, stage=index),
                send_during_last_backward=partial(self.replicas.send_during_last_backward, n)
                if self.replicas
                else nullcontext,
            )
            for n, (index, module, layers) in enumerate(zip(place.stages, self.modules, self._ranges, strict=True))
        ]
        return Engine(
            stages,
            num_stages=place.num_stages,
            ranks=[place.rank_of(position) for position in range(place.num_devices)],
            device=job.device,
            schedule=schedule_of(job.balance.schedule, job.balance.order),
            micro_batches=micro_batches,
            group=self.groups.pipeline,
            precision=job.balance.dtype,
            activity=job.activity,
            check_nan=job.check_nan,
        )
