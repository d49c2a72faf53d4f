"""A model trained as a pipeline: this process is one stage of it."""

import functools
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils._pytree import tree_flatten, tree_map_only

from planner import __version__
from planner.core.balance import Balance
from planner.core.errors import ModelError, UsageError
from planner.core.profile import Device, Environment, Generator
from planner.core.run_report import RunReport, StageRun
from planner.executor.build import build_layers, build_structure
from planner.executor.engine import Engine
from planner.executor.evaluation import ForwardOnly
from planner.executor.gradients import clip_gradients
from planner.executor.loss_scale import LossScale
from planner.executor.losses import UNCOUNTED, loss_counts, weights_of
from planner.executor.parts import Part, micro_batches_of, parts_of, size_of
from planner.executor.random_state import StepSeeds, keeping_random_state, seed_process
from planner.executor.recorder import WARM_UP_STEPS, Recorder
from planner.executor.stage_module import Boundary, Shapes, StageModule, evaluating, shapes_of
from planner.executor.ties import TiedGradients
from planner.files import read_balance
from planner.model.autocast import autocast_dtype
from planner.model.chain import chain_digest, shared_parameters
from planner.model.load import Batch, LoadedModel, load_model, to_device
from planner.model.machine import cpu_name, keep_freed_memory
from planner.model.precision import dtype_of, in_precision, to_precision

__all__ = ["OneRankError", "Pipeline"]

_TIMEOUT = timedelta(minutes=10)
"""A stage that hears nothing for so long takes its neighbours for dead."""


class OneRankError(UsageError):
    """A mistake that this rank alone can see, so that it must be told by this rank."""


