"""Train a small GPT on Python's standard library, generate text with it, and export it.

The run is `recipes/demo.yaml`; arguments are `key=value` overrides, as for `penstock train`. The
demo uses only the public interface: `Config`, `Trainer`, `penstock.data`. Heavy imports come after
the configuration has been checked.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from penstock.cli import output
from penstock.cli.output import surviving_loss
from penstock.cli.train import GracefulStop, ResumeCommand, naming_command, recorded_extra
from penstock.config import Config, check_run, load, load_run
from penstock.errors import ConfigError, PenstockError, ProgramError
from penstock.io import remove
from penstock.progress import View, view_for_command

if TYPE_CHECKING:
    from penstock.telemetry import Listener
    from penstock.training import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"
PROMPT = "class Stack:\n    def"
# Two programs that compute one loss differ by the rounding of their arithmetic.
LARGEST_DIFFERENCE = {"fp32": 1e-4, "bf16": 1e-2}

WELCOME = """\
Penstock trains a small GPT on the source of Python's standard library. Weights and optimizer \
state stay in the store; in each step the weights stream, layer by layer, through the engine. \
It takes {minutes} minutes on two idle cores.
"""
STOPPING = "Ctrl-C saves and stops. To resume: {again}\n"
MINUTES = {"fp32": "five to nine", "bf16": "four to nine"}
HELP = """\
python -m penstock.demo [KEY=VALUE]...

