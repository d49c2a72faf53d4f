"""Models with losses, optimizers, builders and interfaces as recipes on the web have them."""

__all__ = ["MODELS"]

_BLOCKS = """
def build_model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
"""

_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)
"""

MODELS = {
    "teacher_in_the_loss": _BLOCKS
    + """
TEACHER = nn.Sequential(Block(), nn.Linear(D, D)).requires_grad_(False)
with torch.no_grad():
    for p in TEACHER.parameters():
        p.copy_(torch.linspace(-0.4, 0.4, p.numel()).view_as(p))

def example_batch(n):
    x = torch.randn(n, D)
    return x, x

def loss_fn(out, x):
    return F.mse_loss(out, TEACHER(x)) + F.cross_entropy(out, F.softmax(TEACHER(x), 1))
""",
    "orthogonality_in_the_block": """
class Orth(OneLinear):
    def forward(self, pair):
        x, penalty = pair
        w = self.lin.weight
        return torch.tanh(self.lin(x)), penalty + ((w @ w.t() - torch.eye(D)) ** 2).sum()

class Begin(nn.Module):
    def forward(self, x):
        return x, x.new_zeros(())

def build_model():
    return nn.Sequential(Begin(), Orth(), Orth(), Orth())

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + 0.01 * out[1]
""",
    "token_mean_with_padding_and_smoothing": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(9, D), nn.Linear(D, 9)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.out(x)

def example_batch(n):
    ids = torch.randint(1, 9, (n, 6))
    return ids, torch.where(torch.arange(6) < torch.randint(2, 7, (n, 1)), ids.roll(-1, 1), 0)

def loss_count(y):
    return (y != 0).sum()

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=0, label_smoothing=0.1)
""",
    "adaptive_softmax_inside": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Block(), Block(), Block())
        self.soft = nn.AdaptiveLogSoftmaxWithLoss(D, 20, cutoffs=[5, 10])

    def forward(self, x, labels):
        return self.soft(self.body(x), labels)

def example_batch(n):
    return (torch.randn(n, D), torch.randint(20, (n,))), torch.zeros(n)

def loss_fn(out, y):
    return out.loss
""",
    "transformer_with_masks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, D)
        self.model = nn.Transformer(D, 2, 2, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(D, 9)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        h = self.model(self.emb(src), self.emb(tgt), tgt_mask=mask, src_key_padding_mask=src == 0, tgt_is_causal=True)
        return self.out(h)

def example_batch(n):
    src, tgt = torch.randint(1, 9, (n, 5)), torch.randint(1, 9, (n, 4))
    src[:, 4] = 0
    return (src, tgt), tgt.roll(-1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "recurrent_cells_over_time": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.ModuleList([nn.GRUCell(D, D) for _ in range(2)]), nn.Linear(D, D)
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        for cell in self.cells:
            h, steps = x.new_zeros(len(x), D), []
            for t in range(x.shape[1]):
                h = cell(x[:, t], h)
                steps.append(h)
            x = torch.stack(steps, 1)
        return self.out(self.attn(x, x, x, need_weights=False)[0])

def example_batch(n):
    x = torch.randn(n, 4, D)
    return x, x.cumsum(1).tanh()
""",
    "fused_adamw_with_amsgrad": _BLOCKS
    + """
def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, fused=True)
""",
    "foreach_momentum_maximizes": _BLOCKS
    + """
def loss_fn(out, y):
    return -F.mse_loss(out, y)

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, foreach=True, maximize=True)
""",
    "generator_of_parameters_used_twice": _BLOCKS
    + """
def build_optimizer(ps):
    return torch.optim.AdamW([
        {"params": [p for p in ps if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in ps if p.ndim < 2], "weight_decay": 0.0},
    ], lr=1e-2)
""",
    "groups_by_values_of_parameters": _BLOCKS
    + """
def build_optimizer(ps):
    ps = sorted(ps, key=lambda p: float(p.detach().norm()))
    return torch.optim.AdamW([{"params": ps[:6], "lr": 1e-3}, {"params": ps[6:], "lr": 3e-2}])
""",
    "optimizer_replaces_data": """
class Replaces(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * (p.grad / p.grad.norm().clamp(min=1e-3))
                    p.grad = None
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Replaces(ps, lr=0.05)
""",
    "gradients_are_kept_as_zeros": """
class Rests(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.n = Block(), 0

    def forward(self, x):
        self.n += 1
        return x if self.n % 16 >= 8 else self.block(x)

class Zeros(torch.optim.AdamW):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=False)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Rests(), Block(), Rests(), nn.Linear(D, D))

def build_optimizer(ps):
    return Zeros(ps, lr=1e-2, weight_decay=0.3)
""",
    "one_gradient_is_never_cleared": """
class Keeps(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1 or p.grad is None:
                    p.grad = None
                else:
                    p.grad.mul_(0.5)
"""
    + _BLOCKS
    + """
def build_optimizer(ps):
    return Keeps(ps, lr=0.05)
""",
    "parameters_overridden": _NET.replace(
        "    def forward",
        "    def parameters(self, recurse=True):\n        return iter(self.out.parameters())\n\n    def forward",
    )
    + """
def build_model():
    return Net()
""",
    "train_overridden": _NET.replace("Block() for", "nn.Sequential(Block(), nn.Dropout(0.3)) for").replace(
        "    def forward",
        "    def train(self, mode=True):\n        super().train(mode)\n        self.blocks[1].eval()\n"
        "        return self\n\n    def forward",
    )
    + """
def build_model():
    return Net().train()
""",
    "parameter_subclass": """
class Scaled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out * 0.5 if func is F.linear else out

def build_model():
    m = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
    m[1].up.weight = Scaled(m[1].up.weight.data)
    return m
""",
    "built_by_a_class": _NET
    + """
build_model = Net
build_optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
loss_fn = nn.SmoothL1Loss(beta=0.3)
""",
    "built_by_a_closure_over_a_config": """
@dataclass
class Config:
    width: int = D
    depth: int = 3
    act: str = "gelu"

def layer(cfg):
    act = {"gelu": nn.GELU, "relu": nn.ReLU}[cfg.act]()

    def run(self, x):
        return x + act(nn.Linear.forward(self, x))

    made = type("Layer", (nn.Linear,), {"forward": run})
    return made(cfg.width, cfg.width)

def factory(cfg):
    def build():
        return nn.Sequential(*[layer(cfg) for _ in range(cfg.depth)], nn.Linear(cfg.width, D))
    return build

build_model = factory(Config())
""",
    "module_used_under_two_names": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.last = self.first
        self.parts = nn.ModuleDict({"z": Block(), "a": nn.Linear(D, D), "m": Block()})

    def forward(self, x):
        x = self.parts["m"](self.first(x))
        for name in sorted(self.parts, reverse=True):
            x = self.parts[name](x)
        return self.last(x)
