"""Runs that are killed, or whose checkpoints are damaged, resumed and compared bit by bit with an undisturbed run.

    python benchmarks/restarts.py > docs/measurements/restarts.md

Exits with 1 if a run did not go on as the undisturbed one. Takes about five minutes on two cores.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from planner import files  # noqa: E402
from planner.core.values.units import pluralize  # noqa: E402
from planner.device.machine import cpu_name  # noqa: E402
from tests.support.ranks import EndedRanks, end_ranks  # noqa: E402
from tests.support.training import Case, write_balance  # noqa: E402

_TWO = Case(model=ROOT / "tests/zoo/models/mischief.py", balance=(2, 3), batch=8, micro_batches=4)
_THREE = replace(_TWO, balance=(1, 2, 2))
_STEPS = 10
_KILLS = 25
_DAMAGES = 30
_LOST_NODES = 3

_SCRIPT = f"""
import hashlib, json, os, signal, threading
from pathlib import Path
from planner.executor import arguments, checkpoints, pipeline_script

given = arguments(None, steps={_STEPS}, seed=3)
with pipeline_script(os.environ["BALANCE"], given) as pipeline:
    if os.environ.get("KILL_RANK") == os.environ["RANK"]:
        threading.Timer(float(os.environ["KILL_AFTER_S"]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    saved = checkpoints(pipeline, given, optimizer)
    begun = pipeline.step_index
    for inputs, targets in pipeline.batches(given.steps):
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
        saved.step_done()
    tensors = {{
        name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, tensor in pipeline.named_tensors().items()
    }}
    end = {{"begun": begun, "losses": pipeline.losses, "tensors": tensors}}
    Path(f"end-{{pipeline.rank}}.json").write_text(json.dumps(end))
"""

_DAMAGE = ("cut short", "one bit changed", "deleted", "emptied", "replaced by that of an older checkpoint")

_TEXT = """\
# Restarts

`python benchmarks/restarts.py` on {cpu}, {cores} cores, torch {torch},
Python {python}. Five layers with dropout, batch normalization and a tied weight are trained for {steps} steps by Adam,
with a checkpoint every two steps, each rank in a process of its own. "Equal" means that every loss, parameter and
buffer after the restart has the bits that it has in a run that nothing disturbed. "Rounding" means that the losses
agree to 1e-6: one stage adds the gradients of the tied weight in another order than two.

| what happens | runs | equal | rounding |
|---|---|---|---|
{rows}

Kills came {earliest} to {latest} s after the ranks had joined, {before_end} of {kills} before the end of training. Each
run was started again once, and went on after so many steps: {begun}.

Damage to a file: {damage}.
The run was started again, and went on after so many steps: {begun_damaged}.\
"""


@dataclass(frozen=True)
class _Ends:
    """Final parameters and losses of all ranks of a run."""

    begun: int
    losses: tuple[float, ...]
    tensors: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> "_Ends":
        ends = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("end-*.json"))]
        tensors = {name: digest for end in ends for name, digest in end["tensors"].items()}
        losses = max((end["losses"] for end in ends), key=len)
        return cls(ends[0]["begun"], tuple(losses), tensors)

    def goes_on(self, whole: "_Ends") -> bool:
        """Return True if this run ends like an undisturbed one, bit for bit."""
        return (self.losses, self.tensors) == (whole.losses[self.begun :], whole.tensors)

    def is_close(self, whole: "_Ends") -> bool:
        """Return True if this run has the losses of an undisturbed one, but for rounding."""
        losses = zip(self.losses, whole.losses[self.begun :], strict=True)
        return all(math.isclose(loss, right, rel_tol=1e-6) for loss, right in losses)


class _Row(NamedTuple):
    """A row of the table."""

    what: str
    runs: int
    equal: int
    rounding: int = 0
    """Runs whose losses differ by rounding only."""


def main() -> int:
    """Print the page."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    draw = random.Random(7)  # noqa: S311
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    rows: list[_Row] = []
    try:
        killed, moments, begun, before_end = _killed(folder, draw)
        damaged, how, begun_damaged = _damaged(folder, draw)
        rows.append(_Row("a rank is killed at a random moment", _KILLS, killed))
        rows.append(_Row("a file of the newest checkpoint is damaged", _DAMAGES, damaged))
        rows += [_other_plans(folder), _smaller_plan(folder, draw), _lost_node()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    text = _TEXT.format(
        **machine,
        python=platform.python_version(),
        steps=_STEPS,
        rows="\n".join(f"| {row.what} | {row.runs} | {row.equal} | {row.rounding} |" for row in rows),
        earliest=f"{min(moments):.2f}",
        latest=f"{max(moments):.2f}",
        before_end=before_end,
        kills=_KILLS,
        begun=_counts(begun),
        damage=", ".join(f"{name} ({count})" for name, count in sorted(how.items())),
        begun_damaged=_counts(begun_damaged),
    )
    print(text)
    return int(any(row.runs != row.equal + row.rounding for row in rows))


def _counts(begun: Sequence[int]) -> str:
    return ", ".join(f"{steps} ({pluralize(count, 'run')})" for steps, count in sorted(Counter(begun).items()))


def _run(folder: Path, case: Case = _TWO, *arguments: str, **environment: str) -> EndedRanks:
    """Train in `folder`, from its newest checkpoint if it has one."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("end-*.json"):
        path.unlink()
    (folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
    if not (folder / "balance.yaml").exists():
        write_balance(case, folder / "balance.yaml")
    options = ("--timeout", "4s", "--checkpoint", "saved", "--checkpoint-every", "2", "--resume", "auto", *arguments)
    environment = {"BALANCE": "balance.yaml", **environment}
    return end_ranks(case.num_processes, ["train.py", *options], folder, **environment)


def _whole(folder: Path, case: Case = _TWO, **environment: str) -> _Ends:
    """Train undisturbed; the checkpoints stay in `folder`."""
    ended = _run(folder, case, **environment)
    assert not any(ended.codes), ended.output
    return _Ends.of(folder)


def _killed(folder: Path, draw: random.Random) -> tuple[int, list[float], list[int], int]:
    """Kill a rank at random moments; return how many restarts were equal, the moments, where they began, and hits."""
    whole = _whole(folder / "whole")
    equal, before_end = 0, 0
    moments, begun = [], []
    for number in range(_KILLS):
        here = folder / f"killed-{number}"
        moments.append(draw.uniform(0.01, 0.5))
        ended = _run(here, KILL_RANK=str(draw.randrange(2)), KILL_AFTER_S=str(moments[-1]))
        before_end += any(ended.codes)
        again = _run(here)
        if any(again.codes):
            print(again.output, file=sys.stderr)
            continue
        ends = _Ends.of(here)
        begun.append(ends.begun)
        equal += ends.goes_on(whole)
        shutil.rmtree(here)
    return equal, moments, begun, before_end


def _damaged(folder: Path, draw: random.Random) -> tuple[int, Counter[str], list[int]]:
    """Damage files of the checkpoint of step 8; return how many restarts were equal, the kinds, where they began."""
    whole = _Ends.of(folder / "whole")
    equal, begun = 0, []
    kinds: Counter[str] = Counter()
    for number in range(_DAMAGES):
        here = folder / f"damaged-{number}"
        shutil.copytree(folder / "whole", here)
        older, newest, last = sorted((here / "saved").glob("step-*"))[-3:]
        shutil.rmtree(last)
        file = draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        kind = draw.choice(_DAMAGE)
        kinds[kind] += 1
        _damage(file, kind, older / file.relative_to(newest), draw)
        ended = _run(here)
        if any(ended.codes):
            print(kind, file.name, ended.output, file=sys.stderr)
            continue
        ends = _Ends.of(here)
        begun.append(ends.begun)
        equal += ends.goes_on(whole)
        shutil.rmtree(here)
    return equal, kinds, begun


def _damage(file: Path, kind: str, older: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if kind == "cut short":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif kind == "one bit changed":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    elif kind == "deleted":
        file.unlink()
    elif kind == "emptied":
        file.write_bytes(b"")
    else:
        shutil.copy(older, file)


def _other_plans(folder: Path) -> _Row:
    """Resume a checkpoint of two stages under other plans."""
    whole = _Ends.of(folder / "whole")
    plans = {
        "one": replace(_TWO, balance=(5,)),
        "three": _THREE,
        "1f1b": replace(_TWO, schedule="1f1b"),
        "interleaved": replace(_TWO, schedule="interleaved", chunks=2, balance=(1, 1, 1, 2)),
        "recompute": replace(_TWO, recompute="always"),
    }
    equal, rounding = 0, 0
    for name, case in plans.items():
        here = folder / name
        shutil.copytree(folder / "whole/saved", here / "saved")
        for last in sorted((here / "saved").glob("step-*"))[-2:]:
            shutil.rmtree(last)
        ended = _run(here, case)
        if any(ended.codes):
            print(name, ended.output, file=sys.stderr)
            continue
        ends = _Ends.of(here)
        equal += ends.goes_on(whole)
        rounding += not ends.goes_on(whole) and ends.is_close(whole)
    what = "a checkpoint of two stages is resumed by one, three, 1F1B, interleaved, with recomputation"
    return _Row(what, len(plans), equal, rounding)


def _smaller_plan(folder: Path, draw: random.Random) -> _Row:
    """Kill one of three ranks, and continue with two: a plan for three and two devices."""
    whole = _whole(folder / "three-whole", _THREE)
    equal, runs = 0, 5
    for number in range(runs):
        here = folder / f"family-{number}"
        here.mkdir()
        write_balance(_TWO, here / "balance-2.yaml")
        write_balance(_THREE, here / "balance.yaml")
        files.write(str(here / "balance.yaml"), replace(files.read_balance(str(here / "balance.yaml")), smaller=(2,)))
        moment = draw.uniform(0.05, 0.3)
        _run(here, _THREE, KILL_RANK=str(draw.randrange(3)), KILL_AFTER_S=str(moment))
        ended = _run(here, _TWO)
        good = not any(ended.codes) and _Ends.of(here).goes_on(whole)
        equal += good
        if not good:
            print("family", ended.output, file=sys.stderr)
    return _Row("one of three ranks is killed, and two go on by the plan for two devices", runs, equal)


def _lost_node() -> _Row:
    """Run the test of a lost and returning node several times."""
    test = "tests/functional/test_two_nodes.py::test_a_lost_node_rejoins_the_run"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "nightly", "-p", "no:cacheprovider", test]
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False) for _ in range(_LOST_NODES)]
    for failed in done:
        if failed.returncode:
            print(failed.stdout, file=sys.stderr)
    what = "one of two nodes is lost with its launcher, and comes back"
    return _Row(what, _LOST_NODES, sum(not one.returncode for one in done))


if __name__ == "__main__":
    sys.exit(main())
