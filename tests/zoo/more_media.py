"""More models of `transformers` for pictures, sound, time series and several of these at once."""

from typing import Any

import torch
from torch import Tensor

from tests.zoo.real_model import (
    DECODER,
    GROUPED,
    SEQ2SEQ,
    TOKENS,
    VISION,
    WORDS,
    RealModel,
    from_transformers,
    masked,
    pixels,
    series,
    sound,
    vision,
)

__all__ = ["MORE_MEDIA"]


def _captions(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, WORDS, (batch, TOKENS)), "pixel_values": torch.randn(batch, 3, 32, 32)}


def _pairs(batch: int) -> dict[str, Any]:
    return {**_captions(batch), "return_loss": True}


def _picture_first(batch: int) -> dict[str, Tensor]:
    words = torch.cat([torch.full((batch, 16), 3), torch.randint(4, WORDS, (batch, 8))], 1)
    return {"input_ids": words, "labels": words.clone(), "pixel_values": torch.randn(batch, 3, 32, 32)}


def _boxes(batch: int) -> dict[str, Tensor]:
    return {**masked(batch), "bbox": torch.randint(0, 30, (batch, TOKENS, 4)).sort(dim=-1).values}


def _video(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 4, 3, 16, 16)}


def _masked_patches(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "noise": torch.rand(batch, 16)}


def _prompts(batch: int) -> dict[str, Tensor]:
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: torch.randn(batch, 3, 16, 16) for name in names}


def _spectrogram(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 32, 16)}


def _speech(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 32, 8), "labels": torch.randint(2, WORDS, (batch, 6))}


def _known_times(batch: int) -> dict[str, Tensor]:
    past, future = torch.randn(batch, 14, 3), torch.randn(batch, 6, 3)
    return {
        "past_values": past[..., 0],
        "past_time_features": past[..., 1:],
        "past_observed_mask": torch.ones(batch, 14),
        "future_values": future[..., 0],
        "future_time_features": future[..., 1:],
    }


def _trajectories(batch: int) -> dict[str, Tensor]:
    return {
        "states": torch.randn(batch, 5, 7),
        "actions": torch.randn(batch, 5, 3),
        "rewards": torch.randn(batch, 5, 1),
        "returns_to_go": torch.randn(batch, 5, 1),
        "timesteps": torch.arange(5).expand(batch, 5).clone(),
        "attention_mask": torch.ones(batch, 5),
    }


def _vision(name: str, size: int = 32, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=pixels(size), family="vision", **settings)


_SOUND: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
_TIMES: dict[str, Any] = {
    "prediction_length": 6,
    "context_length": 8,
    "lags_sequence": [1, 2, 6],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}

