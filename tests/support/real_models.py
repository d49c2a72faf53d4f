"""Models people know, tiny and with random weights, as `transformers` and `timm` build them from a configuration."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.nests import tensors_in

# The torchvision of the package index is built for CUDA: beside a CPU torch its operators do not load.
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))

__all__ = ["IN_CI", "REAL_MODELS", "RealModel", "loss_of"]

WORDS = 64
TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """One architecture."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    caveat: str = ""


def loss_of(output: Any, _targets: Any = None) -> Tensor:
    """The model's own loss, else a scalar that every number of the output has a part in."""
    own = getattr(output, "loss", None)
    if own is not None:
        loss: Tensor = own
        return loss
    tensors = [t for t in tensors_in(output) if t.is_floating_point()]
    # Not the mean: that of a normalised layer is constant.
    return torch.stack([(t.flatten() * torch.cos(torch.arange(t.numel()))).mean() for t in tensors]).sum()


def _transformers(
    name: str,
    config: str,
    *,
    inputs: Callable[[int], Any],
    family: str,
    caveat: str = "",
    train: bool = False,
    **settings: Any,
) -> RealModel:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        made = getattr(transformers, config)(**settings)
        model: nn.Module = getattr(transformers, name)(made)
        return model.train(train)  # dropout would draw other numbers in every run

    return RealModel(family=family, build=build, inputs=inputs, caveat=caveat)


def _timm(name: str, *, size: int, caveat: str = "", **settings: Any) -> RealModel:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=7, **settings)
        return model.eval()

    return RealModel(family="timm", build=build, inputs=_images(size), caveat=caveat)


def _language(batch: int) -> dict[str, Tensor]:
    words = torch.randint(2, WORDS, (batch, TOKENS))
    return {"input_ids": words, "labels": words.clone()}