""",
    "python_numbers_cross": """
class Measures(OneBlock):
    def forward(self, pair):
        x = pair[0] if isinstance(pair, tuple) else pair
        x = self.block(x)
        return x, float(x.detach().abs().mean()), "norm"

class Uses(OneBlock):
    def forward(self, triple):
        x, scale, how = triple
        return self.block(x / (0.1 + scale) if how == "norm" else x)

def build_model():
    return nn.Sequential(Measures(), Measures(), Uses(), nn.Linear(D, D))
""",
    "rare_flag_crosses": """
class Flags(OneBlock):
    def forward(self, x):
        return self.block(x), bool(x.detach().abs().max() > 3.2)

class Uses(OneBlock):
    def forward(self, pair):
        return self.block(pair[0].clamp(-1, 1) if pair[1] else pair[0])

def build_model():
    return nn.Sequential(Flags(), Uses(), Block(), nn.Linear(D, D))
""",
    "number_between_blocks_in_forward": _NET.replace(
        "            x = b(x)\n", "            x = b(x) / (0.5 + float(x.detach().abs().mean()))\n"
    )
    + """
def build_model():
    return Net()
""",
    "counts_in_the_last_layer": """
def drops():
    for n in range(10**6):
        yield 0.0 if n < 22 else 0.6

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.drops = nn.Linear(D, D), drops()

    def forward(self, x):
        return self.out(F.dropout(x, next(self.drops)))

def build_model():
    return nn.Sequential(Block(), Block(), Block(), Head())
""",
    "half_precision_block_overflows": """
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D).half()

    def forward(self, x):
        y = (self.lin(x.half()) * 2e4).float()
        return x + torch.nan_to_num(y, posinf=0.0, neginf=0.0).mul(1e-5).tanh()

def build_model():
    return nn.Sequential(Block(), Half(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.01)
""",
    "nested_inputs_with_none_and_text": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, *, batch, mode="add", bias=None, extra=torch.ones(D)):
        x = batch["x"] + batch["more"][0] if mode == "add" else batch["x"]
        for b in self.blocks:
            x = b(x)
        return {"out": self.out(x) * extra, "none": bias, "ids": batch["more"][1]}

def example_batch(n):
    x = torch.randn(n, D)
    batch = {"x": x, "more": (torch.randn(n, D), torch.arange(n))}
    return {"batch": batch, "mode": "add", "bias": None}, x.flip(1).tanh()

def loss_fn(out, y):
    return F.mse_loss(out["out"], y)
""",
}
