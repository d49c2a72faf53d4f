"""Two machines, played by two `torchrun` on this one, train what one `torchrun` trains."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from planner.core.costs import costs_at
from planner.model.load import load_model
from tests.support.cli import write_model
from tests.support.measure import profile_of_model
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


def test_two_nodes_train_what_one_trains(tmp_path: Path) -> None:
    """The same losses to the bit: two replicas of two stages, a replica on each node.

    Peak memory is that predicted, though gradients on their way to the other replica are there twice: with few tokens
    that is where the peak is.
    """
    case = Case(
        model=ROOT / "sample_models/transformer_lm.py",
        balance=(3, 3),
        settings=tuple(SETTINGS.items()),
        replicas=2,
        micro_batches=2,
        schedule="1f1b",
    )
    write_balance(case, tmp_path / "balance.yaml")
    write_model(tmp_path, SCRIPT, "train.py")
    run_ranks(4, ["train.py", "--report", "one.json"], tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "train.py", "--report", "two.json"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    output = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert len(two["losses"]) == 3
    assert two["losses"] == one["losses"]
    assert [(stage["index"], stage.get("replica", 0)) for stage in two["stages"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    loaded = load_model(str(case.model), settings={name: str(value) for name, value in SETTINGS.items()})
    predicted = predicted_peaks(case, costs_at(profile_of_model(loaded), 2))
    errors = [predicted[stage["index"]] / stage["peak_bytes"] - 1 for stage in (*one["stages"], *two["stages"])]
    assert min(errors) >= -0.01
    assert max(errors) <= 0.05