def _masked(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    mask[:, -3:] = 0
    return {**_language(batch), "attention_mask": mask}


def _words(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    mask[:, -3:] = 0
    return {"input_ids": torch.randint(2, WORDS, (batch, TOKENS)), "attention_mask": mask}


def _translation(batch: int) -> dict[str, Tensor]:
    return {**_words(batch), "labels": torch.randint(2, WORDS, (batch, TOKENS - 3))}


def _images(size: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _pixels(size: int) -> Callable[[int], Any]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def _sound(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 800)}


def _spectrum(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 32), "labels": torch.randint(2, WORDS, (batch, 6))}


def _series(batch: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(batch, 32, 2), "future_values": torch.randn(batch, 8, 2)}


_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ = {
    **_SPECIAL,
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def _decoder(name: str, config: str, **settings: Any) -> RealModel:
    return _transformers(name, config, inputs=_masked, family="decoder", **settings)


REAL_MODELS: dict[str, RealModel] = {
    "GPT-2": _decoder(
        "GPT2LMHeadModel", "GPT2Config", n_layer=4, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=64, **_SPECIAL
    ),
    "Llama": _decoder("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "Mistral": _decoder("MistralForCausalLM", "MistralConfig", sliding_window=4, **_GROUPED),
    "Qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "Qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_GROUPED),
    "Gemma": _decoder("GemmaForCausalLM", "GemmaConfig", head_dim=8, **_GROUPED),
    "Gemma-2": _decoder("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=4, **_GROUPED),
    "Phi": _decoder("PhiForCausalLM", "PhiConfig", **_DECODER),
    "GPT-NeoX": _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER),
    "OPT": _decoder(
        "OPTForCausalLM",
        "OPTConfig",
        ffn_dim=48,
        word_embed_proj_dim=32,
        **{k: v for k, v in _DECODER.items() if k != "intermediate_size"},
    ),
    "Bloom": _decoder(
        "BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=32, n_layer=4, n_head=4, **_SPECIAL
    ),
    "Falcon": _decoder("FalconForCausalLM", "FalconConfig", alibi=False, **_DECODER),
    "XLNet": _transformers(
        "XLNetLMHeadModel",
        "XLNetConfig",
        inputs=_language,
        family="decoder",
        vocab_size=WORDS,
        d_model=32,
        n_layer=4,
        n_head=4,
        d_inner=48,
    ),
    "OLMo-2": _decoder("Olmo2ForCausalLM", "Olmo2Config", **_GROUPED),
    "Granite": _decoder("GraniteForCausalLM", "GraniteConfig", **_GROUPED),
    "Cohere": _decoder("CohereForCausalLM", "CohereConfig", **_GROUPED),
    "Gemma-3": _decoder("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=8, **_GROUPED),
    "Phi-3": _decoder("Phi3ForCausalLM", "Phi3Config", **_GROUPED),
    "StableLM": _decoder("StableLmForCausalLM", "StableLmConfig", **_GROUPED),
    "MPT": _decoder("MptForCausalLM", "MptConfig", vocab_size=WORDS, d_model=32, n_heads=4, n_layers=4, max_seq_len=64),
    "LFM2": _decoder("Lfm2ForCausalLM", "Lfm2Config", **_GROUPED),
    "BERT": _transformers("BertForMaskedLM", "BertConfig", inputs=_masked, family="encoder", **_DECODER),
    "RoBERTa": _transformers("RobertaForMaskedLM", "RobertaConfig", inputs=_masked, family="encoder", **_DECODER),
    "DeBERTa-v2": _transformers(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        inputs=_masked,
        family="encoder",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        **_DECODER,
    ),
    "ELECTRA": _transformers(
        "ElectraForMaskedLM", "ElectraConfig", inputs=_masked, family="encoder", embedding_size=16, **_DECODER
    ),
    "ALBERT": _transformers(
        "AlbertForMaskedLM", "AlbertConfig", inputs=_masked, family="encoder", embedding_size=16, **_DECODER
    ),
    "DistilBERT": _transformers(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        inputs=_masked,
        family="encoder",
        dim=32,
        hidden_dim=48,
        n_layers=4,
        n_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=64,
        pad_token_id=0,
    ),
    "ModernBERT": _transformers(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        inputs=_masked,
        family="encoder",
        local_attention=4,
        cls_token_id=1,
        sep_token_id=2,
        **_DECODER,
    ),
    "Longformer": _transformers(
        "LongformerForMaskedLM", "LongformerConfig", inputs=_masked, family="encoder", attention_window=4, **_DECODER
    ),
    "BigBird": _transformers(
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        inputs=_masked,
        family="encoder",
        attention_type="original_full",
        **_DECODER,
    ),
    "Funnel": _transformers(
        "FunnelForMaskedLM",
        "FunnelConfig",
        inputs=_masked,
        family="encoder",
        vocab_size=WORDS,
        block_sizes=[2, 2],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
    ),
    "ESM": _transformers("EsmForMaskedLM", "EsmConfig", inputs=_masked, family="encoder", mask_token_id=3, **_DECODER),
    "T5": _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        inputs=_translation,
        family="encoder-decoder",
        vocab_size=WORDS,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        **_SPECIAL,
    ),
    "BART": _transformers(
        "BartForConditionalGeneration", "BartConfig", inputs=_translation, family="encoder-decoder", **_SEQ2SEQ
    ),
    "Marian": _transformers("MarianMTModel", "MarianConfig", inputs=_translation, family="encoder-decoder", **_SEQ2SEQ),
    "Pegasus": _transformers(
        "PegasusForConditionalGeneration", "PegasusConfig", inputs=_translation, family="encoder-decoder", **_SEQ2SEQ
    ),
    "mT5": _transformers(
        "MT5ForConditionalGeneration",
        "MT5Config",
        inputs=_translation,
        family="encoder-decoder",
        vocab_size=WORDS,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "LED": _transformers(
        "LEDForConditionalGeneration",
        "LEDConfig",
        inputs=_translation,
        family="encoder-decoder",
        attention_window=4,
        **_SEQ2SEQ,
    ),
    "ProphetNet": _transformers(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        inputs=_translation,
        family="encoder-decoder",
        vocab_size=WORDS,
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        decoder_start_token_id=0,
    ),
    "ViT": _transformers("ViTModel", "ViTConfig", inputs=_pixels(32), family="vision", **_VISION),
    "DINOv2": _transformers("Dinov2Model", "Dinov2Config", inputs=_pixels(32), family="vision", **_VISION),
    "Swin": _transformers(
        "SwinForImageClassification",
        "SwinConfig",
        inputs=_pixels(32),
        family="vision",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "ConvNeXt": _transformers(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        inputs=_pixels(32),
        family="vision",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 2, 2, 1],
    ),
    "SegFormer": _transformers(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        inputs=_pixels(64),
        family="vision",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 2, 2, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    ),
    "CLIP": _transformers("CLIPVisionModel", "CLIPVisionConfig", inputs=_pixels(32), family="vision", **_VISION),
    "ResNet (transformers)": _transformers(
        "ResNetForImageClassification",
        "ResNetConfig",
        inputs=_pixels(32),
        family="vision",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 2, 2, 1],
    ),
    "BEiT": _transformers("BeitForImageClassification", "BeitConfig", inputs=_pixels(32), family="vision", **_VISION),
    "DeiT": _transformers("DeiTForImageClassification", "DeiTConfig", inputs=_pixels(32), family="vision", **_VISION),
    "SigLIP": _transformers("SiglipVisionModel", "SiglipVisionConfig", inputs=_pixels(32), family="vision", **_VISION),
    "DPT": _transformers(
        "DPTForDepthEstimation",
        "DPTConfig",
        inputs=_pixels(32),
        family="vision",
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 16, 16, 16],
        fusion_hidden_size=16,
        is_hybrid=False,
        **_VISION,
    ),
    "ConvNeXt-V2": _transformers(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        inputs=_pixels(32),
        family="vision",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 2, 2, 1],
    ),
    "MobileViT": _transformers(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        inputs=_pixels(64),
        family="vision",
        hidden_sizes=[24, 32, 40],
        neck_hidden_sizes=[8, 16, 16, 24, 24, 24, 48],
        image_size=64,
    ),
    "Wav2Vec2": _transformers(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        inputs=_sound,
        family="speech",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        conv_dim=[16, 16, 16],
        conv_kernel=[10, 3, 3],
        conv_stride=[5, 2, 2],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    ),
    "HuBERT": _transformers(
        "HubertModel",
        "HubertConfig",
        inputs=_sound,
        family="speech",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        conv_dim=[16, 16, 16],
        conv_kernel=[10, 3, 3],
        conv_stride=[5, 2, 2],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    ),
    "Whisper": _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        inputs=_spectrum,
        family="speech",
        **{k: v for k, v in _SEQ2SEQ.items() if k not in ("max_position_embeddings", "forced_eos_token_id")},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    "PatchTST": _transformers(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        inputs=_series,
        family="time series",
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        patch_length=4,
        patch_stride=4,
        num_hidden_layers=3,
        d_model=16,
        num_attention_heads=4,
        ffn_dim=24,
    ),
    "Mixtral": _transformers(
        "MixtralForCausalLM",
        "MixtralConfig",
        inputs=_masked,
        family="mixture of experts",
        num_local_experts=4,
        num_experts_per_tok=2,
        **_GROUPED,
    ),
    "Qwen2-MoE": _transformers(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        inputs=_masked,
        family="mixture of experts",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        **_GROUPED,
    ),
    "Granite-MoE": _transformers(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        inputs=_masked,
        family="mixture of experts",
        num_local_experts=4,
        num_experts_per_tok=2,
        **_GROUPED,
    ),
    "DeepSeek-V3": _transformers(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        inputs=_masked,
        family="mixture of experts",
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_shared_experts=1,
        **_DECODER,
    ),
    "GPT-OSS": _transformers(
        "GptOssForCausalLM",
        "GptOssConfig",
        inputs=_masked,
        family="mixture of experts",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        **_GROUPED,
    ),
    "Mamba": _transformers(
        "MambaForCausalLM",
        "MambaConfig",
        inputs=_language,
        family="state space",
        vocab_size=WORDS,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=4,
        **_SPECIAL,
    ),
    "Mamba-2": _transformers(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        inputs=_language,
        family="state space",
        vocab_size=WORDS,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
        **_SPECIAL,
    ),
    "RWKV": _transformers(
        "RwkvForCausalLM",
        "RwkvConfig",
        inputs=_language,
        family="state space",
        vocab_size=WORDS,
        hidden_size=32,
        attention_hidden_size=32,
        num_hidden_layers=4,
        use_cache=False,
        train=True,
        caveat="in training mode: when it is evaluated, its first forward rescales its own weights",
        **_SPECIAL,
    ),
    "Jamba": _transformers(
        "JambaForCausalLM",
        "JambaConfig",
        inputs=_masked,
        family="state space",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        **_GROUPED,
    ),
    "Falcon-Mamba": _transformers(
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        inputs=_language,
        family="state space",
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=4,
        state_size=4,
    ),
    "ResNet-26 (timm)": _timm("resnet26", size=64),
    "EfficientNet (timm)": _timm("efficientnet_b0", size=64),
    "ConvNeXt (timm)": _timm("convnext_atto", size=64),
    "ViT (timm)": _timm("vit_tiny_patch16_224", size=32, img_size=32, depth=4),
    "Swin (timm)": _timm(
        "swin_tiny_patch4_window7_224",
        size=32,
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    "RegNet (timm)": _timm("regnety_002", size=64),
    "DenseNet (timm)": _timm("densenet121", size=64),
    "MobileNetV3 (timm)": _timm("mobilenetv3_small_100", size=64),
    "VGG (timm)": _timm("vgg11_bn", size=32),
    "BEiT (timm)": _timm("beit_base_patch16_224", size=32, img_size=32, embed_dim=32, depth=4, num_heads=4),
    "MaxViT (timm)": _timm("maxvit_rmlp_pico_rw_256", size=64, img_size=64),
    "CoAtNet (timm)": _timm("coatnet_pico_rw_224", size=64, img_size=64),
    "HRNet (timm)": _timm("hrnet_w18_small", size=64),
    "Inception-v4 (timm)": _timm("inception_v4", size=96),
    "NFNet (timm)": _timm("dm_nfnet_f0", size=64),
    "CSPDarknet (timm)": _timm("cspdarknet53", size=64),
    "DPN (timm)": _timm("dpn48b", size=64),
}

IN_CI = (
    *("GPT-2", "Llama", "OPT", "BERT", "DeBERTa-v2", "ALBERT", "T5", "Swin", "SegFormer", "Wav2Vec2", "Whisper"),
    *("Mixtral", "Mamba", "ResNet-26 (timm)", "ViT (timm)"),
)
"""Cut in every run of the tests; the others where `GPIPE_PLAN_ALL_MODELS` is set."""
