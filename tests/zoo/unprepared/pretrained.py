"""Models of `transformers` from small configurations, with random weights, whose loss the model computes itself."""

__all__ = ["MODELS"]

_SMALL = (
    "vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, "
    "num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2"
)
_WORDS = """
def example_batch(n):
    ids = torch.randint(3, 40, (n, 8))
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}, None
"""
_IMAGES = """
def example_batch(n):
    return {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(0, 5, (n,))}, None
"""


def _model(name: str, config: str, inputs: str = _WORDS, **changes: str) -> str:
    """Return a model file: class of transformers, keywords of its configuration, and `example_batch`."""
    own = ", ".join(f"{key}={value}" for key, value in changes.items())
    return f"""
import transformers

def build_model():
    config = transformers.{name}.config_class(**dict({config}), **dict({own}))
    config.use_cache = False
    return transformers.{name}(config)

def loss_fn(out, y):
    return out.loss
{inputs}
"""


MODELS = {
    "nanochat": _model("NanoChatForCausalLM", _SMALL),
    "arcee": _model("ArceeForCausalLM", _SMALL),
    "bitnet": _model("BitNetForCausalLM", _SMALL),
    "doge": _model("DogeForCausalLM", _SMALL),
    "diff_llama": _model("DiffLlamaForCausalLM", _SMALL),
    "minimax_lightning": _model("MiniMaxForCausalLM", _SMALL, num_local_experts="3", num_experts_per_tok="2"),
    "persimmon": _model("PersimmonForCausalLM", _SMALL),
    "vault_gemma": _model("VaultGemmaForCausalLM", _SMALL, head_dim="4"),
    "ernie_moe": _model("Ernie4_5_MoeForCausalLM", _SMALL, moe_num_experts="4", moe_k="2", moe_intermediate_size="8"),
    "hunyuan_moe": _model("HunYuanMoEV1ForCausalLM", _SMALL, num_experts="3", moe_topk="2", head_dim="4"),
    "qwen3_next": _model(
        "Qwen3NextForCausalLM",
        _SMALL,
        head_dim="8",
        num_experts="4",
        num_experts_per_tok="2",
        moe_intermediate_size="8",
        shared_expert_intermediate_size="8",
        linear_num_key_heads="2",
        linear_num_value_heads="2",
        linear_key_head_dim="8",
        linear_value_head_dim="8",
    ),
    "gpt_neo": _model(
        "GPTNeoForCausalLM",
        'vocab_size=40, hidden_size=16, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], '
        "window_size=4, max_position_embeddings=32, intermediate_size=24",
    ),
    "biogpt_with_layer_drop": _model(
        "BioGptForCausalLM", _SMALL.replace("num_key_value_heads=2, ", ""), layerdrop="0.3"
    ),
    "xglm": _model(
        "XGLMForCausalLM",
        "vocab_size=40, d_model=16, ffn_dim=24, num_layers=4, attention_heads=4, max_position_embeddings=32",
    ),
    "rembert": _model(
        "RemBertForMaskedLM",
        _SMALL.replace("num_key_value_heads=2, ", ""),
        input_embedding_size="8",
        output_embedding_size="12",
    ),
    "yoso": _model(
        "YosoForMaskedLM", _SMALL.replace("num_key_value_heads=2, ", ""), use_expectation="True", conv_window="3"
    ),
    "umt5": _model(
        "UMT5ForConditionalGeneration",
        "vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, pad_token_id=0, "
        "decoder_start_token_id=0",
    ),
    "mobilenet_v2": _model(
        "MobileNetV2ForImageClassification", "image_size=32, depth_multiplier=0.25, num_labels=5", _IMAGES
    ),
    "regnet": _model(
        "RegNetForImageClassification",
        'embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], groups_width=4, layer_type="y", '
        "num_labels=5",
        _IMAGES,
    ),
    "swiftformer": _model(
        "SwiftFormerForImageClassification",
        "image_size=32, depths=[1, 1, 1, 1], embed_dims=[8, 8, 16, 16], mlp_ratio=2, drop_path_rate=0.2, num_labels=5",
        _IMAGES,
    ),
    "ijepa": _model(
        "IJepaForImageClassification",
        "hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=32, "
        "patch_size=8, "
        "num_labels=5",
        _IMAGES,
    ),
    "xlstm": _model(
        "xLSTMForCausalLM",
        "vocab_size=40, hidden_size=16, num_heads=2, num_hidden_layers=3, chunk_size=4, max_inference_chunksize=8",
    ),
    "luke_two_embeddings": _model(
        "LukeForMaskedLM", _SMALL.replace("num_key_value_heads=2, ", ""), entity_vocab_size="10", entity_emb_size="8"
    ),
}
