"""Models with hooks of all kinds that torch has: on nodes of the graph, on several gradients, on modules, on names."""

__all__ = ["MODELS"]

MODELS = {
    "pre_hook_with_keywords_changes_them": """
class Scaled(Block):
    def forward(self, x, *, gain=1.0):
        return super().forward(x) * gain

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Scaled() for _ in range(4)), nn.Linear(D, D)
        for k, b in enumerate(self.blocks):
            b.register_forward_pre_hook(
                lambda m, a, kw, k=k: (a, {**kw, "gain": kw["gain"] * (1 + 0.1 * k)}), with_kwargs=True
            )

    def forward(self, x):
        for b in self.blocks:
            x = b(x, gain=0.9)
        return self.out(x)
""",
    "hook_on_the_accumulation_node": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))
    m.nodes = []
    for p in m.parameters():
        node = p.view_as(p).grad_fn.next_functions[0][0]
        node.register_prehook(lambda g: tuple(v * 0.5 for v in g))
        m.nodes.append(node)
    return m
""",
    "hook_on_the_node_of_an_activation": """
class Damped(Block):
    def forward(self, x):
        y = super().forward(x)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(lambda grads_in, grads_out: tuple(None if g is None else g * 0.7 for g in grads_in))
        return y

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Damped() for _ in range(3)], nn.Linear(D, D))
""",
    "multi_gradient_hook_of_a_block": """
from torch.autograd.graph import register_multi_grad_hook

class Balanced(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        a, b = torch.tanh(self.up(self.norm(x))).chunk(2, -1)
        if a.requires_grad:
            register_multi_grad_hook((a, b), lambda gs: self.seen.append(sum(float(g.norm()) for g in gs)))
        return x + self.down(torch.cat([b, a], -1))

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Balanced() for _ in range(3)], nn.Linear(D, D))
""",
    "callback_at_the_end_of_a_backward": """
from torch.autograd import Variable

class Finished(Block):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(self.queue)

    def queue(self, module, gin, gout):
        Variable._execution_engine.queue_callback(self.finish)

    def finish(self):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Finished() for _ in range(3)], nn.Linear(D, D))
""",
    "global_backward_hook": """
from torch.nn.modules.module import register_module_full_backward_hook

def halve(module, gin, gout):
    if isinstance(module, nn.LayerNorm):
        return tuple(None if g is None else g * 0.5 for g in gin)

register_module_full_backward_hook(halve)

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
""",
    "registration_hooks_rename_and_scale": """
from torch.nn.modules.module import register_module_parameter_registration_hook

def half(module, name, p):
    if name == "bias" and p is not None:
        with torch.no_grad():
            p.mul_(0.5)

def build_model():
    handle = register_module_parameter_registration_hook(half)
    try:
        return nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
    finally:
        handle.remove()
""",
    "state_dict_hook_renames": """
class Renamed(Block):
    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.old_names)
        self.register_load_state_dict_pre_hook(self.new_names)

    @staticmethod
    def old_names(module, state, prefix, meta):
        state[prefix + "fc1.weight"] = state.pop(prefix + "up.weight")

    @staticmethod
    def new_names(module, state, prefix, *rest):
        if prefix + "fc1.weight" in state:
            state[prefix + "up.weight"] = state.pop(prefix + "fc1.weight")

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Renamed() for _ in range(3)], nn.Linear(D, D))
""",
    "state_dict_hook_leaves_out_frozen": """
class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.register_state_dict_post_hook(self.drop)

    @staticmethod
    def drop(module, state, prefix, meta):
        for name in ("up.weight", "up.bias"):
            state.pop(prefix + name, None)

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Frozen() for _ in range(3)], nn.Linear(D, D))
""",
    "extra_state_counts": """
