"""Architectures of current papers, with techniques that change modules: `torch.compile`, caches, parametrizations."""

__all__ = ["MODELS"]

MODELS = {
    "chunked_results_cross": """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2 * D, 2 * D)
    def forward(self, a, b):
        return torch.tanh(self.l(torch.cat([a, b], 1))).chunk(2, 1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.o = nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.blocks = nn.ModuleList(Two() for _ in range(3))
    def forward(self, x):
        a, b = self.i(x).chunk(2, 1)
        for m in self.blocks:
            a, b = m(a, b)
        return self.o(a - 2 * b)
""",
    "hyper_network_of_later_weights": """
class Hyper(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.z = nn.Parameter(torch.randn(n, 4))
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, D * D + D))
    def forward(self):
        return [(p[:D * D].view(D, D) * 0.3, p[D * D:]) for p in self.net(self.z)]
class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
    def forward(self, x, w, b):
        return x + torch.tanh(F.linear(self.norm(x), w, b))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hyper, self.first = Hyper(4), nn.Linear(D, D)
        self.layers = nn.ModuleList(Target() for _ in range(4))
        self.out = nn.Linear(D, D)
    def forward(self, x):
        x = self.first(x)
        for l, (w, b) in zip(self.layers, self.hyper()):
            x = l(x, w, b)
        return self.out(x)
""",
    "pairs_of_tables_cached_in_the_model": """
class Rot(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.n = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)
    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.n(x)).chunk(3, -1)
        q, k = q * cos + q.roll(4, -1) * sin, k * cos + k.roll(4, -1) * sin
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32, D)
        self.layers = nn.ModuleList(Rot() for _ in range(4))
        self.head = nn.Linear(D, 32)
        self.cache = {}
    def tables(self, T):
        if T not in self.cache:
            a = torch.outer(torch.arange(T).float(), 1.0 / 100 ** (torch.arange(0, D, 2) / D)).repeat(1, 2)
            self.cache[T] = (a.cos(), a.sin())
        return self.cache[T]
    def forward(self, t):
        x = self.emb(t)
        cos, sin = self.tables(t.shape[1])
        for l in self.layers:
            x = l(x, cos, sin)
        return self.head(x)
def example_batch(n):
    t = torch.randint(0, 32, (n, 9)); return t[:, :-1], t[:, 1:]
def loss_fn(o, y):
    return F.cross_entropy(o.transpose(1, 2), y)
""",
    "orthogonal_rectangle": """
from torch.nn.utils import parametrizations as P
def build_model():
    b = [Block() for _ in range(3)]
    P.orthogonal(b[1].up)
    return nn.Sequential(nn.Linear(D, D), *b, nn.Linear(D, D))
""",
    "compiled_in_place_as_full_graphs": """
class Drop(Block):
    def __init__(self):
        super().__init__()
        self.d = nn.Dropout(0.2)
    def forward(self, x, scale=1.0):
        return x + scale * self.d(self.down(torch.tanh(self.up(self.norm(x)))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(D, D)
        self.blocks = nn.ModuleDict({str(k): Drop() for k in range(3)})
        for b in self.blocks.values():
            b.compile(backend="aot_eager", fullgraph=True)
    def forward(self, x):
        x = self.i(x)
        for k, b in self.blocks.items():
            x = b(x, scale=0.5)
        return x
""",
    "compiled_sequentials_as_full_graphs": """
class Drop(Block):
    def __init__(self):
        super().__init__()
        self.d = nn.Dropout(0.2)
    def forward(self, x):
        return x + self.d(self.down(torch.tanh(self.up(self.norm(x)))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(D, D)
        pairs = [nn.Sequential(Drop(), Drop()) for _ in range(2)]
        self.blocks = nn.ModuleList(torch.compile(m, backend="aot_eager", fullgraph=True) for m in pairs)
    def forward(self, x):
        x = self.i(x)
        for b in self.blocks:
            x = b(x)
        return x
""",
    "compiled_children_of_a_sequential": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)])
    for b in m[1:]:
        b.compile(backend="eager", fullgraph=True)
    return m
