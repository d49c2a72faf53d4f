"""Models of everyday recipes: adapters, caches, averages, diffusion, metric learning, graphs, hooks, and classes."""

__all__ = ["MODELS"]

MODELS = {
    "three_way_tie_with_weight_norm": """
V, L = 13, 6

def example_batch(n):
    x = torch.randint(V, (n, L))
    return x, x.roll(1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

from torch.nn.utils.parametrizations import weight_norm

class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Embedding(V, D), nn.Embedding(V, D)
        self.mid = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(D, V, bias=False)
        self.dec.weight = self.enc.weight
        self.head.weight = self.enc.weight
        self.proj = weight_norm(nn.Linear(D, D))
    def forward(self, x):
        h = self.enc(x)
        for i, b in enumerate(self.mid):
            h = b(h)
            if i == 1:
                h = h + self.proj(self.dec(x.roll(-1, 1)))
        return self.head(h)

def build_model():
    return Lm()
""",
    "lora_dora_scale_and_frozen_base": """
class Dora(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(r, D) * 0.1), nn.Parameter(torch.zeros(D, r))
        self.m = nn.Parameter(base.weight.norm(dim=1, keepdim=True).detach())
    def forward(self, x):
        w = self.base.weight + self.b @ self.a
        w = self.m * w / w.norm(dim=1, keepdim=True).detach()
        return F.linear(x, w, self.base.bias)

class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(D, D)
    def forward(self, x):
        return x + torch.tanh(self.f(x))

def build_model():
    m = nn.Sequential(*[Res() for _ in range(4)], nn.Linear(D, D))
    m.requires_grad_(False)
    for r in m[:4]:
        r.f = Dora(r.f)
    return m
""",
    "adapters_only_in_later_layers": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))
    for p in m.parameters():
        p.requires_grad_(False)
    for p in m[3].norm.parameters():
        p.requires_grad_(True)
    return m

def build_optimizer(ps):
    return torch.optim.AdamW([p for p in ps if p.requires_grad], lr=1e-2)
""",
    "kv_cache_in_training_over_segments": """
V, L = 13, 6

def example_batch(n):
    x = torch.randint(V, (n, L))
    return x, x.roll(1, 1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.cache = None
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.cache is not None and self.cache[0].shape[0] == x.shape[0]:
            k2, v2 = torch.cat([self.cache[0], k], 1), torch.cat([self.cache[1], v], 1)
        else:
            k2, v2 = k, v
        self.cache = (k.detach(), v.detach())
        return x + self.o(torch.softmax(q @ k2.transpose(1, 2), -1) @ v2)

def build_model():
    return nn.Sequential(nn.Embedding(V, D), Seg(), Seg(), Seg(), nn.Linear(D, V))
""",
    "running_mean_reregistered_each_forward": """
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.zeros(D))
    def forward(self, x):
        y = x - self.c
        self.register_buffer("c", (0.9 * self.c + 0.1 * x.detach().mean(0)))
        return y

def build_model():
    return nn.Sequential(nn.Linear(D, D), Center(), Block(), Center(), nn.Linear(D, D))
""",
    "non_persistent_running_max": """
class Max(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(()), persistent=False)
    def forward(self, x):
        with torch.no_grad():
            self.m = torch.maximum(self.m, x.abs().max())
        return x / (1 + self.m)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Max(), Block(), Max(), Block(), nn.Linear(D, D))
""",
    "int_histogram_buffer": """
class Hist(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("h", torch.zeros(D, dtype=torch.int32))
    def forward(self, x):
        y = self.lin(x)
        self.h += torch.bincount(y.argmax(1), minlength=D).to(torch.int32)
        return y * (1 + 0.1 * self.h / (1 + self.h.sum()))

def build_model():
    return nn.Sequential(Hist(), Block(), Hist(), Block(), Hist())
""",
    "swa_model_inside_updated_every_fourth_call": """
class Swa(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), nn.Linear(D, D))
        self.swa, self.calls = torch.optim.swa_utils.AveragedModel(self.net), 0
    def forward(self, x):
        self.calls += 1
        if self.calls % 4 == 0:
            self.swa.update_parameters(self.net)
        return self.net(x)

def build_model():
    return Swa()
""",
    "random_depth_by_python_choices": """
