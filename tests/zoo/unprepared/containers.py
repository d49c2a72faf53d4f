"""Models that keep tensors and counts in objects with slots, context variables, classes and globals."""

__all__ = ["MODELS"]

_FOUR = """
def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block())
"""

_LATE = """
class Late(OneLinear):
    def forward(self, x):
        {}
        return x + torch.tanh(self.lin(x)) * torch.where(n <= 40, 1.0, 0.2)
"""

_SHARED = """
class Late(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.lin, self.shared = nn.Linear(D, D), shared

    def forward(self, x):
        {}
        return x + torch.tanh(self.lin(x)) * (1.0 if n <= 40 else 0.2)

def build_model():
    shared = {}
    return nn.Sequential(Late(shared), Block(), Late(shared), Block())
"""

MODELS = {
    "tensor_count_in_a_global": 'STATE = {"n": torch.zeros(())}\n'
    + _LATE.format('STATE["n"] = STATE["n"] + 1; n = STATE["n"]')
    + _FOUR,
    "tensor_count_in_a_global_written": 'STATE = {"n": torch.zeros(())}\n'
    + _LATE.format('STATE["n"].add_(1); n = STATE["n"]')
    + _FOUR,
    "tensor_count_in_a_class": _LATE.format("Late.n = Late.n + 1; n = Late.n").replace(
        "OneLinear):", "OneLinear):\n    n = torch.zeros(())\n"
    )
    + _FOUR,
    "tensor_count_in_a_default": _LATE.format("k.append(k.pop() + 1); n = k[0]").replace(
        "self, x)", "self, x, k=[torch.zeros(())])"
    )
    + _FOUR,
    "slots_shared": """
class Clock:
    __slots__ = ("ticks",)

    def __init__(self):
        self.ticks = 0
"""
    + _SHARED.format("self.shared.ticks += 1; n = self.shared.ticks", "Clock()"),
    "dataclass_with_slots_shared": """
@dataclass(slots=True)
class Clock:
    ticks: int = 0
"""
    + _SHARED.format("self.shared.ticks += 1; n = self.shared.ticks", "Clock()"),
    "context_variable": """
from contextvars import ContextVar
TICKS = ContextVar("ticks", default=0)
"""
    + _SHARED.format("TICKS.set(TICKS.get() + 1); n = TICKS.get()", "None"),
    "thread_local": """
import threading
LOCAL = threading.local()
LOCAL.n = 0
"""
    + _SHARED.format("LOCAL.n += 1; n = LOCAL.n", "None"),
    "ordered_dict_of_tensors": """
from collections import OrderedDict
"""
    + _SHARED.format(
        'self.shared["n"] = self.shared["n"] + 1; n = float(self.shared["n"])', "OrderedDict(n=torch.zeros(()))"
    ),
    "dict_of_tensors_shared": _SHARED.format(
        'self.shared["n"] = self.shared["n"] + 1; n = float(self.shared["n"])', "dict(n=torch.zeros(()))"
    ),
    "tensor_in_an_object_of_one_block": """
class Memory:
    def __init__(self):
        self.mean = torch.zeros(D)

class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.memory = Block(), Memory()

    def forward(self, x):
        self.memory.mean = 0.9 * self.memory.mean + 0.1 * x.detach().mean(0)
        return self.block(x - self.memory.mean)

def build_model():
    return nn.Sequential(Remembers(), Block(), Remembers(), nn.Linear(D, D))
""",
    "tensor_in_a_dataclass_in_a_model": """
@dataclass
class Memory:
    mean: torch.Tensor

class Remembers(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.block, self.memory = Block(), memory

    def forward(self, x):
        return self.block(x - self.memory.mean)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = Memory(torch.zeros(D))
        self.blocks = nn.ModuleList([Remembers(self.memory) for _ in range(4)])

    def forward(self, x):
        self.memory.mean = 0.9 * self.memory.mean + 0.1 * x.detach().mean(0)
        for b in self.blocks:
            x = b(x)
        return x
""",
    "queue_in_a_deque": """
from collections import deque

class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.past = Block(), deque(maxlen=3)

    def forward(self, x):
        y = self.block(x)
        if self.past:
            y = y + 0.3 * torch.stack(list(self.past)).mean(0)
        self.past.append(y.detach().mean(0))
        return y

def build_model():
    return nn.Sequential(Queue(), Block(), Queue(), nn.Linear(D, D))
""",
    "queue_in_a_global_deque": """
from collections import deque
PAST = deque(maxlen=3)

class Queue(OneBlock):
    def forward(self, x):
        y = self.block(x)
        if PAST:
            y = y + 0.3 * torch.stack(list(PAST)).mean(0)
        PAST.append(y.detach().mean(0))
        return y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(), Queue(), Block(), Block()]), nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)
""",
    "mask_cache_in_a_global_by_shape": """
MASKS = {}

class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        t = x.shape[1]
        if (t, x.device) not in MASKS:
            MASKS[t, x.device] = torch.full((t, t), -torch.inf, device=x.device).triu(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2) / D**0.5 + MASKS[t, x.device], -1) @ v)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Attn() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def example_batch(n):
    x = torch.randn(n, 5, D)
    return x, x.flip(1)
""",
    "data_init_flag_in_a_class": """
class Init(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.initialized = nn.Linear(D, D), False

    def forward(self, x):
        y = self.lin(x)
        if not self.initialized:
            with torch.no_grad():
                self.lin.bias -= y.mean(0)
                y = self.lin(x)
            self.initialized = True
        return torch.tanh(y)

def build_model():
    return nn.Sequential(Init(), Init(), Init(), nn.Linear(D, D))
""",
    "started_flag_in_a_global": """
STARTED = {"yes": False}

class Begins(OneBlock):
    def forward(self, x):
        scale = 1.0 if STARTED["yes"] else 0.0
        STARTED["yes"] = True
        return self.block(x) * scale + x

def build_model():
    return nn.Sequential(Begins(), Block(), Block(), nn.Linear(D, D))
""",
    "enum_phase_by_count": """
import enum

class Phase(enum.Enum):
    WARM = 1
    FULL = 2

class Phased(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.phase, self.left = Block(), Phase.WARM, [None] * 10

    def forward(self, x):
        if self.left:
            self.left.pop()
        else:
            self.phase = Phase.FULL
        return self.block(x) if self.phase is Phase.FULL else x + 0.1 * self.block(x)

def build_model():
    return nn.Sequential(Phased(), Block(), Phased(), nn.Linear(D, D))
""",
    "clock_time": """
import time

class Timed(OneBlock):
    def forward(self, x):
        return self.block(x) * (1 + 0.01 * (time.perf_counter() % 1))

def build_model():
    return nn.Sequential(Timed(), Block(), Timed(), nn.Linear(D, D))
""",
    "unseeded_noise": """
class Noise(OneBlock):
    def forward(self, x):
        noise = np.random.default_rng(None).normal(size=tuple(x.shape))
        return self.block(x + 0.1 * torch.from_numpy(noise).to(x))

def build_model():
    return nn.Sequential(Noise(), Block(), Noise(), nn.Linear(D, D))
""",
    "noise_in_a_backward": """
class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 0.1 * torch.randn_like(g) * g.abs().mean()

class Noisy(OneBlock):
    def forward(self, x):
        return self.block(Rounded.apply(x))

def build_model():
    return nn.Sequential(Block(), Noisy(), Block(), Noisy(), nn.Linear(D, D))
""",
    "noise_in_a_hook": """
def build_model():
    m = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
    for p in m.parameters():
        p.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
    return m
""",
}
