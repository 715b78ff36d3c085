"""The memory in which weights and gradients are between the processes of a run, or between a host
and its device."""

from penstock.config import Config
from penstock.distributed.protocol import GRADIENTS, WINDOW, connections
from penstock.distributed.transport import LEAST_BYTES, SHM_BYTES
from penstock.engine import target_of
from penstock.planning.relays import relay_count
from penstock.program import Program, WeightSpec, largest_stage
from penstock.step_schedule import StepSchedule
from penstock.store import index_memory


def transfer_buffer_bytes(
    program: Program, device: str, dense_gradients: bool = False, adds: bool = True
) -> int:
    """Return the memory of the transfer buffers of an engine in a process of its own.

    Weights arrive in `WINDOW` buffers, each as large as the largest stage. A CPU computes with the
    buffers in place, so one buffer is the stage that waits while another computes. Gradients need
    memory for as many operations as shards release at once: the engine's own gradients, and if it
    `adds`, as without relays, their sum with those of others. Chunks of sparse weights and masks
    are beside the buffers. With `dense_gradients` some steps compute those of every element.
    """
    _, largest = largest_stage(program, lambda weight: weight.stream_bytes)
    buffers = (WINDOW if target_of(device).has_own_memory else WINDOW - 1) * largest
    weights = program.weights
    schedule = StepSchedule.of(program, dense_gradients=dense_gradients)
    gradients = [operation.gradient_bytes for operation in schedule.operations]
    most = max(sum(gradients[first : first + GRADIENTS]) for first in range(len(gradients)))
    sparse = [weight for weight in weights.values() if weight.is_sparse]
    if sparse:
        _, chunks = largest_stage(program, lambda w: w.stream_bytes if w.is_sparse else 0)
        masks = sum(index_memory(weight.capacity, weight.elements) for weight in sparse)
        buffers += WINDOW * chunks + masks
    return buffers + (2 if adds else 1) * most


def computes_dense_gradients(config: Config) -> bool:
    """Return whether some steps compute the gradient of every element of sparse weights."""
    return config.sparsity.method == "rigl"


def largest_moved(program: Program, dense_gradients: bool = False) -> int:
    """Return the largest transfer of a stage one way: streamed weights, or gradients in float32;
    those of every element of sparse weights, if some steps compute `dense_gradients`."""
    _, streamed = largest_stage(program, lambda weight: weight.stream_bytes)
    _, returned = largest_stage(program, lambda weight: _gradient_bytes(weight, dense_gradients))
    return max(streamed, returned)


def _gradient_bytes(weight: WeightSpec, dense_gradients: bool) -> int:
    elements = weight.elements if dense_gradients else weight.entries
    return 4 * elements if weight.trainable else 0


def shared_memory_bytes(config: Config, program: Program) -> int:
    """Return the largest shared memory of the connections within this host."""
    cluster, shards = config.cluster, config.store.shards
    largest = max(weight.stream_bytes for weight in program.weights.values())
    if cluster.start == "none" or cluster.shared_memory == "off" or largest < LEAST_BYTES:
        return 0
    pairs = connections(config.engines, shards, relay_count(config))
    if cluster.shards == "here":  # in one process
        pairs = {(max(sender, -1), max(receiver, -1)) for sender, receiver in pairs}
    calls = 2 * shards if cluster.shards == "apart" else 0
    if cluster.has_other_hosts:  # only connections of this process are surely here
        pairs = {pair for pair in pairs if -1 in pair and cluster.shards == "here"}
        calls = 0
    return (len(pairs) + calls) * SHM_BYTES
