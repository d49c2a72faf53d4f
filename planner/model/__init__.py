"""Load a user's model.py and turn its model into a chain of layers. Shared by profiler and executor."""

from planner.core.extras import importing

with importing("train"):
    from planner.model.chain import Chain, Layer, chain_of
    from planner.model.load import Batch, LoadedModel, load_model, load_module
    from planner.model.precision import in_precision, reload_model

__all__ = [
    "Batch",
    "Chain",
    "Layer",
    "LoadedModel",
    "chain_of",
    "in_precision",
    "load_model",
    "load_module",
    "reload_model",
]
