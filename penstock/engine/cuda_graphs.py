"""Records an engine's calls as CUDA graphs, for `recorded_steps.py`."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from penstock.engine.torch_engine import Result
from penstock.garbage_collection import collection_disabled

_ROOM = 1.05  # a recording needs as much memory as the step, and some for the graphs themselves


class CudaGraphs:
    """The graphs of one engine, and the memory that they share.

    Args:
        device: the GPU, as PyTorch names it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def start(self, step_bytes: int) -> bool:
        """Begin a recording; return False if the GPU lacks memory for such a step."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # of a step that was not recorded
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < _ROOM * step_bytes:
            return False
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        return True

    def record(self, act: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        """Record and execute computation; return its result, and what repeats it.

        Raises:
            RuntimeError: an operator waits for the host, or memory is lacking.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with collection_disabled(), torch.cuda.stream(self._stream), warnings.catch_warnings():
            # A stage whose weights are not trained computes nothing in some sweeps.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            # Other threads may use the device meanwhile, for memory of their own.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = act()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        graph.replay()
        return result, graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed."""
        try:
            graph.capture_end()
        except RuntimeError:  # it is invalid, of which some versions do not tell the allocator
            with suppress(RuntimeError):  # others do (pytorch/pytorch#180395)
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the same address that does not keep the memory from reuse."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return tensor
        address = _Address(storage.data_ptr(), storage.nbytes())
        memory = torch.as_tensor(address, device=self._device).view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def drop(self) -> None:
        """Release the memory of what was recorded; none of it is repeated any more."""
        torch.cuda.synchronize(self._device)
        self._pool = self._stream = None
        # cuBLAS has a workspace for each stream, here in the graphs' memory, and would keep it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class _Address:
    """Bytes of device memory, in the form in which libraries exchange them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
