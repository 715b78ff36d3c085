"""Equal blocks of a model are traced once: later blocks are compared with the first.

An export spends most of its time on describing the results of operators and on recording nodes. A
model of many equal blocks repeats both for every block. Here the first block of a group is traced
as usual, and its operator calls are recorded. The Python code of every later block still runs. Its
operator calls are only compared with the record: the operator, the constants, the metadata of the
tensors and which of the block's tensors they are, the module and the line. The graph gets one node
for the block, which `copies.py` replaces by copies of the first block's nodes after the export. The
graph is the one that tracing every block would give, except for the names of its nodes.

A block whose next call differs is traced from there on, after the nodes of its calls so far have
been added. Blocks that write tensors in place, create tensors, change the gradient mode or run
without gradients are always traced. So are all blocks of a program without gradients: there a
forward may call autograd, which would follow the results of another block.

A later block may get results that an earlier one computed. Code that compares the `id` of a tensor
with one of another block, a dispatch mode of the model, and a TorchScript list of results see that.
"""

from penstock.compiler.equal_blocks.copies import expand_equal_blocks as expand_equal_blocks
from penstock.compiler.equal_blocks.tracing import BlockTracing as BlockTracing
