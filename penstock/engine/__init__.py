"""The engine: computes one stage at a time; holds activations; stateless between steps."""

from penstock.engine.interface import Batch, Engine, PendingGradients
from penstock.engine.memory import MemoryAccount
from penstock.engine.null_engine import NullEngine
from penstock.engine.plan import EnginePlan, plan_engine, predict_bytes
from penstock.engine.torch_engine import TorchEngine

__all__ = [
    "Batch",
    "Engine",
    "EnginePlan",
    "MemoryAccount",
    "NullEngine",
    "PendingGradients",
    "TorchEngine",
    "plan_engine",
    "predict_bytes",
]
