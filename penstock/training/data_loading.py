"""The data of a run: the configured data set, built if necessary, and its batches."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config, HuggingFaceModel
from penstock.data import (
    BYTE_VOCABULARY,
    BuiltFrom,
    LanguageModelSource,
    MaskedLanguageModelSource,
    RecordSource,
    Source,
    TokenDataset,
    build_dataset,
    check_vocabulary,
    encodes_as,
    find_files,
    load_tokenizer,
    read_built_from,
    repeated_files,
    sample_of,
    train_size,
    unused_ids,
)
from penstock.engine import return_free_pages
from penstock.errors import DataError
from penstock.models import ModelSource
from penstock.planning import sequence_length
from penstock.training.resume_state import ResumeState
from penstock.training.same_tokenizer import digest_to_record, require_same_tokenizer

_LONG_BUILD_SECONDS = 60.0
_MASK_TOKENS = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class TrainingData:
    """The sources of training and held-out batches; `dataset` is set if they come from text.

    `sequence_length` is the number of tokens in a row, 1 if rows are not of tokens. `tokenizer` is
    the digest that the run records of the data set's tokenizer.
    """

    training: Source
    held_out: Source | None
    dataset: TokenDataset | None
    sequence_length: int
    tokenizer: str | None = None


def open_data(
    config: Config,
    source: ModelSource,
    notice: Callable[[str], None],
    recorded: ResumeState | None = None,
    check_length: Callable[[int], object] = lambda length: None,
    *,
    trains: bool = True,
) -> TrainingData:
    """Open the configured data set; build it first if it comes from `data.input`.

    `recorded` is the resume state of an existing run, whose tokenizer is required. `check_length`
    is called with the sequence length before a data set is built, if it does not depend on the
    data; it raises an error for a run that cannot be executed. Unless the run `trains`, each shard
    is checked when it is read.
    """
    if source.task == "custom" and set(source.inputs) != {"input_ids", "labels"}:
        raise DataError(
            f"{source.name} is a module of your own: give its data from Python, "
            "Trainer(config, source=ArraySource(...))"
        )
    folder = config.data_dir
    is_new = not folder.exists() and bool(config.data.input)
    if is_new:
        _check_mask_id(config, source)
        _check_size_of_tokenizer(config, source, notice)
        if config.data.content == "records":
            _refuse_records(config.data_dir, source)
        return_free_pages()  # of a large tokenizer
        if config.data.content == "text" or config.data.sequence_length:
            check_length(sequence_length(config, source))

        def check(built: TokenDataset) -> None:
            _check_kind(config, source, recorded, built)
            _training_data(config, source, recorded, built)

        _build(config, notice, check)
    dataset = TokenDataset.open(folder) if trains else TokenDataset.described(folder)
    _check_build(config, dataset, recorded)
    if _has_changed_input(config):
        new_text = f"delete {folder}" if recorded is None else "choose another run.dir"
        notice(
            f"the files of data.input have changed since {folder} was built, and the run takes the "
            f"text as it was. To train on the new text, {new_text}"
        )
    _note_repeated_files(config, dataset, notice)
    _check_kind(config, source, recorded, dataset)
    try:
        return _training_data(config, source, recorded, dataset, notice)
    except DataError as error:
        if not config.data.input:
            raise
        raise DataError(f"{error}. {_way_to_other_data(config, recorded)}") from None


def _check_kind(
    config: Config, source: ModelSource, recorded: ResumeState | None, dataset: TokenDataset
) -> None:
    """Refuse a data set of another content, or of another tokenizer, than the run needs."""
    _check_content(config, source, dataset)
    _check_tokenizer(config, source, dataset)
    if recorded is not None:
        require_same_tokenizer(config, recorded, dataset)


def _training_data(
    config: Config,
    source: ModelSource,
    recorded: ResumeState | None,
    dataset: TokenDataset,
    notice: Callable[[str], None] = lambda text: None,
) -> TrainingData:
    """Return the sources of a data set; refuse too many token ids and too little text."""
    if source.vocab_size is not None:
        check_vocabulary(dataset, source.vocab_size)
        _note_unused_ids(config, source.vocab_size, dataset, notice)
    length = sequence_length(config, source, dataset)
    training, validation = (
        _split(config, source, dataset, name, length, notice)
        if name in dataset.splits or name == "train"
        else None
        for name in ("train", "validation")
    )
    assert training is not None
    digest = digest_to_record(recorded, dataset)
    return TrainingData(training, validation, dataset, length, digest)


def _way_to_other_data(config: Config, recorded: ResumeState | None) -> str:
    """Return how the run gets other text or another tokenizer than its data set has."""
    folder, other = config.data_dir, "for other text or another tokenizer"
    if recorded is not None:
        return f"The run resumes with {folder}: {other}, choose another run.dir"
    if config.data.path is not None:
        return f"Other runs may use {folder}: {other}, choose another data.path"
    return f"To change the text or the tokenizer, delete {folder}: the next start builds it again"


def _split(
    config: Config,
    source: ModelSource,
    dataset: TokenDataset,
    name: str,
    length: int,
    notice: Callable[[str], None],
) -> Source:
    """Return the source of a split's rows."""
    if dataset.content == "records":
        records = RecordSource(dataset, name, length, config.data.seed)
        for text in (records.describe(), *records.warnings()):
            notice(text)
        return records
    if source.task == "masked_lm":
        mask = _mask_token(dataset, source)
        return MaskedLanguageModelSource(dataset, name, length, mask, config.data.seed)
    return LanguageModelSource(dataset, name, length, config.data.seed)