class Pick(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = nn.ModuleList([nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Identity()])
    def forward(self, x):
        return x + random.choices(list(self.ops), weights=[3, 2, 1])[0](x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Pick(), Pick(), Pick(), nn.Linear(D, D))
""",
    "diffusion_ddpm_timesteps_and_noise": """
class Ddpm(nn.Module):
    def __init__(self):
        super().__init__()
        b = torch.linspace(1e-3, 0.2, 20)
        self.register_buffer("ab", torch.cumprod(1 - b, 0))
        self.time = nn.Sequential(nn.Embedding(20, D), nn.Linear(D, D), nn.SiLU())
        self.down, self.mid, self.up = Block(), Block(), Block()
        self.out = nn.Linear(2 * D, D)
    def forward(self, x0):
        t = torch.randint(0, 20, (x0.shape[0],), device=x0.device)
        noise = torch.randn_like(x0)
        a = self.ab[t][:, None]
        x = a.sqrt() * x0 + (1 - a).sqrt() * noise
        e = self.time(t)
        d = self.down(x + e)
        u = self.up(self.mid(d) + e)
        return self.out(torch.cat([u, d], 1)), noise

def build_model():
    return Ddpm()

def loss_fn(o, y):
    return F.mse_loss(o[0], o[1])
""",
    "rectified_flow_noise_in_the_batch": """
def example_batch(n):
    x1, x0, t = torch.randn(n, D), torch.randn(n, D), torch.rand(n, 1)
    return {"x": (1 - t) * x0 + t * x1, "t": t}, x1 - x0

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.blocks, self.o = nn.Linear(1, D), nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)
    def forward(self, *, x, t):
        e = torch.sin(self.t(t))
        for b in self.blocks:
            x = b(x) * (1 + e)
        return self.o(x)

def build_model():
    return Flow()
""",
    "loss_fn_is_a_criterion_object": """
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5]))

def example_batch(n):
    return torch.randn(n, D), torch.randint(3, (n,))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, 3))
""",
    "maml_inner_step_by_functional_call": """
class Maml(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, D))
        self.lr = nn.Parameter(torch.tensor(0.05))
        self.post = nn.Linear(D, D)
    def forward(self, x):
        ps = dict(self.net.named_parameters())
        s, q = x[:, :D], x[:, D:]
        l = (torch.func.functional_call(self.net, ps, (s,)) - s).pow(2).mean()
        gs = torch.autograd.grad(l, list(ps.values()), create_graph=True)
        fast = {n: p - self.lr * g for (n, p), g in zip(ps.items(), gs)}
        return self.post(torch.func.functional_call(self.net, fast, (q,)))

def build_model():
    return nn.Sequential(nn.Linear(D, 2 * D), Maml(), Block(), nn.Linear(D, D))
""",
    "module_dict_with_numeric_order": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict({str(i): Block() for i in (10, 2, 33, 4)})
        self.head = nn.Linear(D, D)
    def forward(self, x):
        for k in sorted(self.stages, key=int):
            x = self.stages[k](x)
        return self.head(x)
""",
    "typed_dict_between_blocks_with_none": """
from typing import TypedDict, Optional

class St(TypedDict):
    h: torch.Tensor
    skip: Optional[torch.Tensor]
    extra: tuple

class B(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i, self.b = i, Block()
    def forward(self, s):
        h = self.b(s["h"])
        if s["skip"] is not None:
            h = h + s["skip"]
        return St(h=h, skip=h * 0.1 if self.i % 2 else None, extra=(None, (h.mean(-1, keepdim=True), None)))

class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
    def forward(self, s):
        return self.l(s["h"] + s["extra"][1][0])

class Begin(nn.Module):
    def forward(self, x):
        return St(h=x, skip=None, extra=(None, (x.mean(-1, keepdim=True), None)))

def build_model():
    return nn.Sequential(Begin(), B(0), B(1), B(2), B(3), End())
""",
    "graph_network_with_edge_index_in_each_sample": """
N = 5

def example_batch(n):
    return {"x": torch.randn(n, N, D), "adj": (torch.rand(n, N, N) < 0.5).float()}, torch.randn(n, 3)

class Gat(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.a = nn.Linear(D, D, bias=False), nn.Parameter(torch.randn(2, D) * 0.1)
    def forward(self, x, adj):
        h = self.w(x)
        e = F.leaky_relu((h @ self.a[0])[:, :, None] + (h @ self.a[1])[:, None, :], 0.2)
        adj = adj + torch.eye(N)
        p = torch.softmax(e.masked_fill(adj == 0, float("-inf")), -1)
        return F.elu(p @ h) + x

class Gnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs, self.pool = nn.ModuleList([Gat() for _ in range(4)]), nn.Linear(D, 3)
    def forward(self, x, adj):
        for c in self.convs:
            x = c(x, adj)
        return self.pool(x.mean(1))

def build_model():
    return Gnn()
""",
    "graph_batch_with_edge_index_for_the_whole_batch": """
def example_batch(n):
    return {"x": torch.randn(n, D), "edge_index": torch.randint(n, (2, 3 * n))}, torch.randn(n, D)

class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
    def forward(self, x, e):
        return torch.tanh(self.l(x).index_add(0, e[1], x[e[0]]))

class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.ModuleList([Conv() for _ in range(4)])
    def forward(self, x, edge_index):
        for c in self.c:
            x = c(x, edge_index)
        return x

def build_model():
    return G()
""",
    "straight_through_binary_weights": """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sign() * w.abs().mean()
    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * (w.abs() <= 1)

class BinLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight), self.bias)

def build_model():
    return nn.Sequential(nn.Linear(D, D), BinLinear(D, D), nn.Tanh(), BinLinear(D, D), nn.Tanh(), nn.Linear(D, D))
""",
    "full_backward_hook_replaces_input_gradient": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))
    def scale(mod, gin, gout):
        return tuple(None if g is None else g * 0.5 for g in gin)
    for b in m[1:4]:
        b.register_full_backward_hook(scale)
    return m
