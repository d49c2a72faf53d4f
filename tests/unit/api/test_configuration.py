"""Profiles of a config.json or a preset by formula, as a command and as a function, without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.core import extras
from planner.core.errors import InfeasibleError, MissingPackageError, PlannerError, UsageError
from planner.core.values.profile import Profile
from planner.profile.formula.families import transformer_from_config
from planner.profile.formula.presets import model_presets
from tests.support.cli import call, environment
from tests.support.house import ROOT

CONFIGURATIONS = ROOT / "sample_models" / "configurations"
PARAMETERS = {
    "llama-3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-9b": 9_241_705_984,
    "t5-11b": 11_307_321_344,
}
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
ROUTED = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def of(folder: Path, content: Any = SMALL, **more: Any) -> Profile:
    """Return the profile of a configuration, for an H100."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return planner.profile(folder / "config.json", **{"device": "estimate:h100", "batch_sizes": 1, **more})


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    """The preset of the same name gives the same layers."""
    asked = {"device": "estimate:h100", "dtype": "bf16"}
    file = planner.profile(CONFIGURATIONS / name, **asked)
    preset = planner.profile(preset=name, **asked)
    assert file.model.parameters == PARAMETERS[name]
    assert file.layers == preset.layers
    assert preset.model.settings["preset"] == name


@pytest.mark.parametrize("name", model_presets())
def test_presets_have_the_number_of_parameters_in_their_name(name: str) -> None:
    parameters = transformer_from_config(model_presets()[name], 128, source=name).parameters
    sizes = {"gpt2-xl": 1.5, "phi-4": 14.7, "deepseek-v2": 236, "deepseek-v3": 671, "mixtral-8x7b": 46.7}
    sizes |= {"mixtral-8x22b": 141}
    spelled = next((part for part in name.split("-") if part.endswith("b") and part[0].isdigit()), "0b")
    billions = sizes.get(name) or float(spelled.removesuffix("b"))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.1)


