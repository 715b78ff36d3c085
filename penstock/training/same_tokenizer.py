"""Check that a data set has the tokenizer of the run, so that its ids mean the same text.

A run may be evaluated on other text than it was trained on. Ids of another tokenizer fit the model
as well, but every loss, text and exported tokenizer would be wrong. A run therefore records a
digest of the rules by which its tokenizer turns text into ids.
"""

import contextlib

from penstock.config import Config, load_run
from penstock.data import TokenDataset, tokenizer_digest
from penstock.errors import DataError, PenstockError
from penstock.training.resume_state import ResumeState


def digest_to_record(recorded: ResumeState | None, dataset: TokenDataset) -> str | None:
    """Return the digest that a run records: the recorded one, else that of its data set.

    `recorded` is None for a new run. The result is None if the run was trained on another data set,
    and an older release recorded no digest.
    """
    if recorded is not None and recorded.tokenizer is not None:
        return recorded.tokenizer
    if recorded is not None and recorded.data not in (None, dataset.fingerprint):
        return None
    return tokenizer_digest(dataset.tokenizer())


def require_same_tokenizer(config: Config, recorded: ResumeState, dataset: TokenDataset) -> None:
    """Refuse a data set of another tokenizer than that of the run.

    For a run of an older release, the tokenizer is that of the run's own data set, if that still
    has the recorded fingerprint. Otherwise only a change of the run's own data set is found.

    Raises:
        DataError: the tokenizers differ.
    """
    if recorded.data in (None, dataset.fingerprint):
        return
    run, found = config.run.dir, dataset.manifest.tokenizer.name
    wanted = recorded.tokenizer
    if wanted is None:
        own = _own_dataset(config)
        if own is None:
            return
        if own.fingerprint == recorded.data:
            wanted = tokenizer_digest(own.tokenizer())
        elif own.path.resolve() != dataset.path.resolve():
            return
    if wanted is None:
        raise DataError(
            f"{dataset.path}: expected the data set that {run} was trained on, got another one "
            f"(tokenizer {found}), and the run does not record its tokenizer; restore the data "
            "set, or set data.path to a data set of the same tokenizer"
        )
    if tokenizer_digest(dataset.tokenizer()) != wanted:
        raise DataError(
            f"{dataset.path}: expected the tokenizer that {run} was trained with, got another one "
            f"({found}), whose ids mean other text; restore the data set, or set data.path to a "
            "data set that was built with the run's data set as its tokenizer"
        )


def _own_dataset(config: Config) -> TokenDataset | None:
    """Return the data set that the run's last training used; None if it cannot be opened."""
    with contextlib.suppress(PenstockError):
        return TokenDataset.described(load_run(config.run.dir).data_dir)
    return None
