"""Messages of a compilation are noticed, whatever was said before in the process."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch._logging
import transformers

from penstock.planning.program_cache.compile_messages import noticing


def warn_of_python() -> None:
    warnings.warn("for the user", UserWarning, stacklevel=1)


def warn_of_torch() -> None:
    torch.eye(2).to_sparse_csr()  # the operator warns once per process


def warn_in_log_of_torch() -> None:
    torch._logging.warning_once(logging.getLogger("torch"), "for the user")


def warn_in_log_of_transformers() -> None:
    transformers.utils.logging.get_logger("transformers").warning_once("for the user")


@pytest.mark.parametrize(
    "say",
    [warn_of_python, warn_of_torch, warn_in_log_of_torch, warn_in_log_of_transformers],
)
@pytest.mark.parametrize("action", ["default", "once", "always"])
def test_message_that_was_said_before_is_noticed(say, action):
    with warnings.catch_warnings(record=True):
        warnings.simplefilter(action)
        say()
        with noticing() as noticed:
            say()
    assert noticed.anything


def test_warnings_are_shown_once_within_a_compilation():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            with noticing():
                warn_of_torch()
                warn_of_torch()
    assert len(shown) == 2 * len({str(one.message) for one in shown})


def test_ignored_warning_is_not_noticed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with noticing() as noticed:
            warn_of_python()
            warn_of_torch()
    assert not noticed.anything


def test_torch_warns_as_before_after_a_compilation():
    before = torch.is_warn_always_enabled()
    with pytest.raises(KeyError), noticing():
        raise KeyError
    assert torch.is_warn_always_enabled() == before