class Warm(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * min(1.0, self.calls / 20)

def build_model():
    return nn.Sequential(nn.Linear(D, D), *[Warm() for _ in range(2)], nn.Linear(D, D))
""",
    "backward_pre_hook_of_another_block": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
    norms = {}
    m[3].register_full_backward_pre_hook(lambda mod, g: norms.__setitem__("last", float(g[0].norm())))
    m[1].register_full_backward_hook(lambda mod, gi, go: tuple(v / (1 + norms["last"]) for v in gi))
    return m
""",
    "hook_always_called_and_prepended": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
    for b in m[1:4]:
        b.register_forward_hook(lambda mod, a, out: out * 1.1, always_call=True)
        b.register_forward_hook(lambda mod, a, out: out + 0.1, prepend=True)
    return m
""",
    "sums_of_gradients_after_accumulation_shared": """
def build_model():
    m = nn.Sequential(nn.Linear(D, D), *[Block() for _ in range(3)], nn.Linear(D, D))
    total = torch.zeros(())

    def after(p):
        total.add_(p.grad.detach().norm())
        p.grad.div_(1 + 0.1 * torch.tanh(total))

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(after)
    return m
""",
    "function_with_an_output_without_gradient": """
class TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        values, index = x.topk(k, -1)
        mask = torch.zeros_like(x).scatter(-1, index, 1.0)
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(index, mask)
        return x * mask, index, mask

    @staticmethod
    def backward(ctx, g, *_):
        return g * ctx.saved_tensors[0] + 0.1 * g, None

class Sparse(OneLinear):
    def forward(self, v):
        x, seen = v
        y, index, mask = TopK.apply(self.lin(x), 4)
        return x + y, seen + mask

class Start(nn.Module):
    def forward(self, x):
        return x, torch.zeros_like(x)

class End(nn.Module):
    def forward(self, v):
        return v[0] + 0.1 * v[1]

def build_model():
    return nn.Sequential(Start(), *[Sparse() for _ in range(4)], End())
""",
    "function_with_setup_context_and_jvp": """
class Softsign(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x / (1 + x.abs())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.calls = getattr(ctx, "calls", 0) + 1

    @staticmethod
    def backward(ctx, g):
        return g / (1 + ctx.saved_tensors[0].abs()) ** 2

class Soft(OneLinear):
    def forward(self, x):
        return x + torch.vmap(Softsign.apply)(self.lin(x))

def build_model():
    return nn.Sequential(*[Soft() for _ in range(4)], nn.Linear(D, D))
""",
    "callback_at_the_end_of_a_backward_in_a_model": """
from torch.autograd import Variable

class Finished(Block):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda *_: Variable._execution_engine.queue_callback(self.finish))

    def finish(self):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(D, D), nn.ModuleList(Finished() for _ in range(3)), nn.Linear(D, D)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)
""",
    "losses_balanced_by_norms_of_gradients": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norms, i):
        ctx.norms, ctx.i = norms, i
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        n = g.norm()
        ctx.norms[ctx.i] = 0.9 * ctx.norms[ctx.i] + 0.1 * n
        return g / (ctx.norms[ctx.i] + 1e-6) * 0.1, None, None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.h1, self.h2 = Block(), Block(), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("norms", torch.ones(2))
    def forward(self, x):
        x = self.b(self.a(x))
        return self.h1(Scale.apply(x, self.norms, 0)), self.h2(Scale.apply(x, self.norms, 1))

def build_model():
    return Net()

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + F.l1_loss(out[1], y.flip(1))
""",
    "losses_balanced_by_norms_in_modules": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norms, i):
        ctx.norms, ctx.i = norms, i
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        n = g.norm()
        ctx.norms[ctx.i] = 0.9 * ctx.norms[ctx.i] + 0.1 * n
        return g / (ctx.norms[ctx.i] + 1e-6) * 0.1, None, None

class S(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
        self.register_buffer("norms", torch.ones(2))
    def forward(self, x):
        return Scale.apply(x, self.norms, self.i)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.h1, self.h2 = Block(), Block(), nn.Linear(D, D), nn.Linear(D, D)
        self.s1, self.s2 = S(0), S(1)
    def forward(self, x):
        x = self.b(self.a(x))
        return self.h1(self.s1(x)), self.h2(self.s2(x))

def build_model():
    return Net()

def loss_fn(out, y):
    return F.mse_loss(out[0], y) + F.l1_loss(out[1], y.flip(1))
""",
}