def _build(
    config: Config, notice: Callable[[str], None], check: Callable[[TokenDataset], object]
) -> None:
    """Build the data set of a run, unless `check` refuses it. One that took long, or may be for
    other runs, is kept nevertheless: the caller checks it again."""
    folder, began = config.data_dir, time.monotonic()

    def check_unpublished(staging: Path) -> None:
        if config.data.path is not None or time.monotonic() - began >= _LONG_BUILD_SECONDS:
            return
        try:
            check(TokenDataset.open(staging))
        except DataError as error:
            text = str(error).replace(str(staging), str(folder))
            raise DataError(f"{text}. {folder} was not kept: the next start builds it") from None

    notice(f"building the data set {folder} from {', '.join(config.data.input)}")
    report = build_dataset(
        config.data.input,
        config.tokenizer,
        folder,
        validation=config.data.validation,
        seed=config.data.seed,
        content=config.data.content,
        field=config.data.text_field,
        prompt_field=config.data.prompt_field,
        completion_field=config.data.completion_field,
        check=check_unpublished,
    )
    for note in report.notes:
        notice(note)
    return_free_pages()  # which would be counted as memory of libraries


def _check_mask_id(config: Config, source: ModelSource) -> None:
    """Refuse a tokenizer that may use every id of a model that needs one as its mask."""
    size, limit = train_size(config.tokenizer), source.vocab_size
    if config.tokenizer == "bytes":
        size = BYTE_VOCABULARY
    if source.task != "masked_lm" or size is None or limit is None or size < limit:
        return
    smaller = f"data.tokenizer to train-bpe:{limit - 1}, or " if limit > BYTE_VOCABULARY else ""
    raise DataError(
        f"data.tokenizer: expected fewer ids than the vocabulary of {limit} of {source.name}, got "
        f"{size} of {config.tokenizer}; masked training needs an id that the text never has: set "
        f"{smaller}the model's vocab_size to {size + 1} or more"
    )


def _check_size_of_tokenizer(
    config: Config, source: ModelSource, notice: Callable[[str], None]
) -> None:
    """Refuse a tokenizer with ids that the model does not have; one that is trained may get fewer
    ids than were asked for."""
    limit, most = source.vocab_size, train_size(config.tokenizer)
    if limit is None:
        return
    if most is not None:
        if most > limit:
            notice(
                f"data.tokenizer: {config.tokenizer} gets up to {most} ids from the text, the "
                f"model has vocab_size {limit}: the run is refused if they are more; set "
                f"data.tokenizer to train-bpe:{limit}, or the model's vocab_size to {most}"
            )
        return
    size = load_tokenizer(config.tokenizer).vocab_size
    if size > limit:
        raise DataError(
            f"data.tokenizer: {config.tokenizer} has token ids up to {size - 1} (vocabulary "
            f"{size}), model has vocab_size {limit}; set the model's vocab_size to {size} or more, "
            "or take the model's tokenizer"
        )


def _note_unused_ids(
    config: Config, model_ids: int, dataset: TokenDataset, notice: Callable[[str], None]
) -> None:
    spare = unused_ids(model_ids, dataset.vocab_size)
    if not spare:
        return
    advice = f"set the model's vocab_size to {dataset.vocab_size}, or a little more"
    if isinstance(config.model, HuggingFaceModel):
        advice = (
            "its ids are hardly those that the model was trained with; the model's own tokenizer "
            "is data.tokenizer=auto"
        )
    notice(
        f"the model has a vocabulary of {model_ids}, the data set's tokenizer, "
        f"{dataset.manifest.tokenizer.name}, has {dataset.vocab_size} ids: {spare} rows of the "
        f"embedding are never used; {advice}"
    )


def _check_content(config: Config, source: ModelSource, dataset: TokenDataset) -> None:
    """Refuse records where they cannot be trained on, and text where records are configured."""
    if dataset.content == "text" and config.data.content == "records":
        raise DataError(
            f"data.content: expected a data set of records, {dataset.path} holds plain text; set "
            "data.path to another folder, where Penstock builds one, or set data.content: text"
        )
    if dataset.content == "records":
        _refuse_records(dataset.path, source)


