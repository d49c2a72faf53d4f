"""Formats of engines: golden texts, reading by the engine if it is installed, and reading by us."""

import os
import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner import __version__
from planner.core.errors import FileError, UsageError
from planner.core.values.plan import Inputs, Plan, ProfileReference, RecomputePolicy, ScheduleName
from planner.core.values.profile import LayerProfile, Profile
from planner.emit.engines import ENGINES, engine_file
from planner.emit.layout import EngineFile
from planner.emit.reading import read_balance_list
from planner.emit.signature import is_edited
from planner.files import read_plain
from planner.solve import Request, solve
from tests.support.chains import chain, layer

GOLDEN = Path(__file__).parent / "golden"

FLAT = ("embedding", "block_0", "block_1", "block_2", "block_3", "head")
BALANCES = [(6,), (3, 3), (1, 2, 2, 1), (1,) * 6]
ENGINE = pytest.mark.filterwarnings("ignore")  # what other packages warn of while they are imported is not ours


def profile_of(*names: str, **values: Any) -> Profile:
    """Return layers that take a microsecond each and save a kilobyte."""
    cost = {"forward_us": 1.0, "backward_us": 2.0, "saved_bytes": 1000, "output_bytes": 10, **values}
    return chain(*(layer(name, **cost) for name in names))


def plan_of(
    profile: Profile,
    balance: Sequence[int],
    *,
    schedule: ScheduleName = "gpipe",
    recompute: RecomputePolicy = "never",
    micro_batches: int = 6,
    chunks: int = 1,
    **asked: Any,
) -> Plan:
    """Return a plan with these cuts."""
    devices = asked.pop("devices", len(balance) // chunks)
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest="sha256:0"),
        devices=devices,
        memory_bytes=asked.pop("memory_bytes", (10**9,) * devices),
        batch=micro_batches * asked.get("replicas", 1),
        schedule=schedule,
        recompute=recompute,
        chunks=chunks,
        **asked,
    )
    return solve(profile, Request(inputs=inputs, balance=tuple(balance), micro_batches=micro_batches))


def emitted(name: str, balance: Sequence[int] = (3, 3), profile: Profile | None = None, **how: Any) -> EngineFile:
    """Return the six-layer chain in a format."""
    profile = profile or profile_of(*FLAT)
    return engine_file(name, plan_of(profile, balance, **how), profile)


def write(folder: Path, file: EngineFile) -> Path:
    """Write the file into `folder` and return its path."""
    path = folder / file.name
    path.write_text(file.text)
    return path


def stages_of(names: Sequence[str], balance: Sequence[int]) -> list[list[str]]:
    """Return the names, divided into stages."""
    return [list(names[first:end]) for first, end in pairwise(accumulate(balance, initial=0))]


def predicting(*more: str) -> Profile:
    """Return a model with two layers of multi-token prediction."""
    names = ("e", "h.0", "h.1", "norm", "mtp.layers.0", "mtp.layers.1", "head")
    return profile_of(*(("e", "h.0", "h.1", "norm", *more) if more else names))


# Text


@pytest.mark.parametrize("name", ENGINES)
def test_engine_file_equals_its_golden_text(name: str) -> None:
    """The second of two stages recomputes. UPDATE_GOLDEN=1 writes new texts."""
    profile = profile_of(*FLAT)
    plan = plan_of(profile, (3, 3))
    plan = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], recompute="always")))
    file = engine_file(name, plan, profile)
    text = file.text.replace(__version__, "VERSION").rpartition("\n# As emitted: ")[0]
    path = GOLDEN / f"{file.name}.txt"
    if "UPDATE_GOLDEN" in os.environ:
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", ENGINES)
def test_engine_files_are_signed_repeatable_and_not_overlong(tmp_path: Path, name: str) -> None:
    file = emitted(name)
    assert file == emitted(name)
    path = write(tmp_path, file)
    assert not is_edited(path)
    path.write_text(file.text.replace("Plan: ", "My plan: "))
    assert is_edited(path)
    assert max(map(len, file.text.splitlines())) <= 120
    assert all(line == line.rstrip() for line in file.text.splitlines())
    assert all(note.split()[0] in file.text for note in file.notes)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "megatron"])
