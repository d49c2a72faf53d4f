"""Techniques of papers: adapters, curricula, memories, gates, and autograd functions of the user."""

__all__ = ["MODELS"]

MODELS = {
    "custom_function_keeps_python_state": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cfg):
        ctx.cfg, ctx.n = cfg, cfg["calls"]
        cfg["calls"] += 1
        ctx.save_for_backward(x)
        return x * cfg["k"]
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.cfg["k"] * (1 + 0.01 * ctx.n), None

class S(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.cfg = nn.Linear(D, D), {"k": 0.7, "calls": 0}
    def forward(self, x):
        return self.lin(Scale.apply(x, self.cfg))

def build_model():
    return nn.Sequential(nn.Linear(D, D), S(), Block(), S(), nn.Linear(D, D))
""",
    "gradients_not_materialized": """
class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3
    @staticmethod
    def backward(ctx, a, b):
        if a is None and b is None:
            return None
        return (0 if a is None else 2 * a) + (0 if b is None else 3 * b)

class S(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
    def forward(self, x):
        return Split.apply(self.l(x))

class J(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
    def forward(self, xs):
        a, b = xs
        return self.l(a)

def build_model():
    return nn.Sequential(nn.Linear(D, D), S(), J(), Block(), S(), J(), nn.Linear(D, D))
""",
    "spectral_norm_with_a_tie": """
def build_model():
    a, b = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)), nn.Linear(D, D)
    m = nn.Sequential(nn.Linear(D, D), a, Block(), b, nn.Linear(D, D))
    b.weight = a.parametrizations.weight.original
    return m
""",
    "head_standardizes_the_tied_embedding": """
V, L = 13, 6

def example_batch(n):
    x = torch.randint(V, (n, L))
    return x, x.roll(1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

class Head(nn.Module):
    def __init__(self, e):
        super().__init__()
        self.e = e
        self.g = nn.Parameter(torch.ones(()))
    def forward(self, x):
        w = self.e.weight
        return F.linear(x, self.g * (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5))

def build_model():
    e = nn.Embedding(V, D, max_norm=None, padding_idx=0)
    return nn.Sequential(e, Block(), Block(), Head(e))
""",
    "prefix_tuning": """
V, L = 13, 6

def example_batch(n):
    x = torch.randint(V, (n, L))
    return x, x.roll(1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.pk, self.pv = nn.Parameter(torch.randn(2, D) * 0.1), nn.Parameter(torch.randn(2, D) * 0.1)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        n = len(x)
        k = torch.cat([self.pk.expand(n, -1, -1), k], 1)
        v = torch.cat([self.pv.expand(n, -1, -1), v], 1)
        return x + self.o(F.scaled_dot_product_attention(q, k, v))

def build_model():
    m = nn.Sequential(nn.Embedding(V, D), Attn(), Attn(), Attn(), nn.Linear(D, V))
    for n, p in m.named_parameters():
        p.requires_grad_(n.endswith(("pk", "pv")))
    return m
""",
    "depth_by_the_batch_index": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)
        self.register_buffer("i", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        if self.training:
            self.i += 1
        for k, b in enumerate(self.blocks):
            keep = ((self.i + k) % 3 != 0).float()
            x = x + keep * (b(x) - x)
        return self.out(x)
""",
    "dropout_annealed_by_a_buffer": """
class Anneal(nn.Module):
    def __init__(self):
        super().__init__()
        self.d, self.l = nn.Dropout(0.5), nn.Linear(D, D)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        if self.training:
            self.n += 1
            self.d.p = max(0.0, 0.5 - 0.02 * int(self.n))
        return x + self.l(self.d(x))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Anneal(), Block(), Anneal(), nn.Linear(D, D))
""",
    "curriculum_by_length": """
V, L = 13, 6

def example_batch(n):
    x = torch.randint(V, (n, L))
    return x, x.roll(1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.b, self.h = nn.Embedding(V, D), nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, V)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        self.seen.add_(1)
        n = torch.clamp(2 + self.seen // 4, max=L)
        m = (torch.arange(L) < n).float()[None, :, None]
        h = self.e(x) * m
        for b in self.b:
            h = b(h)
        return self.h(h)
""",
    "detached_until_a_count": """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = Block()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        self.n += 1
        y = self.b(x)
        return torch.where(self.n > 20, y, y.detach() + 0 * x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Gate(), Block(), Gate(), nn.Linear(D, D))
""",
    "memory_in_a_ring_buffer": """
class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(16, D))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))
        self.q = nn.Linear(D, D)
    def forward(self, x):
        p, n = int(self.ptr), len(x)
        sim = torch.softmax(self.q(x) @ self.bank.clone().t(), -1) @ self.bank.clone()
        with torch.no_grad():
            idx = (torch.arange(n) + p) % 16
            self.bank[idx] = x.detach()
            self.ptr[0] = (p + n) % 16
        return x + sim

def build_model():
    return nn.Sequential(nn.Linear(D, D), Bank(), Block(), Bank(), nn.Linear(D, D))
""",
    "module_called_with_other_arguments": """
class Mode(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
    def forward(self, x, mode="a", gain=1.0):
        return x + gain * getattr(self, mode)(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.m, self.b, self.o = Mode(), Block(), nn.Linear(D, D)
    def forward(self, x):
        x = self.m(x)
        x = self.b(x)
        x = self.m(x, mode="b", gain=0.5)
        return self.o(self.m(self.b(x), gain=-0.3))
""",
    "functional_call_of_its_own_module": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Sequential(Block(), nn.Linear(D, D)), Block()
    def forward(self, x):
        soft = {n: p.detach() * 0.9 for n, p in self.f.named_parameters()}
        t = torch.func.functional_call(self.f, soft, (x,))
        return self.g(self.f(x) + 0.1 * t)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Net(), Net(), nn.Linear(D, D))
""",
    "complex_spectral_mixing": """
class Spec(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.cfloat) * 0.3)
    def forward(self, x):
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.w, n=D)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Spec(), Block(), Spec(), nn.Linear(D, D))
""",
    "nested_tensor_within_a_block": """
