"""Models whose state is in objects that are no modules: scopes, cells of C, files, caches of methods, properties."""

__all__ = ["MODELS"]

MODELS = {
    "scopes_on_a_class_stack": """
class scope:
    stack = []

    def __init__(self, gain):
        self.gain = gain

    def __enter__(self):
        scope.stack.append(self.gain)

    def __exit__(self, *a):
        scope.stack.pop()

class Scoped(Block):
    def forward(self, x):
        with scope(0.7):
            return super().forward(x) * math.prod(scope.stack)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scoped() for _ in range(4))

    def forward(self, x):
        with scope(1.5):
            for b in self.blocks:
                x = b(x)
        return x
""",
    "counter_of_ctypes_shared": """
import ctypes

class Counting(Block):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        self.calls.value += 1
        return super().forward(x) / (1 + 0.05 * self.calls.value)

def build_model():
    calls = ctypes.c_int(0)
    return nn.Sequential(Counting(calls), Block(), Counting(calls), nn.Linear(D, D))
""",
    "count_in_a_file": """
import tempfile

class Counting(Block):
    def __init__(self):
        super().__init__()
        self.file = tempfile.TemporaryFile("w+")

    def forward(self, x):
        self.file.seek(0)
        n = int(self.file.read() or 0) + 1
        self.file.seek(0)
        self.file.write(str(n))
        self.file.flush()
        return super().forward(x) / (1 + 0.05 * n)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Counting(), Block(), nn.Linear(D, D))
""",
    "norm_cached_by_a_cached_property": """
class Scaled(Block):
    @functools.cached_property
    def scale(self):
        return self.up.weight.detach().norm()

    def forward(self, x):
        return super().forward(x) / self.scale

def build_model():
    return nn.Sequential(nn.Linear(D, D), Scaled(), Scaled(), nn.Linear(D, D))
""",
    "number_of_a_weight_in_a_method_cache": """
class Scaled(Block):
    @functools.lru_cache(maxsize=None)
    def scale(self, train):
        return self.up.weight.norm().item()

    def forward(self, x):
        return super().forward(x) / self.scale(self.training)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Scaled(), Scaled(), nn.Linear(D, D))
""",
    "single_method_cache_slot_of_all_blocks": """
class Windowed(Block):
    @functools.lru_cache(maxsize=1)
    def window(self, n):
        return torch.hann_window(n + 1)[1:] * random.uniform(0.5, 1.5)

    def forward(self, x):
        return super().forward(x) * self.window(x.shape[-1])

def build_model():
    return nn.Sequential(nn.Linear(D, D), Windowed(), Windowed(), Windowed(), nn.Linear(D, D))
""",
    "coroutine_with_feedback": """
def controller():
    level, gain = 0.0, 1.0
    while True:
        seen = yield gain
        level = 0.9 * level + 0.1 * seen
        gain = 1 / (1 + level)

class Controlled(Block):
    def __init__(self):
        super().__init__()
        self.controller = controller()
        self.controller.send(None)

    def forward(self, x):
        return super().forward(x) * self.controller.send(x.detach().abs().mean().item())

def build_model():
    return nn.Sequential(Controlled(), Block(), Controlled(), nn.Linear(D, D))
""",
    "settings_in_a_namespace_shared": """
from types import SimpleNamespace

class Annealed(Block):
    def __init__(self, cfg, first):
        super().__init__()
        self.cfg, self.first = cfg, first

    def forward(self, x):
        if self.first:
            self.cfg.temperature = max(0.5, self.cfg.temperature * 0.98)
        return super().forward(x) / self.cfg.temperature

def build_model():
    cfg = SimpleNamespace(temperature=2.0)
    return nn.Sequential(*[Annealed(cfg, k == 0) for k in range(4)], nn.Linear(D, D))
""",
    "function_mode_counts_operators": """
from torch.overrides import TorchFunctionMode

class Counted(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.products += func is F.linear
        return func(*args, **(kwargs or {}))

class Warm(Block):
    def __init__(self):
        super().__init__()
        self.mode = Counted()

    def forward(self, x):
        with self.mode:
            return super().forward(x) * min(1.0, self.mode.products / 40)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Warm(), Warm(), nn.Linear(D, D))
""",
    "dispatch_mode_around_all_blocks": """
from torch.utils._python_dispatch import TorchDispatchMode

class Rounded(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return (out * 64).round() / 64 if func is torch.ops.aten.tanh.default else out

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(4)), nn.Linear(D, D)

    def forward(self, x):
        with Rounded():
            for b in self.blocks:
                x = b(x)
        return self.out(x)
""",
    "default_dtype_set_around_a_block": """
class Wide(Block):
    def forward(self, x):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            bias = torch.linspace(-0.1, 0.1, x.shape[-1])
            return super().forward(x) + bias.float()
        finally:
            torch.set_default_dtype(before)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Wide(), Wide(), nn.Linear(D, D))
""",
    "state_behind_getattr": """
class Remembering(Block):
    store = {}

    def __init__(self, key):
        super().__init__()
        self.__dict__["key"] = key

    def __getattr__(self, name):
        if name.startswith("mem_"):
            return Remembering.store.get((self.__dict__["key"], name), 0.0)
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        if name.startswith("mem_"):
            Remembering.store[self.__dict__["key"], name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, x):
        self.mem_level = 0.9 * self.mem_level + 0.1 * x.detach().abs().mean().item()
        return super().forward(x) / (1 + self.mem_level)

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Remembering(k) for k in range(3)], nn.Linear(D, D))
""",
    "blocks_from_a_set_of_names": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict()
        for k, name in enumerate({"spam", "ham", "eggs", "toast", "beans"}):
            self.parts[name] = Block()
            nn.init.constant_(self.parts[name].norm.weight, 1 + 0.2 * k)

    def forward(self, x):
        for b in self.parts.values():
            x = b(x)
        return x
""",
    "scale_by_the_hash_of_a_name": """
class Named(Block):
    def __init__(self, name):
        super().__init__()
        self.gain = 1 + (hash(name) % 100) / 200

    def forward(self, x):
        return super().forward(x) * self.gain

def build_model():
    return nn.Sequential(*[Named(f"layer{k}") for k in range(4)], nn.Linear(D, D))
""",
    "observer_of_the_previous_block": """
class Observed(Block):
    def __init__(self, before):
        super().__init__()
        self.listeners, self.heard = [], 0.0
        if before is not None:
            before.listeners.append(self.hear)

    def hear(self, value):
        self.heard = 0.5 * self.heard + 0.5 * value

    def forward(self, x):
        y = super().forward(x) * (1 + 0.2 * math.tanh(self.heard))
        for tell in self.listeners:
            tell(y.detach().mean().item())
        return y

def build_model():
    blocks, last = [], None
    for _ in range(4):
        last = Observed(last)
        blocks.append(last)
    return nn.Sequential(*blocks, nn.Linear(D, D))
""",
    "lock_and_event_in_a_block": """
import threading

class Locked(Block):
    def __init__(self):
        super().__init__()
        self.lock, self.warm = threading.Lock(), threading.Event()
        self.timer = 0

    def forward(self, x):
        with self.lock:
            self.timer += 1
            if self.timer == 10:
                self.warm.set()
        return super().forward(x) * (1.0 if self.warm.is_set() else 0.5)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Locked(), Locked(), nn.Linear(D, D))
