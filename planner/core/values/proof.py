"""Result of the equivalence check of a model's stages with the unpartitioned model."""

from dataclasses import dataclass

from planner.core.values.units import pluralize


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of the equivalence check, which trains the unpartitioned model and pipelines, and compares them."""

    layers: int
    """Number of layers of the model; 0 if nothing was compared."""
    cuts: int
    """Number of cuts that were compared or are equivalent to a compared cut; 0 if nothing was compared."""
    uncovered: int = 0
    """Number of cuts that the check did not reach within its time limit."""
    gradients: int = 0
    """Number of parameters whose gradients were compared."""
    buffers: int = 0
    """Number of buffers that were compared."""
    states: int = 0
    """Number of tensors of optimizer state that were compared; 0 if the optimizer was not compared."""
    worst: float = 0.0
    """Largest difference in any compared tensor, divided by the largest absolute value of that tensor."""
    reason: str = ""
    """Reason why some cuts, or the optimizer, were not compared."""
    differs_recomputed: str = ""
    """Differences that were found only with recomputation, as text; empty if there are none."""

    @property
    def covers_recompute(self) -> bool:
        """True if pipelines with recomputation train as the unpartitioned model does."""
        return self.cuts > 0 and not self.differs_recomputed

    def __str__(self) -> str:
        """Return the result of the equivalence check in one line."""
        if not self.cuts:
            return f"not compared with the unpartitioned model: {self.reason}"
        parts = ["loss", pluralize(self.gradients, "gradient")]
        parts += [pluralize(self.buffers, "buffer")] if self.buffers else []
        parts += [pluralize(self.states, "optimizer state")] if self.states else []
        all_cuts = self.cuts + self.uncovered
        parts += [f"{self.cuts} of {pluralize(all_cuts, 'cut')}"]
        also = " (also with recomputation)" if self.covers_recompute else ""
        text = (
            f"verified against the unpartitioned model: {', '.join(parts)}{also}; max relative error {self.worst:.0e}"
        )
        return f"{text}; {self.reason}" if self.reason else text