def test_long_chains_have_one_module_per_line(tmp_path: Path, name: str) -> None:
    names = ["embedding", *(f"block_{n}" for n in range(200)), "head"]
    profile = profile_of(*names)
    plan = plan_of(profile, (2,) * 101, micro_batches=101)
    file = engine_file(name, plan, profile)
    assert max(map(len, file.text.splitlines())) <= 120 or name == "deepspeed"
    assert read_balance_list(str(write(tmp_path, file)), profile.layers) == (2,) * 101


# Read again by us


INTERLEAVED = ("torch", "torchtitan", "automodel", "megatron", "device-map")


@pytest.mark.parametrize(
    ("name", "balance", "options"),
    [
        *((name, balance, {}) for name in ENGINES for balance in BALANCES),
        *((name, (2, 1, 1, 2), {"schedule": "interleaved", "chunks": 2}) for name in INTERLEAVED),
    ],
)
def test_cuts_survive_a_round_trip(tmp_path, name, balance, options):
    file = emitted(name, balance, **options)
    assert read_balance_list(str(write(tmp_path, file)), profile_of(*FLAT).layers) == balance


@pytest.mark.parametrize(
    ("name", "text", "balance"),
    [
        ("mine.py", "balance = [2, 4]\nmodel = GPipe(net, balance)\n", (2, 4)),
        ("mine.json", "[2, 4]", (2, 4)),
        ("mine.json", '{"balance": [2, 4], "chunks": 8}', (2, 4)),
        ("map.json", '{"": 0, "block_1": "cpu", "block_2": 1, "block_3": 1, "head": 1}', (2, 1, 3)),
        ("map.json", '{"": 0, "head": 1}', (5, 1)),
        ("old.toml", f"[parallelism]\nmodule_fqns_per_model_part = {[list(FLAT[:2]), list(FLAT[2:])]}\n", (2, 4)),
        ("run.sh", "torchrun pretrain_gpt.py --pipeline-model-parallel-layout 'E|(tt|)*2,L' --bf16\n", (1, 2, 2, 1)),
        ("run.sh", "PP=--pipeline-model-parallel-layout=Et*3|tL\n", (4, 2)),
        ("mine.py", "from torch import x\nspec = 1\nSPLIT_SPEC = {'block_1': SplitPoint.END}\n", (3, 3)),
        ("mine.py", "PARTS: list = []\nparts = [0, 1, 6]\n", (1, 5)),
    ],
)  # fmt: skip
def test_cuts_written_by_hand_are_read(tmp_path: Path, name: str, text: str, balance: tuple[int, ...]) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_balance_list(str(path), profile_of(*FLAT).layers) == balance


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", "x = 1\n", "has no cuts"),
        ("a.py", "balance = compute()\n", "has no cuts"),
        ("a.py", "balance = [1, 2\n", "cannot be parsed"),
        ("a.json", "{", "cannot be parsed"),
        ("a.json", "7", "expected a list or a mapping"),
        ("a.json", '{"split_spec": ["block_1"]}', "expected a mapping"),
        ("a.json", '{"balance": 3}', "cannot be parsed"),
        ("a.json", '{"module_fqns_per_model_part": ["head"]}', "list of modules per stage"),
        ("a.py", "balance = [1, 2]\n", "3 layers together, the profile has 6"),
        ("a.py", "balance = [1, 'x']\n", "whole numbers"),
        ("a.py", "split_spec = {'nowhere': 1}\n", '"nowhere" is not a layer'),
        ("a.py", "split_spec = {'block_1.attention': 1}\n", 'inside the layer "block_1"'),
        ("a.py", "device_map = {'embedding': 0, 'head': 1}\n", 'layer "block_0" is in none'),
        ("a.py", "device_map = {'': 0, 'block_1.a': 0, 'block_1.b': 1}\n", 'layer "block_1" is on several'),
        ("a.py", "device_map = {'': 0, 'other': 1}\n", '"other" is not a layer'),
        ("a.json", '[["head"], ["embedding", "block_0", "block_1", "block_2", "block_3"]]', "not in the order"),
        ("a.json", '[["head"], ["head"]]', "in two stages"),
        ("a.sh", "--pipeline-model-parallel-layout Et*5|L", "EtttttL, but the profile's layers are EttttL"),
        ("a.sh", "--pipeline-model-parallel-layout Et*4m|L", "EttttmL"),
        ("a.sh", "--pipeline-model-parallel-layout E(t*999)*999|L", "repeats `t\\*999` 999 times"),
        ("a.sh", "--pipeline-model-parallel-layout Et*99999999999|L", "repeats `t` 99999999999 times"),
        ("a.py", "device_map = {('embedding', 0): 0}\n", r"expected names of modules, got `\('embedding', 0\)`"),
        ("a.py", "module_fqns_per_model_part = [[1], [2]]\n", "expected names of modules, got `1`"),
        ("a.yaml", "distributed: {pipeline: {module_fqns_per_model_part: [1, [2]]}}", "list of modules per stage"),
        ("a.yaml", "distributed: {pipeline: {layers_per_stage: 3}}", "has no cuts"),
        ("none.py", None, "no such file"),
        ("deep.json", "[" * 100_000, "cannot be parsed"),
    ],
)
def test_files_without_cuts_of_these_layers_are_refused(tmp_path, name, text, expected):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(FileError, match=expected) as caught:
        read_balance_list(str(path), profile_of(*FLAT).layers)
    assert str(path) in str(caught.value)


