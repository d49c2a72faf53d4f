"""Models with code that few repositories have: edited graphs, custom operators, views, loops of torch."""

__all__ = ["MODELS"]

MODELS = {
    "graph_module_of_fx_edited": """
import torch.fx as fx

class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(D, D), nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)
        self.scale = nn.Parameter(torch.ones(D))
    def forward(self, x):
        x = F.relu(self.inp(x))
        for b in self.blocks:
            x = F.relu(b(x) * self.scale)
        return self.out(x)

class LeafBlocks(fx.Tracer):
    def is_leaf_module(self, m, name):
        return isinstance(m, Block) or super().is_leaf_module(m, name)

def build_model():
    core = Core()
    graph = LeafBlocks().trace(core)
    for n in graph.nodes:
        if n.op == "call_function" and n.target is F.relu:
            n.target = F.gelu
            n.kwargs = {}
    gm = fx.GraphModule(core, graph)
    gm.recompile()
    return gm
""",
    "kfac_by_hooks": """
class KLinear(nn.Linear):
    def __init__(self, a, b):
        super().__init__(a, b, bias=False)
        self.register_buffer("A", torch.eye(a))
        self.register_buffer("G", torch.eye(b))
        self.weight.layer = [self]
        self.register_forward_pre_hook(self._save_input)
        self.register_full_backward_hook(self._save_grad)
    def _save_input(self, m, args):
        if torch.is_grad_enabled():
            a = args[0].detach().flatten(0, -2)
            self.A = 0.95 * self.A + 0.05 * a.t() @ a / len(a)
    def _save_grad(self, m, gi, go):
        g = go[0].detach().flatten(0, -2)
        self.G = 0.95 * self.G + 0.05 * g.t() @ g * len(g)

class KFAC(torch.optim.Optimizer):
    def __init__(self, ps, lr=0.02):
        super().__init__(ps, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d = p.grad
                if hasattr(p, "layer"):
                    m = p.layer[0]
                    d = torch.linalg.solve(m.G + 0.1 * torch.eye(len(m.G)), d)
                    d = torch.linalg.solve(m.A + 0.1 * torch.eye(len(m.A)), d.t()).t()
                p.sub_(d, alpha=group["lr"])

class B(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = KLinear(D, D)
    def forward(self, x):
        return x + torch.tanh(self.l(x))

def build_model():
    return nn.Sequential(KLinear(D, D), B(), B(), B(), KLinear(D, D))

def build_optimizer(ps):
    return KFAC(ps)
""",
    "bare_except_around_the_blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(D, D), nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)
        self.fallback = nn.Identity()
    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            try:
                y = b(x)
            except:
                y = self.fallback(x)
            x = y
        return self.out(x)
""",
    "spiking_neurons_over_time": """
class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).float()
    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + 10 * v.abs()) ** 2

