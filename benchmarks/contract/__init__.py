"""What benchmarks share: the line of JSON, and the machine and its limits beside a figure.

As a program (`python benchmarks/contract [--quick]`) it runs all benchmarks and checks their lines.
"""

from contract.limits import (
    PRODUCT_FLOPS,
    READ_BYTES,
    Limit,
    limits_of_this_machine,
    print_limits,
    start_products,
    start_reads,
)
from contract.machine import describe_machine, disk_of
from contract.precisions import fastest_precision, plain_precisions
from contract.result import check_result, print_result

__all__ = [
    "PRODUCT_FLOPS",
    "READ_BYTES",
    "Limit",
    "check_result",
    "describe_machine",
    "disk_of",
    "fastest_precision",
    "limits_of_this_machine",
    "plain_precisions",
    "print_limits",
    "print_result",
    "start_products",
    "start_reads",
]
