"""Modules whose constructors fill their tensors in every way that is known to be replayed."""

import torch
from torch import nn


class ConvNet(nn.Module):
    """Convolutions, batch norm, buffers, partial writes, every common initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
        self.table = nn.Embedding(12, 6, padding_idx=3)
        self.temperature = nn.Parameter(torch.tensor([0.5, 2.0]).log())
        self.offset = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.scratch = torch.rand(3)
        self.register_buffer("scale", torch.linspace(0, 1, 5) ** 2, persistent=False)
        self.register_buffer("shuffle", torch.randperm(9))
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        with torch.no_grad():
            self.head.weight[2:4].normal_(3.0)
            self.head.weight[:, 1] *= 2
            self.head.bias += self.temperature.sum()
            self.table.weight.data = self.table.weight.data.clamp(-1, 1)


class InitialisedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
        self.last = nn.Linear(7, 7, bias=False)
        self.last.weight = self.layers[0].weight
        self.apply(self._fill)

    def _fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.sparse_(module.weight, 0.3)
            nn.init.xavier_uniform_(module.weight)


class OwnSeeds(nn.Module):
    """Reseeds in the middle, forks, goes back, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(40))
        with torch.random.fork_rng(devices=[]):
            self.b = nn.Parameter(torch.randn(40))
        self.c = nn.Parameter(torch.randn(40))
        state = torch.get_rng_state()
        torch.manual_seed(7)
        self.d = nn.Parameter(torch.randn(5))
        torch.manual_seed(7)
        self.e = nn.Parameter(torch.rand(5))
        torch.set_rng_state(state)
        generator = torch.Generator().manual_seed(3)
        self.f = nn.Parameter(torch.empty(20).normal_(generator=generator))
        self.g = nn.Parameter(torch.randn(3))
        self.h = nn.Parameter(torch.rand(20, generator=generator))


class DropPathRates(nn.Module):
    """Reads values that depend on no seed, as vision transformers do for stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.layers = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        kept = torch.nonzero(torch.arange(6) % 2).flatten()
        self.weight = nn.Parameter(torch.randn(len(rates), kept.numel()))
        self.register_buffer("kept", kept)


class FilledConstants(nn.Module):
    """Fills with equal arguments: whole tensors, parts, and a tensor whose value was known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(4))
        self.second = nn.Parameter(torch.empty(4))
        known = torch.tensor(3.0)
        with torch.no_grad():
            for tensor in (self.first, self.second, self.second[1:3], known):
                tensor.fill_(2.0)
            self.second[3].fill_(known.item() + 1)
        self.third = nn.Parameter(torch.empty(3).fill_(known.item()))


class RefusedFill(nn.Module):
    """A fill, and one that PyTorch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.weight.data.normal_(0.0, 1.0)
        torch.empty(4).normal_(0.0, -1.0)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def recurrent() -> nn.Module:
    return nn.LSTM(5, 7, 2)


class Detaching(nn.Module):
    """Writes through detached tensors, which share their memory with others."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 6)
        part = whole[1:3].detach()
        part.mul_(2.0)
        self.part = nn.Parameter(part.clone())
        self.whole = nn.Parameter(whole.t().detach())
        self.part.detach()[0].fill_(3.0)


CUSTOM = [
    ConvNet,
    Detaching,
    InitialisedTwice,
    OwnSeeds,
    DropPathRates,
    FilledConstants,
    encoder,
    recurrent,
]


def real_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found.update({k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)})
    return found