class LIF(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = 0.0
    def forward(self, x):
        self.v = self.v + (x - self.v) / 2
        s = Spike.apply(self.v - 0.2)
        self.v = self.v * (1 - s)
        return s

def reset(net):
    for m in net.modules():
        if isinstance(m, LIF):
            m.v = 0.0

class Net(nn.Module):
    def __init__(self, t=4):
        super().__init__()
        self.t = t
        self.layers = nn.Sequential(
            nn.Linear(D, 16), LIF(), nn.Linear(16, 16), LIF(), nn.Linear(16, 16), LIF(), nn.Linear(16, D)
        )
    def forward(self, x):
        reset(self)
        return sum(self.layers(x) for _ in range(self.t)) / self.t
""",
    "all_pairs_cross": """
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(D, D)
    def forward(self, x):
        h = self.g(x)
        i, j = torch.triu_indices(len(x), len(x), 1)
        return h, h[i] * h[j]

class Relate(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = Block()
    def forward(self, hp):
        h, p = hp
        return h, self.b(p)

class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.o = nn.Linear(2 * D, D)
    def forward(self, hp):
        h, p = hp
        i, j = torch.triu_indices(len(h), len(h), 1)
        m = torch.zeros_like(h).index_add(0, i, p).index_add(0, j, p) / max(1, len(h) - 1)
        return self.o(torch.cat([h, m], -1))

def build_model():
    return nn.Sequential(Pairs(), Relate(), Relate(), Relate(), Read())
""",
    "custom_operator_without_a_fake": """
@torch.library.custom_op("zoo_nofake::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.from_numpy(np.tanh(x.detach().numpy() / limit) * limit)

def _setup(ctx, inputs, output):
    ctx.limit = inputs[1]
    ctx.save_for_backward(output)

def _back(ctx, g):
    (y,) = ctx.saved_tensors
    return g * (1 - (y / ctx.limit) ** 2), None

soft_clip.register_autograd(_back, setup_context=_setup)

class B(OneLinear):
    def forward(self, x):
        return x + soft_clip(self.lin(x), 2.0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.b, self.o = nn.Linear(D, D), nn.ModuleList([B() for _ in range(3)]), nn.Linear(D, D)
    def forward(self, x):
        x = self.i(x)
        for b in self.b:
            x = b(x)
        return self.o(x)
""",
    "custom_operator_writes_a_buffer": """
@torch.library.custom_op("zoo_mut::track", mutates_args={"state"})
def track(x: torch.Tensor, state: torch.Tensor, rate: float) -> None:
    state.mul_(1 - rate).add_(x.abs().mean(0), alpha=rate)

@track.register_fake
def _(x, state, rate):
    return None

class B(OneLinear):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(D))
    def forward(self, x):
        h = self.lin(x)
        track(h.detach(), self.state, 0.1)
        return x + torch.tanh(h / (self.state.clone() + 0.1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.b, self.o = nn.Linear(D, D), nn.ModuleList([B() for _ in range(3)]), nn.Linear(D, D)
    def forward(self, x):
        x = self.i(x)
        for b in self.b:
            x = b(x)
        return self.o(x)
""",
    "parameters_are_views_of_one_tensor": """
def build_model():
    model = nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    k = 0
    for m in model.modules():
        for n, p in list(m._parameters.items()):
            m._parameters[n] = nn.Parameter(flat[k : k + p.numel()].view_as(p))
            k += p.numel()
    return model
""",
    "own_reentrant_checkpoint": """
class Ckpt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn = fn
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)
        torch.autograd.backward(y, g)
        return None, x.grad

class B(OneBlock):
    def forward(self, x):
        return Ckpt.apply(self.block, x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), B(), B(), B(), nn.Linear(D, D))
""",
    "loss_pulls_to_running_statistics": """
class Reg(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.bn = nn.Linear(D, D), nn.BatchNorm1d(D)
    def forward(self, x):
        h = self.lin(x)
        y = self.bn(h)
        drift = (h.mean(0) - self.bn.running_mean).detach()
        return x + torch.tanh(y + 0.3 * drift)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Reg(), Block(), Reg(), nn.Linear(D, D))
""",
    "optimizer_steps_in_backward": """
class LomoOptimizer(torch.optim.Optimizer):
    def __init__(self, ps, lr=0.05):
        super().__init__(ps, dict(lr=lr))
        for g in self.param_groups:
            for p in g["params"]:
                p.register_post_accumulate_grad_hook(self.fused)
    @torch.no_grad()
    def fused(self, p):
        p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        p.grad = None
    def step(self, closure=None):
        pass

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return LomoOptimizer(ps)
""",
    "int8_weights_with_adapters": """
class Quant(nn.Module):
    def __init__(self, r=2):
        super().__init__()
        w = torch.randn(D, D) / D**0.5
        s = w.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((w / s).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(s, requires_grad=False)
        self.perm = nn.Parameter(torch.randperm(D), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(r, D) * 0.1), nn.Parameter(torch.zeros(D, r))
    def forward(self, x):
        w = self.weight.to(x.dtype) * self.scale
        return x + torch.tanh(F.linear(x[:, self.perm], w) + x @ self.a.t() @ self.b.t())

def build_model():
    return nn.Sequential(nn.Linear(D, D), Quant(), Quant(), Quant(), nn.Linear(D, D))
""",
    "buffer_written_through_numpy": """
class Hist(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.counts = np.zeros(D, dtype="float32")
        self.register_buffer("hist", torch.from_numpy(self.counts))
    def forward(self, x):
        np.add.at(self.counts, x.detach().abs().argmax(1).numpy(), 1.0)
        return self.block(x) * (1 + self.hist / (1 + self.hist.sum()))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Hist(), Block(), Hist(), nn.Linear(D, D))
""",
    "grid_is_updated_every_twentieth_call": """
class Kan(nn.Module):
    def __init__(self, g=6):
        super().__init__()
        self.base, self.c = nn.Linear(D, D), nn.Parameter(torch.randn(D, g, D) * 0.1)
        self.register_buffer("grid", torch.linspace(-2, 2, g).repeat(D, 1))
        self.calls = 0
    def basis(self, x):
        return torch.exp(-((x[:, :, None] - self.grid) ** 2))
    def forward(self, x):
        self.calls += 1
        if self.training and self.calls % 20 == 0:
            with torch.no_grad():
                y = torch.einsum("big,igo->bio", self.basis(x), self.c)
                q = torch.linspace(0, 1, self.grid.shape[1])
                self.grid.copy_(0.9 * self.grid + 0.1 * torch.quantile(x, q, dim=0).t())
                a = self.basis(x).transpose(0, 1)
                self.c.data.copy_(torch.linalg.lstsq(a.transpose(1, 2) @ a + 0.1 * torch.eye(a.shape[2]),
                                                     a.transpose(1, 2) @ y.transpose(0, 1)).solution)
        return self.base(F.silu(x)) + torch.einsum("big,igo->bo", self.basis(x), self.c)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Kan(), Block(), Kan(), nn.Linear(D, D))
""",
    "while_loop_of_torch": """
from torch._higher_order_ops.while_loop import while_loop

class Refine(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
    def forward(self, x):
        with torch.no_grad():
            def cond(i, z):
                return (i < 8) & (z.norm() > 1.0)
            def body(i, z):
                return i + 1, z * 0.7
            n, z = while_loop(cond, body, (torch.zeros((), dtype=torch.long), x.detach().clone()))
        return x + torch.tanh(self.lin(z)) / (1 + n)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Refine(), Block(), Refine(), nn.Linear(D, D))
""",
    "parameter_without_elements": """
class Prompted(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.block = Block()
        self.prompt = nn.Parameter(torch.randn(length, D))
    def forward(self, x):
        return self.block(x) + self.prompt.sum(0)
def build_model():
    return nn.Sequential(Prompted(2), Prompted(0), Prompted(0), nn.Linear(D, D))
""",
}
