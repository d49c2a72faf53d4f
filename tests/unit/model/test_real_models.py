"""Known models in three stages have the loss and gradients of the unpartitioned model."""

import os

import pytest
import torch

from planner.model.chain import chain_digest, chain_of
from tests.support.cutting import compare
from tests.zoo.real_models import IN_CI, IN_NIGHTLY, REAL_MODELS, loss_of

pytest.importorskip("transformers")
pytest.importorskip("timm")

NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in IN_NIGHTLY]
NAMES = tuple(REAL_MODELS) if os.environ.get("GPIPE_PLAN_ALL_MODELS") else (*IN_CI, *NIGHTLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("granularity", ["coarse", pytest.param("fine", marks=pytest.mark.nightly)])
def test_loss_and_gradients_of_stages_equal_the_models(name: str, granularity: str) -> None:
    """Two micro-batches are in flight, of sizes that were not recorded."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    real = REAL_MODELS[name]
    compared = compare(
        real.build(), real.inputs, loss_of, granularity="fine" if granularity == "fine" else "coarse", sizes=(3, 2)
    )
    assert compared.loss_error < 1e-4
    assert compared.gradient_error < 1e-4
    assert len(compared.chain.layers) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "output_hidden_states",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("use_cache", "output_attentions")),
    ],
)
def test_unused_outputs_are_not_sent(setting: str) -> None:
    plain, more = (REAL_MODELS["GPT-2"].build() for _ in range(2))
    more.set_attn_implementation("eager")
    setattr(more.config, setting, True)
    inputs = REAL_MODELS["GPT-2"].inputs
    usual, compared = (compare(model, inputs, loss_of, sizes=(3, 2)) for model in (plain, more))
    assert compared.loss_error < 1e-6
    assert compared.gradient_error < 1e-6
    assert max(compared.crossing) <= max(usual.crossing)
    everything = chain_of(more, inputs).outline
    assert setting == "use_cache" or max(map(len, everything.crossings)) > max(compared.crossing)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "ResNet-26 (timm)", pytest.param("T5", marks=pytest.mark.nightly)])
def test_finding_layers_changes_no_weights_random_state_or_digest(name: str) -> None:
    real = REAL_MODELS[name]
    model = real.build().train()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    digest = chain_digest(chain_of(model, real.inputs), {})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert chain_digest(chain_of(real.build().train(), real.inputs), {}) == digest