def test_endless_files_with_cuts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.files.reading.MAX_BYTES", 1000)
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    with pytest.raises(FileError, match="has more than 1000 characters"):
        read_balance_list(str(tmp_path / "endless.py"), profile_of(*FLAT).layers)


def test_python_files_with_cuts_are_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nbalance = [3, 3]\n")
    assert read_balance_list(str(path), profile_of(*FLAT).layers) == (3, 3)
    assert not (tmp_path / "ran").exists()


# Layers of several modules, as in models that are no sequence


def uneven() -> Profile:
    """Return a GPT-2 whose small modules belong to the layer of a neighbor."""
    modules = {"wte": ("wte", "wpe", "drop"), "lm_head": ("ln_f", "lm_head")}
    layers: list[LayerProfile] = [
        replace(one, modules=modules.get(one.name, ()))
        for one in profile_of("wte", "h.0", "h.1", "h.2", "lm_head").layers
    ]
    layers[-1] = replace(layers[-1], tied=("wte.weight",))
    return replace(profile_of("x"), layers=tuple(layers))


@pytest.mark.parametrize("name", ["torch", "torchtitan", "megatron", "device-map"])
def test_cuts_are_before_the_first_module_of_a_layer(tmp_path: Path, name: str) -> None:
    profile = uneven()
    file = emitted(name, (2, 2, 1), profile)
    assert read_balance_list(str(write(tmp_path, file)), profile.layers) == (2, 2, 1)
    expected = {
        "torch": '"h.1": SplitPoint.BEGINNING,\n    "ln_f": SplitPoint.BEGINNING',
        "torchtitan": '[["wte", "wpe", "drop", "h.0"], ["h.1", "h.2"], ["ln_f", "lm_head"]]',
        "megatron": '"Et|t*2|L"',
        "device-map": '"drop": 0,\n    "h.0": 0,\n    "h.1": 1,\n    "h.2": 1,\n    "ln_f": 2',
    }
    assert expected[name] in file.text


# What formats cannot hold


