"""Recurrent networks of PyTorch: their values, gradients, dropout and memory."""

import pytest
import torch
from real_allocations import peak_allocated_bytes
from sweeps import compiled, one_step, sweep, weights_of
from torch import nn

from penstock.compiler import operator_costs, recurrent_layer
from penstock.compiler.serialization import deserialize, serialize
from penstock.engine import EnginePlan, TorchEngine

NETWORKS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
OPTIONS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "without biases": {"num_layers": 2, "bias": False},
    "bidirectional": {"num_layers": 2, "bidirectional": True},
    "batch first": {"bidirectional": True, "batch_first": True},
    "everything dropped": {"num_layers": 2, "dropout": 1.0},
}
CASES = [
    *((network, options) for network in NETWORKS for options in OPTIONS.values()),
    ("rnn", {"num_layers": 2, "nonlinearity": "relu"}),
]


class Recurs(nn.Module):
    """A recurrent network between two layers; the loss [] reads its outputs and last states."""

    def __init__(self, network, **options):
        super().__init__()
        self.inlet = nn.Linear(5, 5)
        self.steps = NETWORKS[network](5, 6, **options)
        self.outlet = nn.Linear(6 * (2 if options.get("bidirectional") else 1), 1)

    def forward(self, x):
        """[4, 3, 5], positions first or rows first."""
        outputs, last = self.steps(self.inlet(x))
        states = last if isinstance(last, tuple) else (last,)
        ends = sum((place + 1) * state.sin().sum() for place, state in enumerate(states))
        return self.outlet(outputs).square().mean() + 0.1 * ends


class StartsFromAState(Recurs):
    """One sequence without rows, from a state that is computed."""

    def forward(self, x):
        state = self.inlet(x[0, :1]).sum() * torch.ones(1, 6)
        first = (state, state * 2) if isinstance(self.steps, nn.LSTM) else state
        return self.outlet(self.steps(self.inlet(x[:, 0]), first)[0]).square().mean()


def assert_as_in_pytorch(module, precision, plan=None):
    rows = {"x": torch.randn(4, 3, 5)}
    step = one_step(module, [rows], plan, precision=precision)
    loss = module(**rows)
    loss.backward()
    close, absolute = (1e-6, 1e-7) if precision == "fp32" else (0.03, 0.01)
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=close, abs=absolute)
    largest = max(float(parameter.grad.abs().max()) for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        difference = (step.gradients[name].float() - parameter.grad).abs().max()
        assert float(difference) <= close * largest, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("network", "options"), CASES)
def test_network_has_the_values_and_gradients_of_pytorch(network, options, precision):
    torch.manual_seed(0)
    assert_as_in_pytorch(Recurs(network, **options), precision)


@pytest.mark.parametrize("network", NETWORKS)
def test_recomputed_stage_has_the_gradients_of_pytorch(network):
    torch.manual_seed(1)
    assert_as_in_pytorch(Recurs(network), "fp32", EnginePlan(recompute=frozenset(range(3))))


@pytest.mark.parametrize("network", NETWORKS)
def test_single_sequence_with_a_given_state_has_the_gradients_of_pytorch(network):
    torch.manual_seed(2)
    assert_as_in_pytorch(StartsFromAState(network), "fp32")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstm_with_a_projection_has_the_gradients_of_pytorch():
    torch.manual_seed(3)
    module = Recurs("lstm", num_layers=2, bidirectional=True, proj_size=3)
    module.outlet = nn.Linear(6, 1)
    assert_as_in_pytorch(module, "fp32")


@pytest.mark.parametrize("network", NETWORKS)
def test_frozen_network_passes_gradients_to_the_layer_before(network):
    torch.manual_seed(4)
    module, rows = Recurs(network), {"x": torch.randn(4, 3, 5)}
    step = one_step(module, [rows], freeze=("steps.*",))
    module(**rows).backward()
    assert not any(name.startswith("steps.") for name in step.gradients)
    found, expected = step.gradients["inlet.weight"], module.inlet.weight.grad
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@pytest.mark.parametrize("network", NETWORKS)
def test_program_read_from_its_bytes_draws_the_same_dropout(network):
    torch.manual_seed(5)
    module, rows = Recurs(network, num_layers=3, dropout=0.4), {"x": torch.randn(4, 3, 5)}
    program = compiled(module, rows)
    losses = []
    for each in (program, deserialize(serialize(program))):
        for recompute in ((), range(len(program.stages) - 1)):
            plan = EnginePlan(recompute=frozenset(recompute))
            engine, weights = TorchEngine(each, plan), weights_of(module, each)
            step = sweep(engine, plan, weights, [rows], seed=7)
            losses.append((step.losses, [g.tolist() for g in step.gradients.values()]))
    assert losses[0] == losses[1] == losses[2] == losses[3]
    other = sweep(TorchEngine(program, plan), plan, weights, [rows], seed=8)
    assert other.losses != losses[0][0]


def test_products_of_a_network_are_counted():
    module = nn.Sequential(Recurs("gru"))[0]
    program = compiled(module, {"x": torch.randn(4, 3, 5)})
    (cost,) = (
        cost
        for stage in program.stages
        for cost in operator_costs(stage.kind.graphs["infer"])
        if cost.name == "recurrent_layer"
    )
    assert cost.flops == 2 * (4 * 3) * (3 * 6) * (5 + 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sizes", [(64, 16, 32, 32), (16, 64, 128, 32), (8, 2, 64, 256)])
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_layer_allocates_no_more_than_is_counted(mode, sizes, bidirectional, dtype):
    positions, rows, features, hidden = sizes
    network = NETWORKS[mode[:4].rstrip("_")](features, hidden, bidirectional=bidirectional)
    weights = [weight.detach().to(dtype) for weight in network.parameters()]
    values = torch.randn(positions, rows, features, dtype=dtype)
    state = torch.randn(2 if bidirectional else 1, rows, hidden, dtype=dtype)
    states = [state, state.clone()] if mode == "lstm" else [state]
    given = (mode, values, states, weights)
    made = recurrent_layer.outputs(*given, True, bidirectional)
    peak = peak_allocated_bytes(lambda: recurrent_layer.outputs(*given, True, bidirectional))
    results = sum(t.nbytes for t in made)
    assert peak <= results + recurrent_layer.scratch_bytes(*given, with_gradients=False)
    peak = peak_allocated_bytes(
        lambda: recurrent_layer.gradients(*given, True, bidirectional, made)
    )
    results = sum(t.nbytes for t in (values, *states, *weights))
    assert peak <= results + recurrent_layer.scratch_bytes(*given, with_gradients=True)
