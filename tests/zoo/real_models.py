"""Known models, small and with random weights: of `transformers`, of `timm`, and written by hand."""

from tests.zoo.more_media import MORE_MEDIA
from tests.zoo.more_text import MORE_TEXT
from tests.zoo.own_models import OWN_MODELS
from tests.zoo.real_model import RealModel, loss_of
from tests.zoo.timm_models import TIMM
from tests.zoo.transformers_media import MEDIA
from tests.zoo.transformers_text import TEXT

__all__ = ["IN_CI", "IN_NIGHTLY", "REAL_MODELS", "RealModel", "loss_of"]

REAL_MODELS: dict[str, RealModel] = {**TEXT, **MORE_TEXT, **MEDIA, **MORE_MEDIA, **TIMM, **OWN_MODELS}
"""By the name they are known by."""

IN_CI = (
    *("GPT-2", "Llama", "DeBERTa-v2", "ALBERT", "T5", "Wav2Vec2", "Mixtral", "Mamba"),
    *("ResNet-26 (timm)", "ViT (timm)"),
)
"""Cut in every run of the tests; others in `make nightly`, and all where `GPIPE_PLAN_ALL_MODELS` is set."""
IN_NIGHTLY = ("OPT", "BERT", "Swin", "SegFormer", "Whisper")
