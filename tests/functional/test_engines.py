"""Tests of exporting plans to other engines and importing them again."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from planner.core.values.profile import Model, Profile
from planner.emit.engines import ENGINES
from tests.support.chains import chain, layer
from tests.support.cli import Ran, call
from tests.support.docs import blocks
from tests.support.ranks import run_ranks
from tests.support.training import Case, write_balance

Capsys = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "engines.md").read_text(encoding="utf-8")


def profile_of(*names: str) -> Profile:
    """Write a profile with layers of a millisecond and some kilobytes."""
    cost = {"forward_us": (500.0, 1000.0), "backward_us": (900.0, 2000.0), "output_bytes": (10, 20)}
    layers = (layer(name, parameter_bytes=1000, saved_bytes=(500, 1000), **cost) for name in names)
    return chain(*layers, sizes=(1, 2))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> Path:
    """Change to a folder with a profile and a plan of two stages."""
    monkeypatch.chdir(tmp_path)
    files.write("profile.yaml", profile_of("wte", "h.0", "h.1", "h.2", "head"))
    files.write("gpt.yaml", profile_of("wte", "h.0", "h.1", "h.2", "head"))
    solve(capsys, "--balance", "2,3")
    return tmp_path


def solve(capsys: Capsys, *arguments: str) -> Ran:
    """Run `gpipe-plan solve` for two devices and four samples."""
    ran = call(capsys, "solve", "--devices", "2", "--mem", "8GB", "--batch", "4", "--recompute", "never", *arguments)
    assert ran.code == 0, ran.err
    return ran


@pytest.mark.parametrize("name", ENGINES)
def test_exported_cuts_are_imported_unchanged(here: Path, capsys: Capsys, name: str) -> None:
    before = set(here.iterdir())
    emitted = call(capsys, "emit", "--format", name, "-o", "out")
    assert emitted.code == 0
    (path,) = emitted.out.split()
    assert set(here.iterdir()) - before == {here / "out"}
    assert [entry.name for entry in (here / "out").iterdir()] == [Path(path).name]
    assert emitted.err.splitlines()[-1].startswith("next: ")
    for note in re.findall(r"(?m)^note: (\S+ \S+)", emitted.err):
        assert note in Path(path).read_text()
    quiet = call(capsys, "emit", "--format", name, "-o", "out", "-q")
    assert (quiet.code, quiet.err) == (0, "")

    solve(capsys, "--balance", path, "-o", "imported.yaml")
    assert files.read_plan("imported.yaml").balance == (2, 3)
    checked = call(capsys, "check", "--balance", path, "--format", "json")
    assert checked.code == 0
    assert '"balance": [\n      2,\n      3\n    ]' in checked.out


@pytest.mark.parametrize("name", ["balance.yaml", "plan.yaml"])
def test_balance_and_plan_files_are_imported_as_cuts(here: Path, capsys: Capsys, name: str) -> None:
    profile = files.read_profile("profile.yaml")
    files.write("profile.yaml", replace(profile, model=Model(source="model.py:build_model")))
    solve(capsys, "--balance", "2,3")
    assert call(capsys, "emit").code == 0
    solve(capsys, "--balance", name, "-o", "imported.yaml")
    assert files.read_plan("imported.yaml").balance == (2, 3)


def test_edited_engine_files_are_kept_without_force(here: Path, capsys: Capsys) -> None:
    assert call(capsys, "emit", "--format", "torch").code == 0
    path = here / "plan_torch.py"
    text = path.read_text()
    path.write_text(text.replace("MICRO_BATCHES", "CHUNKS"))
    refused = call(capsys, "emit", "--format", "torch")
    assert refused.code == 2
    assert refused.error.startswith("plan_torch.py: error: was edited")
    assert call(capsys, "emit", "--format", "torch", "--force").code == 0
    assert path.read_text() == text


def test_unknown_formats_list_the_valid_ones(here: Path, capsys: Capsys) -> None:
    refused = call(capsys, "emit", "--format", "alpa")
    assert refused.code == 2
    assert "unknown `--format alpa`" in refused.error
    assert "native, jax, torchgpipe, torch, torchtitan" in refused.err
    assert refused.err.rstrip().endswith("csv, json")


def test_plans_that_a_format_cannot_express_write_nothing(here: Path, capsys: Capsys) -> None:
    files.write("profile.yaml", profile_of("wte", "h.0.attn", "h.0.mlp", "h.1.attn", "head"))
    solve(capsys, "--balance", "2,3")
    before = set(here.iterdir())
    refused = call(capsys, "emit", "--format", "megatron")
    assert refused.code == 2
    assert 'between "h.0.attn" and "h.0.mlp", which are both part of block 0' in refused.error
    assert "hint: solve with `--together h.0.attn,h.0.mlp`" in refused.err
    assert set(here.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--balance", "3,2"), 0, "fits"),
        (("--balance", "5"), 0, "fits"),
        (("--balance", "1,4", "--mem", "9kB"), 1, 'GP101 error: stage 1 ("h.0" to "head")'),
        (("--balance", "1,3"), 2, "adds up to 4 layers, the profile has 5"),
        (("--balance", "1,1,3"), 2, "3 stages need 3 devices, there are 2"),
        (("--balance", "a,b"), 2, "expected whole numbers with commas between them, got `--balance a,b`"),
        (("--balance", "none.py"), 2, "none.py: error: no such file"),
        (("--balance", "-"), 2, "expected whole numbers"),
    ],
)
def test_check_balance_replaces_the_cuts_of_the_plan(here, capsys, arguments, code, expected):
    """The plan file does not change."""
    before = (here / "plan.yaml").read_bytes()
    checked = call(capsys, "check", *arguments)
    assert checked.code == code
    assert expected in checked.out + checked.err
    assert (here / "plan.yaml").read_bytes() == before


def test_check_balance_still_detects_stale_plans(here: Path, capsys: Capsys) -> None:
    files.write("profile.yaml", profile_of("wte", "h.0", "h.1", "h.2", "lm_head"))
    checked = call(capsys, "check", "--balance", "3,2")
    assert checked.code == 1
    assert "GP201 error" in checked.out


# The page


COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line]


def test_commands_of_the_engines_page_work_in_order(here: Path, capsys: Capsys) -> None:
    assert len(COMMANDS) >= 12
    for line in COMMANDS:
        ran = call(capsys, *shlex.split(line)[1:])
        assert ran.code == 0, (line, ran.err)
    assert files.read_plan("imported.yaml").balance == files.read_plan("torchgpipe.yaml").balance


def test_the_engines_page_names_every_format_and_file(here: Path, capsys: Capsys) -> None:
    for name in ENGINES:
        (path,) = call(capsys, "emit", "--format", name, "-q").out.split()
        assert f"| `{name}` | `{path}` |" in PAGE
        assert re.search(rf"gpipe-plan emit .*--format {name}\n", PAGE)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(block, "engines.md", "exec")
        for module, names in re.findall(r"from (plan_\w+) import (.*)", block):
            defined = Path(f"{module}.py").read_text()
            assert all(re.search(rf"(?m)^(class |def )?{name}\b", defined) for name in names.split(", ")), module


MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

dataset = [{"input_ids": words, "labels": words} for words in (torch.arange(16)[:, None] + torch.arange(8)) % 32]

def build_model():
    sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))

def example_batch(size):
    words = torch.randint(32, (size, 8))
    return {"input_ids": words, "labels": words}, None
"""


@pytest.mark.slow
def test_the_transformers_loop_of_the_page_trains_on_two_stages(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (loop,) = (block for block in blocks("docs/engines.md", "python") if "get_scheduler" in block)
    (tmp_path / "train.py").write_text(loop)
    (tmp_path / "model.py").write_text(MODEL)
    write_balance(Case(model=tmp_path / "model.py", balance=(3, 4), schedule="1f1b"), tmp_path / "balance.yaml")
    said = run_ranks(2, ["train.py", "--steps", "4"], tmp_path)
    assert [int(step) for step in re.findall(r"(?m)^step (\d+): loss \d", said)] == [0, 1, 2, 3]
