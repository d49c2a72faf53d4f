"""Models built from a Hugging Face config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.core.errors import PlannerError, UsageError
from planner.model.load import load_model
from tests.unit.api.test_configuration import SMALL

pytest.importorskip("transformers")

T5 = {
    "model_type": "t5",
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_kv": 16,
    "d_ff": 48,
    "vocab_size": 60,
    "decoder_start_token_id": 0,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
}


def write_configuration(folder: Path, content: dict[str, Any], *architectures: str) -> str:
    """Write a config.json and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps({**content, "architectures": list(architectures)}))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "architecture", "task", "built"),
    [
        (SMALL, "LlamaForCausalLM", None, "LlamaForCausalLM"),
        (BERT, "BertForMaskedLM", "sequence-classification", "BertForSequenceClassification"),
        (T5, "T5ForConditionalGeneration", None, "T5ForConditionalGeneration"),
        (BERT, "BertForMaskedLM", None, "BertForMaskedLM"),
        ({**SMALL, "dtype": "bfloat16"}, "LlamaModel", "causal-lm", "LlamaForCausalLM"),
        ({"model_type": "llava", "text_config": SMALL}, "LlavaForConditionalGeneration", None, "LlamaForCausalLM"),
    ],
)
def test_the_task_chooses_head_and_labels(content, architecture, task, built, tmp_path):
    """Without a task, `architectures` chooses. Parameters are float32."""
    settings = {"sequence": "8"} | ({"task": task} if task else {})
    loaded = load_model(write_configuration(tmp_path, content, architecture), settings=settings)
    model = loaded.build()
    assert type(model).__name__ == built
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    batch = loaded.example_batch(3)
    assert batch.inputs["input_ids"].shape == (3, 8)
    assert loaded.loss_fn(model(**batch.inputs), batch.targets).isfinite()


@pytest.mark.slow
def test_a_profiled_configuration_is_planned_and_emitted_as_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_configuration(Path(), SMALL, "LlamaForCausalLM")
    asked = {"from_formula": "never", "sequence": 16, "batch_sizes": 2, "proof_budget": "0s"}
    profile = planner.profile(path, device="estimate:h100", output="profile.yaml", **asked)
    assert profile.model.source == "config.json:build_model"
    assert profile.model.settings == {"sequence": 16}
    assert profile.layers[1].name == "model.layers.0"
    by_formula = planner.profile(path, device="estimate:h100", sequence=16, batch_sizes=2, dtype="fp32")
    assert profile.model.parameters == by_formula.model.parameters
    planner.solve("profile.yaml", devices=2, batch=4, schedule="1f1b", output="plan.yaml")
    planner.emit("plan.yaml")
    assert "config.json:build_model" in Path("balance.yaml").read_text()


@pytest.mark.parametrize(
    ("architectures", "options", "expected"),
    [
        (("LlamaForCausalLM",), {"task": "poetry"}, "`--task poetry`"),
        (("LlamaForDancing",), {}, "LlamaForDancing"),
        (("LlamaForCausalLM",), {"layers": 3}, "`--layers`"),
    ],
)
def test_unknown_tasks_architectures_and_sizes_are_refused(architectures, options, expected, tmp_path):
    with pytest.raises(PlannerError) as refused:
        planner.profile(write_configuration(tmp_path, SMALL, *architectures), from_formula="never", **options)
    assert expected in refused.value.message


def test_options_of_configurations_are_refused_for_model_files() -> None:
    with pytest.raises(UsageError) as refused:
        planner.profile("model.py", sequence=16)
    assert "`--sequence` needs a config.json" in refused.value.message
