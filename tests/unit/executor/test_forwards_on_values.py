"""Tests that a rank finds the layers of models of transformers whose forwards need the values of tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.executor.build.building import StageRange, build_stages, build_structure
from tests.support.measure import loaded_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def wav2vec2() -> nn.Module:
    """Return a recognizer of speech whose masks are drawn by NumPy, as by default (SpecAugment)."""
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
        layerdrop=0.0,
    )
    assert config.apply_spec_augment
    return transformers.Wav2Vec2ForCTC(config)


def mask2former() -> nn.Module:
    """Return a model that segments images."""
    backbone = transformers.SwinConfig(
        image_size=64,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        encoder_feedforward_dim=32,
        num_queries=5,
        num_labels=3,
        train_num_points=16,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config)


def encodec() -> nn.Module:
    """Return a codec of audio."""
    config = transformers.EncodecConfig(
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        num_lstm_layers=1,
        upsampling_ratios=[4, 2],
        target_bandwidths=[24.0],
    )
    return transformers.EncodecModel(config)


def speech(size: int) -> dict[str, Tensor]:
    """Return sound with its text."""
    return {"input_values": torch.randn(size, 400), "labels": torch.randint(1, 12, (size, 5))}


def images(size: int) -> dict[str, Tensor]:
    """Return images with masks of two objects each."""
    masks = (torch.rand(size, 2, 64, 64) > 0.5).float()
    return {
        "pixel_values": torch.randn(size, 3, 64, 64),
        "mask_labels": masks,
        "class_labels": torch.randint(3, (size, 2)),
    }


def sound(size: int) -> dict[str, Tensor]:
    """Return sound."""
    return {"input_values": torch.randn(size, 1, 320)}


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        pytest.param(wav2vec2, speech, id="ctc"),
        pytest.param(mask2former, images, id="masks", marks=pytest.mark.nightly),
        pytest.param(encodec, sound, id="codec"),
    ],
)
def test_ranks_find_the_profiled_layers(build: Callable[[], nn.Module], inputs: Callable[[int], Any]) -> None:
    """The constructors leave some tensors on the CPU, and the forwards need values: every rank died at its start."""
    loaded = loaded_model(build, inputs)
    chain = build_structure(loaded)
    assert chain.names == loaded.chain(build()).names
    assert len(chain.names) > 3
    (last,) = build_stages(loaded, chain, [StageRange(len(chain.names) - 1, len(chain.names))], seed=0, device=CPU)
    assert not any(parameter.is_meta for layer in last for parameter in layer.module.parameters())