Trains recipes/demo.yaml, generates a sample and exports the model. Any key of the recipe may be
set, such as run.dir=runs/short run.steps=200. The same command again resumes an unfinished run,
and only prints the results of a finished one.
"""


def main(arguments: Sequence[str]) -> int:
    """Run or resume the demo; return the exit code."""
    output.open_closed_streams()
    try:
        return run(arguments)
    finally:
        output.settle()


def run(arguments: Sequence[str]) -> int:
    """Run or resume the demo on the streams as they are; return the exit code."""
    console = Console(highlight=False, markup=False)
    if {"--help", "-h"} & set(arguments):
        console.print(HELP, soft_wrap=True)
        return 0
    python = [os.path.relpath(sys.executable), "-m", "penstock.demo", *arguments]
    again = shlex.join(python) if arguments else "make demo"
    try:
        config = demo_config(arguments)
        exported = config.run.dir / "exported"
        done = is_complete(config, exported)
        if done:
            console.print(f"The demo is complete: {config.run.dir} has all its steps.\n")
        else:
            minutes = MINUTES[config.precision]
            console.print(WELCOME.format(minutes=minutes))
            console.print(STOPPING.format(again=again), soft_wrap=True)
            trainer = train(config, console, again)
            if trainer.step < config.run.steps:
                return 130
            write_a_sample(trainer, console)
            export_and_compare(trainer, exported, console)
        from penstock.demo.report import figures

        console.print(figures(config, exported) or f"{config.run.dir} has no metrics of its steps.")
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        console.print(f"\nstopped; resume with: {again}", soft_wrap=True)
        return 130
    show_next_commands(config, console, done)
    return 0


def is_complete(config: Config, exported: Path) -> bool:
    """Return whether the run has all its steps, and its model is exported."""
    from penstock.demo.report import trained_steps

    trained = trained_steps(config)
    return any(exported.glob("*.safetensors")) and (trained is None or trained >= config.run.steps)


def demo_config(overrides: Sequence[str]) -> Config:
    """Return the configuration of the run in `run.dir`, or of a new run on this machine."""
    if not RECIPE.exists():
        raise ConfigError(f"{RECIPE} is missing; run the demo from a clone of the repository")
    recipe = load(RECIPE).to_mapping()
    recipe["data"]["input"] = [sysconfig.get_paths()["stdlib"]]
    recipe["precision"] = fastest_precision()
    config = Config.from_mapping(recipe, overrides)
    if (config.run.dir / "checkpoints" / "index.json").exists():
        config = load_run(config.run.dir, overrides)
    check_run(config, recorded_extra)
    return config


def fastest_precision() -> str:
    """Return bf16 where the processor multiplies it in hardware, else fp32."""
    import torch

    processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    in_hardware = processor.get("avx512_bf16") or processor.get("amx_bf16")
    return "bf16" if torch.cuda.is_available() or in_hardware else "fp32"


def train(config: Config, console: Console, again: str) -> Trainer:
    """Train to the last step, or until a signal: the run is saved in either case."""
    from penstock.demo.text import build_data
    from penstock.training import KernelWorker

    with KernelWorker() as worker:
        worker.start(config)
        build_data(config, console)
        view = view_for_command(console, config.logging.every)
        return _train(
            config, view, worker.watched(naming_command(view, ResumeCommand(shlex.split(again))))
        )


def _train(config: Config, view: View, listener: Listener) -> Trainer:
    from penstock.training import Trainer

    stop = GracefulStop(view.interrupt)
    with surviving_loss(stop.lose_output), view:
        trainer = Trainer(config, on_event=stop.watched(listener), quiet=True)
        if trainer.model.structure.class_name != "GPT2LMHeadModel":
            raise ConfigError(
                f"model: expected a GPT-2 of any size, got {trainer.model.name}; train other "
                "models with: penstock train"
            )
        with stop.handling(trainer.request_stop):
            if trainer.step < config.run.steps:
                trainer.train()
    return trainer


def write_a_sample(trainer: Trainer, console: Console) -> None:
    """Print text that the model generates."""
    console.print()
    console.rule(f"given '{' '.join(PROMPT.split())}', the model writes")
    console.print(PROMPT, end="")
    for piece in trainer.generate(PROMPT, max_new_tokens=160, temperature=0.7):
        console.print(piece, end="", soft_wrap=True)
    console.print()
    console.rule()


def export_and_compare(trainer: Trainer, exported: Path, console: Console) -> None:
    """Export the model, and compare its held-out loss in `transformers` with Penstock's.

    The folder gets its final name only after the comparison.
    """
    unchecked = exported.with_name("exported.unchecked")
    remove(unchecked)
    trainer.export(unchecked)
    ours, theirs = trainer.evaluate()["loss"], loss_in_transformers(trainer, unchecked)
    precision = trainer.config.precision
    if not abs(ours - theirs) <= LARGEST_DIFFERENCE[precision]:
        raise ProgramError(
            f"{unchecked}: the held-out loss is {ours:.5f} in Penstock and {theirs:.5f} in "
            "transformers, expected equal losses; please report this"
        )
    remove(exported)  # a damaged one, or one of fewer steps
    unchecked.replace(exported)
    console.print(
        f"\n{exported} loads with transformers' AutoModelForCausalLM. The same held-out tokens, "
        f"in {precision}:\nloss {theirs:.5f} nats per token in transformers, {ours:.5f} in "
        f"Penstock, difference {abs(ours - theirs):.1e}.\n",
        soft_wrap=True,
    )


def loss_in_transformers(trainer: Trainer, folder: Path) -> float:
    """Return the mean loss of the exported model on the tokens of an evaluation."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from penstock.data import LanguageModelSource, TokenDataset

    logging.disable_progress_bar()

    config = trainer.config
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    length = config.data.sequence_length or model.config.n_positions
    source = LanguageModelSource(TokenDataset.open(config.data_dir), "validation", length)
    total, count = 0.0, 0
    for rows in source.evaluation_batches(8, config.evaluation.batches * config.batch.size):
        inputs, labels = (torch.from_numpy(rows[name]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=inputs).logits.float()  # [rows, length, vocabulary]
        total += cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += labels.numel()
    return total / count


def show_next_commands(config: Config, console: Console, done: bool) -> None:
    """Print the next commands to try."""
    penstock = os.path.relpath(Path(sys.executable).with_name("penstock"))
    run = shlex.quote(str(config.run.dir))
    steps = config.run.steps
    commands = {
        "generate text": f"{penstock} generate {run} --prompt 'class '",
        "inspect the run, and verify every checksum": f"{penstock} inspect {run}",
        "train twice as many steps, at the last learning rate": (
            f"{penstock} train {run}/config.yaml run.steps={2 * steps} "
            f"optimizer.schedule.decay_steps={config.decay_steps}"
        ),
        "show the stages of a larger model": f"{penstock} program gpt3-175b",
        "configure a run of your own": f"{penstock} init train.yaml --model gpt2 --input 'FILES'",
    }
    if done:
        commands["repeat the demo from the start"] = f"mv {run} {run}.old; make demo"
    console.print("\nnext:")
    for what, command in commands.items():
        console.print(f"  {command}    # {what}", soft_wrap=True)