@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        ("torchgpipe", {"schedule": "1f1b"}, "the plan uses 1F1B, but torchgpipe runs GPipe"),
        ("deepspeed", {}, "the plan uses GPipe, but DeepSpeed runs 1F1B"),
        ("megatron", {}, "the plan uses GPipe, but Megatron-LM runs 1F1B"),
        ("torch", {"recompute": "always"}, "does not recompute.*always on stages 0 to 1"),
        ("torch", {}, "receive buffers.*the planned peaks do not"),
        ("torchtitan", {"recompute": "always"}, "recomputes layers"),
        ("automodel", {"recompute": "always"}, "recomputes layers"),
        ("automodel", {"replicas": 2, "devices": 4}, "shards parameters"),
        ("automodel", {}, "but this model has no such blocks"),
        ("deepspeed", {"recompute": "except-last"}, "completely or not at all"),
        ("megatron", {"recompute": "always"}, "--recompute-granularity"),
        ("device-map", {}, "run one after the other"),
        ("torch", {"replicas": 2, "devices": 4}, "start 2 of them"),
        ("torchgpipe", {"replicas": 2, "devices": 4}, "start 2 of them"),
    ],
)
def test_notes_are_in_the_file_and_printed(name: str, how: dict[str, Any], expected: str) -> None:
    file = emitted(name, **how)
    assert any(re.search(expected, note) for note in file.notes), file.notes
    assert "# Not included:" in file.text


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("torchgpipe", {"recompute": "always"}),
        ("torchtitan", {"replicas": 2, "devices": 4}),
        ("deepspeed", {"schedule": "1f1b", "recompute": "always"}),
        ("megatron", {"schedule": "1f1b", "replicas": 2, "devices": 4}),
    ],
)
def test_complete_formats_have_no_notes(name: str, how: dict[str, Any]) -> None:
    file = emitted(name, **how)
    assert not file.notes
    assert "Not included" not in file.text


def test_torchgpipe_gets_the_strongest_recomputation_of_any_stage() -> None:
    profile = profile_of(*FLAT)
    plan = plan_of(profile, (3, 3))
    plan = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], recompute="except-last")))
    file = engine_file("torchgpipe", plan, profile)
    assert 'CHECKPOINT = "except_last"' in file.text
    assert "solve with `--recompute except-last`" in file.notes[0]


def tied() -> Profile:
    """Return a chain whose head shares the embedding's parameters."""
    profile = profile_of(*FLAT)
    return replace(profile, layers=(*profile.layers[:-1], replace(profile.layers[-1], tied=("embedding.weight",))))


