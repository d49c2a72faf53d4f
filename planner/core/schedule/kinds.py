"""Kinds of action: forward, backward and the two passes of a split backward, one row each.

    F  forward: takes the previous stage's output, makes the next stage's input
    B  backward: takes the gradient from the next stage, makes the gradient for the previous stage
    I  input-gradient pass of a split backward: makes the gradient for the previous stage, and all parameter gradients
       that W does not make
    W  weight-gradient pass: makes the parameter gradients of linear layers, convolutions and embeddings, which are
       needed only at the end of the step

A micro-batch passes each stage with F and B, or with F, I and W. Actions of a micro-batch need each other:

    F        needs F of the previous stage; on the first stage, nothing
    B, I     need B or I of the next stage; on the last stage, F of the same stage
    W        needs I of the same stage

`ActionKind.direction` and `ActionKind.follows` encode these rules, so that other modules do not repeat them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Letter = Literal["F", "B", "I", "W"]

Label = Literal["forward", "backward", "input backward", "weight backward"]

MessageKind = Literal["F", "B"]
"""Message between stages: activations (F), sent to the next stage, or gradients (B), sent to the previous stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionKind:
    """Kind of action: forward, whole backward, or one of the two passes of a split backward."""

    letter: Letter
    """Letter in schedule files: `2F3` is the forward of micro-batch 3 on stage 2."""
    label: Label
    """Name in words."""
    direction: Literal[1, 0, -1]
    """Direction in which the action sends data: +1 to the next stage, -1 to the previous stage, 0 without data."""
    message_kind: MessageKind | None
    """Kind of the messages that the action sends and receives; None without messages."""
    follows: MessageKind | None
    """Kind of message that the action needs from its own stage if no other stage sends it a message; None for F.

    On the last stage, B and I need the activations (kind F) that the stage's F makes. On every stage, W needs the
    gradients (kind B) that the stage's I makes.
    """
    paper: tuple[str, ...]
    """Colors of the action's boxes in timeline pictures, one per chunk. Additional chunks repeat the colors."""
    ink: str
    """Color of the text on the action's boxes in timeline pictures."""
    terminal: tuple[tuple[int, int], ...]
    """Colors of the action's boxes on a 256-color terminal: for each chunk, two shades for alternating boxes."""
    terminal_ink: int
    """Color of the text on the action's boxes on a 256-color terminal."""


# Blue and orange differ for color-blind readers, and in brightness alone. Later chunks have other hues of the same
# brightness: green and yellow, purple and pink, gray. Then the colors repeat.
FORWARD: Final = ActionKind(
    letter="F",
    label="forward",
    direction=1,
    message_kind="F",
    follows=None,
    paper=("#2a6db0", "#1d7a68", "#6b4fa0", "#59636f"),
    ink="#fff",
    terminal=((25, 32), (22, 29), (54, 91), (236, 240)),
    terminal_ink=231,
)
BACKWARD: Final = ActionKind(
    letter="B",
    label="backward",
    direction=-1,
    message_kind="B",
    follows="F",
    paper=("#f2a65a", "#e6cb5c", "#e7a3c4", "#bcc4cc"),
    ink="#2b1700",
    terminal=((214, 172), (228, 185), (218, 175), (254, 249)),
    terminal_ink=16,
)
# Input-gradient passes are red and mauve; weight-gradient passes are pale blue and sand, because they matter less. Of
# four kinds in two chunks, the most similar pairs are the forwards and the backwards of two chunks, also for
# color-blind readers.
INPUT_BACKWARD: Final = ActionKind(
    letter="I",
    label="input backward",
    direction=-1,
    message_kind="B",
    follows="F",
    paper=("#cf4520", "#96588f", "#96602c", "#805a5a"),
    ink="#fff",
    terminal=((160, 124), (133, 96), (130, 94), (95, 131)),
    terminal_ink=231,
)
WEIGHT_BACKWARD: Final = ActionKind(
    letter="W",
    label="weight backward",
    direction=0,
    message_kind=None,
    follows="B",
    paper=("#a9dbe6", "#d6d3b4", "#d0c4e8", "#e2e6ea"),
    ink="#10262b",
    terminal=((152, 116), (187, 144), (189, 146), (255, 251)),
    terminal_ink=16,
)

KINDS: Final[Mapping[Letter, ActionKind]] = {
    kind.letter: kind for kind in (FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)
}
"""All kinds by letter. Legends and lists have the same order."""
