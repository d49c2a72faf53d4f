"""Models that nothing was prepared for: a model of each kind trains as its plain loop does, or is refused with help.

`python benchmarks/unprepared.py` tries all of them.
"""

import pytest

from tests.zoo.unprepared import UnpreparedModel, unprepared_models
from tests.zoo.unprepared.running import try_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RIGHT = (
    "state:running_scale_attribute",
    pytest.param("loops:freezes_and_unfreezes_the_backbone", marks=pytest.mark.nightly),
)

REFUSED = (
    pytest.param("repositories:reformer_reversible_sequence", marks=pytest.mark.nightly),
    pytest.param("backwards:deep_equilibrium_with_a_hook", marks=pytest.mark.nightly),
    pytest.param("loops:clips_each_group", marks=pytest.mark.nightly),
    pytest.param("tricks:unfreezes_gradually", marks=pytest.mark.nightly),
    pytest.param("globals:count_in_blocks", marks=pytest.mark.nightly),
    "optimizers:skips_large_steps",
    "losses:curriculum_in_forward",
    "popular:targets_in_a_dataclass",
    pytest.param("loops:divides_by_the_norm_of_all_gradients", marks=pytest.mark.nightly),
    pytest.param("loops:unfreezes_a_planned_frozen_backbone", marks=pytest.mark.nightly),
    pytest.param("hidden:memory_in_a_list_of_a_model_used_late", marks=pytest.mark.nightly),
)

LATER = tuple(
    pytest.param(name, marks=pytest.mark.nightly)
    for name in (
        "hooks:mask_of_a_weight",
        "detached:running_mean_and_deviation_of_numpy",
        "random:batch_of_python_and_numpy",
        "losses:ignore_index_counted",
        "structures:dict_inputs_dataclass_outputs",
        "tricks:switches_dropout_off",
        "backwards:overwrites_its_result_in_backward",
        "repositories:clip_with_a_mask_in_all_blocks",
        "repositories:vae_of_torch_distributions",
        "popular:writer_and_meters",
        "random:mixup_in_forward",
        "objectives:masked_words_and_next_sentence",
        "modules:prepare_qat",
        "optimizers:layerwise_rates_by_position",
        "ties:numpy_values_unseeded",
        "loops:goes_back_to_the_best_weights",
        "popular:muon_shares_its_work",
        "everyday:vmapped_ensemble_of_mlps",
        "architectures:chunked_results_cross",
        "architectures:pairs_of_tables_cached_in_the_model",
        "architectures:orthogonal_rectangle",
        "architectures:compiled_in_place_as_full_graphs",
        "architectures:compiled_sequentials_as_full_graphs",
    )
)
"""Right models for `make nightly`."""


@pytest.fixture(scope="module")
def models() -> dict[str, UnpreparedModel]:
    """Return all models by kind and name."""
    return {f"{model.kind}:{model.name}": model for model in unprepared_models()}


def test_models_are_many_and_distinct() -> None:
    texts = {model.text for model in unprepared_models()}
    assert len(texts) == len(unprepared_models()) >= 80


@pytest.mark.parametrize("name", [*RIGHT, *LATER])
def test_pipelines_equal_the_plain_loop(models: dict[str, UnpreparedModel], name: str) -> None:
    """Losses of all steps and final tensors are equal up to rounding: with recomputation, and with split backwards.

    The pipelines with fewer stages are left to `benchmarks/unprepared.py`.
    """
    outcome = try_model(models[name], num_pipelines=2)
    assert outcome.verdict == "right", outcome


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_with_a_hint(models: dict[str, UnpreparedModel], name: str) -> None:
    outcome = try_model(models[name])
    assert outcome.verdict == "refused", outcome