@pytest.mark.parametrize(
    ("name", "profile", "balance", "how", "expected"),
    [
        ("torchgpipe", tied(), (6,), {}, 'shared parameters, but "embedding" and "head" share'),
        ("deepspeed", tied(), (3, 3), {}, "share parameters across stages"),
        ("torchgpipe", None, (2, 1, 1, 2), {"schedule": "interleaved", "chunks": 2}, "one stage on each device"),
        ("deepspeed", None, (2, 1, 1, 2), {"schedule": "interleaved", "chunks": 2}, "one stage on each device"),
        ("torchgpipe", uneven(), (2, 3), {}, "3 modules that the model's own code connects"),
        ("torch", profile_of("a", "b#2"), (1, 1), {}, '"b#2" is not a module with a path'),
        ("device-map", profile_of("a", "b\nc"), (1, 1), {}, "is not a module with a path"),
        ("torchtitan", profile_of("a", "b.0.attention"), (1, 1), {}, "members of their lists"),
        ("automodel", profile_of("a", "model.layers.0.mlp"), (1, 1), {}, "cut inside a member of a module list"),
        ("automodel", tied(), (3, 3), {}, "share parameters across stages"),
        ("automodel", None, (3, 3), {"micro_batches": 1}, "as many micro-batches as devices, 2, but the plan has 1"),
        ("megatron", profile_of("a", "b", "c"), (1, 2), {}, "cannot tell which layers"),
        ("megatron", profile_of("h.0", "h.1", "head"), (1, 2), {}, "begins with an embedding"),
        ("megatron", profile_of("e", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "o"), (2, 4), {}, "part of block 0"),
        ("megatron", profile_of("e", "p", "h.0", "h.1", "o"), (1, 4), {}, "part of the embedding"),
        ("megatron", predicting(), (2, 3, 2), {}, "in one stage, but the plan in stages 1, 2"),
        ("megatron", predicting(), (2, 2, 3), {}, "which are both part of layer 0"),
        ("megatron", predicting("mtp.0"), (2, 3), {}, "ends with a head"),
    ],
)
def test_plans_that_a_format_cannot_express_are_refused(name, profile, balance, how, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        emitted(name, balance, profile, **how)
    assert caught.value.hint


def test_ties_within_a_stage_are_allowed() -> None:
    """A device map also allows ties between devices, with a note."""
    assert emitted("deepspeed", (6,), tied(), schedule="1f1b").notes == ()
    assert any("solve with `--together embedding,head`" in note for note in emitted("device-map", (3, 3), tied()).notes)


def test_megatron_finds_blocks_by_digest_if_names_are_numbers() -> None:
    profile = profile_of(*"01234")
    layers = [replace(one, digest="block" if one.name in "123" else one.name) for one in profile.layers]
    assert '"Et|t*2L"' in emitted("megatron", (2, 3), replace(profile, layers=tuple(layers))).text


def test_megatron_layout_has_multi_token_prediction_layers(tmp_path: Path) -> None:
    """The loss may have its own stage."""
    file = emitted("megatron", (2, 1, 3, 1), predicting())
    assert '"Et|t|m*2|L"\n' in file.text
    assert "    --mtp-num-layers 2\n" in file.text
    assert read_balance_list(str(write(tmp_path, file)), predicting().layers) == (2, 1, 3, 1)
    assert '"Et*2m*2L"' in emitted("megatron", (7,), predicting()).text
    assert "mtp" not in emitted("megatron").text


def llama() -> Profile:
    """Return a Llama with the names of transformers; rotary embeddings are a module without parameters."""
    profile = profile_of("model.embed_tokens", *(f"model.layers.{n}" for n in range(4)), "lm_head")
    modules = {"model.embed_tokens": ("model.embed_tokens", "model.rotary_emb"), "lm_head": ("model.norm", "lm_head")}
    return replace(profile, layers=tuple(replace(one, modules=modules.get(one.name, ())) for one in profile.layers))


def test_automodel_recipe_has_modules_batch_replicas_and_schedule(tmp_path: Path) -> None:
    file = emitted("automodel", (3, 3), llama(), schedule="1f1b", replicas=2, devices=4)
    path = write(tmp_path, file)
    assert read_balance_list(str(path), llama().layers) == (3, 3)
    recipe = read_plain(str(path))
    first, second = recipe["distributed"].pop("pipeline").pop("module_fqns_per_model_part")
    assert first == ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"]
    assert second == ["model.layers.2", "model.layers.3", "model.norm", "lm_head", "model.rotary_emb"]
    assert recipe == {
        "distributed": {"strategy": "fsdp2", "pp_size": 2, "dp_size": 2},
        "step_scheduler": {"global_batch_size": 12, "local_batch_size": 6},
    }
    for schedule, says, needs_file in (
        ("zbv", "ZBVZeroBubble", False),
        ("dualpipev", "ZBVZeroBubble", True),
        ("zb-h1", "GPipe", True),
        ("interleaved-zb", "InterleavedZeroBubble", False),
    ):
        chunks = 1 if schedule == "zb-h1" else 2
        file = emitted("automodel", (3, 3) if chunks == 1 else (1, 2, 2, 1), schedule=schedule, chunks=chunks)
        assert f'pp_schedule: "{says}"\n' in file.text
        assert [*file.extra_files] == ["schedule.csv"] * needs_file == re.findall(r'pp_schedule_csv: "(.*)"', file.text)


@dataclass(kw_only=True)
class Options:
    """Options of torchtitan that 0.3.0 and later versions share."""

    pipeline_parallel_degree: int = 1
    pipeline_parallel_schedule: str = "1F1B"


@dataclass(kw_only=True)
class Earlier(Options):
    module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_microbatch_size: int = 1


@dataclass(kw_only=True)
class Later(Options):
    pipeline_parallel_module_fqns_per_model_part: list[list[str]] | None = None
    num_pp_microbatches: int = 1


def test_torchtitan_options_fit_both_versions_of_its_config(tmp_path: Path) -> None:
    planned = values_of(write(tmp_path, emitted("torchtitan", micro_batches=3)))["planned"]
    stages = stages_of(FLAT, (3, 3))
    old = planned(SimpleNamespace(parallelism=Earlier(), training=SimpleNamespace(local_batch_size=8)))
    assert old.parallelism == Earlier(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="GPipe",
        module_fqns_per_model_part=stages,
        pipeline_parallel_microbatch_size=1,
    )
    assert old.training == SimpleNamespace(local_batch_size=3)
    new = planned(SimpleNamespace(parallelism=Later(), training=SimpleNamespace(max_context_length=128)))
    assert new.parallelism == Later(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="GPipe",
        pipeline_parallel_module_fqns_per_model_part=stages,
        num_pp_microbatches=3,
    )
    assert new.training.num_tokens_per_microbatch_per_dp_rank == 128


# The engines themselves


def values_of(path: Path) -> dict[str, Any]:
    """Return the values that the file defines."""
    return runpy.run_path(str(path))


def sequential(names: Sequence[str] = FLAT) -> nn.Sequential:
    """Return a model with these children."""
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4))
    return model