def test_profiles_of_configurations_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    program = (
        "import planner, sys; "
        f"planner.profile({str(tmp_path)!r}, device='estimate:h100'); "
        "planner.profile(preset='qwen3-8b', rate='400TFLOP/s'); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_language_model_of_a_multimodal_configuration_is_profiled(key: str, tmp_path: Path) -> None:
    """Missing sizes have the defaults of transformers, and the outer file ties the head."""
    notes: list[str] = []
    part = {name: value for name, value in SMALL.items() if name != "vocab_size"} | {"tie_word_embeddings": False}
    nested = {"model_type": "llava", key: part, "vision_config": {"hidden_size": 8}, "tie_word_embeddings": True}
    made = of(tmp_path, nested, note=notes.append)
    assert made.layers == of(tmp_path, {**SMALL, "vocab_size": 32_000, "tie_word_embeddings": True}).layers
    assert any(f"only the language model (`{key}`)" in note for note in notes)
    assert any(note.endswith("leaves out sizes; those of transformers are used: `vocab_size` 32000") for note in notes)


T5 = {
    "model_type": "t5",
    "num_layers": 2,
    "d_model": 64,
    "num_heads": 4,
    "d_kv": 16,
    "d_ff": 128,
    "vocab_size": 100,
    "n_positions": 32,
}


@pytest.mark.slow
def test_engines_without_t5_refuse_its_plan(tmp_path, capsys, monkeypatch):
    """Only the schedule can be written."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(T5))
    ran = call(capsys, "profile", "config.json", "--device", "estimate:h100", "--tensor-parallel", "1")
    ran = call(capsys, *_next(ran.err), "--schedule", "1f1b")
    for engine in ("torchtitan", "automodel", "torch", "device-map", "megatron"):
        refused = call(capsys, "emit", "--format", engine)
        assert refused.code != 0, engine
        assert "has no model of the formula `t5`" in refused.err
    assert not list(Path().glob("plan_*"))
    assert _next(ran.err) == ("emit", "--format", "csv")
    assert call(capsys, *_next(ran.err)).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--expert-parallel", "4")])
def test_suggested_next_commands_of_a_configuration_work(more, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(ROUTED if more else SMALL))
    ran = call(capsys, "profile", "config.json", "--device", "estimate:h100", *more)
    assert "samples have 32 tokens" in ran.err
    assert "bf16-mixed" in ran.err
    ran = call(capsys, *_next(ran.err))
    assert ran.code == 0
    assert _next(ran.err) == ("emit", "--format", "megatron")
    assert call(capsys, *_next(ran.err)).code == 0
    assert call(capsys, "emit", "--format", "torchtitan").code == 0
    written = Path("plan_torchtitan.py").read_text()
    for name in ("tok_embeddings", "layers.0", "layers.3", "norm", "lm_head"):
        assert f'"{name}"' in written
    refused = call(capsys, "emit")
    assert refused.code != 0
    assert "--format megatron" in refused.err


@pytest.mark.parametrize(("family", "expected"), [("llama", "torchtitan"), ("transformer", "megatron")])
def test_suggested_engine_runs_the_schedule(family, expected, tmp_path, capsys, monkeypatch):
    """No engine with a model of the formula `transformer` runs ZB-H1."""
    monkeypatch.chdir(tmp_path)
    sizes = ("--layers", "4", "--hidden", "64", "--heads", "4", "--sequence", "32", "--vocabulary", "100")
    sizes += ("--feed-forward", "128") * (family == "llama")
    call(capsys, "profile", "--from-formula", family, *sizes, "--device", "estimate:h100", "--tensor-parallel", "1")
    ran = call(capsys, "solve", "--devices", "2", "--batch", "8", "--schedule", "zb-h1")
    assert _next(ran.err) == ("emit", "--format", expected)
    assert call(capsys, *_next(ran.err)).code == 0


def _next(stderr: str) -> tuple[str, ...]:
    (line,) = (line for line in stderr.splitlines() if line.startswith("next: "))
    return tuple(line.removeprefix("next: gpipe-plan ").split())


def test_suggested_number_of_devices_holds_a_large_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = str(tmp_path / "profile.yaml")
    options = ("--device", "estimate:h100", "-o", output)
    for name, next_ in (("llama-3-8b", "--devices 4"), ("llama-3-70b", "--nodes 5x8 --replicas auto")):
        assert call(capsys, "profile", "--preset", name, *options).err.endswith(f" {next_}\n")
    # Of a block with its state, 8 GPUs hold 26 GB each: one per stage.
    ran = call(capsys, "profile", "--preset", "deepseek-v3", *options)
    assert "--nodes 58x8 --replicas auto" in ran.err
    assert "alone" not in ran.err
    ran = call(capsys, "profile", "--preset", "deepseek-v3", "--tensor-parallel", "1", *options)
    assert "`layers.3` alone take 172 GiB" in ran.err
    assert "--expert-parallel" in ran.err


@pytest.mark.slow
def test_configuration_has_a_profile_of_each_width(tmp_path: Path) -> None:
    """Each block sums its two results; embedding and head have one sum, in forward or backward."""
    profile = of(tmp_path, dtype="bf16")
    assert [profile.tensor_parallel, *(width.tensor_parallel for width in profile.widths)] == [1, 2, 4]
    assert not any(layer.collectives for layer in profile.layers)
    states = 2 * 32 * 64
    for width in profile.widths:
        assert [layer.collectives for layer in width.layers] == [1, 2, 2, 2, 2, 1]
        assert [layer.collective_bytes[0] for layer in width.layers] == [
            states // 2,
            *[2 * states] * 4,
            states // 2,
        ]
        assert of(tmp_path, dtype="bf16", tensor_parallel=width.tensor_parallel).layers == width.layers
        # A rate that is given for a single width includes its collectives.
        given = of(tmp_path, dtype="bf16", tensor_parallel=width.tensor_parallel, rate="433TFLOP/s").layers
        assert [layer.forward_us for layer in given] == [layer.forward_us for layer in width.layers]
        assert not any(layer.collectives for layer in given)
    plan = planner.solve(profile, nodes="1x4", batch=4)
    assert plan.tensor_parallel in (1, 2, 4)


def test_devices_without_a_known_link_have_one_width(tmp_path: Path) -> None:
    """Without a link, plans of several widths cannot be compared."""
    assert of(tmp_path, device="estimate:t4").widths == ()
    executor = of(tmp_path).device.executor
    assert executor.link.bytes_per_s == 450e9


def test_expert_parallelism_divides_the_parameters_of_experts(tmp_path: Path) -> None:
    """Capacity multiplies the tokens of the experts."""
    whole, part, more = (
        of(tmp_path, ROUTED, **given).layers[1] for given in ({}, {"expert_parallel": 4}, {"capacity": 1.5})
    )
    experts = 8 * 3 * 64 * 128
    assert (whole.parameter_bytes - part.parameter_bytes) / 4 == experts * 3 / 4
    assert part.forward_flops == whole.forward_flops
    assert more.forward_flops[0] - whole.forward_flops[0] == 0.5 * 2 * 32 * 2 * 3 * 64 * 128
    assert more.saved_bytes[0] > whole.saved_bytes[0]


def test_selective_recomputation_drops_attention_scores(tmp_path: Path) -> None:
    """The backward computes attention's products once more."""
    kept, again = (of(tmp_path, keep_scores=True, recompute_attention=each).layers[1] for each in (False, True))
    assert kept.saved_bytes[0] - again.saved_bytes[0] == 4 * 32**2 * 5
    products = 4 * 32**2 * 64
    assert again.backward_us[0] - kept.backward_us[0] == pytest.approx(products / 433e12 * 1e6)


def test_multi_token_prediction_adds_a_block_and_logits(tmp_path: Path) -> None:
    plain, further = (of(tmp_path, mtp_layers=count) for count in (0, 1))
    assert further.layers[-2].name == "mtp.layers.0"
    assert further.layers[-1].forward_flops[0] == 2 * plain.layers[-1].forward_flops[0]
    block = plain.layers[1].parameter_bytes / 4
    assert further.layers[-2].parameter_bytes / 4 == block + 2 * 64**2 + 3 * 64


def test_formula_by_name_equals_its_configuration(tmp_path: Path) -> None:
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "key_value_heads": 2, "feed_forward": 128, "vocabulary": 100}
    asked = {"device": "estimate:h100", "dtype": "bf16", "batch_sizes": 1}
    named = planner.profile(from_formula="llama", sequence=32, **sizes, **asked)
    assert named.layers == of(tmp_path, dtype="bf16").layers
    assert named.layers == of(tmp_path, dtype="bf16", from_formula="auto").layers
    routed = planner.profile(from_formula="mixtral", sequence=32, experts=8, experts_per_token=2, **sizes, **asked)
    assert routed.layers == of(tmp_path, ROUTED, dtype="bf16").layers


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("{", {}, "is not JSON"),
        ("[]", {}, "no JSON object"),
        ({"model_type": "mamba"}, {}, "`model_type: mamba`"),
        (SMALL, {"layers": 3}, "`--layers`"),
        (SMALL, {"from_formula": "qwen2"}, "`model_type: llama`"),
        (SMALL, {"tensor_parallel": 3}, "does not divide 4 attention heads"),
        (SMALL, {"expert_parallel": 2}, "does not divide 0 experts"),
        (ROUTED, {"expert_parallel": 3}, "does not divide 8 experts"),
        (ROUTED, {"capacity": "much"}, "`--capacity much`"),
        (model_presets()["t5-11b"], {"mtp_layers": 1}, "an encoder-decoder has no multi-token prediction"),
        (SMALL, {"preset": "llama-3-8b"}, "takes no model"),
    ],
)
def test_contradicting_configurations_are_refused(content, options, expected, tmp_path):
    with pytest.raises(PlannerError) as refused:
        of(tmp_path, content, **options)
    assert expected in refused.value.message


