"""The notices on the progress of the measurement of sparse products."""

import pytest

from penstock.planning.product_choices import progress_notices


@pytest.mark.parametrize(("seconds", "told"), [(6.0, (1, 2, 3, 4)), (2.0, (1, 4)), (0.1, (1,))])
def test_measurement_of_sparse_products_tells_the_case_that_it_has_reached(seconds, told):
    now, notices = 0.0, []
    on_case = progress_notices(notices.append, clock=lambda: now)
    for number in range(1, 5):
        on_case(number, 4)
        now += seconds
    texts = [f"measuring the products of sparse weights, case {number} of 4" for number in told]
    texts[0] += " (a case is a shape, type, number of tokens and sparsity, and takes some seconds)"
    assert notices == texts
