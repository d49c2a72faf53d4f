"""A model trained as a pipeline: this process runs a stage of it, or several under interleaved 1F1B."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from planner import __version__
from planner.core.balance import Balance
from planner.core.errors import ModelError, UsageError
from planner.core.profile import Device, Environment, Generator
from planner.core.run_report import RunReport, StageRun
from planner.core.run_waits import ProcessRun, Waits
from planner.executor.assembly import Assembly
from planner.executor.draws import drawn_alike
from planner.executor.evaluation import ForwardOnly
from planner.executor.failure import Watch, check_gradients, check_losses
from planner.executor.gradients import clip_gradients
from planner.executor.job import join_job
from planner.executor.loss_scale import LossScale
from planner.executor.losses import UNCOUNTED, loss_counts, weights_of
from planner.executor.parts import Part, micro_batches_of, parts_of, size_of
from planner.executor.placement import Groups, place_of
from planner.executor.position import ANY, Position
from planner.executor.random_state import StepSeeds, keeping_random_state, seed_process
from planner.executor.recorder import WARM_UP_STEPS, Recorder
from planner.executor.stage_module import StageModule
from planner.executor.timeline import gather_runs
from planner.files import digest_of, read_balance
from planner.model.autocast import autocast_dtype
from planner.model.load import Batch, LoadedModel, load_model, to_device
from planner.model.machine import cpu_name, keep_freed_memory
from planner.model.precision import dtype_of, in_precision, to_precision

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
        self.position.names = {k: _stage_name(self.balance, k) for k in range(self.balance.num_stages)}
        self.position.stages, self.position.replica = self.place.stages, self.place.replica
        places = [place_of(self.balance, other, num_processes) for other in range(num_processes)]
        self.position.rank_names = {p.rank: self.position.name_of(p.stages, p.replica) for p in places}
        self.position.predicted_bytes = {stage.index: stage.peak_bytes for stage in self.balance.stages}
        self.device = _device(device or self.balance.device)
        torch.set_num_threads(self.balance.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.losses: list[float] = []
        self._samples: list[int] = []
        """Of every step, over all replicas: a mini-batch may be smaller than planned. Known where the loss is."""
        self.runs: list[ProcessRun] = []
        """What every process did in the last steps; on rank 0, once there is a report."""
        self.step_index = 0
        """Steps since training began, also in an earlier process: what a step draws depends on it."""
        self.skipped = False
        """Whether the gradients of the last step overflowed (`fp16-mixed`) and were dropped, on all stages alike."""
        self._joined = False
        self._recorder = Recorder(self.device)
        try:
            seed_process(seed)  # a model that is made while its file is imported starts from it, too
            self.model = _load(self.balance, Path(balance_path).parent)
            self.position.at("joining the others", waits_for=ANY)
            self._joined = join_job(self.device, timeout_s, self._told())
            self._groups = Groups.of(self.place)
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

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank beside tensors."""
        return {
            "step_index": self.step_index,
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.step_index = state["step_index"]
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])

    def batches(self, steps: int) -> Iterator[Batch]:
        """This rank's part of mini-batches until `steps` steps are done; those of steps done before are passed over.

        They are the model's `train_batches`, else its `example_batch`.
        """
        if self.model.train_batches is None:
            for step in range(self.step_index, steps):
                yield self.own_part(*self.example_batch(step))
            return
        for pair in islice(drawn_alike(self._epochs(), self.seed), self.step_index, steps):
            yield self.own_part(*pair)

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
    def step(self, inputs: Any, targets: Any) -> Iterator[float | None]:
        """Forward and backward of a mini-batch; the block then steps the optimizer, and both are timed together.

        Gradients are those of the mini-batch's loss: the mean over its samples, or over what `loss_count` counts. They
        are added to what is there. A mini-batch may be smaller than planned (the last one of an epoch); of what does
        not fill a micro-batch a smaller one is made. With replicas every rank gives its own part (`batches`,
        `own_part`), and gradients and loss are those of the whole. Yields the loss on the ranks with the first and the
        last stage. Under `fp16-mixed` there are no gradients on any stage after a step in which they overflowed, the
        optimizer then does nothing, and `skipped` is true.

        Raises:
            UsageError: The mini-batch is larger than planned.
        """
        with self.accumulate([(inputs, targets)]) as loss:
            yield loss

    @contextmanager
    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[float | None]:
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

    def evaluate(self, inputs: Any, targets: Any) -> float | None:
        """The loss of a batch of any size in evaluation mode; every rank must call it, with its own part of the batch.

        Training goes on as if it had not been called.

        Returns:
            The loss, on the ranks with the first and the last stage.
        """
        batch = Batch(inputs, targets)
        parts = list(parts_of(batch, size_of(batch) or self.balance.replica_batch, self._assembly.micro_batch_size))
        self.position.at("the evaluation")
        weights = self._weights(parts)
        losses: list[Tensor] = []
        first = 0
        with keeping_random_state():
            for part in parts:
                losses += self._evaluate(part, weights[first : first + part.micro_batches])
                first += part.micro_batches
        loss, _ = self._share_loss(torch.stack(losses).sum() if losses else None)
        self.position.at("between steps")
        return loss

    def report(self) -> RunReport | None:
        """What the run took, on rank 0; None elsewhere. Every rank must call it."""
        self._recorder.close()
        self.position.at("the report", waits_for=ANY)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self._stage_runs(), gathered if self.rank == 0 else None)
        runs = gather_runs(ProcessRun(self.rank, self.place.replica, self._recorder.steps), self.device)
        if runs is None:
            return None
        self.runs = runs
        stages = sorted((run for runs in gathered for run in runs), key=lambda run: (run.replica, run.index))
        waits = Waits.of(runs, stages, warm_up=WARM_UP_STEPS, overlaps=self.device.type == "cuda")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_name()
        return RunReport(
            generator=Generator(name="gpipe-plan", version=__version__),
            plan_digest=self.balance.plan_digest,
            seed=self.seed,
            device=Device(kind=self.device.type, name=name),
            environment=Environment(
                torch=str(torch.__version__),
                python=platform.python_version(),
                dtype=self.balance.dtype or dtype_of(self.modules[0]),
                threads=self.balance.threads,
            ),
            losses=tuple(self.losses),
            step_us=tuple(round(time, 1) for time in self._recorder.step_us),
            batch=self.balance.batch,
            samples_per_s=tuple(
                round(samples / time_us * 1e6, 1)
                for samples, time_us in zip(self._samples, self._recorder.step_us, strict=False)
            ),
            bubble=waits.bubble,
            overhead_us=waits.overhead_us,
            warmup_steps=WARM_UP_STEPS,
            stages=waits.stages,
            boundaries=waits.boundaries,
        )

    @property
    def last_step_us(self) -> float:
        """Time of the last step on this rank."""
        return self._recorder.step_us[-1]

    @property
    def last_step_samples(self) -> int:
        """Samples of the last step, over all replicas; on the ranks with the first and the last stage."""
        return self._samples[-1]

    def close(self) -> None:
        """Leaves the job."""
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

    def _stage_runs(self) -> list[StageRun]:
        described = [self.balance.stages[index] for index in self.place.stages]
        return [
            StageRun(
                index=stage.index,
                replica=self.place.replica,
                first=stage.layers[0],
                last=stage.layers[-1],
                forward_us=round(self._recorder.typical_us("forward", stage=stage.index), 1),
                backward_us=round(self._recorder.typical_us("backward", stage=stage.index), 1),
                recompute_us=round(self._recorder.typical_us("recompute", stage=stage.index), 1),
                parameter_bytes=sum(p.nbytes for p in module.parameters()),
                peak_bytes=self._recorder.peak_bytes,
                outside_bytes=self._recorder.outside_bytes,
            )
            for stage, module in zip(described, self.modules, strict=True)
        ]

    def _forward_backward(self, parts: Sequence[Part]) -> float | None:
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
        self.position.at("the loss", waits_for=self.place.num_stages - 1 if self.is_first else None)
        own_samples = sum(part.micro_batches * part.micro_batch_size for part in parts)
        loss, samples = self._share_loss(torch.stack(losses).sum() if losses else None, own_samples)
        if loss is not None:
            if self.is_last and self._loss_scale is None:
                check_losses(losses, loss, self.position)
            self.losses.append(loss)
            self._samples.append(samples)
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

    def _evaluate(self, part: Part, weights: Sequence[float]) -> list[Tensor]:
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
        self.modules[-1].targets = self._targets(part, weights)
        losses = forward.run(micro_batches_of(self._input_tensors(part), part.micro_batches))
        self.modules[-1].targets = []
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

    def _share_loss(self, loss: Tensor | None, samples: int = 0) -> tuple[float | None, int]:
        """Both summed over all replicas, on the ranks with the first and the last stage; no other rank waits for it."""
        place, group = self.place, self._groups.pipeline
        if loss is not None:
            sums = torch.stack([loss.double(), torch.full_like(loss, samples, dtype=torch.float64)])
            if self._groups.replicas is not None:
                dist.all_reduce(sums, group=self._groups.replicas)
            if not place.is_first:
                self._loss_sent = dist.isend(sums, place.rank_of(0), group=group)
        elif place.is_first:
            sums = torch.empty(2, dtype=torch.float64, device=self.device)
            dist.recv(sums, place.rank_of(place.num_stages - 1), group=group)
        else:
            return None, samples
        return float(sums[0]), int(sums[1])


# Private functions


def _load(balance: Balance, folder: Path) -> LoadedModel:
    path, colon, entry = balance.model.source.rpartition(":")
    optimizer = None if balance.optimizer in ("", "build_optimizer") else balance.optimizer
    settings = {name: str(value) for name, value in balance.model.settings.items()}
    source = f"{os.path.relpath(folder / path)}{colon}{entry}"
    loaded = load_model(
        source,
        settings=settings,
        inputs=balance.model.inputs,
        optimizer=optimizer,
        granularity=balance.model.granularity,
    )
    return in_precision(loaded, balance.dtype)


def _stage_name(balance: Balance, stage: int) -> str:
    layers = balance.stages[stage].layers
    return f"stage {stage} (layer{f's {layers[0]} to' * (len(layers) > 1)} {layers[-1]})"


def _device(name: str) -> torch.device:
    if name != "cuda":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= local:
        raise UsageError(
            f"the plan is for CUDA, and this machine has {torch.cuda.device_count()} CUDA devices for rank {local}",
            hint="run on the machine it was planned for, or pass `--device cpu` to try it out",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