""",
    "compiled_in_place_as_a_whole": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        x = self.i(x)
        for b in self.blocks:
            x = b(x)
        return x
def build_model():
    m = Net(); m.compile(backend="eager"); return m
""",
    "deep_equilibrium_keeps_no_hook": """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(D, D), nn.Linear(D, D)
        with torch.no_grad():
            self.w.weight.mul_(0.3)
    def forward(self, z, x):
        return torch.tanh(self.w(z) + self.u(x))
def anderson(f, z, n=12):
    for _ in range(n):
        z = f(z)
    return z
class Deq(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = Cell()
    def forward(self, x):
        with torch.no_grad():
            z = anderson(lambda z: self.f(z, x), torch.zeros_like(x))
        z = self.f(z, x)
        if z.requires_grad:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.f(z0, x)
            z.register_hook(lambda g: anderson(lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + g, g))
        return z
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.d1, self.b, self.d2, self.o = nn.Linear(D, D), Deq(), Block(), Deq(), nn.Linear(D, D)
    def forward(self, x):
        return self.o(self.d2(self.b(self.d1(self.i(x)))))
""",
    "mixture_of_depths": """
class MoD(nn.Module):
    def __init__(self, block, d=D, cap=0.5):
        super().__init__()
        self.block, self.router, self.cap = block, nn.Linear(d, 1, bias=False), cap
    def forward(self, x):
        B, T, C = x.shape
        k = max(1, int(self.cap * T))
        w = self.router(x).squeeze(-1)
        top, idx = w.topk(k, dim=1)
        idx, order = idx.sort(1)
        top = top.gather(1, order)
        sub = x.gather(1, idx[..., None].expand(-1, -1, C))
        out = self.block(sub) * torch.sigmoid(top)[..., None]
        aux = F.binary_cross_entropy_with_logits(w, torch.zeros_like(w).scatter(1, idx, 1.0))
        return x.scatter_add(1, idx[..., None].expand(-1, -1, C), out), aux
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32, D)
        self.blocks = nn.ModuleList(MoD(Block()) if i % 2 else Block() for i in range(5))
        self.head = nn.Linear(D, 32)
    def forward(self, t):
        x, aux = self.emb(t), 0.0
        for b in self.blocks:
            if isinstance(b, MoD):
                x, a = b(x)
                aux = aux + a
            else:
                x = b(x)
        return self.head(x), aux
def example_batch(n):
    t = torch.randint(0, 32, (n, 9)); return t[:, :-1], t[:, 1:]
def loss_fn(o, y):
    return F.cross_entropy(o[0].transpose(1, 2), y) + 0.01 * o[1]
""",
    "gated_cross_attention_to_frozen_towers": """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.LayerNorm(D)
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.g1, self.g2 = nn.Parameter(torch.tensor([0.1])), nn.Parameter(torch.tensor([0.1]))
        self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 16, bias=False), nn.GELU(), nn.Linear(16, D, bias=False))
    def forward(self, x, media):
        k, v = self.kv(media).chunk(2, -1)
        x = self.o(F.scaled_dot_product_attention(self.q(self.n(x)), k, v)) * self.g1.tanh() + x
        return self.ff(x) * self.g2.tanh() + x
class FlamingoLayer(nn.Module):
    def __init__(self, gated, dec):
        super().__init__()
        self.gated, self.dec = gated, dec
        self.vis_x = None
    def condition(self, v):
        self.vis_x = v
    def forward(self, x):
        if self.gated is not None:
            if self.vis_x is None:
                raise ValueError("vis_x must be conditioned before forward pass")
            x = self.gated(x, self.vis_x)
        return self.dec(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(D, D), Block(), Block()).requires_grad_(False)
        self.latents = nn.Parameter(torch.randn(3, D))
        self.resample = Gated()
        self.emb = nn.Embedding(32, D).requires_grad_(False)
        frozen = [Block().requires_grad_(False) for _ in range(4)]
        self.layers = nn.ModuleList(FlamingoLayer(Gated() if i % 2 else None, b) for i, b in enumerate(frozen))
        self.head = nn.Linear(D, 32, bias=False)
        self.head.weight = self.emb.weight
    def forward(self, vis, t):
        with torch.no_grad():
            v = self.vision(vis)
        v = self.resample(self.latents.expand(len(v), -1, -1), v)
        for l in self.layers:
            l.condition(v)
        x = self.emb(t)
        for l in self.layers:
            x = l(x)
        for l in self.layers:
            l.condition(None)
        return self.head(x)
def example_batch(n):
    t = torch.randint(0, 32, (n, 9)); return (torch.randn(n, 5, D), t[:, :-1]), t[:, 1:]
def loss_fn(o, y):
    return F.cross_entropy(o.transpose(1, 2), y)
def build_optimizer(ps):
    return torch.optim.AdamW([p for p in ps if p.requires_grad], lr=1e-2)
""",
    "experts_balanced_after_the_step": """
class MoE(nn.Module):
    def __init__(self, e=4, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(D, e, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D)) for _ in range(e))
        self.shared = nn.Linear(D, D)
        self.register_buffer("expert_bias", torch.zeros(e))
        self.register_buffer("tokens_per_expert", torch.zeros(e), persistent=False)
    def forward(self, x):
        s = self.gate(x).sigmoid()
        _, idx = (s + self.expert_bias).topk(self.k, -1)
        w = s.gather(-1, idx)
        w = w / (w.sum(-1, keepdim=True) + 1e-20)
        with torch.no_grad():
            self.tokens_per_expert.add_(torch.bincount(idx.flatten(), minlength=len(self.experts)).float())
        y = torch.zeros_like(x)
        for e, ex in enumerate(self.experts):
            r, c = torch.where(idx == e)
            if len(r):
                y.index_add_(0, r, ex(x[r]) * w[r, c, None])
        return x + y + self.shared(x)
MODEL = []
def build_model():
    m = nn.Sequential(nn.Linear(D, D), *[MoE() for _ in range(3)], nn.Linear(D, D))
    MODEL[:] = [m]
    return m
def build_optimizer(ps):
    o = torch.optim.AdamW(ps, lr=1e-2)
    def post(opt, a, k):
        for b in MODEL[0]:
            if isinstance(b, MoE):
                t = b.tokens_per_expert
                b.expert_bias.add_(torch.sign(t.mean() - t), alpha=0.01)
                t.zero_()
    o.register_step_post_hook(post)
    return o
""",
    "clip_with_a_clamped_scale": """
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(D, D)
        self.blocks = nn.Sequential(Block(), Block())
        self.proj = nn.Parameter(torch.randn(D, D) * 0.3)
    def forward(self, x):
        return F.normalize(self.blocks(self.i(x)) @ self.proj, dim=-1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(), Tower()
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
    def forward(self, image, text):
        a, b = self.image(image), self.text(text)
        with torch.no_grad():
            self.logit_scale.clamp_(0, math.log(100))
        l = self.logit_scale.exp() * a @ b.t()
        return l, l.t()
def example_batch(n):
    x = torch.randn(n, D)
    return (x, torch.tanh(x.flip(1))), None
def loss_fn(o, y):
    t = torch.arange(len(o[0]), device=o[0].device)
    return (F.cross_entropy(o[0], t) + F.cross_entropy(o[1], t)) / 2
""",
    "gradient_reversal_by_a_buffer": """
class Rev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat = nn.Sequential(nn.Linear(D, D), Block(), Block())
        self.cls = nn.Sequential(Block(), nn.Linear(D, 3))
        self.dom = nn.Sequential(Block(), nn.Linear(D, 2))
        self.register_buffer("p", torch.tensor(0.0))
    def forward(self, x):
        lam = 2.0 / (1.0 + math.exp(-10 * self.p.item())) - 1
        if self.training:
            self.p += 0.01
        f = self.feat(x)
        return self.cls(f), self.dom(Rev.apply(f, lam))
def example_batch(n):
    return torch.randn(n, D), (torch.randint(0, 3, (n,)), torch.randint(0, 2, (n,)))
def loss_fn(o, y):
    return F.cross_entropy(o[0], y[0]) + F.cross_entropy(o[1], y[1])
""",
    "discriminator_in_the_model": """
class VQ(nn.Module):
    def __init__(self, k=16):
        super().__init__()
        self.e = nn.Embedding(k, D)
    def forward(self, z):
        d = torch.cdist(z, self.e.weight)
        q = self.e(d.argmin(-1))
        l = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return z + (q - z).detach(), l
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(D, D), Block(), Block())
        self.vq = VQ()
        self.dec = nn.Sequential(Block(), nn.Linear(D, D))
        self.disc = nn.Sequential(nn.Linear(D, D), nn.LeakyReLU(), nn.Linear(D, 1))
    def forward(self, x):
        z, vql = self.vq(self.enc(x))
        r = self.dec(z)
        self.disc.requires_grad_(False)
        g = -self.disc(r).mean()
        self.disc.requires_grad_(True)
        d = F.relu(1 - self.disc(x)).mean() + F.relu(1 + self.disc(r.detach())).mean()
        return r, vql, g, d
def loss_fn(o, y):
    r, v, g, d = o
    return F.mse_loss(r, y) + v + 0.1 * g + 0.5 * d
""",
}
