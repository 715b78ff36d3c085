"""Equal blocks of a model are traced once: later blocks are compared with the first.

An export spends most of its time on describing the results of operators and on recording nodes. A
model of many equal blocks repeats both for every block. Here the first block of a kind is traced as
usual, and its operator calls are recorded. The Python code of every further block still runs, so no
assumption is made about it. Its operator calls are only compared with the record: the operator, the
constants, which tensor each argument is, and the metadata of tensors from outside the block. The
calls return the results of one earlier block, and the graph gets one node for the block, which
`copies.py` replaces by copies of the first block's nodes after the export.

The graph is the one that tracing every block would give. Any difference between blocks raises
`NotEqual`, and the model is captured again without their kind. Blocks that write tensors in place,
create tensors or change the gradient mode are traced as usual.
"""

from penstock.compiler.equal_blocks.copies import expand_equal_blocks as expand_equal_blocks
from penstock.compiler.equal_blocks.records import NotEqual as NotEqual
from penstock.compiler.equal_blocks.tracing import BlockTracing as BlockTracing
