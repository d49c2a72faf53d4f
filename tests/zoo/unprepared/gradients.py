"""Models that change gradients and graphs: own autograd functions, checkpoints, saved-tensor hooks, local losses."""

__all__ = ["MODELS"]


MODELS = {
    "function_with_state_on_its_class": """
class Scaled(torch.autograd.Function):
    largest = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Scaled.largest = max(0.9 * Scaled.largest, float(g.abs().max()))
        return g / (1 + Scaled.largest)

class Scales(OneBlock):
    def forward(self, x):
        return Scaled.apply(self.block(x))

def build_model():
    return nn.Sequential(Scales(), Block(), Scales(), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.1)
""",
    "function_writes_its_input": """
class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g.mul_(0.5)

class Halved(OneLinear):
    def forward(self, x):
        return torch.tanh(self.lin(Halves.apply(x)))

def build_model():
    return nn.Sequential(Block(), Halved(), Block(), Halved(), nn.Linear(D, D))
""",
    "function_writes_its_gradient": """
class Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g -= g.mean(1, keepdim=True)
        return g

class Centers(nn.Module):
    def forward(self, x):
        return Centered.apply(x) + 0.1 * x

def build_model():
    return nn.Sequential(Block(), Centers(), Block(), Centers(), nn.Linear(D, D))
""",
    "function_needs_input_gradient": """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = g @ w.t() if ctx.needs_input_grad[0] else None
        return gx, (x.t() @ g if gx is not None else 0.5 * x.t() @ g)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x):
        return torch.tanh(Own.apply(x, self.w))

def build_model():
    m = nn.Sequential(nn.Linear(D, D), nn.Tanh(), Layer(), Block(), Layer(), nn.Linear(D, D))
    m[0].requires_grad_(False)
    return m
""",
    "asks_if_its_input_needs_a_gradient": """
class Asks(OneBlock):
    def forward(self, x):
        return self.block(x * 0.5 if x.requires_grad else x)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Asks(), Block(), Asks(), nn.Linear(D, D))
""",
    "asks_if_its_input_is_a_leaf": """
class Asks(OneBlock):
    def forward(self, x):
        return self.block(x * 0.5 if x.is_leaf else x)

def build_model():
    return nn.Sequential(Asks(), Block(), Asks(), nn.Linear(D, D))
""",
    "retains_a_gradient_for_the_next_forward": """
class Weighs(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.kept = Block(), None

    def forward(self, x):
        y = self.block(x)
        scale = 1.0
        if self.kept is not None and self.kept.grad is not None:
            scale = 1 / (1 + 10 * self.kept.grad.abs().mean())
        self.kept = y
        y.retain_grad()
        return y * scale

def build_model():
    return nn.Sequential(Block(), Weighs(), Block(), nn.Linear(D, D))
""",
    "saved_tensors_in_half_precision": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            for b in self.blocks[:3]:
                x = b(x)
        return self.out(self.blocks[3](x))
""",
    "autocast_around_half_of_the_blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for b in self.blocks[:3]:
                x = b(x)
        return self.out(self.blocks[3](x.float()))
""",
    "random_state_forked_around_blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(4)])
        self.out = nn.Linear(D, D)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            for b in self.blocks:
                x = b(x)
        return self.out(x)
""",
    "flag_of_a_context_manager": """
from contextlib import contextmanager

class Flags:
    sharp = False

@contextmanager
def sharp():
    Flags.sharp = True
    try:
        yield
    finally:
        Flags.sharp = False

class Flagged(OneLinear):
    def forward(self, x):
        return x + torch.tanh(self.lin(x) * (3.0 if Flags.sharp else 1.0))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Flagged() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        x = self.blocks[0](x)
        with sharp():
            for b in self.blocks[1:3]:
                x = b(x)
        return self.out(self.blocks[3](x))
""",
    "local_losses_in_forward": """
class Local(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.probe = Block(), nn.Linear(D, D)

    def forward(self, x):
        x = x.detach()
        y = self.block(x)
        if self.training and torch.is_grad_enabled():
            (0.25 * F.mse_loss(self.probe(y), x.flip(1))).backward()
        return y.detach()

def build_model():
    return nn.Sequential(Local(), Local(), Local(), nn.Linear(D, D))

def build_optimizer(ps):
    return torch.optim.SGD(ps, lr=0.1)
""",
    "checkpoint_keeps_no_random_state": """
from torch.utils.checkpoint import checkpoint

class Saves(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.drop = Block(), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False))

def build_model():
    return nn.Sequential(nn.Linear(D, D), Saves(), Saves(), Saves(), nn.Linear(D, D))
""",
    "checkpoint_of_a_counting_block": """
from torch.utils.checkpoint import checkpoint

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.n = Block(), 0

    def inner(self, x):
        self.n += 1
        return self.block(x) * (1.0 if self.n < 30 else 0.5)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Counts(), Block(), Counts(), nn.Linear(D, D))
""",
    "selective_checkpoint": """
from functools import partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

def keeps(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, keeps)
            x = checkpoint(b, x, use_reentrant=False, context_fn=contexts)
        return self.out(x)
""",
    "hook_replaces_arguments_and_output": """
def build_model():
    m = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
    m[1].register_forward_pre_hook(lambda mod, a, k: ((a[0] * 0.5,), k), with_kwargs=True)
    m[1].register_forward_hook(lambda mod, a, k, out: (out, a[0]), with_kwargs=True)
    m[2].register_forward_pre_hook(lambda mod, a: a[0][0] + a[0][1])
    return m
""",
    "global_forward_hook": """
from torch.nn.modules.module import register_module_forward_hook

HOOKS = []

def build_model():
    while HOOKS:
        HOOKS.pop().remove()
    HOOKS.append(register_module_forward_hook(lambda m, a, o: o * 0.9 if isinstance(m, nn.Linear) else None))
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))
""",
    "branches_in_threads": """
from concurrent.futures import ThreadPoolExecutor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.left, self.right, self.out = Block(), Block(), Block(), nn.Linear(2 * D, D)

    def forward(self, x):
        x = self.inp(x)
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda m: m(x), (self.left, self.right)))
        return self.out(torch.cat(parts, 1))
""",
    "identity_then_in_place": """
class Same(nn.Module):
    def forward(self, x):
        return x

class Writes(nn.Module):
    def forward(self, x):
        return x.tanh_()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.same, self.writes, self.b = nn.Linear(D, D), Same(), Writes(), Block()

    def forward(self, x):
        x = self.a(x)
        skip = self.same(x)
        return self.b(self.writes(x)) + skip
""",
    "weights_cross_as_outputs": """
class Emb(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, D) / 3)

    def forward(self, ids):
        return F.embedding(ids, self.weight).mean(1), self.weight

class Mid(OneBlock):
    def forward(self, pair):
        return self.block(pair[0]), pair[1]

class Head(nn.Module):
    def forward(self, pair):
        return pair[0] @ pair[1].t()

def build_model():
    return nn.Sequential(Emb(), Mid(), Mid(), Head())

def example_batch(n):
    return torch.randint(9, (n, 4)), torch.randint(9, (n,))

def loss_fn(out, y):
    return F.cross_entropy(out, y, label_smoothing=0.1)
""",
    "blocks_change_a_dict_and_return_nothing": """
class Changes(OneBlock):
    def forward(self, state):
        state["x"] = self.block(state["x"])
        state["sum"] = state["sum"] + state["x"]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Changes() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        state = {"x": x, "sum": torch.zeros_like(x)}
        for b in self.blocks:
            b(state)
        return self.out(state["sum"])
""",
}