""",
    "tensor_hooks_that_clip_by_value_and_norm_each": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))
    for i, p in enumerate(m.parameters()):
        if i % 2:
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        else:
            p.register_hook(lambda g: g * (0.05 / (g.norm() + 1e-6)).clamp(max=1.0))
    return m
""",
    "global_module_forward_hook_adds": """
from torch.nn.modules.module import register_module_forward_hook

def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))
    register_module_forward_hook(lambda mod, a, o: o * 1.01 if type(mod) is nn.LayerNorm else None)
    return m
""",
    "getattr_delegates_to_the_wrapped_model": """
class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)
    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

def build_model():
    return Wrap(Inner())
""",
    "metaclass_registers_and_post_init": """
class Meta(type):
    registry = {}
    def __new__(mcs, n, b, d):
        c = super().__new__(mcs, n, b, d)
        mcs.registry[n] = c
        return c
    def __call__(cls, *a, **k):
        o = super().__call__(*a, **k)
        o.post_init()
        return o

class Base(nn.Module, metaclass=Meta):
    def post_init(self):
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.orthogonal_(p)

class Foo(Base):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(D, D)
    def forward(self, x):
        return x + torch.tanh(self.l(x))

def build_model():
    return nn.Sequential(*[Meta.registry["Foo"]() for _ in range(4)], nn.Linear(D, D))
""",
    "deepcopy_and_getstate_customized": """
class Cust(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.fn = nn.Linear(D, D), lambda z: torch.tanh(z)
    def __getstate__(self):
        s = self.__dict__.copy()
        s["fn"] = None
        return s
    def __setstate__(self, s):
        self.__dict__.update(s)
        self.fn = torch.tanh
    def __deepcopy__(self, memo):
        c = type(self)()
        memo[id(self)] = c
        c.load_state_dict(self.state_dict())
        return c
    def forward(self, x):
        return x + self.fn(self.l(x))

def build_model():
    a = Cust()
    return nn.Sequential(a, copy.deepcopy(a), copy.deepcopy(a), nn.Linear(D, D))
""",
    "vmapped_ensemble_of_mlps": """
class Ens(nn.Module):
    def __init__(self):
        super().__init__()
        ms = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(3)]
        ps, _ = torch.func.stack_module_state(ms)
        self.ps = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in ps.items()})
        self.names = {k.replace(".", "_"): k for k in ps}
        object.__setattr__(self, "base", copy.deepcopy(ms[0]).to("meta"))
    def forward(self, x):
        ps = {self.names[k]: v for k, v in self.ps.items()}
        return torch.vmap(lambda p: torch.func.functional_call(self.base, p, (x,)))(ps).mean(0)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Ens(), Block(), Ens(), nn.Linear(D, D))
""",
    "labels_as_strings": """
def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

NAMES = ["cat", "dog", "emu"]

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, 3))

def example_batch(n):
    return torch.randn(n, D), [NAMES[i % 3] for i in range(n)]

def loss_fn(out, y):
    return F.cross_entropy(out, torch.tensor([NAMES.index(s) for s in y]))
""",
}
