"""Tests of two nodes, simulated on one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from planner.core.cost.costs import costs_at
from planner.model.load import load_model
from tests.support.cli import write_model
from tests.support.measure import profile_of_model
from tests.support.ports import free_port
from tests.support.processes import wait_for, write_script
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, predicted_peaks, write_balance

pytestmark = pytest.mark.slow

SETTINGS: Final = {"layers": 4, "width": 128, "feed_forward": 256, "heads": 2, "vocabulary": 64, "tokens": 4}

SCRIPT: Final = """
from planner.executor import arguments, pipeline_script

given = arguments(None, steps=3, seed=1)
with pipeline_script("balance.yaml", given) as pipeline:
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    for inputs, targets in pipeline.batches(given.steps):
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_nodes_have_the_losses_of_one_node(tmp_path: Path, *, by_torchrun: bool) -> None:
    """Losses are bit-for-bit equal. Measured peak memory, which includes gradients in transfer, is as predicted.

    Two `torchrun` start the processes, or they have the variables of such processes.
    """
    case = Case(
        model=ROOT / "sample_models/transformer_lm.py",
        balance=(3, 3),
        settings=tuple(SETTINGS.items()),
        micro_batches=2,
        schedule="1f1b",
    )
    write_balance(case, tmp_path / "balance.yaml")
    write_model(tmp_path, SCRIPT, "train.py")
    run_ranks(2, ["train.py", "--report", "one.json"], tmp_path)
    script = ["train.py", "--report", "two.json"]
    if by_torchrun:
        run_nodes(script, tmp_path)
    else:
        run_ranks(2, script, tmp_path, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert len(two["losses"]) == 3
    assert two["losses"] == one["losses"]
    assert [stage["index"] for stage in two["stages"]] == [0, 1]
    loaded = load_model(str(case.model), settings={name: str(value) for name, value in SETTINGS.items()})
    predicted = predicted_peaks(case, costs_at(profile_of_model(loaded, sizes=(4,)), 4))
    errors = [predicted[stage["index"]] / stage["peak_bytes"] - 1 for stage in (*one["stages"], *two["stages"])]
    assert min(errors) >= -0.01
    assert max(errors) <= 0.05


def run_nodes(script: Sequence[str], folder: Path) -> None:
    """Run a script with one process on each of two simulated machines."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), *script],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    output = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output


@pytest.mark.nightly
def test_a_lost_node_rejoins_the_run(tmp_path: Path) -> None:
    """The launchers count restarts differently, and find each other. Losses equal those of an undisturbed run."""
    model = ROOT / "tests/zoo/models/mischief.py"
    write_script(Case(model=model, balance=(2, 3), batch=8, micro_batches=4), tmp_path)
    steps = ("train.py", "--steps", "10", "--checkpoint-every", "4")
    run_ranks(2, [*steps, "--report", "whole.json"], tmp_path)
    port = free_port()
    arguments = (*steps, "--checkpoint", "saved", "--resume", "auto", "--report", "lost.json")
    nodes = [_node(port, tmp_path, arguments, "first")]
    wait_for(lambda: _listens(port))  # who comes first holds the rendezvous, and is not the one that is lost
    try:
        nodes.append(_node(port, tmp_path, arguments, "second"))
        nodes[1].wait(timeout=200)
        assert nodes[1].returncode == -signal.SIGKILL
        # The other launcher has counted a restart when this one comes back.
        wait_for(
            lambda: "gives no sign of life while stage 0 (layers 0 to 1) wait" in (tmp_path / "first.log").read_text()
        )
        time.sleep(2)
        nodes[1] = _node(port, tmp_path, arguments, "again")
        codes = [node.wait(timeout=200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    printed = "\n".join((tmp_path / f"{name}.log").read_text() for name in ("first", "second", "again"))
    assert codes == [0, 0], printed
    assert "resumed saved/step-00000004 after 4 steps" in printed
    whole, lost = (json.loads((tmp_path / name).read_text())["losses"] for name in ("whole.json", "lost.json"))
    assert lost == whole[4:]


# Private functions


def _node(port: int, folder: Path, arguments: Sequence[str], name: str) -> "subprocess.Popen[str]":
    """Start one process on a simulated machine; stage 1 loses its machine in step 6."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3", "--max-restarts", "3"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MISCHIEF": "lose 25 3 lost",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen([*command, *arguments], cwd=folder, env=environment, stdout=log, stderr=log, text=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
