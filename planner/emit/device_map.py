"""Emitter for Hugging Face accelerate 1.15 and transformers 5: a `device_map`.

A device map is a dictionary from module path to device. It must cover every parameter and buffer
(huggingface.co/docs/accelerate, "Handling big models for inference", "Designing a device map"). Because a device map
only places modules, only one device computes at a time.
"""

from typing import Final

from planner.emit.layout import EngineFile, PlanLayout, module_paths_of, python_assignments, signed_text

_NAME: Final = "a device map"

_USE: Final = """\
Use it:
    model = AutoModelForCausalLM.from_pretrained(name, device_map=DEVICE_MAP)"""

_NO_PIPELINE: Final = """\
a device map only places modules, which run one after the other: micro-batches, schedule and \
recomputation are not included, and a step takes longer than planned"""


def emit_device_map(layout: PlanLayout) -> EngineFile:
    """Return a Python file that defines `DEVICE_MAP`.

    Raises:
        UsageError: A layer has no module path.
    """
    layout.module_paths(_NAME)
    device_map, device_of = {}, {}
    for stage, device in zip(layout.stages, layout.devices_of_stages, strict=True):
        for layer in stage:
            device_of[layer.name] = device
            device_map.update(dict.fromkeys(module_paths_of(layer), device))
    apart = [pair for pair in layout.tied_pairs() if device_of[pair[0]] != device_of[pair[1]]]
    notes = [
        _NO_PIPELINE,
        *(f'"{a}" and "{b}" share parameters across devices: solve with `--together {a},{b}`' for a, b in apart),
        *layout.replica_notes(_NAME),
    ]
    return EngineFile(
        name="plan_device_map.py",
        text=signed_text(
            layout,
            python_assignments(DEVICE_MAP=device_map),
            engine="accelerate 1.15 and transformers 5",
            option="device-map",
            notes=notes,
            docstring=_USE,
        ),
        notes=tuple(notes),
        use="`from_pretrained(…, device_map=DEVICE_MAP)` with what plan_device_map.py defines",
    )
