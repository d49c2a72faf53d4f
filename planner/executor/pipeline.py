"""Train a model as a pipeline: this process runs a stage of it, or several under interleaved 1F1B."""

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
from planner.executor.build.assembly import Assembly
from planner.executor.job import job_of, join, load_planned
from planner.executor.measure.recorder import Recorder
from planner.executor.measure.reporting import run_report
from planner.executor.measure.step_record import OnStep
from planner.executor.mini_batches import MiniBatches
from planner.executor.run.evaluation import EvaluationResult, Metrics
from planner.executor.run.placement import Groups
from planner.executor.trainer import Trainer
from planner.executor.watch.failure import Watch
from planner.executor.watch.position import ANY
from planner.model.chain import Chain
from planner.model.load import Batch, LoadedModel
from planner.model.optimizer_scope import check_optimizer
from planner.model.optimizers import ModelOptimizer
from planner.model.seeding import seed_process

if TYPE_CHECKING:
    from planner.executor.measure.run_times import ProcessRun


class Pipeline:
    """Process of the pipelines that a `balance.yaml` describes; every rank of the job makes one.

    Args:
        balance_path: The balance configuration, as `gpipe-plan emit` writes it.
        seed: Seed of initial parameters, example batches and dropout.
        device: Device to use instead of the plan's.
        timeout_s: Seconds after which a transfer fails.
        check_nan: Whether every output and gradient must be finite, not only the loss; waits for the device.
        watch: Watch of this process, if any.
        on_step: Called on rank 0 after every step, after the block and outside the step's time.
        built: The loaded model and its structure, if the caller has them; otherwise they are loaded from the balance's
            model.

    Raises:
        UsageError: The number of processes is not what the plan needs, or the device is missing.
        ModelError: The model is not the one that was planned.
    """

    def __init__(
        self,
        balance_path: str | Path | Balance,
        *,
        seed: int = 0,
        device: str | None = None,
        timeout_s: float = 300.0,
        check_nan: bool = False,
        watch: Watch | None = None,
        on_step: OnStep | None = None,
        built: tuple[LoadedModel, Chain] | None = None,
    ) -> None:
        job = job_of(balance_path, seed=seed, device=device, watch=watch, check_nan=check_nan)
        self.balance, self.seed, self.place, self.device = job.balance, job.seed, job.place, job.device
        self.watch, self.position = job.watch, job.position
        self.at_end: list[Callable[[], None]] = []
        """Functions to call on all ranks when the loop has ended (`pipeline_script` calls them)."""
        self.at_close: list[Callable[[], None]] = []
        self.runs: list[ProcessRun] = []
        """Actions of every process in the last steps; on rank 0, once there is a report."""
        torch.set_num_threads(job.balance.threads)
        if built is None and not kind_of(job.device).has_own_memory:
            keep_freed_memory()
        # Before anything that counts as this process's memory.
        self._recorder = Recorder(job.device)
        self._is_joined = False
        try:
            seed_process(seed)  # a model that is made while its file is imported starts from it, too
            self.model, structure = built or (load_planned(job.balance, _folder_of(balance_path)), None)
            with self._recorder.paused():  # a thread of gloo may be the last to release memory of joining
                self._is_joined = join(job, timeout_s)
            groups = Groups.of(job.place)
            job.position.at("building the model")
            self._mini_batches = MiniBatches(job, self.model)
            self._assembly = Assembly(job, self.model, groups, self._recorder, structure=structure)
            # Failed attempts to find or build layers may be in cycles with their errors, and keep the whole model.
            gc.collect()
            # Later draws of the script (the order of its data) are the same on every rank.
            seed_process(seed * 1_000_003 + 7919)
            self._trainer = Trainer(job, self._assembly, self._mini_batches, on_step)
            self.modules = self._assembly.modules
            """Stages that this rank runs, first to last."""
            self.first_names = self._assembly.first_names
            """First name of each tensor in the model's state dict, by each of its names."""
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
        """True if this rank runs the first stage, in any replica."""
        return self.place.is_first

    @property
    def is_last(self) -> bool:
        """True if this rank runs the last stage, in any replica."""
        return self.place.is_last

    @property
    def step_index(self) -> int:
        """Steps since training began, including earlier processes: random draws of a step depend on it."""
        return self._trainer.step_index

    @step_index.setter
    def step_index(self, steps: int) -> None:
        self._trainer.step_index = steps

    @property
    def skipped(self) -> bool:
        """True if the gradients of the last step overflowed (`fp16-mixed`) and were dropped, on all stages."""
        return self._trainer.skipped

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters with the names they have in the whole model; each once."""
        return self._assembly.named_parameters()

    def optimizer(self, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimizer that `build(model.parameters())` makes, with only this rank's parameters in its groups.

        `build` gets the parameters of the whole model, in its order. Those of other ranks have a shape and no values,
        and are removed from their groups afterwards. All ranks have the same groups, some of them empty.

        Raises:
            ModelError: The step reads all parameters at once, or `build` needs the values of other ranks' parameters.
        """
        if build is not self.model.build_optimizer and self.balance.num_stages > 1:
            check_optimizer(build, self._assembly.whole_parameters, self.device)  # it was not profiled
        optimizer = ModelOptimizer(build, self._assembly.whole_parameters).over(self._assembly.own_of_whole())
        self._trainer.steps_with(optimizer)
        return optimizer

    def named_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of the model's state dict: parameters and persistent buffers by name."""
        return self._assembly.named_tensors()

    @property
    def computation(self) -> dict[str, str]:
        """Digests of the model's code, `loss` and `layers`, which its tensors do not show."""
        return self._assembly.computation

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint, without tensors."""
        return {**self._trainer.state_dict(), "loader": self._mini_batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self._trainer.load_state_dict(state)
        self._mini_batches.load_state_dict(state["loader"])

    def batches(self, steps: int, loader: Iterable[Any] | None = None) -> Iterator[Batch]:
        """Yield this rank's part of mini-batches until `steps` steps are done; those of earlier steps are skipped.

        Args:
            steps: Steps of the whole run.
            loader: Yields whole mini-batches `(inputs, targets)`, the same on every rank. It is iterated again when it
                ends, and continues within an epoch after a resume. By default the model's `train_batches`, else its
                `example_batch`.

        Raises:
            UsageError: The loader is not the one that a resumed run had, or it is empty.
        """
        yield from self._mini_batches.between(self.step_index, steps, loader)

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """Return this rank's part of a mini-batch that every rank has: its replica's samples.

        The first stage keeps inputs and the last stage targets. Other tensors are on the meta device, so that every
        rank knows the same sizes.

        Raises:
            UsageError: There are fewer samples than replicas.
        """
        return self._mini_batches.own_part(inputs, targets)

    def example_batch(self, step: int) -> Batch:
        """Return the example mini-batch of a step, which depends on seed and step alone."""
        return self._mini_batches.example(step)

    def step(self, inputs: Any, targets: Any) -> AbstractContextManager[float]:
        """Run forward and backward of a mini-batch; the block then steps the optimizer, and both are timed together.

        Yields the loss, on every rank. Loss and gradients are those of the mini-batch: the mean over its samples, or
        over the items of `loss_count`. Gradients are added to existing ones.

        A mini-batch may be smaller than planned (the last one of an epoch); its last micro-batch may then be smaller.
        With replicas every rank passes its own part (`batches`, `own_part`), and gradients and loss are those of the
        whole. If gradients overflow under `fp16-mixed`, they are dropped on all stages, the optimizer does nothing, and
        `skipped` is true.

        Raises:
            UsageError: The mini-batch is larger than planned.
            TrainingError: Another rank does not begin this step, or has a mini-batch of another size.
        """
        return self.accumulate([(inputs, targets)])

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> AbstractContextManager[float]:
        """Run `step` for a mini-batch in several pieces, each of them no larger than the plan's.

        Gradients and loss are those of all pieces together.
        """
        return self._trainer.step(batches)

    def clip_gradients(self, max_norm: float) -> float:
        """Apply `torch.nn.utils.clip_grad_norm_` to the whole model.

        Every rank must call it, within the block of a step.

        Returns:
            The norm of all gradients before clipping.
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
        """Return the loss of a batch of any size in evaluation mode; every rank must call it.

        Every rank passes its part of the batch. The evaluation does not affect later training.

        Args:
            inputs: Inputs as in `step`.
            targets: Targets as in `step`.
            metrics: Called with the output and the target of every micro-batch; returns numbers by name, which are
                means over samples.
            outputs: Whether to keep the outputs.

        Returns:
            The loss, on every rank; an `EvaluationResult` with `metrics` or `outputs`.
        """
        evaluation = self._trainer.evaluate(Batch(inputs, targets), metrics, outputs=outputs)
        return evaluation.loss if metrics is None and not outputs else evaluation

    def end_loop(self) -> None:
        """Check that all ranks have ended their loops; every rank must call it after its last step.

        `pipeline_script`, `report` and `close` call it. A second call in a row does nothing.

        Raises:
            TrainingError: Another rank begins a step, an evaluation or a checkpoint.
        """
        self._trainer.agree("end")

    def begin_checkpoint(self) -> None:
        """Check that all ranks save a checkpoint; every rank must call it before it saves one.

        Raises:
            TrainingError: Another rank begins a step or an evaluation, or has ended its loop.
        """
        self._trainer.agree("checkpoint")

    def report(self) -> RunReport | None:
        """Return the report of the run on rank 0; None on others. Every rank must call it."""
        self.end_loop()
        self._recorder.close()
        self.position.at("the report", waits_for=ANY)
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
        """Time of the last step on this rank."""
        return self._recorder.step_us[-1]

    @property
    def last_step_samples(self) -> int:
        """Samples of the last step, over all replicas."""
        return self._trainer.samples[-1]

    def close(self) -> None:
        """Leave the job; without an error, wait first until every rank has ended its loop and has the last loss.

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


def _folder_of(balance: str | Path | Balance) -> Path:
    """Return the folder that the model's path is relative to."""
    return Path() if isinstance(balance, Balance) else Path(balance).parent
