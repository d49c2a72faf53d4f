"""Models whose forward calls modules in other ways than by `self.module(x)`: slices, methods, recursion, weak links."""

__all__ = ["MODELS"]

MODELS = {
    "slices_of_a_sequential": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D))

    def forward(self, x):
        h = self.net[:2](x)
        return self.net[2:](torch.tanh(h)) + 0.1 * h
""",
    "forward_called_directly": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            x = b.forward(x)
        return self.out.forward(x)
""",
    "modules_made_in_forward": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = nn.Dropout(0.2)(nn.LayerNorm(D)(self.a(x)))
        return self.c(nn.Softmax(dim=1)(self.b(x)))
""",
    "forward_set_in_init": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)
        self.forward = self.run

    def run(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)
""",
    "forward_set_in_blocks": """
class Chosen(nn.Module):
    def __init__(self, twice):
        super().__init__()
        self.block, self.lin = Block(), nn.Linear(D, D)
        self.forward = self.two if twice else functools.partial(self.one, scale=0.5)

    def one(self, x, scale):
        return self.block(x) * scale

    def two(self, x):
        return self.block(torch.tanh(self.lin(x)))

def build_model():
    return nn.Sequential(Chosen(True), Chosen(False), Chosen(True), nn.Linear(D, D))
""",
    "weak_reference_to_the_parent": """
import weakref

class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent, self.lin = weakref.ref(parent), nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) * self.parent().scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.children_ = nn.ModuleList([Child(self) for _ in range(4)])

    def forward(self, x):
        for c in self.children_:
            x = c(x)
        return x
""",
    "modules_in_a_plain_list": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.hidden = nn.Linear(D, D), [Block() for _ in range(3)]
        self.out = nn.Linear(D, D)

    def forward(self, x):
        x = self.inp(x)
        for b in self.hidden:
            x = b(x)
        return self.out(x)
""",
    "recursion_over_a_tree": """
class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf, self.join, self.out = nn.Linear(D, D), nn.Linear(2 * D, D), nn.Linear(D, D)

    def walk(self, x):
        if x.shape[1] == 1:
            return torch.tanh(self.leaf(x[:, 0]))
        half = x.shape[1] // 2
        return torch.tanh(self.join(torch.cat([self.walk(x[:, :half]), self.walk(x[:, half:])], 1)))

    def forward(self, x):
        return self.out(self.walk(x))

def build_model():
    return Tree()

def example_batch(n):
    x = torch.randn(n, 4, D)
    return x, x.mean(1)
""",
    "names_of_a_module_dict": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a": Block(), "b": Block(), "c": Block(), "out": nn.Linear(D, D)})
        self.path = "a b c b".split()

    def forward(self, x):
        for name in self.path:
            x = self.parts[name](x)
        return self.parts["out"](x)
""",
    "task_by_the_data": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Sequential(Block(), Block()), nn.ModuleDict({k: nn.Linear(D, D) for k in "xy"})

    def forward(self, x, task):
        h = self.body(x)
        return self.heads["x" if float(task.float().mean()) > 0.5 else "y"](h)

def example_batch(n):
    x = torch.randn(n, D)
    return (x, torch.randint(2, (n,))), x
""",
    "generator_of_blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(D, D)

    def levels(self, x):
        for b in self.blocks:
            x = b(x)
            yield x

    def forward(self, x):
        return self.out(sum(self.levels(x)))
""",
    "methods_and_keywords": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(D, D)

    def encode(self, x, *, keep):
        for b in self.enc:
            x = b(x)
            keep.append(x)
        return x

    def decode(self, x, *skips, scale=0.5, **_):
        for b, s in zip(self.dec, reversed(skips)):
            x = b(x) + scale * s
        return x

    def forward(self, *, x, scale=None):
        keep = []
        h = self.encode(x, keep=keep)
        return self.out(self.decode(h, *keep, unused=1))

def example_batch(n):
    x = torch.randn(n, D)
    return {"x": x}, x.flip(1)
""",
    "weight_tied_by_a_property": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body = nn.Embedding(12, D), nn.ModuleList([Block(), Block()])
        self.bias = nn.Parameter(torch.zeros(12))

    @property
    def head(self):
        return functools.partial(F.linear, weight=self.emb.weight, bias=self.bias)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.body:
            x = b(x)
        return self.head(x)

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(12, (n, 5))
    return ids, ids.flip(1)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "call_replaced": """
class Traced(OneBlock):
    def __call__(self, x):
        return torch.tanh(super().__call__(x))

    def forward(self, x):
        return self.block(x)

def build_model():
    return nn.Sequential(Traced(), Traced(), Traced(), nn.Linear(D, D))
""",
    "decorated_forwards": """
def traced(f):
    @functools.wraps(f)
    def run(self, *a, **k):
        return f(self, *a, **k) * 1.0
    return run

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(D, D)

    @torch.no_grad()
    def probe(self, x):
        return self.a(x).mean(1, keepdim=True)

    @traced
    def forward(self, x):
        return self.c(self.b(self.a(x) + self.probe(x)))
""",
    "packed_sequence_between_blocks": """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(10, D), nn.Linear(D, 10)
        self.one, self.two = nn.GRU(D, D, batch_first=True), nn.GRU(D, D, batch_first=True)

    def forward(self, ids, sizes):
        p = pack_padded_sequence(self.emb(ids), sizes.cpu(), batch_first=True, enforce_sorted=False)
        p = self.two(self.one(p)[0])[0]
        return self.out(pad_packed_sequence(p, batch_first=True, total_length=6)[0])

def example_batch(n):
    ids = torch.randint(10, (n, 6))
    return (ids, torch.randint(2, 7, (n,))), ids

def loss_fn(out, y):
    return F.cross_entropy(out.transpose(1, 2), y)
""",
    "whole_model_compiled": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)

def build_model():
    return torch.compile(Net(), backend="eager")
""",
    "wrapped_for_data_parallel": """
def build_model():
    return nn.DataParallel(nn.Sequential(Block(), Block(), Block(), nn.Linear(D, D)))
""",
    "blocks_sorted_by_a_parameter": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.order = nn.Parameter(torch.tensor([0.3, 0.1, 0.2]))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        for i in self.order.argsort().tolist():
            x = x + self.order[i] * self.blocks[i](x)
        return self.out(x)
""",
}