def test_unknown_families_get_a_hint_to_profile_the_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        of(tmp_path, {"model_type": "mamba"})
    assert "`--from-formula never`" in refused.value.hint


def test_configuration_is_not_overwritten(tmp_path: Path) -> None:
    of(tmp_path)
    with pytest.raises(PlannerError):
        planner.profile(tmp_path, device="estimate:h100", output=tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text()) == SMALL


def test_key_value_heads_are_divided_or_copied_evenly(tmp_path: Path) -> None:
    content = {**SMALL, "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 16}
    profile = of(tmp_path, content)
    assert [width.tensor_parallel for width in profile.widths] == [2]
    assert of(tmp_path, content, tensor_parallel=12).tensor_parallel == 12
    with pytest.raises(UsageError, match="does not divide 6 key-value heads"):
        of(tmp_path, content, tensor_parallel=4)


def test_undivided_weights_process_all_tokens_on_each_device(tmp_path: Path) -> None:
    """The router is such a weight, unless sequence parallelism divides the tokens."""
    one, eight, divided = (
        of(tmp_path, {**ROUTED, "num_attention_heads": 8, "num_key_value_heads": 8}, **options).layers[1]
        for options in (
            {"tensor_parallel": 1},
            {"tensor_parallel": 8},
            {"tensor_parallel": 8, "sequence_parallel": True},
        )
    )
    router = 2 * 32 * SMALL["hidden_size"] * ROUTED["num_local_experts"]
    assert eight.forward_flops[0] == pytest.approx((one.forward_flops[0] - router) / 8 + router, abs=1)
    assert divided.forward_flops[0] == pytest.approx(one.forward_flops[0] / 8, abs=1)


@pytest.mark.slow
def test_replicas_are_a_multiple_of_expert_parallelism(tmp_path: Path) -> None:
    profile = of(tmp_path, ROUTED, expert_parallel=2, tensor_parallel=1)
    with pytest.raises(UsageError, match="divides experts among 2 replicas"):
        planner.solve(profile, devices=4, batch=8)
    with pytest.raises(UsageError, match="a batch of 7 cannot be shared equally by 2 replicas"):
        planner.solve(profile, devices=4, batch=7, replicas="auto")
    with pytest.raises(UsageError, match="need 2 GPUs or more, there are 1"):
        planner.solve(profile, devices=1, batch=8, replicas="auto")
    fits = {"devices": 4, "batch": 8, "schedule": "gpipe"}
    assert planner.solve(profile, **fits, replicas="auto").replicas % 2 == 0
    assert planner.solve(profile, **fits, replicas=2).replicas == 2


def test_suggested_memory_is_enough_with_default_headroom(tmp_path: Path) -> None:
    profile = of(tmp_path, tensor_parallel=1)
    options = {"devices": 2, "batch": 4, "schedule": "gpipe"}
    with pytest.raises(PlannerError) as refused:
        planner.solve(profile, mem="1MB", reserve="0B", **options)
    named = re.search(r"`--mem` (?:is )?(\S+)", refused.value.hint)
    assert planner.solve(profile, mem=named[1], reserve="0B", **options).stages


def test_suggested_nodes_hold_a_model_that_is_too_large_for_the_cluster(tmp_path: Path) -> None:
    """The error counts GPUs, because several of them share each layer."""
    profile, options = of(tmp_path), {"mem": "600kB", "reserve": "0B", "headroom": "0%", "schedule": "1f1b"}
    with pytest.raises(InfeasibleError, match=r"on each of 2 GPUs: .* alone take \S+ MiB, 2 GPUs together") as refused:
        planner.solve(profile, nodes="1x2", batch=8, **options)
    named = re.search(r"`--nodes (\dx2)` fits", refused.value.hint)
    assert planner.solve(profile, nodes=named[1], batch=8, **options).stages


def test_missing_packages_are_reported_before_the_model_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "transformers" else name)
    with pytest.raises(MissingPackageError, match="transformers is not installed"):
        of(tmp_path, from_formula="never")
    with pytest.raises(MissingPackageError, match="transformers is not installed") as refused:
        of(tmp_path, device="cpu")
    assert refused.value.hint.startswith("pip install transformers; or use `--device estimate:h100`")


