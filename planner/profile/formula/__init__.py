"""Profiles of transformers by published formulas, from a shape or a Hugging Face configuration, without torch."""
