"""The work of this host's processor as cases: engine, store, sparse products."""

from collections.abc import Iterator

from penstock.calibration.operator_cases import operator_cases
from penstock.calibration.overhead_cases import overhead_cases
from penstock.calibration.reference_step import reference_cases
from penstock.calibration.repetitions import Case
from penstock.calibration.sparse_cases import Choices, sparse_cases
from penstock.calibration.store_cases import store_cases
from penstock.compiler import Products
from penstock.engine import target_of, thread_count
from penstock.kernels.processor import Processor


def host_products() -> Products:
    """Return the library of large products on this host."""
    return target_of("cpu").choose_products(Processor.here())


def processor_cases(choices: Choices) -> Iterator[Case]:
    """Yield the cases; `choices` are the ways of sparse products."""
    products = host_products()
    yield from overhead_cases()
    yield from operator_cases(products, thread_count(None))
    yield from reference_cases(products)
    yield from store_cases()
    yield from sparse_cases(choices)