def test_all_missing_options_are_reported_together() -> None:
    with pytest.raises(UsageError) as refused:
        planner.profile(from_formula="mixtral", layers=4, hidden=64)
    for name in ("heads", "sequence", "vocabulary", "feed-forward", "experts", "experts-per-token", "device"):
        assert f"`--{name}" in refused.value.message
    assert "--layers" not in refused.value.message


@pytest.mark.slow
def test_estimates_keep_headroom_for_their_error_range_by_default(tmp_path: Path) -> None:
    profile, notes = of(tmp_path), list[str]()
    asked = {"devices": 2, "batch": 4, "schedule": "gpipe"}
    plan = planner.solve(profile, mem="4GB", note=notes.append, **asked)
    assert 0.15 < plan.inputs.headroom < 0.2
    assert plan.inputs.memory_bytes == (int(4 * 10**9 * (1 - plan.inputs.headroom)),) * 2
    assert any("`--headroom 0%` uses all memory" in note for note in notes)
    full = planner.solve(profile, mem="4GB", headroom="0%", **asked)
    assert full.inputs.memory_bytes == (4 * 10**9,) * 2
    (cell,) = planner.sweep(profile, **asked).cells
    assert cell.memory_bytes == profile.device.memory_bytes
    assert cell.plan.inputs.memory_bytes == (int(cell.memory_bytes * (1 - cell.plan.inputs.headroom)),) * 2
