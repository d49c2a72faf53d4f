"""Pipeline of a model: this process runs one stage, or several stages under schedules such as interleaved."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.core.values.balance import Balance
from planner.core.values.run_report import RunReport
from planner.device.kinds import kind_of
from planner.device.machine import keep_freed_memory
from planner.executor.build.assembly import ProcessStages
from planner.executor.job import join_process_group, load_planned_model, make_rank_job
from planner.executor.measure.recorder import RunRecorder
from planner.executor.measure.reporting import run_report
from planner.executor.measure.step_record import OnStep
from planner.executor.mini_batches import MiniBatches
from planner.executor.model_file import ModelFile
from planner.executor.run.evaluation import EvaluationResult, Metrics
from planner.executor.run.placement import ProcessGroups
from planner.executor.trainer import Trainer
from planner.executor.used_batches import UsedBatches
from planner.executor.watch.activity import ANY
from planner.executor.watch.failure import FailureWatch
from planner.model.chain import Chain
from planner.model.load import Batch, LoadedModel
from planner.model.optimizer_scope import check_optimizer, optimizer_step_check
from planner.model.optimizers import WholeModelOptimizer
from planner.model.seeding import seed_process

if TYPE_CHECKING:
    from planner.executor.measure.run_times import ProcessRun


class Pipeline:
    """Stages of this process in the pipeline that a `balance.yaml` describes. Every rank creates a `Pipeline`.

    Args:
        balance_path: Path of the balance configuration that `gpipe-plan emit` writes.
        seed: Seed of initial parameters, example batches and dropout.
        device: Name of the device to use; None for the device of the plan.
        timeout_s: Transfers time out after `timeout_s` + 30 seconds. A failure watch whose timeout is `timeout_s`
            reports earlier, with a better message.
        check_nan: If true, check that every output and gradient is finite, in addition to the loss. Each check waits
            for the device.
        watch: FailureWatch of this process; None if other ranks need not be watched.
        on_step: Function that is called on rank 0 after each `with pipeline.step(…)` block. Its time is not part of the
            recorded step time.
        built: Model and its structure; None to load the model that the balance configuration names.

    Raises:
        UsageError: The plan needs another number of processes, or the device is missing.
        ModelError: The model is not the planned one.
    """

    def __init__(
        self,
        balance_path: str | Path | Balance,
        *,
        seed: int = 0,
        device: str | None = None,
        timeout_s: float = 300.0,
        check_nan: bool = False,
        watch: FailureWatch | None = None,
        on_step: OnStep | None = None,
        built: tuple[LoadedModel, Chain] | None = None,
    ) -> None:
        job = make_rank_job(balance_path, seed=seed, device=device, watch=watch, check_nan=check_nan)
        self.balance, self.seed, self.place, self.device = job.balance, job.seed, job.place, job.device
        self.watch, self.activity = job.watch, job.activity
        self.at_end: list[Callable[[], None]] = []
        """Functions to call on all ranks when the loop has ended (`pipeline_script` calls them)."""
        self.at_close: list[Callable[[], None]] = []
        self.runs: list[ProcessRun] = []
        """Recorded actions of all processes in the last steps. On rank 0, `report` fills this list."""
        torch.set_num_threads(job.balance.threads)
        if built is None and not kind_of(job.device).has_own_memory:
            keep_freed_memory()
        # The recorder must exist before this process allocates memory.
        self._recorder = RunRecorder(job.device)
        self._is_joined = False
        self._used = UsedBatches()
        try:
            seed_process(seed)  # before the model file is imported, because the import may build the model
            # The model's path in a balance configuration is relative to the configuration's folder.
            folder = Path() if isinstance(balance_path, Balance) else Path(balance_path).parent
            self.model, structure = built or (load_planned_model(job.balance, folder), None)
            self._model_file = ModelFile(Path(self.model.source.rpartition(":")[0]))
            with self._recorder.paused():  # a thread of gloo may be the last to release memory of joining
                self._is_joined = join_process_group(job, timeout_s)
            groups = ProcessGroups.of(job.place)
            job.activity.begin("building the model")
            self._mini_batches = MiniBatches(job, self.model)
            self._assembly = ProcessStages(job, self.model, groups, self._recorder, structure=structure)
            # Errors of failed attempts to build layers may refer to the whole model in reference cycles.
            gc.collect()
            # Random numbers that the script draws later (the order of its data) are equal on every rank.
            seed_process(seed * 1_000_003 + 7919)
            self._trainer = Trainer(job, self._assembly, self._mini_batches, on_step)
            self.at_close.append(self._trainer.own_optimizers.remove)
            self.modules = self._assembly.modules
            """Stages that this rank runs, first to last."""
            self._meta_model = self._assembly.whole_model  # private, because stages do not see changes of it
            self.canonical_names = self._assembly.canonical_names
            """Map from each name in the model's state dict to the first name of the same tensor."""
            self.losses = self._trainer.losses
            """Loss of every step of this process."""
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        return self.place.rank

    @property
    def is_first(self) -> bool:
        """True if this rank runs the first stage of its replica."""
        return self.place.is_first

    @property
    def is_last(self) -> bool:
        """True if this rank runs the last stage of its replica."""
        return self.place.is_last

    @property
    def step_index(self) -> int:
        """Number of completed steps, with those before a resume. It determines the random draws of the next step."""
        return self._trainer.step_index

    @step_index.setter
    def step_index(self, steps: int) -> None:
        self._trainer.step_index = steps

    @property
    def skipped(self) -> bool:
        """True if the last step changed no parameters, because gradients overflowed in float16 (`fp16-mixed`)."""
        return self._trainer.skipped

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters once each, with their names in `named_parameters()` of the model."""
        return self._assembly.named_parameters()

    def optimizer(self, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimizer that `build` makes, with only this rank's parameters in its groups.

        `build` is called with the parameters of the whole model, in the model's order. Parameters of other ranks have
        shapes but no values, and are removed from the groups afterwards. All ranks therefore have the same groups, but
        a group may be empty.

        Optimizers that are not torch's are checked during the run: a `step()` that would depend on parameters of other
        ranks raises a `ModelError` instead.

        Raises:
            ModelError: The optimizer's step reads all parameters at once, or `build` needs values of parameters of
                other ranks.
        """
        self._trainer.check_parameters()
        whole, is_divided = list(self._meta_model.parameters()), self.balance.num_stages > 1
        with self._trainer.own_optimizers.paused():  # an optimizer may call `step()` when it is built
            if is_divided and build is not self.model.build_optimizer:
                check_optimizer(build, whole, self.device)  # the profile had another optimizer
            optimizer = WholeModelOptimizer(build, whole).build_for(self._assembly.parameter_pairs())
            check = optimizer_step_check(optimizer, build, whole) if is_divided else None
        self._trainer.record_optimizer(optimizer, check)
        return optimizer

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that `optimizer` has returned and that still exist."""
        return self._trainer.optimizers

    def named_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of the model's state dict: parameters and persistent buffers by name."""
        return self._assembly.named_tensors()

    @property
    def code_digests(self) -> dict[str, str]:
        """Digests of the code of the loss (`loss`) and of the layers (`layers`). A resumed run compares them."""
        return self._assembly.code_digests

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, without the model's tensors."""
        state = {**self._trainer.state_dict(), "loader": self._mini_batches.state_dict()}
        return state if self._used.num_used in (0, self.step_index) else {**state, "num_used": self._used.num_used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._trainer.load_state_dict(state)
        self._mini_batches.load_state_dict(state["loader"])
        self._used.begin(state.get("num_used", 0))

    def batches(self, steps: int, loader: Iterable[Any] | None = None) -> Iterator[Batch]:
        """Yield this rank's part of each mini-batch, until the run has had `steps` mini-batches.

        Args:
            steps: Number of mini-batches, including those before a resume. It is the number of steps, unless a step
                uses several mini-batches.
            loader: Iterable of whole mini-batches `(inputs, targets)`, the same on every rank. It is iterated again for
                each epoch, and continues within an epoch after a resume. The default is the model's `train_batches`, or
                its `example_batch` if the model has no `train_batches`.

        Raises:
            UsageError: The loader is not the one that a resumed run had, or it is empty.
        """
        begin = self._used.num_used or self.step_index
        batches = self._mini_batches.batches_of_steps(begin, steps, loader)
        self._used.begin(begin)
        # The loader draws random numbers only after the check. No variable may hold a mini-batch through its step.
        yield from iter(lambda: self._next_of(batches), None)

    def _next_of(self, batches: Iterator[Batch]) -> Batch | None:
        batch = self._trainer.next_batch(batches)
        if batch is not None:
            self._used.take(batch)
        return batch

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """Return the samples of this rank's replica. Every rank passes the same mini-batch.

        Inputs are real on the first stage only, and targets on the last stage only; elsewhere they are meta tensors.

        Raises:
            UsageError: There are fewer samples than replicas.
        """
        return self._mini_batches.own_part(inputs, targets)

    def example_batch(self, step: int) -> Batch:
        """Return the example mini-batch of a step. It depends only on the seed and the step."""
        return self._mini_batches.example_batch(step)

    def step(self, inputs: Any, targets: Any) -> AbstractContextManager[float]:
        """Run forward and backward of a mini-batch. The `with` block must run the optimizer's step.

        The value of the `with` statement is the loss, on every rank. Loss and gradients are means over the samples of
        the mini-batch, or over the items that the model's `loss_count` counts. Gradients are added to existing
        gradients.

        A mini-batch may be smaller than planned, such as the last one of an epoch. With replicas, pass the samples of
        this rank's replica, from `batches` or `own_part`. If gradients overflow under `fp16-mixed`, all stages drop
        their gradients, the optimizer does nothing, and `skipped` is true.

        Raises:
            UsageError: The mini-batch is larger than planned.
            TrainingError: Another rank does not begin this step, or has a mini-batch of another size.
        """
        return self.accumulate([(inputs, targets)])

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> AbstractContextManager[float]:
        """Run one step over several mini-batches, each at most as large as planned; see `step`.

        Gradients and loss are those of one mini-batch with all samples.
        """
        self._model_file.check_functions()
        return self._trainer.step(self._used.used(batches))

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradients of the whole model, as `torch.nn.utils.clip_grad_norm_` does for one process.

        Every rank must call this method, within the block of a step.

        Returns:
            Norm of all gradients before clipping.
        """
        return self._trainer.clip_gradients(max_norm)

    @overload
    def evaluate(self, inputs: Any, targets: Any) -> float: ...
    @overload
    def evaluate(
        self, inputs: Any, targets: Any, *, metrics: Metrics | None = ..., outputs: bool = ...
    ) -> EvaluationResult: ...
    def evaluate(
        self, inputs: Any, targets: Any, *, metrics: Metrics | None = None, outputs: bool = False
    ) -> float | EvaluationResult:
        """Return the loss of a batch of any size in evaluation mode.

        Every rank must call this method with its part of the batch. As in a plain loop, the evaluation affects later
        training only if the model or its loss also changes state in evaluation mode.

        Args:
            inputs: Inputs as in `step`.
            targets: Targets as in `step`.
            metrics: Function that is called with the output and the target of every micro-batch. It returns numbers by
                name, each a mean over the samples of the micro-batch.
            outputs: If true, also return the model's outputs.

        Returns:
            The loss, on every rank; an `EvaluationResult` if `metrics` or `outputs` is given.
        """
        evaluation = self._trainer.evaluate(Batch(inputs, targets), metrics, outputs=outputs)
        return evaluation.loss if metrics is None and not outputs else evaluation

    def end_loop(self) -> None:
        """Check that all ranks have ended their training loops.

        Every rank must call this method after its last step. `pipeline_script`, `report` and `close` call it; a second
        call in a row does nothing.

        Raises:
            TrainingError: Another rank begins a step, an evaluation or a checkpoint.
        """
        self._trainer.check_same_phase("end")

    def check_all_ranks_save(self) -> None:
        """Check that all ranks save a checkpoint. Every rank must call this method before it saves one.

        Raises:
            TrainingError: Another rank begins a step or an evaluation, or has ended its loop.
        """
        self._trainer.check_same_phase("checkpoint")

    def report(self) -> RunReport | None:
        """Return the report of the run on rank 0; None on other ranks. Every rank must call this method."""
        self.end_loop()
        self._recorder.close()
        self.activity.begin("the report", waits_for=ANY)
        self.runs, report = run_report(
            self.balance,
            self.place,
            self._recorder,
            self.modules,
            device=self.device,
            seed=self.seed,
            losses=self.losses,
            samples=self._trainer.samples,
        )
        return report

    @property
    def last_step_us(self) -> float:
        """Time of the last step on this rank, in microseconds."""
        return self._recorder.step_us[-1]

    @property
    def last_step_samples(self) -> int:
        """Number of samples in the last step, over all replicas."""
        return self._trainer.samples[-1]

    def close(self) -> None:
        """Leave the job.

        If no error is being handled, first wait until every rank has ended its loop and received its last loss.

        Raises:
            TrainingError: Another rank begins a step, an evaluation or a checkpoint.
        """
        if sys.exc_info()[0] is None:
            self.end_loop()
        for release in self.at_close:
            release()
        self._recorder.close()
        if self._is_joined:
            dist.destroy_process_group()
