"""The compiler: a PyTorch module becomes a program."""

from penstock.compiler.build import CompileOptions, compile_module
from penstock.compiler.capture import Precision

__all__ = ["CompileOptions", "Precision", "compile_module"]
