"""Models that send rare tensors from module to module: small floats, integers, views, scalars, empty ones, None."""

__all__ = ["MODELS"]

_CAST = """
class Through(OneBlock):
    def forward(self, x, code):
        return self.block(x) + 0.1 * code.to(x.dtype).reshape(len(x), -1)[:, :D], code

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([Through() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x):
        code = {}
        for layer in self.layers:
            x, code = layer(x, code)
        return self.out(x)
"""

MODELS = {
    "float8": _CAST.replace("{}", "x.detach().to(torch.float8_e4m3fn)"),
    "bfloat16": _CAST.replace("{}", "x.detach().bfloat16()"),
    "int8": _CAST.replace("{}", "(x.detach() * 20).to(torch.int8)"),
    "int16": _CAST.replace("{}", "(x.detach() * 20).to(torch.int16)"),
    "bool_mask": _CAST.replace("{}", "x > 0"),
    "transposed": _CAST.replace("{}", "x.detach().t().contiguous().t()"),
    "expanded": _CAST.replace("{}", "x.detach()[:, :1].expand(-1, D)"),
    "a_view_of_what_is_changed": """
class Adds(OneLinear):
    def forward(self, x, head):
        y = x * 1
        v = y[:, :4]
        y += torch.tanh(self.lin(x))
        return y, v + 0.1 * head

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([Adds() for _ in range(3)]), nn.Linear(D + 4, D)

    def forward(self, x):
        head = x[:, 4:]
        for layer in self.layers:
            x, head = layer(x, head)
        return self.out(torch.cat([x, head], 1))
""",
    "skip_changed_in_place_later": """
class Doubles(OneLinear):
    def forward(self, x):
        y = torch.tanh(self.lin(x))
        x.mul_(0.5)
        return y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.layers = Block(), nn.ModuleList([Doubles() for _ in range(3)])

    def forward(self, x):
        h = self.inp(x).detach()
        for layer in self.layers:
            h = layer(h * 1) + h
        return h
""",
    "twice_the_same_tensor": """
class Twice(OneBlock):
    def forward(self, pair):
        y = self.block(pair[0] + 0.5 * pair[1])
        return y, y

class First(nn.Module):
    def forward(self, x):
        return x, x

class Last(nn.Module):
    def forward(self, pair):
        return pair[0] * pair[1]

def build_model():
    return nn.Sequential(First(), Twice(), Twice(), Twice(), Last(), nn.Linear(D, D))
""",
    "scalars_and_none": """
class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.gain = Block(), nn.Parameter(torch.ones(()))

    def forward(self, x, total, extra=None, name="x"):
        x = self.block(x) * self.gain
        total = x.pow(2).mean() if total is None else total + x.pow(2).mean()
        return x, total, None, name

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([Step() for _ in range(4)])

    def forward(self, x):
        total = extra = None
        for s in self.steps:
            x, total, extra, _ = s(x, total, extra)
        return {"y": x, "total": total, "extra": extra}

def loss_fn(out, y):
    return F.mse_loss(out["y"], y) + 0.01 * out["total"]
""",
    "empty_tensors": """
class Step(OneBlock):
    def forward(self, x, past):
        return self.block(x) + past.sum(1), torch.cat([past, x[:, None] * 0.1], 1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([Step() for _ in range(4)])

    def forward(self, x):
        past = x.new_zeros(len(x), 0, D)
        for s in self.steps:
            x, past = s(x, past)
        return x
""",
    "channels_last_and_uneven": """
def build_model():
    m = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, stride=2),
        nn.PixelShuffle(1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )
    return m.to(memory_format=torch.channels_last)

def example_batch(n):
    x = torch.randn(n, 3, 7, 5).to(memory_format=torch.channels_last)
    return x, torch.randint(3, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y)
""",
    "a_scalar_among_the_inputs": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x, temperature):
        for b in self.blocks:
            x = b(x) / temperature
        return self.out(x)

def example_batch(n):
    x = torch.randn(n, D)
    return (x, torch.tensor(1.5)), x
""",
    "a_mask_for_all_samples_among_the_inputs": """
class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + torch.softmax(q @ k.transpose(1, 2) + bias, -1) @ v

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([Attn() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x, bias):
        for layer in self.layers:
            x = layer(x, bias)
        return self.out(x)

def example_batch(n):
    x = torch.randn(n, 4, D)
    return (x, torch.randn(4, 4)), x
""",
}
