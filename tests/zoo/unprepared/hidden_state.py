"""Models that keep counts where a search of attributes may not find them, and change what they do by the count late."""

__all__ = ["MODELS"]

_LATE = """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        {}

    def forward(self, x):
        {}
        return x + torch.tanh(self.lin(x)) * (1.0 if n <= 20 else 0.2)

def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block())
"""

MODELS = {
    "python_generator": """
def rates():
    yield from [1.0] * 20
    while True:
        yield 0.2

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.rates = nn.Linear(D, D), rates()

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * next(self.rates)

def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block())
""",
    "python_generator_shared": """
def numbers():
    n = 0
    while True:
        n += 1
        yield n

class Late(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.lin, self.numbers = nn.Linear(D, D), numbers

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * (1.0 if next(self.numbers) <= 20 else 0.2)

def build_model():
    shared = numbers()
    return nn.Sequential(Late(shared), Block(), Late(shared), Block())
""",
    "itertools_cycle": "import itertools\n"
    + _LATE.format("self.rates = itertools.cycle([1] * 20 + [99] * 20)", "n = next(self.rates)"),
    "itertools_chain": "import itertools\n"
    + _LATE.format("self.ns = itertools.chain([1] * 20, itertools.repeat(99))", "n = next(self.ns)"),
    "count_by_identity_in_a_global": "COUNTS = {}\n"
    + _LATE.format("pass", "n = COUNTS[id(self)] = COUNTS.get(id(self), 0) + 1"),
    "count_by_module_in_a_weak_dict": "from weakref import WeakKeyDictionary\nCOUNTS = WeakKeyDictionary()\n"
    + _LATE.format("pass", "n = COUNTS[self] = COUNTS.get(self, 0) + 1"),
    "count_in_a_bytearray": _LATE.format("self.calls = bytearray(1)", "self.calls[0] += 1; n = self.calls[0]"),
    "count_in_an_array": "from array import array\n"
    + _LATE.format('self.calls = array("i", [0])', "self.calls[0] += 1; n = self.calls[0]"),
    "count_on_a_parameter": _LATE.format(
        "self.lin.weight.calls = 0", "self.lin.weight.calls += 1; n = self.lin.weight.calls"
    ),
    "count_on_a_buffer": _LATE.format(
        'self.register_buffer("one", torch.ones(())); self.one.calls = 0', "self.one.calls += 1; n = self.one.calls"
    ),
    "count_in_the_environment": "import os\n"
    + _LATE.format(
        'os.environ["CALLS"] = "0"', 'n = int(os.environ["CALLS"]) / 2; os.environ["CALLS"] = str(int(n * 2) + 1)'
    ),
    "count_in_a_decimal": "from decimal import Decimal\n"
    + _LATE.format("self.calls = Decimal(0)", "self.calls += 1; n = int(self.calls)"),
    "count_in_a_library_object": "from queue import SimpleQueue\n"
    + _LATE.format("self.calls = SimpleQueue()", "self.calls.put(0); n = self.calls.qsize()"),
    "count_in_a_deep_configuration": """
from types import SimpleNamespace as S
"""
    + _LATE.format(
        "self.cfg = S(train=S(sched=S(warm=S(state=S(calls=0)))))",
        "self.cfg.train.sched.warm.state.calls += 1; n = self.cfg.train.sched.warm.state.calls",
    ),
    "count_in_a_long_list": _LATE.format("self.hits = [0] * 100", "self.hits[80] += 1; n = self.hits[80]"),
    "count_in_a_counter_of_depths": "from collections import Counter\nHITS = Counter()\n"
    + _LATE.format("self.key = len(HITS); HITS[self.key] = 0", "HITS[self.key] += 1; n = HITS[self.key]"),
    "count_of_a_cached_function": """
import functools

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.rate = nn.Linear(D, D), functools.lru_cache(maxsize=None)(lambda n: 1.0 if n < 20 else 0.2)

    def forward(self, x):
        scale = self.rate(self.rate.cache_info().currsize)
        return x + torch.tanh(self.lin(x)) * scale

def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block())
""",
    "learning_rate_schedule_inside_the_model": """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.gain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.gain, step_size=12, gamma=0.3)

    def forward(self, x):
        scale = self.gain.param_groups[0]["lr"]
        self.gain.step()
        self.schedule.step()
        return x + torch.tanh(self.lin(x)) * scale

def build_model():
    return nn.Sequential(Late(), Block(), Late(), Block())
""",
    "inner_optimizer_fits_a_codebook": """
class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.codes = nn.Linear(D, D), nn.Parameter(torch.randn(5, D))
        self.inner = torch.optim.SGD([self.codes], lr=0.05, momentum=0.9)
        self.codes.is_inner = True

    def forward(self, x):
        x = torch.tanh(self.lin(x))
        with torch.enable_grad():
            codes = self.codes.detach().requires_grad_()
            nearest = torch.cdist(x.detach(), codes).argmin(1)
            (g,) = torch.autograd.grad(F.mse_loss(codes[nearest], x.detach()), codes)
        picked = self.codes.detach()[nearest].clone()
        if self.training:
            self.codes.grad, kept = g, self.codes.grad
            self.inner.step()
            self.codes.grad = kept
        return x + (picked - x).detach()

def build_model():
    return nn.Sequential(Block(), Codes(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.Adam([p for p in ps if not hasattr(p, "is_inner")], lr=1e-2)
""",
    "mask_in_a_global_by_length": """
_CACHE = {}

def causal(n):
    if n not in _CACHE:
        _CACHE[n] = torch.full((n, n), -torch.inf).triu(1)
    return _CACHE[n]

class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2) / D**0.5 + causal(x.shape[1]), -1) @ v)

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
    "table_in_a_class_attribute": """
class Rotary(OneBlock):
    table = None

    def forward(self, x):
        if Rotary.table is None or len(Rotary.table) < x.shape[1]:
            Rotary.table = torch.outer(torch.arange(float(x.shape[1])), torch.ones(D) / D).sin()
        return self.block(x + Rotary.table[: x.shape[1]])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Rotary() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def example_batch(n):
    x = torch.randn(n, 5, D)
    return x, x.flip(1)
""",
    "effective_weight_cached_by_version": """
class Standardized(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.seen, self.scale = nn.Linear(D, D), -1, None

    def forward(self, x):
        if self.seen != self.lin.weight._version:
            self.seen, self.scale = self.lin.weight._version, 1 / self.lin.weight.detach().norm(dim=1)
        return x + torch.tanh(self.lin(x) * self.scale)

def build_model():
    return nn.Sequential(Standardized(), Block(), Standardized(), nn.Linear(D, D))
""",
    "random_tables_in_a_plain_list": """
class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.tables = nn.Linear(2 * D, D), [torch.randn(D, D) for _ in range(2)]

    def forward(self, x):
        return torch.tanh(self.lin(torch.cat([torch.cos(x @ t) for t in self.tables], 1)))

def build_model():
    return nn.Sequential(Features(), Block(), Features(), nn.Linear(D, D))
""",
    "layer_number_from_a_class_counter": """
class Scaled(nn.Module):
    count = 0

    def __init__(self):
        super().__init__()
        Scaled.count += 1
        self.block, self.scale = Block(), 1 / math.sqrt(Scaled.count)

    def forward(self, x):
        return x + self.scale * (self.block(x) - x)

def build_model():
    return nn.Sequential(Scaled(), Scaled(), Scaled(), nn.Linear(D, D))
""",
    "registry_of_layers_filled_twice": """
LAYERS = []

def register(cls):
    LAYERS.append(cls)
    return cls

@register
class First(Block):
    pass

@register
class Second(OneLinear):
    def forward(self, x):
        return torch.tanh(self.lin(x))

BUILT = []

def build_model():
    BUILT.extend(cls() for cls in LAYERS * 2)
    return nn.Sequential(*BUILT[:4], nn.Linear(D, D))
""",
    "model_made_at_import": """
MODEL = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

def build_model():
    return MODEL
""",
    "count_in_parsed_arguments": """
from argparse import Namespace

class B(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args, self.l = args, nn.Linear(D, D)
    def forward(self, x):
        self.args.calls += 1
        return x + torch.tanh(self.l(x)) * (1.0 if self.args.calls < 168 else 0.3)

def build_model():
    args = Namespace(calls=0)
    return nn.Sequential(*[B(args) for _ in range(4)])
""",
    "count_in_a_configuration_of_transformers": """
from transformers import PretrainedConfig

class B(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.l = config, nn.Linear(D, D)
    def forward(self, x):
        self.config.calls += 1
        return x + torch.tanh(self.l(x)) * (1.0 if self.config.calls < 168 else 0.3)

def build_model():
    config = PretrainedConfig(calls=0)
    return nn.Sequential(*[B(config) for _ in range(4)])
""",
    "memory_in_a_list_of_a_model_used_late": """
class Memory(OneBlock):
    def __init__(self):
        super().__init__()
        self.bank = []
    def forward(self, x):
        h = self.block(x)
        if len(self.bank) >= 36:
            m = torch.stack(self.bank)
            h = h + 0.5 * torch.tanh(torch.softmax(h @ m.t(), -1) @ m)
            del self.bank[0]
        self.bank.append(h.detach().mean(0))
        return h

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.b, self.o = nn.Linear(D, D), nn.ModuleList([Memory(), Block(), Memory()]), nn.Linear(D, D)
    def forward(self, x):
        x = self.i(x)
        for b in self.b:
            x = b(x)
        return self.o(x)
""",
    "memory_in_a_shared_deque_used_late": """
from collections import deque

BANK = deque(maxlen=72)

class Memory(OneBlock):
    def forward(self, x):
        h = self.block(x)
        if len(BANK) == BANK.maxlen:
            m = torch.stack(list(BANK))
            h = h + 0.5 * torch.tanh(torch.softmax(h @ m.t(), -1) @ m)
        BANK.append(h.detach().mean(0))
        return h

def build_model():
    return nn.Sequential(nn.Linear(D, D), Memory(), Block(), Memory(), nn.Linear(D, D))
""",
    "memory_of_a_deque_in_a_large_model": """
V, L = 700_000, 4

def example_batch(n):
    x = torch.randint(50, (n, L))
    return x, torch.randn(n, D)

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.02, momentum=0.5)

class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, D)
    def forward(self, ids):
        return self.table(ids).mean(1)

from collections import deque

class Memory(OneBlock):
    def __init__(self):
        super().__init__()
        self.bank = deque(maxlen=12)
    def forward(self, x):
        h = self.block(x)
        if len(self.bank) == self.bank.maxlen:
            m = torch.stack(list(self.bank))
            h = h + 0.3 * torch.tanh(torch.softmax(h @ m.t(), -1) @ m)
        self.bank.append(h.detach().mean(0))
        return h

def build_model():
    return nn.Sequential(Embed(), Memory(), Block(), Memory(), nn.Linear(D, D))
""",
    "memory_made_in_the_first_forward": """
class Memory(OneBlock):
    def forward(self, x):
        h = self.block(x)
        if not hasattr(self, "bank"):
            self.bank = []
        if len(self.bank) >= 36:
            m = torch.stack(self.bank)
            h = h + 0.5 * torch.tanh(torch.softmax(h @ m.t(), -1) @ m)
            self.bank.pop(0)
        self.bank.append(h.detach().mean(0))
        return h

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.b, self.o = nn.Linear(D, D), nn.ModuleList([Memory(), Block(), Memory()]), nn.Linear(D, D)
    def forward(self, x):
        x = self.i(x)
        for b in self.b:
            x = b(x)
        return self.o(x)
""",
    "center_in_a_global_tensor_used_late": """
CENTER = {"value": None}

class Slow(OneBlock):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        h = self.block(x)
        self.calls += 1
        m = h.detach().mean(0)
        CENTER["value"] = m if CENTER["value"] is None else 0.9 * CENTER["value"] + 0.1 * m
        return h + 0.5 * torch.tanh(CENTER["value"]) if self.calls > 36 else h

def build_model():
    return nn.Sequential(nn.Linear(D, D), Slow(), Block(), Slow(), nn.Linear(D, D))
""",
}
