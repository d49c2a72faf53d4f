"""The kinds of work that a schedule is made of: one row each, from which everything reads what a kind is.

    F  forward: takes what the stage in front sends, makes what the stage behind waits for
    B  backward: takes the gradient from the stage behind, makes the gradient for the stage in front
    I  the half of a backward that others wait for: it makes the gradient for the stage in front, and everything else
       but the gradients of large weights
    W  the other half: gradients of weights, for which nobody waits until the step ends

A micro-batch passes each stage with F and B, or with F, I and W.

What a kind needs and what it sends is told by the direction in which its data flow, so that no other module has to
know that a forward needs stage s-1 and a backward stage s+1. The last stage of a direction sends nothing; a kind that
follows another one on the same stage begins with it where the direction begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Letter = Literal["F", "B", "I", "W"]

Label = Literal["forward", "backward", "input backward", "weight backward"]

Flow = Literal["F", "B"]
"""What stages tell each other: activations, from front to back, or their gradients, from back to front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a device computes for one micro-batch on one of its stages."""

    letter: Letter
    """What people and torch's schedule files call it: `F3` is the forward of micro-batch 3."""
    label: Label
    """What it is called in words."""
    direction: Literal[1, 0, -1]
    """Where its data flow: +1 from the stage in front to the one behind, -1 the other way, 0 nowhere."""
    flow: Flow | None
    """What it sends on, and what it waits for from the stage before it; None if it has to do with no other stage."""
    follows: Flow | None
    """What the same stage must have made of the same micro-batch, where no other stage has to do with it."""
    paper: tuple[str, ...]
    """Colours of its boxes in pictures, one for each chunk of a device in turn: hex, with a dash on dark and light."""
    ink: str
    """Colour of what is written on them."""
    terminal: tuple[tuple[int, int], ...]
    """The same on a terminal of 256 colours: per chunk two shades, in which neighbours take turns."""
    terminal_ink: int
    """The colour of what is written on them there."""


# Blue and orange: told apart by all eyes, and by brightness alone. Later chunks have other hues in the same
# brightness: green and yellow, purple and pink, grey; then it begins anew.
FORWARD: Final = Kind(
    letter="F",
    label="forward",
    direction=1,
    flow="F",
    follows=None,
    paper=("#2a6db0", "#1d7a68", "#6b4fa0", "#59636f"),
    ink="#fff",
    terminal=((25, 32), (22, 29), (54, 91), (236, 240)),
    terminal_ink=231,
)
BACKWARD: Final = Kind(
    letter="B",
    label="backward",
    direction=-1,
    flow="B",
    follows="F",
    paper=("#f2a65a", "#e6cb5c", "#e7a3c4", "#bcc4cc"),
    ink="#2b1700",
    terminal=((214, 172), (228, 185), (218, 175), (254, 249)),
    terminal_ink=16,
)
# The halves: the one that others wait for in red and mauve, the other in pale blue and sand, which step back. Of four
# kinds in two chunks the most alike, also for eyes that lack a cone, are the forwards and the backwards of two chunks.
INPUT_BACKWARD: Final = Kind(
    letter="I",
    label="input backward",
    direction=-1,
    flow="B",
    follows="F",
    paper=("#cf4520", "#96588f", "#96602c", "#805a5a"),
    ink="#fff",
    terminal=((160, 124), (133, 96), (130, 94), (95, 131)),
    terminal_ink=231,
)
WEIGHT_BACKWARD: Final = Kind(
    letter="W",
    label="weight backward",
    direction=0,
    flow=None,
    follows="B",
    paper=("#a9dbe6", "#d6d3b4", "#d0c4e8", "#e2e6ea"),
    ink="#10262b",
    terminal=((152, 116), (187, 144), (189, 146), (255, 251)),
    terminal_ink=16,
)

KINDS: Final[Mapping[Letter, Kind]] = {
    kind.letter: kind for kind in (FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)
}
"""All kinds by their letters, in the order in which they are counted and drawn."""
