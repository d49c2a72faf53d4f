"""A model trained as a pipeline: this process runs a stage of it, or several under interleaved 1F1B."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import accumulate
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
from planner.core.run_waits import ProcessRun, Waits
from planner.executor.build import StageRange, build_stages, build_structure
from planner.executor.engine import Engine, EngineStage
from planner.executor.loss_scale import LossScale
from planner.executor.placement import Groups, place_of
from planner.executor.recorder import WARM_UP_STEPS, Recorder
from planner.executor.replicas import ReplicaGradients
from planner.executor.stage_module import Shapes, StageModule, shapes_of
from planner.executor.ties import TiedGradients
from planner.executor.timeline import gather_runs
from planner.files import read_balance
from planner.model.autocast import autocast_dtype
from planner.model.chain import Chain, Layer, chain_digest, shared_parameters
from planner.model.load import Batch, LoadedModel, load_model, to_device
from planner.model.machine import cpu_name, keep_freed_memory
from planner.model.precision import dtype_of, in_precision, to_precision

__all__ = ["OneRankError", "Pipeline"]

_TIMEOUT = timedelta(minutes=10)
"""A stage that hears nothing for so long takes its neighbours for dead."""


class OneRankError(UsageError):
    """A mistake that this rank alone can see, so that it must be told by this rank."""


class Pipeline:
    """One process of the pipelines that a `balance.yaml` describes; every rank of the job makes one.

    Args:
        balance_path: The balance configuration, as `gpipe-plan emit` writes it.
        seed: Of initial parameters, example batches and dropout.
        device: Overrides the device of the plan.

    Raises:
        UsageError: The number of processes is not what the plan needs, or the device is missing.
        ModelError: The model is not the one that was planned.
    """

    def __init__(self, balance_path: str | Path, *, seed: int = 0, device: str | None = None) -> None:
        self.balance = read_balance(str(balance_path))
        self.seed = seed
        rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.place = place_of(self.balance, rank, num_processes)
        self.device = _device(device or self.balance.device)
        torch.set_num_threads(self.balance.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.losses: list[float] = []
        self.runs: list[ProcessRun] = []
        """What every process did in the last steps; on rank 0, once there is a report."""
        self._joined = False
        self._recorder = Recorder(self.device)
        try:
            torch.manual_seed(seed)  # a model that is made while its file is imported starts from it, too
            self.model = _load(self.balance, Path(balance_path).parent)
            self._join()
            self._groups = Groups.of(self.place)
            self._modules, self._engine = self._build()
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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model; each once."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self._modules:
            for name, parameter in module.named_parameters():
                named.setdefault(id(parameter), (name, parameter))
        return iter(named.values())

    def optimizer(self, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """`build(parameters)` over this stage's trainable parameters."""
        parameters = [p for _, p in self.named_parameters() if p.requires_grad]
        # A stage of pooling and reshaping has nothing to optimize, which torch's optimizers refuse.
        return build(iter(parameters or [nn.Parameter(torch.zeros(0))]))

    def batches(self, steps: int) -> Iterator[Batch]:
        """This rank's part of `steps` mini-batches: the model's `train_batches`, else its `example_batch`."""
        if self.model.train_batches is None:
            for step in range(steps):
                yield self.own_part(*self.example_batch(step))
            return
        made = 0
        while made < steps:
            before = made
            for pair in self.model.train_batches(self.balance.batch):
                if made == steps:
                    return
                yield self.own_part(*pair)
                made += 1
            if made == before:
                raise ModelError("`train_batches` is empty")

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """What this rank needs of a mini-batch that every rank has: its replica's samples.

        Inputs are kept with the first stage and targets with the last: the others are None.
        """
        batch = Batch(inputs, targets)
        # The size is checked before anything is dropped, so that every rank finds a wrong one.
        self._check_size(batch, self.balance.batch)
        if self.place.num_replicas > 1:
            size = self.balance.replica_batch
            first = self.place.replica * size
            # Copies: views would keep the other replicas' samples in memory.
            batch = Batch(*tree_map_only(Tensor, lambda t: t[first : first + size].clone(), tuple(batch)))
        return Batch(batch.inputs if self.is_first else None, batch.targets if self.is_last else None)

    def example_batch(self, step: int) -> Batch:
        """The example mini-batch of a step: a function of seed and step alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + step)
            return self.model.example_batch(self.balance.batch)

    @contextmanager
    def step(self, inputs: Any, targets: Any) -> Iterator[float | None]:
        """Forward and backward of a mini-batch; the block then steps the optimizer, and both are timed together.

        With replicas every rank gives its own part (`batches`, `own_part`). Gradients are those of the mean loss over
        the whole mini-batch. Yields that loss on the ranks with the first and the last stage. Under
        `fp16-mixed` there are none on any stage in a step whose gradients overflowed: the optimizer then does nothing.
        """
        batch = Batch(inputs, targets)
        self._check_size(batch, self.balance.replica_batch)
        with self._recorder.step():
            loss = self._forward_backward(batch)
            with self._recorder.optimizer(stage=self.place.stages[0]):
                yield loss

    def report(self) -> RunReport | None:
        """What the run took, on rank 0; None elsewhere. Every rank must call it."""
        self._recorder.close()
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
                dtype=self.balance.dtype or dtype_of(self._modules[0]),
                threads=self.balance.threads,
            ),
            losses=tuple(self.losses),
            step_us=tuple(round(time, 1) for time in self._recorder.step_us),
            batch=self.balance.batch,
            samples_per_s=tuple(round(self.balance.batch / time * 1e6, 1) for time in self._recorder.step_us),
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

    def close(self) -> None:
        """Leaves the job."""
        self._recorder.close()
        if self._joined:
            dist.destroy_process_group()

    # Private methods

    def _check_size(self, batch: Batch, expected: int) -> None:
        sizes = {leaf.shape[0] for leaf in tree_flatten(tuple(batch))[0] if isinstance(leaf, Tensor)}
        for size in sizes - {expected}:
            if size == self.balance.batch:
                raise UsageError(
                    f"got a mini-batch of {size} samples for a pipeline that is one of {self.balance.replicas}",
                    hint=f"give each its own {expected}: `inputs, targets = pipeline.own_part(inputs, targets)`",
                )
            raise UsageError(
                f"got a mini-batch of {size} samples, the plan is for {expected}",
                hint="drop or pad the last one (`drop_last=True`), or plan for this batch",
            )

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
            for stage, module in zip(described, self._modules, strict=True)
        ]

    def _join(self) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._joined = not dist.is_initialized()
        if not self._joined:
            return  # the caller's group, which the caller leaves
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())

    def _build(self) -> tuple[list[StageModule], Engine]:
        balance, place = self.balance, self.place
        chain = build_structure(self.model)
        _check_same_model(balance, chain.names, chain_digest(chain, self.model.settings, balance.dtype))
        samples = balance.replica_batch // balance.micro_batches
        micro_batch = tree_map_only(Tensor, lambda t: t[:samples], self.example_batch(0).inputs)
        shapes = shapes_of(chain, micro_batch, precision=balance.dtype, device=self.device)
        cuts = list(accumulate(balance.balance, initial=0))
        ranges = [StageRange(cuts[k], cuts[k + 1], bool(balance.stages[k].recomputed)) for k in place.stages]
        built = build_stages(self.model, chain, ranges, seed=self.seed, device=self.device)
        modules = [self._module(chain, shapes, *stage) for stage in zip(place.stages, ranges, built, strict=True)]
        for index, module in zip(place.stages, modules, strict=True):
            module.timed_again = partial(self._recorder.timed_again, stage=index)
        stage_of = [k for k, count in enumerate(balance.balance) for _ in range(count)]
        named = {name: p for module in modules for name, p in module.named_parameters(remove_duplicate=False)}
        self._tied = TiedGradients(shared_parameters(chain.layers), named, place, stage_of)
        self._replicas = self._replica_gradients(modules)
        # From here on only what a step draws (dropout) uses the random state: another one for every rank.
        torch.manual_seed(self.seed * 1_000_003 + 7919 * (self.rank + 1))
        return modules, self._engine_for(modules, shapes, ranges)

    def _module(
        self, chain: Chain, shapes: Shapes, index: int, layers: StageRange, built: tuple[Layer, ...]
    ) -> StageModule:
        stage, end, is_last = self.balance.stages[index], layers.end, index == self.place.num_stages - 1
        recomputed = {stage.layers.index(n): shapes.recomputed(chain.names.index(n), end) for n in stage.recomputed}
        return StageModule(
            built,
            received=shapes.boundaries[layers.first],
            recompute=stage.recompute,
            micro_batches=self.balance.micro_batches,
            loss_fn=self.model.loss_fn if is_last else None,
            # A first layer that is recomputed makes its own copy: what it keeps is then the received tensor itself.
            copies_input=shapes.stage_writes_input(layers.first, end) and 0 not in recomputed,
            carries=() if is_last else [t.requires_grad for t in shapes.boundaries[end].tensors],
            recomputed=recomputed,
        )

    def _replica_gradients(self, modules: Sequence[StageModule]) -> ReplicaGradients | None:
        if self._groups.replicas is None:
            return None
        tied = set(self._tied.parameters)  # summed over the replicas, too
        own = [[p for p in module.parameters() if p.requires_grad and p not in tied] for module in modules]
        return ReplicaGradients(own, self._groups.replicas)

    def _engine_for(self, modules: Sequence[StageModule], shapes: Shapes, ranges: Sequence[StageRange]) -> Engine:
        loss = torch.empty((), device="meta", requires_grad=True)
        place, last = self.place, self.place.num_stages - 1
        stages = [
            EngineStage(
                module=module,
                index=index,
                received=shapes.boundaries[layers.first].tensors,
                sent=(loss,) if index == last else shapes.boundaries[layers.end].tensors,
                timer=partial(self._recorder.timed, stage=index),
                last_backward=partial(self._replicas.last_backward, n) if self._replicas else nullcontext,
            )
            for n, (index, module, layers) in enumerate(zip(place.stages, modules, ranges, strict=True))
        ]
        return Engine(
            stages,
            num_stages=place.num_stages,
            ranks=[place.rank_of(position) for position in range(place.num_devices)],
            device=self.device,
            schedule=self.balance.schedule,
            micro_batches=self.balance.micro_batches,
            group=self._groups.pipeline,
            precision=self.balance.dtype,
        )

    def _forward_backward(self, batch: Batch) -> float | None:
        tensors: Sequence[Tensor] = ()
        targets: Sequence[Any] = ()
        if self.is_first:
            inputs = to_precision(to_device(batch.inputs, self.device), self.balance.dtype)
            leaves = tree_flatten(inputs)[0]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.is_last:
            targets = _micro_batches(to_device(batch.targets, self.device), self.balance.micro_batches)
        if self._loss_scale is not None:
            self._engine.loss_scale = self._loss_scale.value
        losses = self._engine.step(tensors, targets)
        if self._replicas is not None:
            self._replicas.finish()
        self._tied.sum()
        self._average()
        if self._loss_scale is not None:
            self._loss_scale.unscale()
        loss = self._share_loss(torch.stack(losses).mean() if losses else None)
        if loss is not None:
            self.losses.append(loss)
        return loss

    def _average(self) -> None:
        """Gradients are sums over all micro-batches of all replicas, and become means."""
        gradients = [p.grad for _, p in self.named_parameters() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self.balance.micro_batches * self.balance.replicas)

    def _share_loss(self, loss: Tensor | None) -> float | None:
        """The mean over all replicas, on the ranks with the first and the last stage; no other rank waits for it."""
        place, group = self.place, self._groups.pipeline
        if loss is not None:
            loss = loss.float().reshape(1)
            if self._groups.replicas is not None:
                dist.all_reduce(loss, group=self._groups.replicas)
                loss /= place.num_replicas
            if not place.is_first:
                self._loss_sent = dist.isend(loss, place.rank_of(0), group=group)
            return float(loss)
        if place.is_first:
            loss = torch.empty(1, device=self.device)
            dist.recv(loss, place.rank_of(place.num_stages - 1), group=group)
            return float(loss)
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


def _micro_batches(value: Any, count: int) -> list[Any]:
    """`value` cut into `count` along the first dimension of its tensors; views, not copies."""
    size = next((leaf.shape[0] for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)), 0) // count

    def cut(i: int) -> Any:
        return tree_map_only(Tensor, lambda t: t[i * size : (i + 1) * size], value)

    return [cut(i) for i in range(count)]
