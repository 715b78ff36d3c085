"""One generator in several threads, after its trainer, and with a model that decodes slowly."""

import threading

import numpy as np
import pytest
import torch
from command_line import penstock

from penstock.data import ArraySource, build_dataset
from penstock.errors import ConfigError
from penstock.models import ModelSource
from penstock.telemetry import Notice
from penstock.training.trainer import Trainer

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_layer": 2, "n_embd": 32, "n_head": 4}
MAMBA = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 32, "state_size": 4}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SLOW = "every token computes the whole window, which is slow, because"


def trainer_of(folder, source, **options):
    ids = np.random.default_rng(0).integers(0, 64, (16, 33))
    arrays = {"input_ids": ids[:, :-1].copy(), "labels": ids[:, 1:].copy()}
    config = {
        "batch": {"size": 4},
        "data": {"sequence_length": 32},
        "engine": {"threads": 1},
        "run": {"dir": folder / "run", "steps": 1},
    }
    if isinstance(source, dict):
        source = ModelSource.from_hf_config({**NO_TOKENS, **source})
    return Trainer(config, model=source, source=ArraySource(arrays), **options)


@pytest.fixture
def trainer(tmp_path):
    trainer = trainer_of(tmp_path, GPT2, quiet=True)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("lengths", [(3, 3), (3, 10)])
def test_threads_that_share_a_generator_write_the_texts_they_write_alone(trainer, lengths):
    texts = [list(range(first, first + n)) for first, n in enumerate(lengths)]
    options = {"max_new_tokens": 13, "temperature": 0.9, "seed": 3}
    alone = [list(trainer.token_generator().generate(text, **options)) for text in texts]
    trainer._tokens = None  # the threads make the programs, too
    found, start = {}, threading.Barrier(len(texts))

    def write(number):
        start.wait()
        for _ in range(3):
            generator = trainer.token_generator()
            found.setdefault(number, []).append(list(generator.generate(texts[number], **options)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [text] * 3 for number, text in enumerate(alone)}


def test_texts_that_take_turns_are_those_written_alone(trainer):
    generator = trainer.token_generator()
    alone = [list(generator.generate([first], max_new_tokens=9)) for first in (1, 2)]
    turns = zip(*(generator.generate([first], max_new_tokens=9) for first in (1, 2)), strict=True)
    assert [list(text) for text in zip(*turns, strict=True)] == alone


@pytest.mark.parametrize("in_thread", [False, True])
def test_text_that_ends_within_the_token_of_another_one_leaves_its_keys(
    trainer, monkeypatch, in_thread
):
    """As the garbage collector ends an abandoned text, also in a thread that a token waits for."""
    generator = trainer.token_generator()
    alone = list(generator.generate([1], max_new_tokens=9))
    abandoned, text = (generator.generate([first], max_new_tokens=9) for first in (2, 1))
    next(abandoned)
    fetch = trainer.store.stream
    following = next(iter(generator._windows.values()))

    def end_and_fetch(names):
        ending = threading.Thread(target=abandoned.close)
        ending.start() if in_thread else abandoned.close()
        if in_thread:
            ending.join(20)
            assert not ending.is_alive()
        return fetch(names)

    monkeypatch.setattr(following, "_fetch", end_and_fetch)
    runs = []
    run = following._run
    monkeypatch.setattr(
        following, "_run", lambda engine, visible: runs.append(engine) or run(engine, visible)
    )
    assert list(text) == alone
    assert runs[1:] == [following._decode] * 8  # none computes the prompt again
    assert not generator._ended
    assert not following._kept


def test_options_may_be_numbers_of_numpy(trainer):
    generator = trainer.token_generator()
    expected = list(generator.generate([1], max_new_tokens=4, top_k=3))
    options = {"max_new_tokens": np.int64(4), "top_k": np.int32(3)}
    assert list(generator.generate(np.array([1]), **options)) == expected


def test_event_handler_may_generate_in_another_thread(tmp_path):
    texts = []

    def handle(event):
        if isinstance(event, Notice):
            write = threading.Thread(target=lambda: texts.append(list(generator.generate([2]))))
            write.start()
            write.join(60)
            assert texts

    trainer = trainer_of(tmp_path, own_module(), on_event=handle, quiet=True)
    generator = trainer.token_generator()
    assert len(list(generator.generate([1], max_new_tokens=2))) == 2
    trainer.close()


def test_closed_trainer_generates_no_token(trainer):
    generator = trainer.token_generator()
    begun = generator.generate([1, 2], max_new_tokens=5)
    prepared = generator.generate([1, 2], max_new_tokens=5)
    next(begun)
    trainer.close()
    for generate in (
        lambda: next(begun),
        lambda: next(prepared),
        lambda: generator.generate([1, 2]),
        trainer.token_generator,
        lambda: trainer.generate("a"),
    ):
        assert not generator._windows
        with pytest.raises(ConfigError, match=r"the trainer was closed, .* create a new Trainer"):
            generate()


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def own_module():
    return ModelSource.from_module(Own(), task="causal_lm", vocab_size=64)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (lambda: {**MAMBA, "vocab_size": 64}, "aten.conv1d.default may mix positions"),
        (own_module, "Own is a module of your own, whose layers may read later positions"),
    ],
)
def test_slow_decoding_is_a_notice_once(tmp_path, source, reason):
    events = []
    trainer = trainer_of(tmp_path, source(), on_event=events.append, quiet=True)
    generator = trainer.token_generator()
    assert not events
    for length in (1, 1, 20):  # of two windows
        list(generator.generate([1] * length, max_new_tokens=2))
    trainer.close()
    (event,) = events
    assert isinstance(event, Notice)
    assert event.text.startswith(SLOW)
    assert reason in event.text


