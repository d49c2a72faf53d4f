"""Models as users write them, each of a kind that is easily cut wrong, small enough to run in a second."""

from tests.zoo.own_models.experts import EXPERTS
from tests.zoo.own_models.generative import GENERATIVE
from tests.zoo.own_models.language import LANGUAGE
from tests.zoo.own_models.tables import TABLES
from tests.zoo.own_models.vision import VISION_MODELS
from tests.zoo.real_model import RealModel

__all__ = ["OWN_MODELS"]

OWN_MODELS: dict[str, RealModel] = {**LANGUAGE, **VISION_MODELS, **GENERATIVE, **EXPERTS, **TABLES}
"""By name; all in training mode unless the model says otherwise itself."""
