"""Tests that run the commands of README and guides, in the order of the page, on small models."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from planner import files
from planner.api import verifying
from planner.cli import main
from planner.cli.main import app_for
from planner.core.values.profile import Model
from tests.support.cli import EXAMPLE, HEAD, LOSS, MODEL, environment, known_executor
from tests.support.docs import ROOT, blocks, lines, quick
from tests.support.profiles import profile_of
from tests.support.ranks import run_ranks, start_forked

PAGES = {
    "README": "README.md",
    "guide": "docs/guide.md",
    "engines": "docs/engines.md",
    "training": "docs/training.md",
    "clusters": "docs/clusters.md",
    "tpu": "docs/tpu.md",
    "recipes": "docs/recipes.md",
    "schedules": "docs/schedules.md",
    "troubleshooting": "docs/troubleshooting.md",
}
SLOW = {"guide", "tpu"}
NOT_RUN = re.compile(r"make |pip install ")
"""What CI itself runs, or ran before."""
SHELL = re.compile(r"[|;&><$*`]")
"""What only a shell understands."""

BLOCKS = """import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.lm_head = nn.Linear(16, 64)
    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)

def example_batch(size):
    return torch.randint(64, (size, 8)), torch.randint(64, (size, 8))

def build_model():
    return Model()

def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def prepare(page: str, folder: Path) -> None:
    """Write the files that the page assumes, in a form that is quick to measure."""
    if page == "README":
        source = (ROOT / "sample_models" / "transformer_lm.py").read_text()
        (folder.parent / "sample_models").mkdir()
        # As many parameters, so that the page's caps mean what they mean there.
        (folder.parent / "sample_models" / "transformer_lm.py").write_text(
            source.replace("tokens: int = 128", "tokens: int = 8")
        )
    if page in {"README", "guide"}:
        model = next(b for b in blocks(PAGES[page], "python") if "def build_model" in b)
        (folder / "model.py").write_text(model.replace("depth: int = 12", "depth: int = 4"))
        config = (ROOT / "sample_models" / "configurations" / "llama-3-70b" / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"num_hidden_layers": 80', '"num_hidden_layers": 8'))
    if page == "training":
        (folder / "model.py").write_text(BLOCKS)
        run("gpipe-plan profile model.py --batch-sizes 2", folder)
        for balance, output in (("2,3", "."), ("1,2,2", "three")):
            run(f"gpipe-plan solve --devices 3 --mem 8GB --batch 8 --balance {balance}", folder)
            run(f"gpipe-plan emit -o {output}", folder)
    if page == "recipes":
        (folder / "model.py").write_text(next(b for b in blocks(PAGES[page], "python") if "def train_batches" in b))
    if page in {"schedules", "troubleshooting"}:
        (folder / "model.py").write_text(BLOCKS)
        run("gpipe-plan profile model.py --batch-sizes 8,16", folder)
        run("gpipe-plan solve --devices 2 --mem 8GB --batch 64 --schedule 1f1b --balance 2,3", folder)
        run(f"gpipe-plan emit --format {'csv' if page == 'schedules' else 'native'}", folder)
    if page == "clusters":
        (folder / "model.py").write_text(MODEL)
        by_hand = profile_of([1e4] * 5, [2e4] * 5, size=2)
        layers = tuple(replace(layer, name=str(n)) for n, layer in enumerate(by_hand.layers))
        by_hand = replace(by_hand, layers=layers, model=Model(source="model.py:build_model"), optimizer="adamw")
        files.write(str(folder / "profile.yaml"), by_hand)
    if page == "tpu":
        layers = "*(nn.Linear(8, 8) for _ in range(8)), nn.Linear(8, 4)"  # one for each of eight cores
        (folder / "model.py").write_text(
            f"{HEAD}\n\ndef build_model():\n    return nn.Sequential({layers})\n{EXAMPLE}{LOSS}"
        )
    if page == "engines":
        (folder / "model.py").write_text(BLOCKS)
        run("gpipe-plan profile model.py --batch-sizes 2,4", folder)
        run("gpipe-plan solve --devices 2 --mem 8GB --batch 8 --schedule 1f1b --recompute never", folder)
        shutil.copy(folder / "profile.yaml", folder / "gpt.yaml")


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one command: `gpipe-plan` in this process, and ranks without torchrun."""
    if line.startswith("gpipe-plan ") and not SHELL.search(line):
        with contextlib.chdir(folder):
            return subprocess.CompletedProcess(line, main.run(shlex.split(quick(line), comments=True)[1:]), "", "")
    env = environment(
        PATH=f"{Path(sys.executable).parent}:{environment()['PATH']}",
        PYTHONPATH=f"{folder}:{ROOT}",
        XDG_CACHE_HOME=known_executor(folder / "cache"),
    )
    line = quick(re.sub(r"^gpipe-plan\b", "python -m planner", line))
    launched = re.fullmatch(r"torchrun --nproc-per-node (\d+) (.*)", line)
    if launched:
        said = run_ranks(
            int(launched[1]), shlex.split(launched[2], comments=True), folder, PYTHONPATH=env["PYTHONPATH"]
        )
        return subprocess.CompletedProcess(line, 0, said, "")
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.nightly) if p in SLOW else p for p in PAGES])
def test_commands_of_pages_have_the_documented_exit_codes(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is 1 if the page shows an error, else 0. `console` blocks name the written files."""
    if page == "tpu" and find_spec("torchax") is None:
        pytest.skip("needs the extra: pip install 'gpipe-plan[tpu]'")
    folder = tmp_path / page / "here"
    folder.mkdir(parents=True)
    monkeypatch.setattr(verifying, "_started", start_forked)
    prepare(page, folder)
    for line, shown in lines(PAGES[page]):
        if NOT_RUN.match(line):
            continue
        done = run(line, folder)
        wanted = 1 if shown.startswith("error:") else 0
        assert done.returncode == wanted, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("number", range(6))
def test_recipes_are_complete_model_files(number: int, tmp_path: Path) -> None:
    recipe = blocks("docs/recipes.md", "python")[number]
    for package in ("transformers", "timm"):
        if package in recipe:
            pytest.importorskip(package, exc_type=ImportError)
    (tmp_path / "model.py").write_text(recipe)
    assert run("gpipe-plan profile model.py --batch-sizes 1,2", tmp_path).returncode == 0


def test_options_in_the_documentation_exist() -> None:
    others = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"}
    others |= {"--rdzv-conf", "--standalone", "--env", "--signal", "--requeue", "--help", "--debug"}
    others |= {"--pipeline-model-parallel-layout", "--mtp-num-layers"}
    group = get_command(app_for([]))
    options = {o for command in group.commands.values() for p in command.params for o in (*p.opts, *p.secondary_opts)}
    scripts = ("executor/script.py", "tpu/training.py")
    script = "".join((ROOT / "planner" / name).read_text(encoding="utf-8") for name in scripts)
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
        unknown = {option for option in named - options - others if f'"{option}"' not in script}
        assert not unknown, page.name