MORE_MEDIA: dict[str, RealModel] = {
    "Informer": from_transformers("InformerForPrediction", inputs=_known_times, family="time series", **_TIMES),
    "Autoformer": from_transformers(
        "AutoformerForPrediction", inputs=_known_times, family="time series", label_length=4, **_TIMES
    ),
    "Time Series Transformer": from_transformers(
        "TimeSeriesTransformerForPrediction", inputs=_known_times, family="time series", **_TIMES
    ),
    "PatchTSMixer": from_transformers(
        "PatchTSMixerForPrediction",
        inputs=series,
        family="time series",
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        patch_length=4,
        patch_stride=4,
        num_layers=3,
        d_model=16,
    ),
    "UniSpeech": from_transformers("UniSpeechModel", inputs=sound, family="speech", **_SOUND),
    "SEW": from_transformers("SEWModel", inputs=sound, family="speech", squeeze_factor=2, **_SOUND),
    "WavLM": from_transformers("WavLMModel", inputs=sound, family="speech", **_SOUND),
    "Data2Vec (audio)": from_transformers(
        "Data2VecAudioModel", inputs=sound, family="speech", **{**_SOUND, "num_conv_pos_embeddings": 2}
    ),
    "Audio Spectrogram Transformer": from_transformers(
        "ASTModel",
        inputs=_spectrogram,
        family="speech",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=32,
        num_mel_bins=16,
    ),
    "Speech2Text": from_transformers(
        "Speech2TextForConditionalGeneration",
        inputs=_speech,
        family="speech",
        input_feat_per_channel=8,
        input_channels=1,
        conv_channels=16,
        num_conv_layers=2,
        max_source_positions=64,
        max_target_positions=64,
        **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
    ),
    "TimeSformer": from_transformers(
        "TimesformerModel", inputs=_video, family="vision", num_frames=4, **{**VISION, "image_size": 16}
    ),
    "VideoMAE": from_transformers(
        "VideoMAEModel", inputs=_video, family="vision", num_frames=4, tubelet_size=2, **{**VISION, "image_size": 16}
    ),
    "ViViT": from_transformers(
        "VivitModel",
        inputs=_video,
        family="vision",
        num_frames=4,
        tubelet_size=[2, 8, 8],
        **{**VISION, "image_size": 16},
    ),
    "ViTMAE": from_transformers(
        "ViTMAEForPreTraining",
        inputs=_masked_patches,
        family="vision",
        decoder_num_attention_heads=4,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=48,
        mask_ratio=0.5,
        **VISION,
    ),
    "SegGPT": from_transformers(
        "SegGptForImageSegmentation",
        inputs=_prompts,
        family="vision",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=[32, 16],
        patch_size=8,
        mlp_dim=48,
        decoder_hidden_size=16,
        pretrain_image_size=16,
        merge_index=1,
        intermediate_hidden_state_indices=[1, 2, 3],
        drop_path_rate=0.0,
    ),
    "DETR": _vision(
        "DetrForObjectDetection",
        size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=6,
        num_labels=5,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage4"],
        },
        auxiliary_loss=True,
    ),
    "YOLOS": vision("YolosForObjectDetection", num_detection_tokens=5, **{**VISION, "image_size": [32, 32]}),
    "DINOv3": vision("DINOv3ViTModel", num_register_tokens=2, **VISION),
    "Hiera": _vision(
        "HieraForImageClassification",
        embed_dim=16,
        image_size=[32, 32],
        patch_size=[3, 3],
        patch_stride=[2, 2],
        patch_padding=[1, 1],
        masked_unit_size=[8, 8],
        depths=[1, 1, 2, 1],
        num_heads=[1, 2, 4, 8],
        query_stride=[2, 2],
        num_query_pool=2,
    ),
    "PVT-v2": _vision(
        "PvtV2ForImageClassification",
        size=64,
        image_size=64,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "LeViT": _vision(
        "LevitForImageClassification",
        size=64,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[2, 2, 2],
        key_dim=[4, 4, 4],
        drop_path_rate=0,
        train=True,
    ),
    "FocalNet": _vision(
        "FocalNetForImageClassification",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "Swin-v2": _vision(
        "Swinv2ForImageClassification",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "EfficientNet": _vision(
        "EfficientNetForImageClassification",
        size=64,
        image_size=64,
        width_coefficient=0.25,
        depth_coefficient=0.5,
        hidden_dim=320,
    ),
    "BiT": _vision(
        "BitForImageClassification", embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 2, 1], num_groups=4
    ),
    "CLIP (both towers)": from_transformers(
        "CLIPModel",
        inputs=_pairs,
        family="several inputs",
        text_config={**DECODER, "projection_dim": 16},
        vision_config={**VISION, "projection_dim": 16},
        projection_dim=16,
    ),
    "SigLIP (both towers)": from_transformers(
        "SiglipModel",
        inputs=_pairs,
        family="several inputs",
        text_config={**DECODER, "projection_size": 32},
        vision_config={**VISION},
    ),
    "ViLT": from_transformers(
        "ViltModel", inputs=_captions, family="several inputs", **VISION, vocab_size=WORDS, max_position_embeddings=64
    ),
    "BLIP": from_transformers(
        "BlipForConditionalGeneration",
        inputs=_captions,
        family="several inputs",
        text_config={**DECODER, "encoder_hidden_size": 32, "is_decoder": True},
        vision_config=VISION,
    ),
    "LLaVA": from_transformers(
        "LlavaForConditionalGeneration",
        inputs=_picture_first,
        family="several inputs",
        text_config={"model_type": "llama", **GROUPED},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_id=3,
        image_token_index=3,
        vision_feature_layer=-1,
    ),
    "Decision Transformer": from_transformers(
        "DecisionTransformerModel",
        inputs=_trajectories,
        family="several inputs",
        state_dim=7,
        act_dim=3,
        hidden_size=32,
        n_layer=3,
        n_head=4,
        max_ep_len=16,
    ),
    "LayoutLM": from_transformers(
        "LayoutLMForMaskedLM", inputs=_boxes, family="several inputs", max_2d_position_embeddings=64, **DECODER
    ),
}
