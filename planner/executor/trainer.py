"""Training steps and evaluations with the stages of one process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from planner.core.errors import ModelError, UsageError
from planner.executor.build.assembly import ProcessStages
from planner.executor.job import RankJob
from planner.executor.measure.step_record import OnStep, StepCallback, StepRecord, learning_rates
from planner.executor.mini_batches import MiniBatches
from planner.executor.run.agreement import Phase, PhaseAgreement
from planner.executor.run.engine import Engine
from planner.executor.run.evaluation import EvaluationResult, ForwardRunner, Metrics, MetricsCollector, mean_results
from planner.executor.run.gradients import (
    check_gradients_are_finite,
    check_gradients_have_values,
    check_losses,
    refuse_norm_of_own_gradients,
)
from planner.executor.run.loss_scale import LossScale
from planner.executor.run.losses import loss_weights_of_parts, sum_losses
from planner.executor.run.own_optimizers import OwnOptimizers
from planner.executor.run.parts import MiniBatchPart, micro_batches_of
from planner.executor.run.random_state import StepSeeds
from planner.executor.run.same_batch import NO_CHECKSUMS
from planner.executor.run.script_changes import ScriptChangeRecorder, numbers_in_options
from planner.executor.watch.activity import ANY
from planner.model.autocast import autocast_dtype
from planner.model.load import Batch
from planner.model.optimizer_scope import step_hooks
from planner.model.process_group import hide_process_group_in_step
from planner.model.seeding import keeping_random_state
from planner.model.shared_memory import num_hooks


class Trainer:
    """Training and evaluation of the stages of one process."""

    def __init__(
        self, job: RankJob, assembly: ProcessStages, mini_batches: MiniBatches, on_step: OnStep | None = None
    ) -> None:
        self._job, self._assembly, self._mini_batches = job, assembly, mini_batches
        self._groups, self._recorder = assembly.groups, assembly.recorder
        self._parameters = dict(assembly.named_parameters())
        self._num_hooks = {name: num for name, p in self._parameters.items() if (num := num_hooks(p))}
        own = self._parameters.values() if job.place.num_devices > 1 else []
        self._script = ScriptChangeRecorder(own)
        self.own_optimizers = OwnOptimizers([*own, *assembly.whole_model.parameters()])
        self._agreement = PhaseAgreement(job.place, assembly.groups, job.device, job.activity, script=self._script)
        self._frozen = [name for name, parameter in self._parameters.items() if not parameter.requires_grad]
        """Names of the parameters that `build_model` freezes, and no `forward` has unfrozen."""
        is_float16 = autocast_dtype(job.balance.dtype) == torch.float16
        self._loss_scale = LossScale(self._parameters.values(), job.device) if is_float16 else None
        self.step_index = 0
        """Number of steps since training began, including the steps before a resume."""
        self.skipped = False
        """True if the last step changed no parameters, because gradients overflowed in float16 (`fp16-mixed`)."""
        self.losses: list[float] = []
        """Loss of every step of this process."""
        self.samples: list[int] = []
        """Number of samples of every step, over all replicas."""
        self._optimizers: list[ref[torch.optim.Optimizer]] = []
        self._hook = StepCallback(on_step, job.seed) if on_step is not None and job.place.rank == 0 else None

    @contextmanager
    def step(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[float]:
        """Run the forwards and backwards of one step, and yield its loss to a `with` block; see `Pipeline.accumulate`.

        Raises:
            UsageError: A mini-batch is larger than planned.
            ModelError: The last micro-batch of a mini-batch is too small for a layer.
            TrainingError: Another rank does not begin this step.
        """
        self._script.check_before_step()
        if len(self.losses) < 2:
            self.check_parameters()
        self._check_hooks()
        pieces = [list(self._mini_batches.parts(Batch(inputs, targets))) for inputs, targets in batches]
        for part in chain.from_iterable(pieces):
            self._make_engine(part)
        self._check_frozen_parameters()
        self._job.activity.step = self.step_index
        with self._recorder.step():
            loss = self._compute(self._agree_on_phase("step", pieces))
            with self._recorder.optimizer(stage=self._job.place.stages[0]), self._norms():
                self._script.begin_block()
                yield loss
        self._script.end_block()
        if self._assembly.shared_values is not None:
            self._assembly.shared_values.step_done()
        self.step_index += 1
        if self._hook is not None:
            self._hook.call(self._step_record(loss))

    def record_optimizer(self, optimizer: torch.optim.Optimizer, check: Callable[[], None] | None) -> None:
        """Record steps and learning rates of an optimizer until it is deleted. Its `step()` sees no process group.

        Args:
            optimizer: Optimizer of this rank.
            check: Function to call before each step; None for no check.
        """
        held, hooks = ref(optimizer), step_hooks(optimizer)
        self._optimizers.append(held)
        # Other optimizers may set rates in `step()`, and only those of groups that are not empty on this rank.
        num_groups = len(optimizer.param_groups) if type(optimizer).__module__.startswith("torch.optim") else 0
        options = optimizer.defaults.items() if self._job.place.num_devices > 1 else ()
        compared = [name for name, value in options if value is not None and not isinstance(value, bool)]

        @contextmanager
        def recorded_step() -> Iterator[None]:
            optimizer = held()
            if optimizer is not None and self._job.place.num_devices > 1 and step_hooks(optimizer) != hooks:
                raise UsageError(
                    f"the script has added a hook to the {type(optimizer).__name__} that `pipeline.optimizer` "
                    "returned: the pipeline cannot check what this hook changes",
                    hint="add it in the function passed to `pipeline.optimizer`, or call its function in the loop",
                )
            groups = [] if optimizer is None else optimizer.param_groups[:num_groups]
            self._script.begin_optimizer_step(numbers_in_options(groups, compared))
            try:
                with self.own_optimizers.paused():
                    if check is not None:
                        check()
                    yield
            finally:
                self._script.end_optimizer_step()

        # After an overflow there are no gradients, but an optimizer of the user may also count or average in its step.
        hide_process_group_in_step(optimizer, recorded_step, is_skipped=lambda: self.skipped)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that `record_optimizer` got and that still exist."""
        return [optimizer for held in self._optimizers if (optimizer := held()) is not None]

    def clip_gradients(self, max_norm: float) -> float:
        """Clip all gradients by their Euclidean norm over all stages, and return the norm before clipping."""
        self._script.check_random_draws()
        elsewhere = {id(parameter) for parameter in self._assembly.tied.counted_elsewhere}
        trained = [parameter for parameter in self._parameters.values() if parameter.grad is not None]
        counted = [p.grad for p in trained if p.grad is not None and id(p) not in elsewhere]
        squares = torch.zeros((), dtype=torch.float64, device=self._job.device)
        if counted:
            squares = torch.nn.utils.get_total_norm(counted).double().square()
        self._job.activity.begin("the norm of the gradients", waits_for=ANY)
        dist.all_reduce(squares, group=self._groups.pipeline)
        self._job.activity.begin("between steps")
        norm: Tensor = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm.float())
        self._script.begin_block()
        return float(norm)

    def evaluate(self, batch: Batch, metrics: Metrics | None, *, outputs: bool) -> EvaluationResult:
        """Return loss and metrics of a batch of any size, on every rank; see `Pipeline.evaluate`.

        Args:
            batch: This rank's part of the batch.
            metrics: Function that returns numbers by name for an output and a target; None for the loss only.
            outputs: If true, also return the model's outputs.
        """
        self._script.ignore_random_draws()
        parts = self._mini_batches.parts_of_any_size(batch)
        observed = MetricsCollector(metrics, keeps_outputs=outputs)
        agreed = self._agree_on_phase("evaluation" if metrics is None else "evaluation with metrics", [parts])
        self._job.activity.begin("the evaluation")
        with keeping_random_state(), self.own_optimizers.paused():
            losses = [loss for part, _, weights in agreed for loss in self._evaluate_part(part, weights, observed)]
        place, device = self._job.place, self._job.device
        loss, means = mean_results(sum_losses(losses), observed, place, self._groups, device=device)
        self._job.activity.begin("between steps")
        return EvaluationResult(loss=loss, metrics=means, outputs=observed.outputs())

    def check_parameters(self, *, replaced_only: bool = False) -> None:
        """Raise a `UsageError` if the script or the model has added a parameter, or replaced one by a new one."""
        known = set(map(id, self._parameters.values()))
        for name, parameter in self._assembly.named_parameters():
            if id(parameter) not in known and (name in self._parameters or not replaced_only):
                raise UsageError(
                    f'the script or `forward` has added the parameter "{name}" to a stage: optimizers and checkpoints '
                    "of the pipeline do not contain it",
                    hint="create it in `build_model`, and run `gpipe-plan profile`, `solve` and `emit` again",
                )

    def _check_hooks(self) -> None:
        # The equivalence check has compared the hooks of `build_model`. It adds hooks of its own, and has no script.
        if self._assembly.is_equivalence_check:
            return
        is_divided = self._job.balance.micro_batches * self._job.balance.replicas > 1
        for name, parameter in self._parameters.items():
            is_part = is_divided or name in self._assembly.shared_names
            if parameter.requires_grad and is_part and num_hooks(parameter) > self._num_hooks.get(name, 0):
                raise UsageError(
                    f'the script has added a hook to "{name}", which gets only a part of the gradient: that of one '
                    "micro-batch, replica or stage",
                    hint="read or change `parameter.grad` in the block of `with pipeline.step(…)` instead of in a hook",
                )

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next mini-batch; None if there is none. First check what the script has done since the step."""
        self._script.check_random_draws()
        batch = next(batches, None)
        self._script.begin_batch()
        return batch

    def check_same_phase(self, phase: Literal["checkpoint", "end"]) -> None:
        """Check that all ranks are in the same phase, with equal copies of tied parameters and of shared values.

        In the phase `checkpoint`, a rank saves a checkpoint. In the phase `end`, it has ended its training loop.

        Raises:
            TrainingError: Another rank begins another phase, or has other tied parameters or shared values.
        """
        if phase == "end" and self._agreement.has_ended:
            return
        self._script.check_random_draws()
        self.check_parameters(replaced_only=True)
        self._agreement.check_and_sum(phase, self.step_index)
        self._assembly.tied.check_equal()
        if self._assembly.shared_values is not None:
            self._assembly.shared_values.check_equal()
        self._job.activity.begin("between steps")

    def state_dict(self) -> dict[str, Any]:
        """Return the step index and the loss scale, for a checkpoint."""
        scale = self._loss_scale.state_dict() if self._loss_scale is not None else None
        return {"step_index": self.step_index, "loss_scale": scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.step_index = int(state["step_index"])
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])

    # Private methods: training

    def _agree_on_phase(
        self, phase: Phase, pieces: Sequence[Sequence[MiniBatchPart]]
    ) -> list[tuple[MiniBatchPart, int, list[float]]]:
        if not dist.is_initialized():
            raise UsageError(
                "the script calls a method of the pipeline within `optimizer.step()`, such as from a closure",
                hint="call `optimizer.step()` without a closure, in the block of `with pipeline.step(…)`",
            )
        parts = [*chain.from_iterable(pieces)]
        counts, sizes = (
            self._mini_batches.loss_item_counts(parts),
            [sum(part.num_samples for part in piece) for piece in pieces],
        )
        checksums = self._mini_batches.take_checksums() if phase == "step" else NO_CHECKSUMS
        total = self._agreement.check_and_sum(phase, self.step_index, sizes, checksums=checksums, count=sum(counts))
        return loss_weights_of_parts(parts, counts, total)

    def _check_frozen_parameters(self) -> None:
        """Raise an error if the script unfreezes a parameter that `build_model` freezes."""
        name = next((name for name in self._frozen if self._parameters[name].requires_grad), None)
        if name is not None:
            raise UsageError(
                f'the script unfreezes "{name}", which `build_model` freezes: the plan has no memory for its gradient, '
                "and stages do not send gradients that only frozen layers need",
                hint="let `build_model` leave it trainable, plan again, and freeze it in train.py before the first "
                "step: `for name, parameter in pipeline.named_parameters(): parameter.requires_grad_(…)`",
            )

    def _norms(self) -> AbstractContextManager[None]:
        """Return a context manager that refuses `clip_grad_norm_` if its norm lacks gradients of other ranks."""
        if self._job.place.num_devices == 1:
            return nullcontext()
        stages = self._job.balance.stages
        layers = [name for stage in self._job.place.stages for name in stages[stage].layers]
        return refuse_norm_of_own_gradients(self._parameters, layers)

    def _make_engine(self, part: MiniBatchPart) -> None:
        """Make the engine for a part of the mini-batch, before this rank sends anything."""
        # If a layer cannot be trained with so small micro-batches, every rank raises the error here, and none waits.
        try:
            self._assembly.engine(part.micro_batches, part.micro_batch_size)
        except ModelError as error:
            raise ModelError(
                f"the last {part.micro_batch_size} samples of a mini-batch cannot be a micro-batch: {error}",
                hint="drop the last mini-batch (`drop_last=True`), or choose a batch that fits the data",
            ) from error

    def _compute(self, agreed: Sequence[tuple[MiniBatchPart, int, list[float]]]) -> float:
        """Compute the gradients of a step, and return its loss. See `_forward_backward` for `agreed`."""
        losses, loss = self._forward_backward(agreed)  # locals, because the optimizer needs the memory of the losses
        self._sum_gradients()
        return self._sum_loss(losses, loss, sum(part.num_samples for part, *_ in agreed))

    def _forward_backward(
        self, agreed: Sequence[tuple[MiniBatchPart, int, list[float]]]
    ) -> tuple[list[Tensor], Tensor]:
        """Run the forwards and backwards of a mini-batch.

        Args:
            agreed: For each part of the mini-batch: the part, the index of its first micro-batch in the step, and the
                weights of its micro-batches' losses.

        Returns:
            Weighted losses of all micro-batches, on the last stage; and their sum, on every rank.
        """
        assembly = self._assembly
        assembly.tied.drop_copies()
        if self._loss_scale is not None:
            self._loss_scale.scale_existing_gradients()
        if assembly.replicas is not None:
            assembly.replicas.drop_existing()
        losses: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64, device=self._job.device)
        # Micro-batches are numbered over all replicas.
        before = self._job.place.replica * sum(part.micro_batches for part, *_ in agreed)
        trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        with keeping_random_state(), self.own_optimizers.paused():
            for part, first, weights in agreed:
                for module in assembly.modules:
                    module.seeds = StepSeeds(self._job.seed, self.step_index, before + first)
                if assembly.replicas is not None:
                    assembly.replicas.is_last_part = part is agreed[-1][0]
                self._recorder.first_micro_batch = first
                engine = self._prepared_engine(part)
                losses += engine.step(
                    self._mini_batches.input_tensors(part), self._mini_batches.targets(part, weights), weights
                )
                loss += engine.loss
                if assembly.shared_values is not None:  # the equivalence check itself names the parameters
                    engine.check_gradients_sent()
        # Models may freeze and unfreeze parameters in `forward`; the equivalence check has compared these.
        self._frozen = [name for name in self._frozen if not self._parameters[name].requires_grad]
        frozen = next((name for name in trained if not self._parameters[name].requires_grad), None)
        if frozen is not None and self.losses:  # not in the first step, which the equivalence check has compared
            raise ModelError(
                f'`forward` has frozen "{frozen}" after the first step: earlier micro-batches of this step, whose '
                "backward is still to come, would give it no gradient",
                hint="freeze parameters in train.py, between two steps",
            )
        return losses, loss

    def _prepared_engine(self, part: MiniBatchPart) -> Engine:
        engine = self._assembly.engine(part.micro_batches, part.micro_batch_size)
        self._assembly.set_shapes(part, training=True)
        if self._loss_scale is not None:
            engine.loss_scale = self._loss_scale.value
        return engine

    def _sum_gradients(self) -> None:
        self._job.activity.begin("the gradients", waits_for=ANY)
        # Release snapshots before running statistics are written: otherwise the write would copy them.
        for module in self._assembly.modules:
            module.release_snapshots()
        self._assembly.statistics.update_running_statistics(self._groups.replicas)
        check_gradients_have_values(self._parameters)
        if self._assembly.replicas is not None:
            self._assembly.replicas.wait_for_sums()
        self._assembly.tied.sum()
        self.skipped = self._loss_scale is not None and not self._loss_scale.unscale_and_update()
        if self._loss_scale is None and self._job.check_nan:
            check_gradients_are_finite(self._parameters, self._job.activity)

    def _step_record(self, loss: float) -> StepRecord:
        return StepRecord(
            step=self.step_index - 1,
            loss=loss,
            step_us=self._recorder.step_us[-1],
            samples=self.samples[-1],
            learning_rates=learning_rates(self.optimizers),
            skipped=self.skipped,
        )

    def _sum_loss(self, losses: Sequence[Tensor], loss: Tensor, num_samples: int) -> float:
        """Sum `loss` and `num_samples` over the replicas, store both sums, and return the sum of `loss`.

        `losses` are the losses of this rank's micro-batches. They show the cause if the sum is not finite.
        """
        replicas, activity = self._groups.replicas, self._job.activity
        activity.begin("the loss", waits_for=None if replicas is None else ANY)
        numbers = torch.stack([loss, torch.full_like(loss, num_samples)])
        if replicas is not None:
            dist.all_reduce(numbers, group=replicas)
        total, samples = map(float, numbers.tolist())
        if self._job.place.is_last and self._loss_scale is None:
            check_losses(losses, total, activity)
        self.losses.append(total)
        self.samples.append(int(samples))
        activity.begin("between steps")
        return total

    # Private methods: evaluating

    def _evaluate_part(self, part: MiniBatchPart, weights: Sequence[float], observed: MetricsCollector) -> list[Tensor]:
        job, modules, batches = self._job, self._assembly.modules, self._mini_batches
        forward = ForwardRunner(modules=modules, place=job.place, device=job.device, precision=job.balance.dtype)
        self._assembly.set_shapes(part, training=False)
        last = modules[-1]
        last.targets = batches.targets(part, weights)
        if job.place.is_last:
            # Metrics also read targets whose weight in the loss is zero.
            targets = batches.targets(part, [1.0] * len(weights))
            last.seen = partial(observed.observe, part.micro_batch_size, targets)
        try:
            losses = forward.run(micro_batches_of(batches.input_tensors(part), part.micro_batches))
        finally:
            last.targets, last.seen = [], None
        return [loss * weight for loss, weight in zip(losses, weights, strict=True)]