""",
    "dataclass_with_slots_of_settings": """
@dataclass(slots=True)
class Settings:
    gain: float = 0.5
    calls: int = 0

SETTINGS = Settings()

class Gained(Block):
    def forward(self, x):
        return x + SETTINGS.gain * super().forward(x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Gained(), Gained(), Gained(), nn.Linear(D, D))
""",
    "dict_whose_attributes_are_its_items": """
class Options(dict):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.__dict__ = self

class Scaled(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.up, self.down = nn.Linear(D, options.width), nn.Linear(options.width, D)

    def forward(self, x):
        return x + self.options.scale * self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.blocks = nn.ModuleList(Scaled(options) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.options.scale

def build_model():
    return Net(Options(width=12, scale=0.5))
""",
    "dict_that_raises_key_errors_for_attributes": """
class Options(dict):
    __getattr__ = dict.__getitem__

class Scaled(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.up, self.down = nn.Linear(D, options.width), nn.Linear(options.width, D)

    def forward(self, x):
        return x + self.options.scale * self.down(torch.tanh(self.up(x)))

def build_model():
    options = Options(width=12, scale=0.5)
    return nn.Sequential(*[Scaled(options) for _ in range(4)])
""",
    "nan_in_a_global": """
UNKNOWN = float("nan")

class Filled(Block):
    def __init__(self):
        super().__init__()
        self.best = UNKNOWN

    def forward(self, x):
        filled = torch.where(torch.full_like(x, UNKNOWN).isnan(), x, torch.zeros_like(x))
        return super().forward(filled)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Filled(), Filled(), Filled(), nn.Linear(D, D))
""",
}
