"""Models people know, tiny and with random weights: of `transformers`, of `timm`, and written by hand."""

from tests.support.more_media import MORE_MEDIA
from tests.support.more_text import MORE_TEXT
from tests.support.own_models import OWN_MODELS
from tests.support.real_model import RealModel, loss_of
from tests.support.timm_models import TIMM
from tests.support.transformers_media import MEDIA
from tests.support.transformers_text import TEXT

__all__ = ["IN_CI", "REAL_MODELS", "RealModel", "loss_of"]

REAL_MODELS: dict[str, RealModel] = {**TEXT, **MORE_TEXT, **MEDIA, **MORE_MEDIA, **TIMM, **OWN_MODELS}
"""By the name they are known by."""

IN_CI = (
    *("GPT-2", "Llama", "OPT", "BERT", "DeBERTa-v2", "ALBERT", "T5", "Swin", "SegFormer", "Wav2Vec2", "Whisper"),
    *("Mixtral", "Mamba", "ResNet-26 (timm)", "ViT (timm)"),
)
"""Cut in every run of the tests; the others where `GPIPE_PLAN_ALL_MODELS` is set."""