def held(module: nn.Module) -> list[str]:
    """Return the children whose parameters the module has."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in module.named_parameters()))


@pytest.mark.parametrize("balance", BALANCES)
@ENGINE
def test_torch_pipeline_builds_the_planned_stages(tmp_path: Path, balance: tuple[int, ...]) -> None:
    from torch.distributed.pipelining import pipeline
    from torch.distributed.pipelining.schedules import get_schedule_class

    values = values_of(write(tmp_path, emitted("torch", balance)))
    pipe = pipeline(sequential(), mb_args=(torch.randn(2, 4),), split_spec=values["SPLIT_SPEC"])
    assert [held(pipe.get_stage_module(k)) for k in range(pipe.num_stages)] == stages_of(FLAT, balance)
    assert get_schedule_class(values["SCHEDULE"]).__name__ == "ScheduleGPipe"


@ENGINE
def test_torch_pipeline_cuts_nested_sequences(tmp_path: Path) -> None:
    from torch.distributed.pipelining import pipeline

    names = ("0", "1.0", "1.1", "2")
    profile = profile_of(*names)
    values = values_of(write(tmp_path, emitted("torch", (2, 2), profile)))
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(
        nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)),
        mb_args=(torch.randn(2, 4),),
        split_spec=values["SPLIT_SPEC"],
    )
    assert [held(pipe.get_stage_module(k)) for k in range(pipe.num_stages)] == [["0", "1.0"], ["1.1", "2"]]


@pytest.mark.parametrize("balance", BALANCES)
@ENGINE
def test_torchgpipe_builds_the_planned_stages(tmp_path: Path, balance: tuple[int, ...]) -> None:
    gpipe = pytest.importorskip("torchgpipe", reason="torchgpipe is not installed", exc_type=ImportError)
    values = values_of(write(tmp_path, emitted("torchgpipe", balance, recompute="always")))
    model = sequential()
    model = nn.Sequential(*(model.get_submodule(name) for name in values["LAYERS"]))
    devices = ["cpu"] * len(values["DEVICES"])
    model = gpipe.GPipe(
        model, balance=values["BALANCE"], devices=devices, chunks=values["CHUNKS"], checkpoint=values["CHECKPOINT"]
    )
    assert [len(partition) for partition in model.partitions] == list(balance)
    assert (model.chunks, model.checkpoint) == (6, "always")
    model(torch.randn(6, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("balance", BALANCES)
@ENGINE
def test_deepspeed_builds_the_planned_stages(tmp_path, balance, capsys):
    """Its constructor cuts the layers on each rank of its topology."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed", exc_type=ImportError)
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    values = values_of(write(tmp_path, emitted("deepspeed", balance)))
    stages = []
    for rank in range(len(balance)):
        module = values["PlannedPipelineModule"].__new__(values["PlannedPipelineModule"])
        nn.Module.__init__(module)
        module._num_layers, module.global_rank = len(values["LAYERS"]), rank
        module._topo = PipeDataParallelTopology(num_pp=len(balance), num_dp=1)
        module._partition_layers()
        stages.append(values["LAYERS"][module._local_start : module._local_stop])
    assert stages == stages_of(FLAT, balance)
    capsys.readouterr()  # what it says of the machine


