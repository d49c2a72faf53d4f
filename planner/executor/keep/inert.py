"""Reads a pickle as data: nothing that it names is imported, called or changed.

The index of a `torch.distributed.checkpoint` is a pickle, and a pickle is a programme: `pickle.load` runs whatever it
says. What such an index needs of that language is little, so this module interprets that little itself: names stay
names, and a call stays a record of what would have been called with what. Everything else is refused. Time and memory
are proportional to the number of operations, which has a limit.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any


class InertError(Exception):
    """The bytes are no pickle of the kind that an index is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A name that the pickle wants looked up, which nobody does."""

    module: str
    name: str

    def __str__(self) -> str:
        """Dotted, as a person writes it."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, kw_only=True, slots=True)
class Record:
    """What would have been made by calling `maker` with `arguments`, and its state."""

    maker: Named
    arguments: tuple[Any, ...]
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as its pairs, for the keys may be anything: hashing them could take forever."""

    def strings(self) -> dict[str, Any]:
        """Its values by those keys that are strings."""
        return {key: value for key, value in self if isinstance(key, str)}


class _Mark:
    """The opcode MARK on the stack."""


_MARK = _Mark()
_MOST_OPERATIONS = 2**25
"""A tensor takes about 110 operations of an index: 300,000 tensors and optimizer states."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
    ]
)
"""Opcodes whose argument is the value."""


def read_inert(content: bytes, admits: Callable[[Named], bool]) -> Any:
    """What a pickle would make: numbers, strings, tuples, lists, `Pairs`, `Record`, and any `Named` that is admitted.

    Raises:
        InertError: It is none, is cut short, is too long, or does or names what no index does.
    """
    machine = _Machine(admits)
    # The reader of opcodes decodes text and looks no further; what it trips over is no pickle.
    stream = BytesIO(content)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if opcode.name == "STOP":
                return machine.pop()
            if number >= _MOST_OPERATIONS:
                raise InertError(f"it has more than {_MOST_OPERATIONS} operations, which no index needs")
            machine.run(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise InertError(f"it is damaged ({str(error) or type(error).__name__})") from error
    raise InertError("it is cut short")


class _Machine:
    """The stack and the memo."""

    def __init__(self, admits: Callable[[Named], bool]) -> None:
        self._admits = admits
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def run(self, name: str, argument: Any) -> None:
        if name in ("PROTO", "FRAME"):
            return
        if name in _ARGUMENTS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            self._push_name(Named(module=module, name=attribute))
        elif name in _OPERATIONS:
            _OPERATIONS[name](self)
        else:
            raise InertError(f"it uses `{name}`, which no index needs")

    def _top(self) -> Any:
        value = self.pop()
        self._stack.append(value)
        return value

    def _since_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def _name(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a name that is no text")
        self._push_name(Named(module=module, name=name))

    def _push_name(self, name: Named) -> None:
        if not self._admits(name):
            raise InertError(f"it names `{str(name)[:100]}`, which is no part of an index and is not run")
        self._stack.append(name)

    def _record(self) -> None:
        arguments, maker = self.pop(), self.pop()
        if not isinstance(maker, Named) or not isinstance(arguments, tuple):
            raise TypeError("a call of what is no name")
        self._stack.append(Record(maker=maker, arguments=arguments))

    def _build(self) -> None:
        state, record = self.pop(), self._top()
        if not isinstance(record, Record):
            raise TypeError("a state for what has none")
        record.state = state

    def _tuple(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self._stack.append(tuple(values[::-1]))

    def _append(self, values: list[Any]) -> None:
        held = self._top()
        if not isinstance(held, list) or isinstance(held, Pairs):
            raise TypeError("an element for what is no list")
        held.extend(values)

    def _set(self, values: list[Any]) -> None:
        held = self._top()
        if not isinstance(held, Pairs):
            raise TypeError("a key for what is no dictionary")
        held.extend(zip(values[::2], values[1::2], strict=True))

    def _set_one(self) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])


_OPERATIONS: dict[str, Callable[[_Machine], None]] = {
    "MARK": lambda m: m._stack.append(_MARK),
    "POP": lambda m: m._stack.pop(),
    "MEMOIZE": _Machine._memoize,
    "EMPTY_TUPLE": lambda m: m._stack.append(()),
    "TUPLE1": lambda m: m._tuple(1),
    "TUPLE2": lambda m: m._tuple(2),
    "TUPLE3": lambda m: m._tuple(3),
    "TUPLE": lambda m: m._stack.append(tuple(m._since_mark())),
    "EMPTY_LIST": lambda m: m._stack.append([]),
    "EMPTY_DICT": lambda m: m._stack.append(Pairs()),
    "APPEND": lambda m: m._append([m.pop()]),
    "APPENDS": lambda m: m._append(m._since_mark()),
    "SETITEM": _Machine._set_one,
    "SETITEMS": lambda m: m._set(m._since_mark()),
    "STACK_GLOBAL": _Machine._name,
    "REDUCE": _Machine._record,
    "NEWOBJ": _Machine._record,
    "BUILD": _Machine._build,
}