class Pipeline:
    """One stage of the pipeline that a `balance.yaml` describes; every rank of the job makes one.

    Args:
        balance_path: The balance configuration, as `gpipe-plan emit` writes it.
        seed: Of initial parameters, example batches and dropout.
        device: Overrides the device of the plan.

    Raises:
        UsageError: The number of processes is not the number of stages, or the device is missing.
        ModelError: The model is not the one that was planned.
    """

    def __init__(self, balance_path: str | Path, *, seed: int = 0, device: str | None = None) -> None:
        self.balance = read_balance(str(balance_path))
        self.seed = seed
        self.rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if num_processes != self.balance.num_stages:
            raise UsageError(
                f"the plan has {self.balance.num_stages} stages, but {num_processes} processes were started",
                hint=f"run `torchrun --nproc-per-node {self.balance.num_stages} train.py`",
            )
        self.device = _device(device or self.balance.device)
        torch.set_num_threads(self.balance.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.losses: list[float] = []
        self.step_index = 0
        """Steps since training began, also in an earlier process: what a step draws depends on it."""
        self.skipped = False
        """Whether the gradients of the last step overflowed (`fp16-mixed`) and were dropped, on all stages alike."""
        self._joined = False
        self._recorder = Recorder(self.device)
        try:
            seed_process(seed)  # a model that is made while its file is imported starts from it, too
            self.model = _load(self.balance, Path(balance_path).parent)
            self._join()
            self._module = self._build()
            is_float16 = autocast_dtype(self.balance.dtype) == torch.float16
            self._loss_scale = LossScale(self._module.parameters(), self.device) if is_float16 else None
        except BaseException:
            self.close()
            raise

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the first stage."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.rank == self.balance.num_stages - 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters under the names they have in the whole model."""
        return self._module.named_parameters()

    def optimizer(self, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """`build(parameters)` over this stage's trainable parameters."""
        parameters = [p for _, p in self.named_parameters() if p.requires_grad]
        # A stage of pooling and reshaping has nothing to optimize, which torch's optimizers refuse.
        return build(iter(parameters or [nn.Parameter(torch.zeros(0))]))

    def batches(self, steps: int) -> Iterator[Batch]:
        """`steps` mini-batches: the model's `train_batches`, else its `example_batch`.

        The same on every rank, but inputs are kept on the first and targets on the last: of the others there are only
        shapes (tensors on the meta device).
        """
        if self.model.train_batches is None:
            for step in range(steps):
                yield self._own_part(self.example_batch(step))
            return
        made = 0
        while made < steps:
            before = made
            for pair in self.model.train_batches(self.balance.batch):
                if made == steps:
                    return
                yield self._own_part(Batch(*pair))
                made += 1
            if made == before:
                raise ModelError("`train_batches` is empty")

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
        not fill a micro-batch a smaller one is made. Yields the loss on the first and last rank. Under `fp16-mixed`
        there are no gradients on any stage after a step in which they overflowed, the optimizer then does nothing, and
        `skipped` is true.

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
        with self._recorder.step():
            yield self._forward_backward(parts)

    def clip_gradients(self, max_norm: float) -> float:
        """As `torch.nn.utils.clip_grad_norm_` of the whole model; every rank must call it, within the block of a step.

        Returns:
            The norm of all gradients before.
        """
        counted_elsewhere = self._tied.counted_elsewhere
        return clip_gradients(self._module.parameters(), max_norm, self.device, counted_elsewhere=counted_elsewhere)

    def evaluate(self, inputs: Any, targets: Any) -> float | None:
        """The loss of a batch of any size in evaluation mode, on the first and last rank; every rank must call it.

        Training goes on as if it had not been called.
        """
        batch = Batch(inputs, targets)
        parts = list(parts_of(batch, size_of(batch) or self.balance.batch, self._micro_batch_size))
        weights = self._weights(parts)
        losses: list[Tensor] = []
        first = 0
        with keeping_random_state():
            for part in parts:
                losses += self._evaluate(part, weights[first : first + part.micro_batches])
                first += part.micro_batches
        return self._share_loss(torch.stack(losses).sum() if losses else None)

    def report(self) -> RunReport | None:
        """What the run took, on rank 0; None elsewhere. Every rank must call it."""
        self._recorder.close()
        mine = StageRun(
            index=self.rank,
            first=self.balance.stages[self.rank].layers[0],
            last=self.balance.stages[self.rank].layers[-1],
            forward_us=round(self._recorder.typical_us("forward"), 1),
            backward_us=round(self._recorder.typical_us("backward"), 1),
            parameter_bytes=sum(p.nbytes for _, p in self.named_parameters()),
            peak_bytes=self._recorder.peak_bytes,
        )
        stages: list[Any] = [None] * self.balance.num_stages
        dist.gather_object(mine, stages if self.is_first else None)
        if not self.is_first:
            return None
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_name()
        return RunReport(
            generator=Generator(name="gpipe-plan", version=__version__),
            plan_digest=self.balance.plan_digest,
            seed=self.seed,
            device=Device(kind=self.device.type, name=name),
            environment=Environment(
                torch=str(torch.__version__),
                python=platform.python_version(),
                dtype=self.balance.dtype or dtype_of(self._module),
                threads=self.balance.threads,
            ),
            losses=tuple(self.losses),
            step_us=tuple(round(time, 1) for time in self._recorder.step_us),
            warmup_steps=WARM_UP_STEPS,
            stages=tuple(stages),
        )

    @property
    def last_step_us(self) -> float:
        """Time of the last step on this rank."""
        return self._recorder.step_us[-1]

    def close(self) -> None:
        """Leaves the job."""
        self._recorder.close()
        if self._joined:
            dist.destroy_process_group()

    # Private methods

    def _own_part(self, batch: Batch) -> Batch:
        # Shapes stay, so that every rank finds the same sizes.
        def shapes(value: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), value)

        inputs, targets = batch
        return Batch(inputs if self.is_first else shapes(inputs), targets if self.is_last else shapes(targets))

    @property
    def _micro_batch_size(self) -> int:
        return self.balance.batch // self.balance.micro_batches

    def _parts(self, batch: Batch) -> Iterator[Part]:
        size = size_of(batch) or self.balance.batch
        if size > self.balance.batch:
            raise UsageError(
                f"got a mini-batch of {size} samples, the plan is for {self.balance.batch}",
                hint="plan for this batch, or give it in pieces to `accumulate`",
            )
        yield from parts_of(batch, size, self._micro_batch_size)

    def _make_engine(self, part: Part) -> None:
        """Made on every rank before anything is sent: a micro-batch too small for a layer is found on all of them."""
        try:
            self._engine(part.micro_batches, part.micro_batch_size)
        except ModelError as error:
            raise ModelError(
                f"the last {part.micro_batch_size} samples of a mini-batch cannot be a micro-batch: {error}",
                hint="drop the last mini-batch (`drop_last=True`), or choose a batch that fits the data",
            ) from error

    def _join(self) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._joined = not dist.is_initialized()
        if not self._joined:
            return  # the caller's group, which the caller leaves
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())

    def _build(self) -> StageModule:
        balance = self.balance
        chain = build_structure(self.model)
        _check_same_model(balance, chain.names, chain_digest(chain, self.model.settings, balance.dtype))
        ends = [sum(balance.balance[: k + 1]) for k in range(balance.num_stages)]
        first, end = ends[self.rank] - balance.balance[self.rank], ends[self.rank]

        @functools.cache
        def shapes_for(size: int, *, training: bool) -> Shapes:
            inputs = tree_map_only(Tensor, lambda tensor: tensor[:size], self.example_batch(0).inputs)
            with nullcontext() if training else evaluating(chain.model):
                return shapes_of(chain, inputs, precision=balance.dtype, device=self.device)

        shapes = shapes_for(self._micro_batch_size, training=True)
        stage = balance.stages[self.rank]
        apart = bool(stage.recomputed)
        layers = build_layers(self.model, chain, first, end, seed=self.seed, device=self.device, apart=apart)
        recomputed = {stage.layers.index(n): shapes.recomputed(chain.names.index(n), end) for n in stage.recomputed}
        module = StageModule(
            layers,
            received=shapes.boundaries[first],
            recompute=stage.recompute,
            micro_batches=balance.micro_batches,
            loss_fn=self.model.loss_fn if self.is_last else None,
            # A first layer that is recomputed makes its own copy: what it keeps is then the received tensor itself.
            copies_input=shapes.stage_writes_input(first, end) and 0 not in recomputed,
            carries=() if self.is_last else [t.requires_grad for t in shapes.boundaries[end].tensors],
            recomputed=recomputed,
            first_layer=first,
        )
        stage_of = [k for k, count in enumerate(balance.balance) for _ in range(count)]
        self._tied = TiedGradients(
            shared_parameters(chain.layers), dict(module.named_parameters(remove_duplicate=False)), self.rank, stage_of
        )
        # What the script draws from here on (the order of its data) is the same on every rank.
        seed_process(self.seed * 1_000_003 + 7919)

        @functools.cache
        def engine_for(micro_batches: int, size: int) -> Engine:
            return self._engine_for(module, shapes_for(size, training=True), first, end, micro_batches)

        def received(size: int, *, training: bool) -> Boundary:
            return shapes_for(size, training=training).boundaries[first]

        # What a last smaller mini-batch needs is made when it comes.
        self._engine, self._received = engine_for, received
        engine_for(balance.micro_batches, self._micro_batch_size)
        return module

    def _engine_for(self, module: StageModule, shapes: Shapes, first: int, end: int, micro_batches: int) -> Engine:
        loss = torch.empty((), device="meta", requires_grad=True)
        return Engine(
            module,
            index=self.rank,
            num_stages=self.balance.num_stages,
            device=self.device,
            received=shapes.boundaries[first].tensors,
            sent=(loss,) if self.is_last else shapes.boundaries[end].tensors,
            schedule=self.balance.schedule,
            micro_batches=micro_batches,
            timer=self._recorder.timed,
            precision=self.balance.dtype,
        )

    def _forward_backward(self, parts: Sequence[Part]) -> float | None:
        weights = self._weights(parts)
        self._tied.begin()
        if self._loss_scale is not None:
            self._loss_scale.begin()
        losses: list[Tensor] = []
        first = 0
        with keeping_random_state():
            for part in parts:
                self._module.seeds = StepSeeds(self.seed, self.step_index, first)
                losses += self._run(part, weights[first : first + part.micro_batches])
                first += part.micro_batches
        self._module.statistics.commit()
        self._tied.sum()
        self.skipped = self._loss_scale is not None and not self._loss_scale.unscale()
        self.step_index += 1
        loss = self._share_loss(torch.stack(losses).sum() if losses else None)
        if loss is not None:
            self.losses.append(loss)
        return loss

    def _weights(self, parts: Sequence[Part]) -> list[float]:
        """What the loss of each micro-batch counts for; on the last rank."""
        if not self.is_last:
            return []
        counts = [float(part.micro_batch_size) for part in parts for _ in range(part.micro_batches)]
        if self.model.loss_count is not None:
            targets = [target for part in parts for target in part.targets()]
            try:
                counts = loss_counts(self.model.loss_count, targets, self.model.source)
            except ModelError as error:
                raise OneRankError(str(error), hint=error.hint) from error
        return weights_of(counts)

    def _run(self, part: Part, weights: Sequence[float]) -> list[Tensor]:
        """Forward and backward; on the last rank, what each loss adds to that of the mini-batch."""
        engine = self._engine(part.micro_batches, part.micro_batch_size)
        self._module.received = self._received(part.micro_batch_size, training=True)
        if self._loss_scale is not None:
            engine.loss_scale = self._loss_scale.value
        return engine.step(self._input_tensors(part), self._targets(part, weights), weights)

    def _evaluate(self, part: Part, weights: Sequence[float]) -> list[Tensor]:
        """The same without gradients."""
        forward = ForwardOnly(
            module=self._module,
            device=self.device,
            precision=self.balance.dtype,
            before=None if self.is_first else self.rank - 1,
            behind=None if self.is_last else self.rank + 1,
        )
        received = self._module.received = self._received(part.micro_batch_size, training=False)
        self._module.targets = self._targets(part, weights)
        inputs = micro_batches_of(self._input_tensors(part), part.micro_batches)
        losses = forward.run(inputs, received.tensors)
        self._module.targets = []
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

    def _share_loss(self, loss: Tensor | None) -> float | None:
        """Sends the last rank's loss to the first, without holding any rank up."""
        if self.is_first and self.is_last:
            return float(loss) if loss is not None else None
        if self.is_last and loss is not None:
            self._loss_sent = dist.isend(loss.float().reshape(1), 0)
            return float(loss)
        if self.is_first:
            received = torch.empty(1, device=self.device)
            dist.recv(received, self.balance.num_stages - 1)
            return float(received)
        return None


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


def _device(name: str) -> torch.device:
    if name != "cuda":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= local:
        raise OneRankError(
            f"the plan is for CUDA, and this machine has {torch.cuda.device_count()} CUDA devices for rank {local}",
            hint="run on the machine it was planned for, or pass `--device cpu` to try it out",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _check_same_model(balance: Balance, names: tuple[str, ...], digest: str) -> None:
    planned = tuple(name for stage in balance.stages for name in stage.layers)
    changed = [(a, b) for a, b in zip(planned, names, strict=False) if a != b]
    if planned != names:
        what = f'"{changed[0][1]}" stands where "{changed[0][0]}" was' if changed else f"{len(names)} layers"
        raise ModelError(
            f"the model is not the one that was planned: {what} (planned were {len(planned)} layers)",
            hint="profile, solve and emit again",
        )
    if balance.model.digest and digest != balance.model.digest:
        raise ModelError(
            f"the model has changed since it was planned (digest {digest[:19]}…, planned {balance.model.digest[:19]}…)",
            hint="profile, solve and emit again",
        )
