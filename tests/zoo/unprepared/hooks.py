"""Models with hooks: on parameters, on activations, on modules."""

__all__ = ["MODELS"]

MODELS = {
    "mask_of_a_weight": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    mask = torch.tril(torch.ones(D, D))
    m[0].weight.data *= mask
    m[0].weight.register_hook(lambda g: g * mask)
    return m
""",
    "numpy_masks_of_all_blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(D, D) for _ in range(5)])
        rng = np.random.default_rng(3)
        for b in self.blocks:
            keep = torch.from_numpy(rng.random((D, D)) < 0.6).float()
            b.weight.data.mul_(keep)
            b.weight.register_hook(lambda g, keep=keep: g.mul(keep))

    def forward(self, x):
        for b in self.blocks:
            x = torch.tanh(b(x)) + 0.1 * x
        return x
""",
    "clamp_every_gradient": """
def build_model():
    m = nn.Sequential(*[Block() for _ in range(4)])
    for p in m.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return m
""",
    "normalize_after_accumulation": """
def build_model():
    m = nn.Sequential(*[Block() for _ in range(4)])

    def clip(p):
        p.grad.mul_(min(1.0, 0.05 / float(p.grad.norm() + 1e-6)))

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(clip)
    return m
""",
    "optimizer_in_backward": """
def build_model():
    m = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(D, D))
    for p in m.parameters():
        o = torch.optim.SGD([p], lr=1e-2)

        def apply(q, o=o):
            o.step()
            o.zero_grad()

        p.register_post_accumulate_grad_hook(apply)
    return m

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.0)
""",
    "weight_decay_by_hook": """
def build_model():
    m = nn.Sequential(*[Block() for _ in range(4)])
    for p in m.parameters():
        if p.ndim > 1:
            p.register_hook(lambda g, p=p: g + 0.1 * p.detach())
    return m

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9)
""",
    "pull_towards_another_layer": """
def build_model():
    m = nn.Sequential(*[nn.Linear(D, D) for _ in range(4)])
    a, b = m[0].weight, m[3].weight
    a.register_hook(lambda g: g + 0.05 * (a.detach() - b.detach()))
    return m
""",
    "pull_between_blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        first, last = self.blocks[0].up.weight, self.blocks[3].up.weight
        first.register_hook(lambda g: g + 0.05 * (first.detach() - last.detach()))

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x
""",
    "forward_hook_scales": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.gain = nn.Parameter(torch.ones(D))
        self.blocks[1].register_forward_hook(lambda m, a, out: out * self.gain)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x
""",
    "feature_capture": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(2 * D, D)
        self.features = {}
        self.body[0].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.features["first"] = output

    def forward(self, x):
        x = self.body(x)
        return self.head(torch.cat([x, self.features["first"]], 1))
""",
    "pre_hook_noise": """
def build_model():
    m = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
    for b in m:
        b.register_forward_pre_hook(lambda mod, a: (a[0] + 0.05 * torch.randn_like(a[0]),))
    return m
""",
    "backward_hook_scales": """
def build_model():
    m = nn.Sequential(Block(), nn.Linear(D, D), Block(), nn.Linear(D, D))
    m[1].register_full_backward_hook(lambda mod, gi, go: tuple(None if g is None else 0.5 * g for g in gi))
    return m
""",
    "backward_pre_hook_clips": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(D, D)
        self.b.register_full_backward_pre_hook(lambda m, go: tuple(g.clamp(-0.02, 0.02) for g in go))

    def forward(self, x):
        return self.c(self.b(self.a(x)))
""",
    "activation_gradient_clamp": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
            if x.requires_grad:
                x.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return x
""",
    "gradient_norm_feedback": """
class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.size = nn.Linear(D, D), 1.0

    def see(self, g):
        self.size = 0.9 * self.size + 0.1 * float(g.norm())

    def forward(self, x):
        y = self.lin(x) / (0.5 + self.size)
        if y.requires_grad:
            y.register_hook(self.see)
        return x + y

def build_model():
    return nn.Sequential(Block(), Adaptive(), Block(), Adaptive())
""",
    "counting_gradient_noise": """
def build_model():
    m = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(D, D))
    for i, p in enumerate(m.parameters()):
        calls = []

        def shrink(g, calls=calls):
            calls.append(1)
            return g / (1 + 0.1 * len(calls))

        p.register_hook(shrink)
    return m
""",
    "tied_additive_hook": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(12, D), Block(), nn.Linear(D, 12, bias=False)
        self.head.weight = self.emb.weight
        self.emb.weight.register_hook(lambda g: g * 0.5)

    def forward(self, ids):
        return self.head(self.body(self.emb(ids)))

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(12, (n, 5))
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "tied_clipping_hook": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(12, D), Block(), nn.Linear(D, 12, bias=False)
        self.head.weight = self.emb.weight
        self.emb.weight.register_hook(lambda g: g / g.norm().clamp(min=1e-3))

    def forward(self, ids):
        return self.head(self.body(self.emb(ids)))

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(12, (n, 5))
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "gradient_reversal_hook": """
class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.main, self.domain = nn.Sequential(Block(), Block()), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.body(x)
        r = h * 1.0
        if r.requires_grad:
            r.register_hook(lambda g: -0.3 * g)
        return self.main(h), self.domain(r)

def build_model():
    return Adversarial()

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + F.mse_loss(out[1], -y)
""",
    "teacher_updated_in_a_pre_hook_of_the_model": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.pred = nn.Sequential(Block(), Block()), Block()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_forward_pre_hook(self.update)
    @staticmethod
    def update(self, args):
        if self.training:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                    t.lerp_(s, 0.05)
    def forward(self, x):
        with torch.no_grad():
            t = self.teacher(x)
        return self.pred(self.student(x)), t

def build_model():
    return Net()

def loss_fn(out, y):
    return F.smooth_l1_loss(*out) + F.mse_loss(out[0], y)
""",
    "inputs_normalized_in_a_pre_hook_of_the_model": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((D,), 0.1))
        self.scale = nn.Parameter(torch.ones(D))
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)
        self.register_forward_pre_hook(lambda m, args: ((args[0] - m.mean) * m.scale,))
    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.head(x)

def build_model():
    return Net()
""",
}
