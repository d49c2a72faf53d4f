"""A model trained as a pipeline: this process runs a stage of it, or several under interleaved 1F1B."""

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
    """One process of the pipelines that a `balance.yaml` describes; every rank of the job makes one.

    Args:
        balance_path: The balance configuration, as `gpipe-plan emit` writes it.
        seed: Of initial parameters, example batches and dropout.
        device: Overrides the device of the plan.
        timeout_s: A transfer that takes so long fails.
        check_nan: Whether every output and gradient must be finite, not the loss alone; waits for the device.
        watch: Is told what this rank is doing.
        on_step: Is called on rank 0, and on no other, after every step: behind the block, outside the step's time.
        built: The loaded model and its structure, where the caller has them; else they come from the balance's file.

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
        """What is yet to be done when the loop has ended, on all ranks alike (`pipeline_script` does it)."""
        self.at_close: list[Callable[[], None]] = []
        self.runs: list[ProcessRun] = []
        """What every process did in the last steps; on rank 0, once there is a report."""
        torch.set_num_threads(job.balance.threads)
        if built is None and not kind_of(job.device).has_own_memory:
            keep_freed_memory()
        # Before anything that counts as this process's memory.
        self._recorder = Recorder(job.device)
        self._is_joined = False
        try:
            seed_process(seed)  # a model that is made while its file is imported starts from it, too
            self.model, structure = built or (load_planned(job.balance, _folder_of(balance_path)), None)
            with self._recorder.paused():  # a thread of gloo may be the last to let go of what joining takes
                self._is_joined = join(job, timeout_s)
            groups = Groups.of(job.place)
            job.position.at("building the model")
            self._mini_batches = MiniBatches(job, self.model)
            self._assembly = Assembly(job, self.model, groups, self._recorder, structure=structure)
            # Failed attempts to find or build layers may lie in cycles with their errors, and hold the whole model.
            gc.collect()
            # What the script draws from here on (the order of its data) is the same on every rank.
            seed_process(seed * 1_000_003 + 7919)
            self._trainer = Trainer(job, self._assembly, self._mini_batches, on_step)
            self.modules = self._assembly.modules
            """The stages that this rank runs, first to last."""
            self.first_names = self._assembly.first_names
            """By name in the model's state dict, the first of the names that its tensor has there."""
            self.losses = self._trainer.losses
            """The loss of every step of this process."""
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """The number of this process in the job."""
        return self.place.rank

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the first stage, of whichever replica."""
        return self.place.is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage, of whichever replica."""
        return self.place.is_last

    @property
    def step_index(self) -> int:
        """Steps since training began, also in an earlier process: what a step draws depends on it."""
        return self._trainer.step_index

    @step_index.setter
    def step_index(self, steps: int) -> None:
        self._trainer.step_index = steps

    @property
    def skipped(self) -> bool:
        """Whether the gradients of the last step overflowed (`fp16-mixed`) and were dropped, on all stages alike."""
        return self._trainer.skipped

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model; each once."""
        return self._assembly.named_parameters()

    def optimizer(self, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimizer that `build(model.parameters())` makes, with this rank's parameters alone in its groups.

        `build` gets the parameters of the whole model, in its order. Those of other ranks have a shape and no values,
        and are removed from their groups afterwards. All ranks have the same groups, some of them empty.

        Raises:
            ModelError: The step looks at all parameters at once, or `build` needs the values of other ranks'.
        """
        if build is not self.model.build_optimizer and self.balance.num_stages > 1:
            check_optimizer(build, self._assembly.whole_parameters, self.device)  # it was not profiled
        optimizer = ModelOptimizer(build, self._assembly.whole_parameters).over(self._assembly.own_of_whole())
        self._trainer.steps_with(optimizer)
        return optimizer

    def named_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the model's state dict: parameters and persistent buffers, under their names there."""
        return self._assembly.named_tensors()

    @property
    def computation(self) -> dict[str, str]:
        """Digests of what the whole model computes, which its tensors do not show: `loss` and `layers`."""
        return self._assembly.computation

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank beside tensors."""
        return {**self._trainer.state_dict(), "loader": self._mini_batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self._trainer.load_state_dict(state)
        self._mini_batches.load_state_dict(state["loader"])

    def batches(self, steps: int, loader: Iterable[Any] | None = None) -> Iterator[Batch]:
        """This rank's part of mini-batches until `steps` steps are done; those of steps done before are passed over.

        Args:
            steps: Of the whole run.
            loader: Gives whole mini-batches `(inputs, targets)`, the same on every rank; it is begun anew when it ends,
                and goes on in mid-epoch after a resume. By default the model's `train_batches`, else its
                `example_batch`.

        Raises:
            UsageError: The loader is not the one that a resumed run had, or it is empty.
        """
        yield from self._mini_batches.between(self.step_index, steps, loader)

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """What this rank needs of a mini-batch that every rank has: its replica's samples.

        Inputs are kept with the first stage and targets with the last: of the others there are only shapes (tensors on
        the meta device), so that every rank finds the same sizes.

        Raises:
            UsageError: There are fewer samples than replicas.
        """
        return self._mini_batches.own_part(inputs, targets)

    def example_batch(self, step: int) -> Batch:
        """The example mini-batch of a step: a function of seed and step alone."""
        return self._mini_batches.example(step)

    def step(self, inputs: Any, targets: Any) -> AbstractContextManager[float]:
        """Forward and backward of a mini-batch; the block then steps the optimizer, and both are timed together.

        Gradients are those of the mini-batch's loss: the mean over its samples, or over what `loss_count` counts. They
        are added to what is there. A mini-batch may be smaller than planned (the last one of an epoch); of what does
        not fill a micro-batch a smaller one is made. With replicas every rank gives its own part (`batches`,
        `own_part`), and gradients and loss are those of the whole. Yields the loss, on every rank. Under `fp16-mixed`
        there are no gradients on any stage after a step in which they overflowed, the optimizer then does nothing, and
        `skipped` is true.

        Raises:
            UsageError: The mini-batch is larger than planned.
            TrainingError: Another rank does not begin this step, or has a mini-batch of another size.
        """
        return self.accumulate([(inputs, targets)])

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> AbstractContextManager[float]:
        """`step` for a mini-batch that comes in several pieces, each of them no larger than the plan's.

        Gradients and loss are those of all pieces together.
        """
        return self._trainer.step(batches)

    def clip_gradients(self, max_norm: float) -> float:
        """`torch.nn.utils.clip_grad_norm_` for the whole model; every rank must call it, within the block of a step.

        Returns:
            The norm of all gradients before.
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
        """The loss of a batch of any size in evaluation mode; every rank must call it, with its own part of the batch.

        Training goes on as if it had not been called.

        Args:
            inputs: As in `step`.
            targets: As in `step`.
            metrics: Is called with the output and the target of every micro-batch and gives numbers by name, which are
                means over samples.
            outputs: Whether to keep the outputs.

        Returns:
            The loss, on every rank; with `metrics` or `outputs`, these beside it.
        """
        evaluation = self._trainer.evaluate(Batch(inputs, targets), metrics, outputs=outputs)
        return evaluation.loss if metrics is None and not outputs else evaluation

    def end_loop(self) -> None:
        """Compare with the other ranks that all have ended their loops; every rank must call it after its last step.

        `pipeline_script`, `report` and `close` call it. A second call in a row does nothing.

        Raises:
            TrainingError: Another rank begins a step, an evaluation or a checkpoint.
        """
        self._trainer.agree("end")

    def begin_checkpoint(self) -> None:
        """Compare with the other ranks that all save a checkpoint; every rank must call it before it saves one.

        Raises:
            TrainingError: Another rank begins a step or an evaluation, or has ended its loop.
        """
        self._trainer.agree("checkpoint")

    def report(self) -> RunReport | None:
        """What the run took, on rank 0; None elsewhere. Every rank must call it."""
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
        """Leave the job; after a run without errors, once every rank has ended its loop and has the last step's loss.

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
