"""What compiles a program: the versions of the libraries, and the sources of this package."""

import functools
import hashlib
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.processor import Processor


@functools.cache
def code_digest() -> str:
    """Return a digest of the sources of this package, of the versions of the libraries, and of the
    kind of processor, for which PyTorch chooses operators."""
    processor = Processor.here()
    digest = hashlib.blake2b(digest_size=32)
    for part in (
        torch.__version__,
        str(torch.version.git_version),
        metadata.version("transformers"),  # not imported: reading a program needs none of it
        sys.version,
        platform.system(),
        processor.architecture,
        str(processor.vendor),
        torch.backends.cpu.get_cpu_capability(),
    ):
        digest.update(f"{part}\0".encode())
    root = Path(__file__).parents[2]  # of this package
    for source in sorted(root.rglob("*.py")):
        content = source.read_bytes()
        digest.update(f"{source.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def file_digest(path: str) -> str:
    """Return a digest of a file of a library."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def torch_settings(device: str) -> dict[str, Any]:
    """Return the settings of this process on which PyTorch's choice of operators depends.

    **Arguments:** `device` is the kind of device for which stages are traced.
    """
    cuda = torch.backends.cuda
    return {
        "default type": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "attention": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "oneDNN": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")],
        "capability": _capability() if device == "cuda" else None,
    }


def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
