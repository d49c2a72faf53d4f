"""Tests of which files of a checkpoint a rank opens: large jobs read from one file system."""

import json

import pytest

from planner.executor.keep.index import rank_file_name
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

pytestmark = pytest.mark.slow

MODEL = ROOT / "tests/zoo/models/mischief.py"
FOUR = Case(model=MODEL, balance=(1, 1, 1, 2), batch=8, micro_batches=4)
TWO = Case(model=MODEL, balance=(2, 3), batch=8, micro_batches=4)
REPLICATED = Case(model=MODEL, balance=(2, 3), batch=8, micro_batches=2, replicas=2)

SCRIPT = """
import json, sys
from pathlib import Path
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import rank_file

opened = []

def open_counted(path, **options):  # Python does not see what the package opens
    opened.append(path.name)
    return safe_open(path, **options)

safe_open, rank_file.safe_open = rank_file.safe_open, open_counted

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str | Path) and "step-" in str(arguments[0]):
        opened.append(Path(arguments[0]).name)

steps = int(sys.argv[1])
pipeline = Pipeline("balance.yaml")
optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
sys.addaudithook(hook)
saved = Checkpoints(pipeline, optimizer, folder="saved", every=1, steps=steps, resume="auto")
Path(f"opened-{pipeline.rank}.json").write_text(json.dumps(opened))
for inputs, targets in pipeline.batches(steps):
    with pipeline.step(inputs, targets):
        optimizer.step()
    saved.step_done()
pipeline.close()
"""


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        pytest.param(FOUR, FOUR, {2: [2], 3: [3]}, marks=pytest.mark.nightly),
        (REPLICATED, REPLICATED, {1: [1], 2: [0, 2], 3: [1, 3]}),
        (FOUR, TWO, {1: [0, 2, 3]}),
        (TWO, FOUR, {1: [0], 2: [0, 1]}),
    ],
    ids=["same plan", "replicas", "fewer stages", "more stages"],
)
def test_a_rank_opens_only_files_of_its_own_layers_once(first, then, expected, tmp_path):
    """Each once; a weight of the last layer is tied to the first one's, and is stored by both ranks.

    Under another plan all ranks continue from the first rank's state.
    """
    (tmp_path / "worker.py").write_text(SCRIPT)
    for steps, case in ((1, first), (2, then)):
        write_balance(case, tmp_path / "balance.yaml")
        run_ranks(case.num_processes, ["worker.py", str(steps)], tmp_path)
    for rank, files in expected.items():
        opened = json.loads((tmp_path / f"opened-{rank}.json").read_text())
        assert sorted(opened) == ["checkpoint.json", *map(rank_file_name, files)]
