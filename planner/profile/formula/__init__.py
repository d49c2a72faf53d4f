"""Compute profiles of transformers by published formulas, from sizes or a Hugging Face config.json, without torch."""
