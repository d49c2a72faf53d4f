"""What a rank of a thousand reads of a checkpoint when it resumes: files that it opens, and seconds of CPU.

    python benchmarks/resume.py [--ranks N]

The checkpoint is synthetic: a Transformer with a layer per stage and an output tied to the embedding, under Adam, with
the random states that a run has. All tensors are small, so that what is measured is opening and parsing, not copying.
Each row is the largest of a few ranks, each in a process of its own, which reads as a run does
(`planner.executor.read_checkpoint`): weights, optimizer state, and the rank's state.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import safetensors
import torch
from torch import Tensor, nn

from planner.device.machine import cpu_name
from planner.executor.keep import rank_file
from planner.executor.keep.index import INDEX, PYTHON, CheckpointIndex, rank_file_name, write_index
from planner.executor.keep.json_state import to_json
from planner.executor.keep.optimizer_state import OptimizerState
from planner.executor.keep.stored import name_in_rank_file
from planner.executor.read_checkpoint import read_checkpoint
from planner.executor.run.random_state import HostRandomStates

PARTS = ("ln_1", "attn.qkv", "attn.out", "ln_2", "mlp.up", "mlp.down")
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
COMPUTATION = {"loss": "0" * 64, "layers": "0" * 64}
SIZE = 8


class Job:
    """A job of `stages` times `replicas` ranks, in place of a pipeline."""

    def __init__(self, stages: int, replicas: int) -> None:
        self.stages, self.replicas = stages, replicas
        layers = [
            f"transformer.h.{n}.{part}.{kind}" for n in range(stages) for part in PARTS for kind in ("weight", "bias")
        ]
        self.canonical_names = {EMBEDDING: EMBEDDING, **{name: name for name in layers}, HEAD: EMBEDDING}

    def parameters(self, rank: int) -> dict[str, Tensor]:
        """Return the parameters of a rank by name in the model."""
        stage = rank % self.stages
        names = [f"transformer.h.{stage}.{part}.{kind}" for part in PARTS for kind in ("weight", "bias")]
        names = [*([EMBEDDING] if stage == 0 else []), *names, *([HEAD] if stage == self.stages - 1 else [])]
        return {name: nn.Parameter(torch.full((SIZE,), float(stage))) for name in names}

    def optimizer(self, rank: int, *, stepped: bool) -> tuple[dict[str, Tensor], OptimizerState]:
        """Return the parameters of a rank and their optimizer, after a step if `stepped`."""
        parameters = self.parameters(rank)
        optimizer = torch.optim.AdamW(parameters.values())
        if stepped:
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameters, OptimizerState(optimizer, parameters, self.canonical_names)

    def write(self, folder: Path) -> None:
        """Write a checkpoint of all ranks."""
        folder.mkdir()
        files = []
        random = HostRandomStates.seeded(0).plain()
        for rank in range(self.stages * self.replicas):
            parameters, optimizer = self.optimizer(rank, stepped=True)
            tensors: dict[str, Tensor] = {}
            state: dict[str, Any] = {"optimizer": {}}
            if rank < self.stages:
                tensors = {name_in_rank_file(self.canonical_names[name]): p.detach() for name, p in parameters.items()}
                for name, held in optimizer.state_by_name().items():
                    state["optimizer"][name] = to_json(held, f"optimizer[{name!r}]", tensors)
            others = {"pipeline": {"step_index": 1}, "device_random": None, "others": {"schedule": {"last_epoch": 1}}}
            parts = {"groups": optimizer.parameter_groups(), "random": random, **others}
            state |= {part: to_json(value, part, tensors) for part, value in parts.items()}
            with (folder / rank_file_name(rank)).open("wb") as file:
                files.append(rank_file.write_rank_file(file, state, tensors))
        index = CheckpointIndex(
            step=1,
            seed=0,
            plan_digest="",
            balance=(1,) * self.stages,
            torch=str(torch.__version__),
            python=PYTHON,
            computation=COMPUTATION,
            files=tuple(files),
            tensors={EMBEDDING: 0}
            | {name: int(name.split(".")[2]) for name in self.canonical_names if ".h." in name}
            | {HEAD: EMBEDDING},
        )
        write_index(folder, index)

    def read(self, folder: Path, rank: int) -> tuple[list[str], float]:
        """Read what a rank reads; return the files that it opened, and seconds of CPU."""
        opened: list[str] = []

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(folder) in str(arguments[0]):
                opened.append(Path(arguments[0]).name)

        def open_counted(path: Path, **options: Any) -> Any:
            opened.append(path.name)  # Python does not see what the package opens
            return safetensors.safe_open(path, **options)

        parameters, optimizer = self.optimizer(rank, stepped=False)
        place = SimpleNamespace(
            stages=[rank % self.stages], rank_of=lambda stage, replica: replica * self.stages + stage
        )
        pipeline: Any = SimpleNamespace(
            rank=rank,
            place=place,
            balance=SimpleNamespace(balance=(1,) * self.stages),
            code_digests=COMPUTATION,
            canonical_names=self.canonical_names,
            named_tensors=lambda: parameters,
        )
        sys.addaudithook(hook)
        with (
            mock.patch.object(rank_file, "safe_open", open_counted),
            mock.patch("torch.distributed.get_world_size", return_value=self.stages * self.replicas),
        ):
            begin = time.process_time()
            read = read_checkpoint(folder, pipeline, optimizer)
            seconds = time.process_time() - begin
        assert read.is_same_plan
        assert len(read.optimizer_state) == len(parameters)
        return opened, seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    ranks = parser.parse_args().ranks
    torch.set_num_threads(1)
    print(
        f"`python benchmarks/resume.py --ranks {ranks}` on {cpu_name()} ({os.cpu_count()} cores), torch "
        f"{torch.__version__}, safetensors {safetensors.__version__}, Python {platform.python_version()}; load average "
        f"{os.getloadavg()[0]:.1f}.\n"
    )
    print("| stages x replicas | tensors of the model | index | a rank's file | rank | files opened | CPU |")
    print("|---|---|---|---|---|---|---|")
    for replicas in (1, 8):
        job = Job(ranks // replicas, replicas)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "step-00000001")
            job.write(folder)
            sizes = [(folder / name).stat().st_size / 1e3 for name in (INDEX, rank_file_name(1))]
            for what, rank in (("the first", 0), ("a middle one", ranks // 2), ("the last", job.stages * replicas - 1)):
                opened, seconds = _in_process(job, folder, rank)
                print(
                    f"| {job.stages} x {replicas} | {len(job.canonical_names)} | {sizes[0]:.0f} kB | {sizes[1]:.0f} kB "
                    f"| {what} | {len(opened)} | {1e3 * seconds:.0f} ms |",
                    flush=True,
                )


def _in_process(job: Job, folder: Path, rank: int) -> tuple[list[str], float]:
    """Return the result of `Job.read` in a new process."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.write(writes, json.dumps(job.read(folder, rank)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    with os.fdopen(reads, "rb") as found:
        opened, seconds = json.loads(found.read())
    os.waitpid(process, 0)
    return opened, seconds


if __name__ == "__main__":
    main()
