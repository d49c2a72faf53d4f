"""gpipe-plan: an automatic partitioner and planner for pipeline-parallel training."""

__all__ = ["__version__"]

__version__ = "0.1.0"