def _refuse_records(folder: Path, source: ModelSource) -> None:
    """Refuse a model that records cannot train."""
    if source.task != "causal_lm":
        raise DataError(
            f"{folder} holds prompts with completions, for next-token prediction (task "
            f"causal_lm); {source.name} is trained for {source.task}: build a data set of plain "
            "text for it"
        )


def _check_build(config: Config, dataset: TokenDataset, recorded: ResumeState | None) -> None:
    """Refuse a data set that the run has built from other input or settings than configured."""
    if config.data.path is not None:
        return
    advice = "set it back, or choose another run.dir"
    if recorded is None:  # a run that resumes needs its data
        advice = (
            f"set it back, delete {dataset.path} to have it built again, or choose another run.dir"
        )
    wanted, found = config.data.tokenizer, dataset.manifest.tokenizer.name
    if wanted != found and (wanted == "bytes" or wanted.startswith("train-bpe:")):
        raise DataError(
            f"data.tokenizer: {dataset.path} was built with {found}, got {wanted}; {advice}"
        )
    made_from = read_built_from(dataset.path)
    if made_from is None or not config.data.input:
        return
    data, files = config.data, []
    if not made_from.is_named_as(data.input):
        with contextlib.suppress(DataError):  # a deleted file: only its name is compared
            files = find_files(data.input)
    difference = made_from.difference(
        BuiltFrom.of(
            data.input,
            files,
            data.content,
            data.text_field,
            data.prompt_field,
            data.completion_field,
            data.validation,
            data.seed,
            reads_all=True,
        )
    )
    if difference is not None:
        name, was, wants = difference
        how = "from" if name == "input" else "with"
        raise DataError(f"data.{name}: {dataset.path} was built {how} {was}, got {wants}; {advice}")


def _has_changed_input(config: Config) -> bool:
    """Return whether the files of which the run has built its own data set have other content now.

    Files at other places are not compared here, nor data sets of some of the files, and of older
    releases.
    """
    if config.data.path is not None or not config.data.input:
        return False
    made_from = read_built_from(config.data_dir)
    if made_from is None or not made_from.reads_all or not made_from.sample:
        return False
    if [os.path.abspath(name) for name in config.data.input] != made_from.paths:
        return False
    with contextlib.suppress(DataError):  # a deleted file: the data set is whole without it
        return sample_of(find_files(config.data.input)) not in ("", made_from.sample)
    return False


def _note_repeated_files(
    config: Config, dataset: TokenDataset, notice: Callable[[str], None]
) -> None:
    """Tell that an older release read files several times for the run's own data set.

    It is not refused: a run that began with the data set can only be resumed with it.
    """
    if config.data.path is not None or dataset.read_each_file_once:
        return
    repeated = 0
    with contextlib.suppress(DataError):  # a deleted file
        repeated = repeated_files(config.data.input)
    if repeated:
        files = "1 file" if repeated == 1 else f"{repeated:,} files"
        notice(
            f"{dataset.path} was built by an older release, which read {files} of data.input more "
            "than once: held-out documents may also be trained on, and the held-out loss is then "
            f"too low. To start a new run without them, delete {dataset.path} or choose another "
            "run.dir; a run that began with this data set needs it to resume"
        )


def _check_tokenizer(config: Config, source: ModelSource, dataset: TokenDataset) -> None:
    """Refuse a data set whose token ids differ from those of the model folder's tokenizer."""
    if source.folder is None or config.data.tokenizer != "auto":  # another tokenizer is configured
        return
    if not encodes_as(dataset.tokenizer(), source.folder):
        found = dataset.manifest.tokenizer.name
        raise DataError(
            f"{dataset.path} was built with the tokenizer {found}, but the tokenizer of the model "
            f"in {source.folder} gives other ids; build the data set with that folder as its "
            f"tokenizer, or set data.tokenizer: {found} if the model is to learn other tokens"
        )


def _mask_token(dataset: TokenDataset, source: ModelSource) -> int:
    """Return a token id that the text never contains: `[MASK]`, or the model's last id if unused.

    The tokenizer encodes the data as plain text, so its own mask token never occurs in the data.
    """
    tokenizer = dataset.tokenizer()
    for name in _MASK_TOKENS:
        number = tokenizer.token_id(name)
        if number is not None:
            return number
    assert source.vocab_size is not None
    if source.vocab_size <= dataset.vocab_size:
        raise DataError(
            f"masked training needs a token that the text never has: {source.name} has a "
            f"vocabulary of {source.vocab_size}, the data set uses all of {dataset.vocab_size}; "
            f"set vocab_size to {dataset.vocab_size + 1} or more"
        )
    return source.vocab_size - 1