class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
    def forward(self, x):
        t = torch.nested.nested_tensor([r[None].expand(1 + k % 3, -1) for k, r in enumerate(x)], layout=torch.jagged)
        y = self.l(t.values())
        return x + torch.stack([p.mean(0) for p in y.split([1 + k % 3 for k in range(len(x))])])

def build_model():
    return nn.Sequential(nn.Linear(D, D), Nest(), Block(), Nest(), nn.Linear(D, D))
""",
    "experts_balanced_by_a_bias": """
class Moe(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.g, self.e = nn.Linear(D, n), nn.ModuleList([nn.Linear(D, D) for _ in range(n)])
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("load", torch.zeros(n))
    def forward(self, x):
        s = self.g(x) + self.bias
        w, i = s.softmax(-1).topk(2)
        y = sum(w[:, k, None] * torch.stack([self.e[int(j)](r) for j, r in zip(i[:, k], x)]) for k in range(2))
        if self.training:
            self.load += torch.bincount(i.flatten(), minlength=len(self.e)).float()
            self.bias -= 0.01 * torch.sign(self.load - self.load.mean())
        return x + y

def build_model():
    return nn.Sequential(nn.Linear(D, D), Moe(), Block(), Moe(), nn.Linear(D, D))
""",
    "sequential_that_adds": """
class Res(nn.Sequential):
    def forward(self, x):
        for k, m in enumerate(self):
            x = x + m(x) / (k + 1)
        return x

def build_model():
    return Res(nn.Linear(D, D), Block(), Res(nn.Linear(D, D), Block()), nn.Linear(D, D))
""",
    "hook_scales_by_a_running_norm": """
class H(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
        self.register_buffer("s", torch.ones(()))
        self.l.weight.register_hook(self.hook)
    def hook(self, g):
        self.s.mul_(0.9).add_(g.norm().detach(), alpha=0.1)
        return g / (1 + self.s)
    def forward(self, x):
        return x + self.l(x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), H(), Block(), H(), nn.Linear(D, D))
""",
    "adapters_in_partial_forwards": """
def adapted(lin, a, b, scale, x):
    return F.linear(x, lin.weight.detach(), lin.bias) + scale() * (x @ a.T @ b.T)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(D, D)
        self.alphas = nn.Parameter(torch.ones(4))
        self.lora = nn.ParameterDict()
        for i, b in enumerate(self.h):
            self.lora[f"a{i}"] = nn.Parameter(torch.randn(2, D) * 0.1)
            self.lora[f"b{i}"] = nn.Parameter(torch.zeros(2 * D, 2))
            b.up.weight.requires_grad_(False)
            own = self.lora[f"a{i}"], self.lora[f"b{i}"], functools.partial(self.scale, i)
            b.up.forward = functools.partial(adapted, b.up, *own)
    def scale(self, i):
        return torch.sigmoid(self.alphas[i])
    def forward(self, x):
        for b in self.h:
            x = b(x)
        return self.head(x)
""",
    "output_class_made_in_forward": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
    def forward(self, x, mask=None, labels=None):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h) if mask is None else b(h) * mask
        loss = None if labels is None else F.mse_loss(h, labels)
        return namedtuple("Out", "loss h hidden")(loss, h, None)

def example_batch(n):
    x = torch.randn(n, D)
    return {"x": x, "mask": None, "labels": torch.tanh(x.flip(1))}, None

def loss_fn(out, y):
    return out.loss
""",
    "bfloat16_blocks_beside_a_float_stream": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block().bfloat16() for _ in range(4)])
        self.scales = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.mid, self.head = nn.Linear(D, D).double(), nn.Linear(D, D).double()
    def forward(self, x):
        x = self.stem(x)
        for i, b in enumerate(self.blocks):
            x = x + self.scales[i] * b(F.rms_norm(x, (D,)).to(torch.bfloat16))
            if i == 1:
                x = x + torch.tanh(self.mid(x.double())).float()
        return self.head(x.double())

def loss_fn(out, y):
    return F.mse_loss(out, y.double())
""",
    "u_vit_with_register_tokens": """
class Transformer(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.depth = depth
        self.layers = nn.ModuleList()
        for i in range(depth):
            combine = nn.Linear(2 * D, D) if i >= depth / 2 else None
            self.layers.append(nn.ModuleList([combine, Block(), Block()]))
    def forward(self, x):
        skips = []
        for i, (combine, attn, ff) in enumerate(self.layers):
            if i < self.depth / 2:
                skips.append(x)
            if combine is not None:
                x = combine(torch.cat((skips.pop(), x), dim=-1))
            x = ff(attn(x))
        return x

class UViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(D, D)
        self.register_buffer("pos_embedding", torch.randn(4, D), persistent=False)
        self.register_tokens = nn.Parameter(torch.randn(2, D))
        self.transformer, self.head = Transformer(), nn.Linear(D, D)
    def forward(self, x):
        x = self.patches(x) + self.pos_embedding
        x = torch.cat([x, self.register_tokens.expand(len(x), -1, -1)], dim=1)
        return self.head(self.transformer(x).mean(dim=1))

def build_model():
    return UViT()

def example_batch(n):
    return torch.randn(n, 4, D), torch.randn(n, D)
""",
}
