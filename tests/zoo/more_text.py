"""More models of `transformers` that read and write words."""

from typing import Any

from tests.zoo.real_model import (
    DECODER,
    GROUPED,
    SEQ2SEQ,
    SPECIAL,
    TOKENS,
    WORDS,
    RealModel,
    decoder,
    encoder,
    from_transformers,
    language,
    masked,
    translation,
)

__all__ = ["MORE_TEXT"]


def _moe(name: str, **settings: Any) -> RealModel:
    return from_transformers(name, inputs=masked, family="mixture of experts", **settings)


MORE_TEXT: dict[str, RealModel] = {
    "Qwen3-MoE": _moe(
        "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, **GROUPED
    ),
    "Qwen3-MoE (router loss)": _moe(
        "Qwen3MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
        output_router_logits=True,
        **GROUPED,
    ),
    "OLMoE": _moe("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, output_router_logits=True, **GROUPED),
    "DBRX": _moe(
        "DbrxForCausalLM",
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=64,
        vocab_size=WORDS,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        output_router_logits=True,
        **SPECIAL,
    ),
    "Phi-MoE": _moe("PhimoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "Switch Transformers": from_transformers(
        "SwitchTransformersForConditionalGeneration",
        inputs=translation,
        family="mixture of experts",
        vocab_size=WORDS,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        expert_capacity=64,
        router_dtype="float32",
        decoder_start_token_id=0,
    ),
    "XLM-RoBERTa": encoder("XLMRobertaForMaskedLM", **DECODER),
    "MobileBERT": encoder(
        "MobileBertForMaskedLM", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2, **DECODER
    ),
    "FNet": encoder("FNetForMaskedLM", inputs=language, **DECODER),
    "Nystromformer": encoder("NystromformerForMaskedLM", num_landmarks=TOKENS, segment_means_seq_len=TOKENS, **DECODER),
    "SqueezeBERT": encoder("SqueezeBertForMaskedLM", embedding_size=32, **DECODER),
    "MPNet": encoder("MPNetForMaskedLM", **DECODER),
    "ConvBERT": encoder("ConvBertForMaskedLM", embedding_size=32, **DECODER),
    "RoFormer": encoder("RoFormerForMaskedLM", embedding_size=32, **DECODER),
    "I-BERT": encoder("IBertForMaskedLM", **DECODER),
    "Perceiver": encoder(
        "PerceiverForMaskedLM",
        vocab_size=WORDS,
        d_model=32,
        d_latents=32,
        num_latents=8,
        num_blocks=1,
        num_self_attends_per_block=4,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        max_position_embeddings=TOKENS,
        qk_channels=32,
        v_channels=32,
    ),
    "Data2Vec (text)": encoder("Data2VecTextForMaskedLM", **DECODER),
    "Reformer": decoder(
        "ReformerModelWithLMHead",
        attention_head_size=8,
        attn_layers=["local", "local", "local"],
        axial_pos_embds=False,
        train=True,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        feed_forward_size=48,
        hidden_size=32,
        is_decoder=True,
        local_attn_chunk_length=4,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=64,
    ),
    "CodeGen": decoder(
        "CodeGenForCausalLM",
        vocab_size=WORDS,
        n_positions=64,
        n_ctx=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        rotary_dim=4,
        **SPECIAL,
    ),
    "GPT-J": decoder(
        "GPTJForCausalLM", vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=4, n_head=4, rotary_dim=4, **SPECIAL
    ),
    "GPT-BigCode": decoder(
        "GPTBigCodeForCausalLM", vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=4, n_head=4, **SPECIAL
    ),
    "CTRL": decoder("CTRLLMHeadModel", vocab_size=WORDS, n_positions=64, n_embd=32, dff=48, n_layer=4, n_head=4),
    "Nemotron": decoder("NemotronForCausalLM", head_dim=8, **GROUPED),
    "Gemma-3n": decoder(
        "Gemma3nForCausalLM",
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=WORDS,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=4,
        **{**GROUPED, "intermediate_size": [48] * 4},
    ),
    "SmolLM3": decoder("SmolLM3ForCausalLM", **GROUPED),
    "RecurrentGemma": decoder(
        "RecurrentGemmaForCausalLM",
        head_dim=8,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        **GROUPED,
    ),
    "Bamba": from_transformers(
        "BambaForCausalLM",
        inputs=masked,
        family="state space",
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=4,
        mamba_chunk_size=4,
        **GROUPED,
    ),
    "LongT5": from_transformers(
        "LongT5ForConditionalGeneration",
        inputs=translation,
        family="encoder-decoder",
        vocab_size=WORDS,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=3,
        num_heads=4,
        local_radius=3,
        decoder_start_token_id=0,
    ),
    "M2M-100": from_transformers(
        "M2M100ForConditionalGeneration", inputs=translation, family="encoder-decoder", **SEQ2SEQ
    ),
    "Blenderbot": from_transformers(
        "BlenderbotForConditionalGeneration", inputs=translation, family="encoder-decoder", **SEQ2SEQ
    ),
}
