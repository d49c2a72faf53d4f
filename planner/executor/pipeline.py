"""A model trained as a pipeline: this process is one stage of it."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
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
from planner.executor.draws import drawn_alike
from planner.executor.engine import Engine
from planner.executor.failure import Watch, check_gradients, check_losses
from planner.executor.loss_scale import LossScale
from planner.executor.position import ANY, Position
from planner.executor.recorder import WARM_UP_STEPS, Recorder
from planner.executor.stage_module import Shapes, StageModule, shapes_of
from planner.executor.store import job_store
from planner.executor.ties import TiedGradients
from planner.executor.weights import first_names
from planner.files import digest_of, read_balance
from planner.model.autocast import autocast_dtype
from planner.model.chain import chain_digest, shared_parameters
from planner.model.load import Batch, LoadedModel, load_model, to_device
from planner.model.machine import cpu_name, keep_freed_memory
from planner.model.precision import dtype_of, in_precision, to_precision

__all__ = ["Pipeline"]


class Pipeline:
    """One stage of the pipeline that a `balance.yaml` describes; every rank of the job makes one.

    Args:
        balance_path: The balance configuration, as `gpipe-plan emit` writes it.
        seed: Of initial parameters, example batches and dropout.
        device: Overrides the device of the plan.
        timeout_s: A transfer that takes so long fails.
        check_nan: Whether every output and gradient must be finite, not the loss alone; waits for the device.
        watch: Is told what this rank is doing.

    Raises:
        UsageError: The number of processes is not the number of stages, or the device is missing.
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
        self.step_index = 0
        """Number of the next step; a checkpoint sets it."""
        self._timeout = timedelta(seconds=timeout_s)
        self._check_nan = check_nan
        self.rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if num_processes != self.balance.num_stages:
            raise UsageError(
                f"the plan has {self.balance.num_stages} stages, but {num_processes} processes were started",
                hint=f"run `torchrun --nproc-per-node {self.balance.num_stages} train.py`",
            )
        self.watch = watch
        self.position = watch.position if watch is not None else Position()
        self.position.names = {k: _stage_name(self.balance, k) for k in range(self.balance.num_stages)}
        self.position.stages = (self.rank,)
        self.position.predicted_bytes = {stage.index: stage.peak_bytes for stage in self.balance.stages}
        self.device = _device(device or self.balance.device)
        torch.set_num_threads(self.balance.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.losses: list[float] = []
        self._joined = False
        self._recorder = Recorder(self.device)
        try:
            torch.manual_seed(seed)  # a model that is made while its file is imported starts from it, too
            self.model = _load(self.balance, Path(balance_path).parent)
            self._join()
            self._module, self._engine = self._build()
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

    def named_tensors(self) -> dict[str, Tensor]:
        """This stage's part of the model's state dict: parameters and persistent buffers, under their names there."""
        module = self._module
        held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {name: tensor for name, tensor in held if name in self.first_names}

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
        """Mini-batches until `steps` steps are done: the model's `train_batches`, else its `example_batch`.

        The same on every rank, but inputs are kept on the first and targets on the last: the others are None. After a
        checkpoint those of the steps done are passed over.
        """
        if self.model.train_batches is None:
            for step in range(self.step_index, steps):
                yield self._own_part(self.example_batch(step))
            return
        for pair in islice(drawn_alike(self._epochs(), self.seed), self.step_index, steps):
            yield self._own_part(Batch(*pair))

    def example_batch(self, step: int) -> Batch:
        """The example mini-batch of a step: a function of seed and step alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + step)
            return self.model.example_batch(self.balance.batch)

    @contextmanager
    def step(self, inputs: Any, targets: Any) -> Iterator[float | None]:
        """Forward and backward of a mini-batch; the block then steps the optimizer, and both are timed together.

        Gradients are those of the mean loss over the mini-batch. Yields that loss on the first and last rank. Under
        `fp16-mixed` there are none on any stage in a step whose gradients overflowed: the optimizer then does nothing.
        """
        batch = Batch(inputs, targets)
        self._check_size(batch)
        self.position.step = self.step_index
        with self._recorder.step():
            yield self._forward_backward(batch)
        self.step_index += 1

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
        self.position.at("the report", waits_for=ANY)
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

    def _own_part(self, batch: Batch) -> Batch:
        # The size is checked before anything is dropped, so that every rank finds a wrong one.
        self._check_size(batch)
        return Batch(batch.inputs if self.is_first else None, batch.targets if self.is_last else None)

    def _check_size(self, batch: Batch) -> None:
        sizes = {leaf.shape[0] for leaf in tree_flatten(tuple(batch))[0] if isinstance(leaf, Tensor)}
        for size in sizes - {self.balance.batch}:
            raise UsageError(
                f"got a mini-batch of {size} samples, the plan is for {self.balance.batch}",
                hint="drop or pad the last one (`drop_last=True`), or plan for this batch",
            )

    def _join(self) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if dist.is_initialized():
            return  # the caller's group, which the caller leaves
        if "RANK" not in os.environ:
            dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
            self._joined = True
            return
        self.position.at("joining the others", waits_for=ANY)
        # The watch, which knows more, is to find out first.
        timeout = self._timeout + timedelta(seconds=30)
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=timeout, store=job_store(timeout), rank=self.rank, world_size=world)
        self._joined = True
        self._check_same_start()

    def _check_same_start(self) -> None:
        """Refuses, on every rank, to start with ranks that were told different things."""
        mine = {
            "balance.yaml": digest_of(self.balance),
            "--seed": self.seed,
            "--device": self.device.type,
            "torch": str(torch.__version__),
        }
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        for what, value in told[0].items():
            others = [rank for rank, its in enumerate(told) if its[what] != value]
            if others:
                raise UsageError(
                    f"rank {others[0]} has another {what} ({told[others[0]][what]}) than rank 0 ({value})",
                    hint="give every process the same files and the same command line, also on other machines",
                )

    def _build(self) -> tuple[StageModule, Engine]:
        balance = self.balance
        self.position.at("building the model")
        chain = build_structure(self.model)
        _check_same_model(balance, chain.names, chain_digest(chain, self.model.settings, balance.dtype))
        micro_batch = _micro_batches(self.example_batch(0).inputs, balance.micro_batches)[0]
        self.first_names = first_names(chain.model)
        shapes = shapes_of(chain, micro_batch, precision=balance.dtype, device=self.device)
        ends = [sum(balance.balance[: k + 1]) for k in range(balance.num_stages)]
        first, end = ends[self.rank] - balance.balance[self.rank], ends[self.rank]
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
        )
        stage_of = [k for k, count in enumerate(balance.balance) for _ in range(count)]
        self._tied = TiedGradients(
            shared_parameters(chain.layers), dict(module.named_parameters(remove_duplicate=False)), self.rank, stage_of
        )
        # From here on only what a step draws (dropout) uses the random state: another one for every stage.
        torch.manual_seed(self.seed * 1_000_003 + 7919 * (self.rank + 1))
        return module, self._engine_for(module, shapes, first, end)

    def _engine_for(self, module: StageModule, shapes: Shapes, first: int, end: int) -> Engine:
        loss = torch.empty((), device="meta", requires_grad=True)
        return Engine(
            module,
            index=self.rank,
            num_stages=self.balance.num_stages,
            device=self.device,
            received=shapes.boundaries[first].tensors,
            sent=(loss,) if self.is_last else shapes.boundaries[end].tensors,
            schedule=self.balance.schedule,
            micro_batches=self.balance.micro_batches,
            timer=self._recorder.timed,
            precision=self.balance.dtype,
            position=self.position,
            check_nan=self._check_nan,
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
        self.position.at("the gradients", waits_for=ANY)
        self._tied.sum()
        if self._loss_scale is not None:
            self._loss_scale.unscale()
        elif self._check_nan:
            check_gradients(dict(self.named_parameters()), self.position)
        self.position.at("the loss", waits_for=self.balance.num_stages - 1 if self.is_first else None)
        loss = self._share_loss(torch.stack(losses).mean() if losses else None)
        if loss is not None:
            if self.is_last and self._loss_scale is None:
                check_losses(losses, loss, self.position)
            self.losses.append(loss)
        self.position.at("between steps")
        return loss

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
