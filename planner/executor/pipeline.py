"""A model trained as a pipeline: this process runs a stage of it, or several under interleaved 1F1B."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from planner.core.errors import ModelError, UsageError
from planner.core.values.run_report import RunReport
from planner.device.machine import keep_freed_memory
from planner.executor.build.assembly import Assembly
from planner.executor.build.opening import device_of_rank, load_planned, stage_name
from planner.executor.job import join_job
from planner.executor.measure.recorder import Recorder
from planner.executor.measure.reporting import run_report
from planner.executor.run.draws import drawn_alike
from planner.executor.run.evaluation import Evaluation, ForwardOnly, Metrics, Observed
from planner.executor.run.finite import check_gradients, check_losses
from planner.executor.run.gradients import clip_gradients
from planner.executor.run.loader import Loader, checked_state
from planner.executor.run.loss_scale import LossScale
from planner.executor.run.losses import UNCOUNTED, loss_counts, weights_of
from planner.executor.run.parts import Part, micro_batches_of, parts_of, size_of
from planner.executor.run.placement import Groups, place_of
from planner.executor.run.random_state import StepSeeds, keeping_random_state, seed_process
from planner.executor.run.relay import Relay
from planner.executor.run.stage_module import StageModule
from planner.executor.watch.failure import Watch
from planner.executor.watch.position import ANY, Position
from planner.files import digest_of, read_balance
from planner.model.autocast import autocast_dtype
from planner.model.load import Batch, to_device
from planner.model.precision import to_precision

if TYPE_CHECKING:
    from planner.executor.measure.run_waits import ProcessRun

__all__ = ["Pipeline"]


class Pipeline:
    """One process of the pipelines that a `balance.yaml` describes; every rank of the job makes one.

    Args:
        balance_path: The balance configuration, as `gpipe-plan emit` writes it.
        seed: Of initial parameters, example batches and dropout.
        device: Overrides the device of the plan.
        timeout_s: A transfer that takes so long fails.
        check_nan: Whether every output and gradient must be finite, not the loss alone; waits for the device.
        watch: Is told what this rank is doing.

    Raises:
        UsageError: The number of processes is not what the plan needs, or the device is missing.
        ModelError: The model is not the one that was planned.
    """

    def __init__(
        self,
        balance_path: str | Path,
        *,
        seed: int = 0,
        device: str | None = None,
        timeout_s: float = 300.0,
        check_nan: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.balance = read_balance(str(balance_path))
        self.seed = seed
        self._check_nan = check_nan
        rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.place = place_of(self.balance, rank, num_processes)
        self.watch = watch
        self.position = watch.position if watch is not None else Position()
        self.position.names = {k: stage_name(self.balance, k) for k in range(self.balance.num_stages)}
        self.position.stages, self.position.replica = self.place.stages, self.place.replica
        places = [place_of(self.balance, other, num_processes) for other in range(num_processes)]
        self.position.rank_names = {p.rank: self.position.name_of(p.stages, p.replica) for p in places}
        self.position.predicted_bytes = {stage.index: stage.peak_bytes for stage in self.balance.stages}
        self.device = device_of_rank(device or self.balance.device)
        torch.set_num_threads(self.balance.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.losses: list[float] = []
        self._samples: list[int] = []
        """Of every step, over all replicas: a mini-batch may be smaller than planned."""
        self.runs: list[ProcessRun] = []
        """What every process did in the last steps; on rank 0, once there is a report."""
        self.step_index = 0
        """Steps since training began, also in an earlier process: what a step draws depends on it."""
        self.skipped = False
        """Whether the gradients of the last step overflowed (`fp16-mixed`) and were dropped, on all stages alike."""
        self._loader: Loader | None = None
        self._loader_state: Mapping[str, Any] | None = None
        """Of a checkpoint, until `batches` is given the loader."""
        self.at_end: list[Callable[[], None]] = []
        """What is yet to be done when the loop has ended, on all ranks alike (`pipeline_script` does it)."""
        self.at_close: list[Callable[[], None]] = []
        self._joined = False
        self._recorder = Recorder(self.device)
        try:
            seed_process(seed)  # a model that is made while its file is imported starts from it, too
            self.model = load_planned(self.balance, Path(balance_path).parent)
            self.position.at("joining the others", waits_for=ANY)
            self._joined = join_job(self.device, timeout_s, self._told())
            self._groups = Groups.of(self.place)
            self._relay = Relay(self.place, self._groups, self.device)
            self.position.at("building the model")
            self._assembly = Assembly(
                self.balance,
                self.model,
                place=self.place,
                groups=self._groups,
                device=self.device,
                seed=seed,
                example_inputs=self.example_batch(0).inputs,
                recorder=self._recorder,
                position=self.position,
                check_nan=check_nan,
            )
            # Failed attempts to find or build layers may lie in cycles with their errors, and hold the whole model.
            gc.collect()
            # What the script draws from here on (the order of its data) is the same on every rank.
            seed_process(seed * 1_000_003 + 7919)
            is_float16 = autocast_dtype(self.balance.dtype) == torch.float16
            own = [parameter for _, parameter in self.named_parameters()]
            self._loss_scale = LossScale(own, self.device) if is_float16 else None
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
    def modules(self) -> list[StageModule]:
        """The stages that this rank runs, first to last."""
        return self._assembly.modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model; each once."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                named.setdefault(id(parameter), (name, parameter))
        return iter(named.values())

    def optimizer(self, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """`build(parameters)` over this stage's trainable parameters."""
        parameters = [p for _, p in self.named_parameters() if p.requires_grad]
        # A stage of pooling and reshaping has nothing to optimize, which torch's optimizers refuse.
        return build(iter(parameters or [nn.Parameter(torch.zeros(0))]))

    def named_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the model's state dict: parameters and persistent buffers, under their names there."""
        held: dict[str, Tensor] = {}
        for module in self.modules:
            held |= dict(module.named_parameters(remove_duplicate=False))
            held |= dict(module.named_buffers(remove_duplicate=False))
        return {name: tensor for name, tensor in held.items() if name in self.first_names}

    @property
    def first_names(self) -> dict[str, str]:
        """By name in the model's state dict, the first of the names that its tensor has there."""
        return self._assembly.first_names

    @property
    def computation(self) -> dict[str, str]:
        """Digests of what the whole model computes, which its tensors do not show: `loss` and `layers`."""
        return self._assembly.computation

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank beside tensors."""
        return {
            "step_index": self.step_index,
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale is not None else None,
            "loader": self._loader.state_dict() if self._loader is not None else self._loader_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.step_index = int(state["step_index"])
        self._loader_state = checked_state(state["loader"])
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])

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
        drawn: Iterator[Any]
        if loader is not None:
            drawn = islice(self._loaded(loader), max(0, steps - self.step_index))
        elif self._loader_state is not None:
            raise UsageError(
                "the checkpoint goes on in the middle of a loader, and `batches` is given none",
                hint="give it the same loader as before: `pipeline.batches(given.steps, loader)`",
            )
        elif self.model.train_batches is None:
            drawn = map(self.example_batch, range(self.step_index, steps))
        else:
            drawn = islice(drawn_alike(self._epochs(), self.seed), self.step_index, steps)
        yield from starmap(self.own_part, drawn)  # no variable may hold a whole mini-batch through its step

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """What this rank needs of a mini-batch that every rank has: its replica's samples.

        Inputs are kept with the first stage and targets with the last: of the others there are only shapes (tensors on
        the meta device), so that every rank finds the same sizes.

        Raises:
            UsageError: There are fewer samples than replicas.
        """
        batch = Batch(inputs, targets)
        size, replica, replicas = size_of(batch), self.place.replica, self.place.num_replicas
        if replicas > 1 and size is not None:
            if size < replicas:
                raise UsageError(
                    f"got a mini-batch of {size} samples for {replicas} replicas",
                    hint="drop the last mini-batch (`drop_last=True`), or choose a batch that fits the data",
                )
            first, end = size * replica // replicas, size * (replica + 1) // replicas
            # Copies: views would keep the other replicas' samples in memory.
            batch = Batch(*tree_map_only(Tensor, lambda t: t[first:end].clone(), tuple(batch)))

        def shapes(value: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), value)

        inputs, targets = batch
        return Batch(inputs if self.is_first else shapes(inputs), targets if self.is_last else shapes(targets))

    def example_batch(self, step: int) -> Batch:
        """The example mini-batch of a step: a function of seed and step alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + step)
            return self.model.example_batch(self.balance.batch)

    @contextmanager
    def step(self, inputs: Any, targets: Any) -> Iterator[float]:
        """Forward and backward of a mini-batch; the block then steps the optimizer, and both are timed together.

        Gradients are those of the mini-batch's loss: the mean over its samples, or over what `loss_count` counts. They
        are added to what is there. A mini-batch may be smaller than planned (the last one of an epoch); of what does
        not fill a micro-batch a smaller one is made. With replicas every rank gives its own part (`batches`,
        `own_part`), and gradients and loss are those of the whole. Yields the loss, on every rank. Under `fp16-mixed`
        there are no gradients on any stage after a step in which they overflowed, the optimizer then does nothing, and
        `skipped` is true.

        Raises:
            UsageError: The mini-batch is larger than planned.
        """
        with self.accumulate([(inputs, targets)]) as loss:
            yield loss

    @contextmanager
    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[float]:
        """As `step`, of one mini-batch that comes in several pieces, each of them no larger than the plan's.

        Gradients and loss are those of all pieces together.
        """
        parts = [part for inputs, targets in batches for part in self._parts(Batch(inputs, targets))]
        for part in parts:
            self._make_engine(part)
        self.position.step = self.step_index
        with self._recorder.step():
            loss = self._forward_backward(parts)
            with self._recorder.optimizer(stage=self.place.stages[0]):
                yield loss
        self.step_index += 1

    def clip_gradients(self, max_norm: float) -> float:
        """As `torch.nn.utils.clip_grad_norm_` of the whole model; every rank must call it, within the block of a step.

        Returns:
            The norm of all gradients before.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        counted_elsewhere = self._assembly.tied.counted_elsewhere
        group = self._groups.pipeline
        return clip_gradients(own, max_norm, self.device, counted_elsewhere=counted_elsewhere, group=group)

    @overload
    def evaluate(self, inputs: Any, targets: Any) -> float: ...
    @overload
    def evaluate(
        self, inputs: Any, targets: Any, *, metrics: Metrics | None = ..., outputs: bool = ...
    ) -> Evaluation: ...
    def evaluate(
        self, inputs: Any, targets: Any, *, metrics: Metrics | None = None, outputs: bool = False
    ) -> float | Evaluation:
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
        batch = Batch(inputs, targets)
        parts = list(parts_of(batch, size_of(batch) or self.balance.replica_batch, self._assembly.micro_batch_size))
        self.position.at("the evaluation")
        weights = self._weights(parts)
        observed = Observed(metrics, keeps_outputs=outputs)
        losses: list[Tensor] = []
        first = 0
        with keeping_random_state():
            for part in parts:
                losses += self._evaluate(part, weights[first : first + part.micro_batches], observed)
                first += part.micro_batches
        names = self._relay.names(list(observed.sums)) if metrics is not None else []
        numbers = [_sum_of(losses), observed.samples, *(observed.sums.get(name, 0.0) for name in names)]
        loss, samples, *sums = self._relay.everywhere(numbers, len(numbers))
        self.position.at("between steps")
        if metrics is None and not outputs:
            return loss
        means = {name: total / samples for name, total in zip(names, sums, strict=True)}
        return Evaluation(loss=loss, metrics=means, outputs=observed.outputs())

    def report(self) -> RunReport | None:
        """What the run took, on rank 0; None elsewhere. Every rank must call it."""
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
            samples=self._samples,
        )
        return report

    @property
    def last_step_us(self) -> float:
        """Time of the last step on this rank."""
        return self._recorder.step_us[-1]

    @property
    def last_step_samples(self) -> int:
        """Samples of the last step, over all replicas."""
        return self._samples[-1]

    def close(self) -> None:
        """Leaves the job."""
        for release in self.at_close:
            release()
        self._recorder.close()
        if self._joined:
            dist.destroy_process_group()

    # Private methods

    def _told(self) -> dict[str, Any]:
        """What every rank must have been told alike."""
        return {
            "balance.yaml": digest_of(self.balance),
            "--seed": self.seed,
            "--device": self.device.type,
            "torch": str(torch.__version__),
        }

    def _loaded(self, loader: Iterable[Any]) -> Iterator[Any]:
        if self._loader is None or self._loader.loader is not loader:
            self._loader = Loader(loader, self.seed)
            if self._loader_state is not None:
                self._loader.load_state_dict(self._loader_state)
            elif self.step_index:  # of a checkpoint that was written without it
                next(islice(self._loader, self.step_index - 1, None), None)
            self._loader_state = None
        return iter(self._loader)

    def _epochs(self) -> Iterator[Any]:
        """All that `train_batches` gives, again and again."""
        assert self.model.train_batches is not None
        while True:
            is_empty = True
            for pair in self.model.train_batches(self.balance.batch):
                is_empty = False
                yield pair
            if is_empty:
                raise ModelError("`train_batches` is empty")

    def _parts(self, batch: Batch) -> Iterator[Part]:
        planned = self.balance.replica_batch
        size = size_of(batch) or planned
        if planned < size <= self.balance.batch:
            raise UsageError(
                f"got a mini-batch of {size} samples for a pipeline that is one of {self.balance.replicas}",
                hint="give each its own part: `inputs, targets = pipeline.own_part(inputs, targets)`",
            )
        if size > planned:
            raise UsageError(
                f"got a mini-batch of {size} samples, the plan is for {planned}",
                hint="plan for this batch, or give it in pieces to `accumulate`",
            )
        rounds_of = self.place.num_devices if self.balance.schedule == "interleaved" else 1
        yield from parts_of(batch, size, self._assembly.micro_batch_size, rounds_of=rounds_of)

    def _make_engine(self, part: Part) -> None:
        """Made on every rank before anything is sent: a micro-batch too small for a layer is found on all of them."""
        try:
            self._assembly.engine(part.micro_batches, part.micro_batch_size)
        except ModelError as error:
            raise ModelError(
                f"the last {part.micro_batch_size} samples of a mini-batch cannot be a micro-batch: {error}",
                hint="drop the last mini-batch (`drop_last=True`), or choose a batch that fits the data",
            ) from error

    def _forward_backward(self, parts: Sequence[Part]) -> float:
        weights = self._weights(parts)
        self._assembly.tied.begin()
        if self._loss_scale is not None:
            self._loss_scale.begin()
        if self._assembly.replicas is not None:
            self._assembly.replicas.begin()
        losses: list[Tensor] = []
        # The mini-batch of all replicas is numbered through.
        before, first = self.place.replica * sum(part.micro_batches for part in parts), 0
        with keeping_random_state():
            for part in parts:
                for module in self.modules:
                    module.seeds = StepSeeds(self.seed, self.step_index, before + first)
                if self._assembly.replicas is not None:
                    self._assembly.replicas.is_last_part = part is parts[-1]
                self._recorder.first_micro_batch = first
                losses += self._run(part, weights[first : first + part.micro_batches])
                first += part.micro_batches
        self.position.at("the gradients", waits_for=ANY)
        self._assembly.statistics.commit(self._groups.replicas)
        if self._assembly.replicas is not None:
            self._assembly.replicas.finish()
        self._assembly.tied.sum()
        self.skipped = self._loss_scale is not None and not self._loss_scale.unscale()
        if self._loss_scale is None and self._check_nan:
            check_gradients(dict(self.named_parameters()), self.position)
        self.position.at("the loss", waits_for=None if self.is_last else self.place.stages[-1] + 1)
        own_samples = sum(part.micro_batches * part.micro_batch_size for part in parts)
        loss, samples = self._relay.everywhere([_sum_of(losses), own_samples], 2)
        if self.is_last and self._loss_scale is None:
            check_losses(losses, loss, self.position)
        self.losses.append(loss)
        self._samples.append(int(samples))
        self.position.at("between steps")
        return loss

    def _weights(self, parts: Sequence[Part]) -> list[float]:
        """What the loss of each micro-batch counts for, among those of all replicas; on the last rank."""
        if not self.is_last:
            return []
        counts = [float(part.micro_batch_size) for part in parts for _ in range(part.micro_batches)]
        if self.model.loss_count is not None:
            targets = [target for part in parts for target in part.targets()]
            counts = loss_counts(self.model.loss_count, targets, self.model.source)
        total = torch.tensor(sum(counts), dtype=torch.float64, device=self.device)
        if self._groups.replicas is not None:
            dist.all_reduce(total, group=self._groups.replicas)
        return weights_of(counts, float(total))

    def _run(self, part: Part, weights: Sequence[float]) -> list[Tensor]:
        """Forward and backward; on the last rank, what each loss adds to that of the mini-batch."""
        engine = self._assembly.engine(part.micro_batches, part.micro_batch_size)
        self._assembly.expect(part, training=True)
        if self._loss_scale is not None:
            engine.loss_scale = self._loss_scale.value
        return engine.step(self._input_tensors(part), self._targets(part, weights), weights)

    def _evaluate(self, part: Part, weights: Sequence[float], observed: Observed) -> list[Tensor]:
        """The same without gradients."""
        place = self.place
        forward = ForwardOnly(
            modules=self.modules,
            device=self.device,
            precision=self.balance.dtype,
            before=[None if stage == 0 else place.rank_of(stage - 1) for stage in place.stages],
            behind=[None if stage == place.num_stages - 1 else place.rank_of(stage + 1) for stage in place.stages],
            num_devices=place.num_devices,
        )
        self._assembly.expect(part, training=False)
        last = self.modules[-1]
        last.targets, last.seen = self._targets(part, weights), observed.see if self.is_last else None
        observed.expect(part, self._targets(part, [1.0] * len(weights)))
        try:
            losses = forward.run(micro_batches_of(self._input_tensors(part), part.micro_batches))
        finally:
            last.targets, last.seen = [], None
        return [loss * weight for loss, weight in zip(losses, weights, strict=True)]

    def _input_tensors(self, part: Part) -> list[Tensor]:
        """On the first rank."""
        if not self.is_first:
            return []
        inputs = to_precision(to_device(part.batch.inputs, self.device), self.balance.dtype)
        return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]

    def _targets(self, part: Part, weights: Sequence[float]) -> list[Any]:
        """Of every micro-batch, on the last rank."""
        if not self.is_last:
            return []
        targets = micro_batches_of(to_device(part.batch.targets, self.device), part.micro_batches)
        return [target if weight else UNCOUNTED for target, weight in zip(targets, weights, strict=True)]


# Private functions


def _sum_of(losses: Sequence[Tensor]) -> Tensor | float:
    return torch.stack(list(losses)).sum() if losses else 0.0
