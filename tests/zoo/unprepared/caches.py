"""Models with caches that the first forward fills, random paths, and effects that begin after many steps."""

__all__ = ["MODELS"]

_MASK = """
class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.tril(torch.ones(x.shape[-1], x.shape[-1], device=x.device))
        return x + torch.tanh(self.lin(x) @ self.mask)

def build_model():
    return nn.Sequential(*[Causal() for _ in range(4)], nn.Linear(D, D))
"""

MODELS = {
    "rotary_guarded_by_length": """
class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim), persistent=False)
        self.seq_len_cached, self.cos, self.sin = 0, None, None

    def forward(self, x, seq_len):
        if seq_len > self.seq_len_cached or self.cos.device != x.device:
            self.seq_len_cached = seq_len
            angles = torch.outer(torch.arange(seq_len, device=x.device).type_as(self.inv_freq), self.inv_freq)
            angles = torch.cat([angles, angles], -1)
            self.cos, self.sin = angles.cos(), angles.sin()
        return self.cos[:seq_len], self.sin[:seq_len]

def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)

class Attention(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.norm, self.qkv, self.out, self.rotary = nn.RMSNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D), rotary

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        cos, sin = self.rotary(x, x.shape[1])
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        rotary = Rotary(D)
        self.tok = nn.Embedding(20, D)
        self.layers = nn.ModuleList(Attention(rotary) for _ in range(4))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, 20, bias=False)

    def forward(self, ids):
        h = self.tok(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))

def build_model():
    return LM()

def example_batch(n):
    ids = torch.randint(0, 20, (n, 9))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "teacher_forcing_by_python_random": """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(15, D), nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.rnn(self.emb(x))

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attn = nn.Embedding(15, D), nn.Linear(2 * D, D)
        self.rnn, self.out = nn.GRU(2 * D, D, batch_first=True), nn.Linear(D, 15)

    def forward(self, token, h, encoded):
        e = self.emb(token)[:, None]
        query = torch.tanh(self.attn(torch.cat([e, h[-1][:, None]], -1)))
        weights = torch.bmm(query, encoded.transpose(1, 2)).softmax(-1)
        o, h = self.rnn(torch.cat([e, weights @ encoded], -1), h)
        return self.out(o[:, 0]), h

class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, src, trg):
        encoded, h = self.encoder(src)
        token, outs = trg[:, 0], []
        for t in range(1, trg.shape[1]):
            o, h = self.decoder(token, h, encoded)
            outs.append(o)
            token = trg[:, t] if random.random() < 0.5 else o.argmax(1)
        return torch.stack(outs, 1)

def build_model():
    return Seq2Seq()

def example_batch(n):
    src, trg = torch.randint(0, 15, (n, 5)), torch.randint(0, 15, (n, 4))
    return (src, trg), trg[:, 1:].clone()

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
""",
    "clip_after_twenty_steps": """
class WarmClip(torch.optim.AdamW):
    def __init__(self, ps):
        super().__init__(ps, lr=1e-2)
        self.step_count = 0

    def step(self, closure=None):
        self.step_count += 1
        if self.step_count > 20:
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), nn.Linear(D, D))

def build_optimizer(ps):
    return WarmClip(ps)
""",
    "mask_registered_as_none": _MASK,
    "mask_not_persistent": _MASK.replace('("mask", None)', '("mask", None, persistent=False)'),
    "cached_question_whether_it_is_distributed": """
import torch.distributed as dist

@functools.cache
def is_distributed():
    return dist.is_initialized() and dist.get_world_size() > 1

class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        h = self.lin(x)
        mean = h.mean(1, keepdim=True)
        if is_distributed():
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        return x + torch.tanh(h - mean)

def build_model():
    return nn.Sequential(nn.Linear(D, D), Centered(), Block(), Centered(), nn.Linear(D, D))
""",
}
