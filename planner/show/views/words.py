"""What schedules and solvers are called when people are told of them."""

_METHODS = {
    "dynamic-programming": "dynamic programme",
    "integer-programming": "integer programme",
    "simulated": "bounds and simulation",
}


def method_name(method: str) -> str:
    """How a plan was found, in words; methods of other tools keep the name they have."""
    return _METHODS.get(method, method)


def place_word(chunks: int) -> str:
    """What a row per device is called: as tables call it, where every device has one stage."""
    return "stage" if chunks == 1 else "device"


def not_measured(how: str) -> str:
    """What to say of numbers from a profile that was compiled or estimated; nothing of a measured one."""
    return "" if how == "measured" else f"{how}, not measured: profile on the device before you rely on these numbers"
