"""What the stages of a model were found to compute, held against the model in one piece."""

from dataclasses import dataclass

from planner.core.values.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One small mini-batch was run through the model and through stages of one layer each, and compared.

    The executor's own stages ran one after the other in one process, each in a copy of the model of its own.
    """

    layers: int
    """How many layers took part, from the first one on; where it is not all, time or memory did not suffice."""
    cuts: int
    """Boundaries between them."""
    gradients: int = 0
    """How many parameters' gradients were compared."""
    buffers: int = 0
    """How many buffers were, after the step."""
    worst: float = 0.0
    """The largest difference of loss, gradients and buffers, relative to the largest number in each."""
    reason: str = ""
    """Why not all layers took part."""
    differs_recomputed: str = ""
    """What comes out wrong where stages are recomputed; empty where nothing does."""

    @property
    def recomputed(self) -> bool:
        """Whether stages that are recomputed came out right, too."""
        return self.cuts > 0 and not self.differs_recomputed

    def __str__(self) -> str:
        """In a line, as in `the same as in one piece: loss, 214 gradients, 11 cuts, recomputed too; worst 6e-08`."""
        if not self.cuts:
            return f"not held against the model in one piece: {self.reason}"
        parts = ["loss", counted(self.gradients, "gradient")]
        parts += [counted(self.buffers, "buffer")] if self.buffers else []
        parts += [counted(self.cuts, "cut")]
        parts += ["recomputed too"] if self.recomputed else []
        text = f"the same as in one piece: {', '.join(parts)}; worst {self.worst:.0e}"
        return f"{text}; of the first {counted(self.layers, 'layer')} only: {self.reason}" if self.reason else text
