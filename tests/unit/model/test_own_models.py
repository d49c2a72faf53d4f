"""Models as users write them: separately built stages train like the unpartitioned model, or the model is refused."""

import os

import pytest
import torch

from planner.core.errors import ModelError
from tests.support.apart import Whole, compare_apart, even_cuts
from tests.zoo.own_models import OWN_MODELS

IN_CI = (
    *(
        "nanoGPT, checkpoints",
        "LSTM language model",
        "Residuals at the top",
    ),
    *("U-Net, long skips", "Stochastic depth", "Frozen backbone", "weight_norm", "Siamese", "VAE", "RealNVP"),
    *("MoE, aux_loss in attributes", "MoE, experts hit by the data", "MMoE", "DLRM"),
    "Tiny perceptron",
)
"""Compared in every run of the tests; others in `make nightly`, and all where `GPIPE_PLAN_ALL_MODELS` is set."""
NIGHTLY = [
    pytest.param(name, marks=pytest.mark.nightly) for name in ("GRU tagger", "DETR by hand", "Two towers, one encoder")
]
TRAINED = [name for name, real in OWN_MODELS.items() if not real.refusal]
NAMES = TRAINED if os.environ.get("GPIPE_PLAN_ALL_MODELS") else (*IN_CI, *NIGHTLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_separately_built_stages_equals_the_models(name: str) -> None:
    """Loss, gradients and buffers of three recomputed stages, and of one stage per layer."""
    if name.startswith("GPT-2"):
        pytest.importorskip("transformers")
    torch.set_num_threads(1)
    whole = Whole.of(OWN_MODELS[name])
    assert whole.gradients
    num_layers = len(whole.chain.layers)
    recomputed = compare_apart(whole, even_cuts(num_layers), "always")
    many = compare_apart(whole, range(num_layers + 1), together=True)
    assert recomputed.worst < 1e-4
    assert many.worst < 1e-4


@pytest.mark.parametrize("name", [name for name, real in OWN_MODELS.items() if real.refusal])
def test_models_that_cannot_be_cut_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ModelError, match=OWN_MODELS[name].refusal) as caught:
        _train(name)
    assert caught.value.hint


def _train(name: str) -> None:
    whole = Whole.of(OWN_MODELS[name])
    compare_apart(whole, even_cuts(len(whole.chain.layers)))