def test_model_that_is_decoded_incrementally_gets_no_notice(tmp_path):
    events = []
    trainer = trainer_of(tmp_path, GPT2, on_event=events.append, quiet=True)
    list(trainer.token_generator().generate([1], max_new_tokens=2))
    trainer.close()
    assert not events


def test_text_longer_than_the_window_is_a_notice_once(tmp_path):
    events = []
    trainer = trainer_of(tmp_path, GPT2 | {"n_positions": 32}, on_event=events.append, quiet=True)
    generator = trainer.token_generator()
    list(generator.generate([1] * 30, max_new_tokens=3))  # the last one follows 32 tokens
    assert not events
    for _ in range(2):
        list(generator.generate([1] * 30, max_new_tokens=6))
    trainer.close()
    (event,) = events
    assert event.text == (
        f"from here on {SLOW} the text is longer than 32 tokens, the most that the model reads: "
        "its beginning is no longer read, and with each new token the last ones get other positions"
    )


def test_prompt_longer_than_the_window_is_a_notice_of_its_own(tmp_path):
    events = []
    trainer = trainer_of(tmp_path, GPT2 | {"n_positions": 32}, on_event=events.append, quiet=True)
    generator = trainer.token_generator()
    list(generator.generate([2] * 5, max_new_tokens=2))  # leaves keys and values of another text
    for _ in range(2):
        list(generator.generate([1] * 40, max_new_tokens=3))
    trainer.close()
    assert [event.text for event in events] == [
        "the prompt is longer than 32 tokens, the most that the model reads: only its last ones "
        "are read, its beginning is not",
        f"{SLOW} the text is longer than 32 tokens: with each new token the last ones get other "
        "positions",
    ]


@pytest.mark.parametrize(
    ("source", "positions"),
    [(lambda: GPT2, " (the model has 1,024 positions)"), (own_module, "")],
)
def test_the_beginning_of_a_prompt_beyond_the_runs_sequences_is_not_read(
    tmp_path, source, positions
):
    events = []
    trainer = trainer_of(tmp_path, source(), on_event=events.append, quiet=True)
    list(trainer.token_generator().generate([1] * 40, max_new_tokens=1))
    trainer.close()
    assert events[0].text == (
        f"the prompt is longer than 32 tokens, the data.sequence_length of the run{positions}: "
        "only its last ones are read, its beginning is not"
    )


@pytest.mark.parametrize("quiet", [False, True])
def test_notice_of_slow_decoding_goes_to_the_view_of_the_trainer(tmp_path, capsys, quiet):
    trainer = trainer_of(tmp_path, own_module(), quiet=quiet)
    list(trainer.token_generator().generate([1], max_new_tokens=2))
    trainer.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count(SLOW) == (0 if quiet else 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of a recurrent model on text."""
    folder = tmp_path_factory.mktemp("recurrent")
    (folder / "text.txt").write_text("water streams\n" * 400)
    build_dataset([folder / "text.txt"], "bytes", folder / "set", validation=0.1, seed=0)
    config = {
        "model": {"hf_config": {**NO_TOKENS, **MAMBA, "vocab_size": 257}},
        "data": {"path": str(folder / "set"), "sequence_length": 16},
        "batch": {"size": 4},
        "engine": {"threads": 1},
        "run": {"dir": str(folder / "run"), "steps": 1},
        "evaluation": {"every": None},
    }
    trainer = Trainer(config, quiet=True)
    trainer.train()
    trainer.close()
    return folder / "run"


def test_command_prints_the_notice_on_stderr_and_the_text_on_stdout(run):
    options = ("--prompt", "water", "--max-new-tokens", 3, "--temperature", 0)
    done = penstock("generate", run, *options)
    assert done.returncode == 0, done
    assert done.stderr.startswith(f"note: {SLOW} ")
    assert "aten.conv1d.default" in done.stderr
    assert done.stderr.count("\n") == 1
    trainer = Trainer(run / "config.yaml", quiet=True)
    text = "".join(trainer.generate("water", max_new_tokens=3, temperature=0))
    trainer.close()
    assert done.stdout == f"water{text}\n"


def test_command_refuses_a_temperature_before_it_prints(run):
    done = penstock("generate", run, "--prompt", "water", "--temperature", "inf")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: temperature: expected a finite number from 0 up, got inf")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("top-k", 2.5), ("top-k", -1), ("seed", -1), ("seed", 1.5)),
        *(("max-new-tokens", 2.5), ("max-new-tokens", -1), ("temperature", "nan")),
    ],
)
def test_command_names_a_wrong_option(run, option, value):
    done = penstock("generate", run, f"--{option}", value)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"'--{option}'" in done.stderr