@pytest.mark.parametrize("balance", BALANCES)
@ENGINE
def test_megatron_parses_and_validates_the_layout(tmp_path: Path, balance: tuple[int, ...]) -> None:
    name = "megatron.core.transformer.pipeline_parallel_layer_layout"
    layout = pytest.importorskip(name, reason="megatron-core is not installed", exc_type=ImportError)
    text = write(tmp_path, emitted("megatron", balance)).read_text()
    words = text.partition("layout ")[2].split()[0].strip('"')
    parsed = layout.PipelineParallelLayerLayout(words, len(balance))
    parsed.validate_layer_layout(num_layers=4, mtp_num_layers=0)
    assert [len(stages[0]) for stages in parsed.layout] == list(balance)
    text = write(tmp_path, emitted("megatron", (2, 1, 3, 1), predicting())).read_text()
    parsed = layout.PipelineParallelLayerLayout(text.partition("layout ")[2].split()[0].strip('"'), 4)
    parsed.validate_layer_layout(num_layers=2, mtp_num_layers=2)


@ENGINE
def test_torchtitan_builds_the_planned_stages(tmp_path: Path) -> None:
    name = "torchtitan.distributed.pipeline_parallel"
    titan = pytest.importorskip(name, reason="torchtitan is not installed", exc_type=ImportError)
    from torchtitan.config.configs import ParallelismConfig

    names = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "lm_head")
    profile = profile_of(*names)
    for balance in BALANCES:
        values = values_of(write(tmp_path, emitted("torchtitan", balance, profile)))
        config = SimpleNamespace(parallelism=ParallelismConfig(), training=SimpleNamespace(local_batch_size=1))
        config = values["planned"](config).parallelism
        assert len(balance) == config.pipeline_parallel_degree
        model = nn.Module()
        for child in ("tok_embeddings", "norm", "lm_head"):
            model.add_module(child, nn.Linear(2, 2))
        model.layers = nn.ModuleList(nn.Linear(2, 2 + n) for n in range(3))
        parts = [titan._split_module(model, part) for part in config.module_fqns_per_model_part]
        counts = [sum(1 for m in part.modules() if isinstance(m, nn.Linear)) for part in parts]
        assert counts == list(balance)


@pytest.mark.parametrize("balance", BALANCES)
@ENGINE
def test_automodel_parses_the_recipe(tmp_path: Path, balance: tuple[int, ...]) -> None:
    name = "nemo_automodel.recipes._dist_utils"
    recipes = pytest.importorskip(name, reason="nemo_automodel is not installed", exc_type=ImportError)
    recipe = read_plain(str(write(tmp_path, emitted("automodel", balance, llama()))))
    parsed = recipes.parse_distributed_section(recipe["distributed"])
    assert parsed["pp_size"] == len(balance)
    if len(balance) > 1:  # else its pipeline is off
        stages = parsed["pipeline_config"].module_fqns_per_model_part
        assert [len([path for path in stage if not path.endswith(("rotary_emb", "norm"))]) for stage in stages] == [
            *balance
        ]


@pytest.mark.parametrize("balance", BALANCES)
@ENGINE
def test_accelerate_accepts_the_device_map(tmp_path: Path, balance: tuple[int, ...]) -> None:
    modeling = pytest.importorskip(
        "accelerate.utils.modeling", reason="accelerate is not installed", exc_type=ImportError
    )
    device_map = values_of(write(tmp_path, emitted("device-map", balance)))["DEVICE_MAP"]
    modeling.check_device_map(sequential(), device_map)
    assert list(device_map) == list(FLAT)
    by_device = [[name for name, device in device_map.items() if device == k] for k in range(len(balance))]
    assert by_device == stages_of(FLAT, balance)
