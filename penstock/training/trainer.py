"""The trainer: a run from its first step to its last checkpoint.

`penstock/step/local.py` executes a step; `run_assembly.py` assembles the parts of a run. This
module creates or resumes the run, evaluates, saves, stops early, and serves the uses of a trained
model (export, generation). Notebooks use the same class.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from penstock.config import Config, to_config, trajectory, write_record
from penstock.data import Source
from penstock.engine import Engine, set_threads
from penstock.errors import ConfigError, DataError, NonFiniteError, PenstockError
from penstock.models import ModelSource
from penstock.program import Program
from penstock.progress import view_from_python
from penstock.step import LocalEngines
from penstock.store import MAX_SHARD_BYTES, FolderLock
from penstock.telemetry import (
    Evaluated,
    Evaluating,
    Finished,
    Listener,
    Notice,
    RunReport,
    StepDone,
    Stopped,
    broadcast,
    open_run_files,
)
from penstock.training import checkpoint_backends
from penstock.training.best_checkpoint import nothing_trained
from penstock.training.checkpoint_scheduler import CheckpointScheduler
from penstock.training.compilation_events import CompilationEvents
from penstock.training.early_stop import EarlyStop, evaluation_due, require_held_out, unfinished
from penstock.training.evaluation import Evaluator
from penstock.training.export import export, export_adapters
from penstock.training.gradient_check import GradientCheck
from penstock.training.numerics import numerics_here
from penstock.training.predicted_steps import keep_measured
from penstock.training.read_only_store import no_training
from penstock.training.resume_state import ResumeState
from penstock.training.run_assembly import (
    make_runner,
    require_known_elsewhere,
    set_up,
    start_cluster,
)
from penstock.training.run_start import describe, keep_files_of_model, run_started
from penstock.training.same_run import (
    own_architecture,
    require_newest,
    require_same_beginning,
    require_same_model,
)
from penstock.training.startup_notices import all_steps_done, notices_at_start
from penstock.training.text_generation import TextGenerator
from penstock.training.token_generation import TokenGenerator, closed_error, make_token_generator

if TYPE_CHECKING:
    from penstock.distributed.control import ClusterManager


class Trainer:
    """Trains a model as a configuration specifies; resumes automatically if the run exists.

    Args:
        config: a `Config`, a mapping of its keys, or the path of a YAML file.
        model: a built `nn.Module` or a `ModelSource` that replaces `config.model`.
        source: batches that replace `config.data`: an `ArraySource`, or any object with the
            methods of `penstock.data.Source`.
        held_out: the same, for evaluations.
        on_event: called with each event (`penstock.telemetry.events`), in addition to the view.
        quiet: show nothing. Otherwise progress goes to stderr, in a terminal as a panel.
        must_exist: refuse a run without a checkpoint; check its data only where it is read.
        cluster: "local", "ray", a Ray cluster's address, or "none": everything in this process,
            with one replica of each shard.
        ignore_initial_values: resume a run with its own weights although `model` has other values
            than the run started with.
        best: open the checkpoint with the lowest held-out loss instead of the newest state, to
            evaluate, generate and export in this process. Such a trainer does not train.

    Raises:
        ConfigError: the configuration or the model cannot be used; the text says what to change.
        DataError: data is missing, damaged, or does not fit the model.
        CompileError: the model cannot be compiled to a program.
        BudgetError: the required memory exceeds a budget; the text names the budget to raise.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        *,
        model: nn.Module | ModelSource | None = None,
        source: Source | None = None,
        held_out: Source | None = None,
        on_event: Listener | None = None,
        quiet: bool = False,
        must_exist: bool = False,
        cluster: str | None = None,
        ignore_initial_values: bool = False,
        best: bool = False,
    ) -> None:
        self.config = to_config(config, "none" if best else cluster)
        self._trajectory = trajectory(self.config)  # once: Pydantic's code loses a second Ctrl-C
        self._is_best = best
        self._view = view_from_python(self.config.logging.every, quiet)
        self._listener = self._notify = broadcast([self._view, *([on_event] if on_event else [])])
        set_threads(self.config.engine.threads)
        self._checkpoints = checkpoint_backends.make_checkpoint_backend(self.config, best)
        self._recorded = recorded = self._checkpoints.recorded
        if not must_exist:
            checkpoint_backends.require_own_store(self.config, recorded)
        elif recorded is None:
            raise nothing_trained(self.config)
        self._has_given_model = model is not None
        self._compilations = CompilationEvents(lambda event: self._notify(event))
        with self._compilations.reported(lambda: self._checkpoints.newest_step or 0):
            given, store = (model, source, held_out), self._checkpoints
            self._setup = set_up(self.config, *given, store, self._notice, trains=not must_exist)
        self.model, self.device = self._setup.model, self._setup.device
        self._data, self._layout = self._setup.data, self._setup.plan
        self.program: Program = self._layout.program
        known = recorded.weights if recorded else None
        self._initial_weights = self.model.weights_fingerprint() if known is None else known
        self._initial_values = recorded.values if recorded else self.model.values_fingerprint()
        self._ignore_initial_values = ignore_initial_values
        self._architecture = own_architecture(
            self.config, self.model, self._layout, self._has_given_model
        )
        self._stop_reason: str | None = None
        self._here: LocalEngines | None = None  # the engines of this process
        self._tokens: TokenGenerator | None = None
        self._tokens_lock, self._is_closed = threading.Lock(), False
        self._lock: FolderLock | None = None  # held from the start of the first process to `close`
        self._manager = self._open_cluster()
        try:
            remote_shards = self._manager.remote_shards() if self._manager else None
            self.store = self._checkpoints.open(
                self.model, self._layout, self.device, self._notice, remote_shards
            )
        except BaseException:
            self._close_cluster()
            raise
        try:
            self._make_engines_and_runner(recorded)
        except BaseException:
            self.close()
            raise

    def _make_engines_and_runner(self, recorded: ResumeState | None) -> None:
        """Create the parts that need the store: engines, step runner, evaluation."""
        if recorded is not None:
            require_same_model(self.config, recorded, self._architecture, self._notice)
        self.resumed_from = self.store.step if recorded else None
        self._runner, self._here = make_runner(self.config, self._setup, self.store, self._manager)
        self.engines: list[Engine] = self._here.engines if self._here else []
        if self._here is not None:
            self.fabric = self._here.fabric
        self._gradient_check = GradientCheck(self._notice)
        self._evaluator = self._make_evaluator()
        self._early_stop = EarlyStop.of_run(self.config, recorded, self.step)
        self._checkpoint_scheduler = CheckpointScheduler(
            self._checkpoints,
            self.config.checkpoint,
            self._extra,
            lambda event: self._notify(event),
            self.resumed_from,
        )

    def _open_cluster(self) -> ClusterManager | None:
        """Start the run's other processes, if it has any."""
        if self.config.cluster.start == "none":
            return None
        require_known_elsewhere(self._has_given_model)
        # Before the rendezvous file is written: a run that trains already has its own.
        self._lock = self._lock_folder()
        try:
            return start_cluster(
                self.config,
                self._setup,
                notify=lambda event: self._notify(event),
                should_stop=lambda: self._stop_reason is not None,
            )
        except BaseException:
            self._lock.release()
            raise

    def _lock_folder(self) -> FolderLock:
        return FolderLock(self.config.run.dir, "run.dir", "training.lock")

    def _close_cluster(self) -> None:
        """End the run's other processes, if any, and unlock the run's folder."""
        if self._manager is not None:
            self._manager.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.store.step

    @property
    def saved_step(self) -> int | None:
        """The step from which the run would resume now; None if nothing is saved."""
        return self._checkpoints.newest_step

    def __repr__(self) -> str:
        return describe(self.config, self.model, self.program, self.step, self._setup.device_names)

    def request_stop(self, reason: str = "a stop was requested") -> None:
        """From any thread: finish the step but no evaluation, save, and return from `train`."""
        self._stop_reason = reason

    def train(self) -> dict[str, Any]:
        """Run to the configured number of steps; return the metrics, and the `steps` of this call.

        Raises:
            NonFiniteError, NoTrainingError: a loss is not finite; a weight does not train.
            DataError: a source failed, which its cause explains, or gave rows that do not fit the
                model. The run resumes at the last committed step.
            CorruptionError, StorageError: stored data is damaged, or data cannot be stored.
        """
        if self._is_best:
            raise no_training()
        if self._data.dataset is not None:
            self._data.dataset.check_sizes()  # of shards that only training reads
        require_held_out(self.config, self._data.held_out)
        if self._recorded is not None:
            require_same_beginning(
                self.config,
                self._recorded,
                self.model,
                self._data.dataset,
                ignore_values=self._ignore_initial_values,
            )
        lock = self._lock or self._lock_folder()
        try:
            require_newest(self.config, self.saved_step, self.step)
            write_record(self.config)
            keep_files_of_model(self.config, self.model)
            with self._view, self._compilations.reported(lambda: self.step):
                return self._train()
        except BaseException as error:
            self._checkpoint_scheduler.end(error)
            raise
        finally:
            if lock is not self._lock:
                lock.release()
            self._stop_reason, self._notify = None, self._listener

    def _train(self) -> dict[str, Any]:
        config, started = self.config, time.perf_counter()
        report = RunReport(config.memory, has_workers=config.cluster.start != "none")
        recording = open_run_files(config, self.request_stop)
        self._notify = broadcast([report, recording, self._listener])
        self._notify(
            run_started(
                config,
                self.model,
                self._layout,
                self.store,
                self._data,
                devices=self._setup.device_names,
                resumed_from=self.step or self.resumed_from,
                early_stop=self._early_stop,
            )
        )
        if (self.resumed_from or 0) == self.step < config.run.steps:  # its first steps here follow
            for text in notices_at_start(config, self._setup, self._recorded):
                self._notice(text)
        if self._evaluator is not None and config.evaluation.every:
            self._evaluator.check()
        if self._early_stop.forgotten is not None:
            self._notice(self._early_stop.forgotten)
        first_step = self.step
        last_loss: float | None = None
        if self.step > self._early_stop.judged_step:  # killed between a step and its evaluation
            self._evaluate_and_judge(is_start=True)
        if self._early_stop.is_due:
            self._notice(
                "the run has stopped early; raise evaluation.early_stop_patience to continue"
            )
            self._stop_reason = "no better held-out loss"
        while self.step < config.run.steps and self._stop_reason is None:
            try:
                last_loss = self.run_step().loss
                self._compilations.raise_failure()
                self._checkpoint_scheduler.poll()
                self._evaluate_and_judge()
            except PenstockError as error:
                is_of_data = isinstance(error, (NonFiniteError, DataError)) or error.is_from_source
                if is_of_data and self.step > first_step:
                    self.save()  # the committed state is valid
                raise
            except InterruptedError:  # a stop was requested while no engine was available
                break
            if self._checkpoint_scheduler.is_due(self.step):
                self._checkpoint_scheduler.begin(self.step)
        self._gradient_check.end(self.store)
        if self.step == first_step and self.step >= config.run.steps:
            self._notice(all_steps_done(config, self.step))
        self.save()
        report.add_behind(self.store.take_flash_traffic())
        summary = self._summary(self.step - first_step, last_loss, started)
        if (measured := report.measured(summary["seconds"])) is not None:
            summary["peak_rss_bytes"] = measured.peak_rss_bytes
            self._notify(measured)
            if (problem := keep_measured(self.model.name, measured)) is not None:
                self._notice(problem)
        if self._stop_reason is not None and self.step < config.run.steps:
            command = f"penstock train {config.run.dir / 'config.yaml'}"
            self._notify(Stopped(self.step, self._stop_reason, command))
        else:
            self._notify(Finished(summary, self.step))
        if recording.failure is not None:
            raise recording.failure
        return summary

    def _summary(self, steps: int, last_loss: float | None, started: float) -> dict[str, Any]:
        best_loss = self._early_stop.best_loss
        return {
            "steps": steps,
            **({} if last_loss is None else {"loss": last_loss}),
            **({} if best_loss is None else {"best_held_out_loss": best_loss}),
            "seconds": time.perf_counter() - started,
            "engine_peak_bytes": self._runner.engine_peak_bytes,
            "store_bytes": sum(self.store.memory_bytes.values()),
        }

    def run_step(self) -> StepDone:
        """Execute one step, report it, and check whether every weight trains."""
        self.store.remember(self._extra())
        done = self._runner.run()
        self._notify(done)
        assert self._runner.commit is not None
        self._gradient_check.observe(self._runner.commit, self.store)
        return done

    def evaluate(self, batches: int | None = None) -> dict[str, float]:
        """Return the metrics of the model on `batches` held-out batches.

        **Returns:** `loss` and `tokens`, or `rows` of a model without tokens; for language models
        `perplexity`, `accuracy` and `held_out_tokens`; for records `exact_match`, `records` and
        `held_out_records` (`penstock.training.evaluation`).
        """
        if self._evaluator is None:
            raise DataError(
                "there is no held-out data: the data set has no validation split, or "
                "Trainer(held_out=...) was not given"
            )
        if batches is not None and batches < 1:
            raise ConfigError(f"batches: expected 1 or more, got {batches}")
        found = self._evaluator.evaluate(batches or self.config.evaluation.batches)
        self.store.take_traffic()
        return found

    def _make_evaluator(self) -> Evaluator | None:
        parts = (self.config, self.model, self._layout, self.store)
        rows = self._data.held_out
        return None if rows is None else Evaluator(*parts, rows, self.device)

    def _evaluate_and_judge(self, is_start: bool = False) -> None:
        """Evaluate if it is due, save the best checkpoint, stop early without improvement."""
        early_stop, due = self._early_stop, evaluation_due(self.config, self.step)
        if self._evaluator is None or due is None or (is_start and due == "last"):
            return
        started = time.perf_counter()
        try:
            found = self._evaluator.evaluate(
                self.config.evaluation.batches,
                lambda: self._stop_reason is not None and self.step < self.config.run.steps,
                lambda batch, of: self._notify(Evaluating(self.step, batch, of)),
            )
        except InterruptedError as stop:  # it was requested; the number of micro-batches done
            if any(stop.args):
                self._notice(unfinished(self.step))
            return
        finally:
            self.store.take_traffic()
        best = early_stop.judge(self.step, found["loss"], is_counted=due == "scheduled")
        self._notify(Evaluated.of(found, self.step, time.perf_counter() - started, best))
        if best and self.config.checkpoint.best:
            self._checkpoint_scheduler.begin(self.step, best=True)
        if early_stop.is_due:
            self.request_stop(f"no better held-out loss in {early_stop.patience} evaluations")
            self._checkpoint_scheduler.begin(self.step, again=is_start)  # no step follows

    def save(self) -> None:
        """Make the last committed step durable; as a checkpoint, if the store is in memory."""
        self._checkpoint_scheduler.save(self.step)

    def _extra(self) -> dict[str, Any]:
        """Return the resume state outside the store."""
        dataset, sparse = self._data.dataset, self._layout.sparse
        in_engines = self._layout.sparse_weights
        return ResumeState(
            trajectory=self._trajectory,
            micro_batch=self._layout.micro_batch,
            slot_bytes=self._layout.slot_bytes,
            products=self._layout.products,
            data=dataset.fingerprint if dataset else None,
            weights=self._initial_weights,
            values=self._initial_values,
            architecture=self._architecture,
            **self._early_stop.to_record(self.config.evaluation.batches),
            sparse_entries=dict(sparse.kept) if sparse else None,
            sparse_products=in_engines.products.as_record() if in_engines else None,
            tokenizer=self._data.tokenizer,
            buffer_seed=self.model.buffer_seed,
            numerics=numerics_here(self.config, self.device),
            **checkpoint_backends.flash_folders(self.config),
        ).to_mapping()

    def close(self) -> None:
        """Abandon a pending checkpoint, and release files, threads and devices."""
        with self._tokens_lock:
            self._is_closed = True
        try:
            if self._tokens is not None:
                self._tokens.close()
            if self._here is not None:
                self._here.close()
            if self.config.cluster.shards == "apart":
                self.store.close()  # while the remote shards are still running
        finally:
            self._close_cluster()
        self._checkpoints.abandon()
        self.store.close()

    def export(
        self,
        folder: str | Path,
        dtype: str = "fp32",
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        packed: bool = False,
    ) -> list[Path]:
        """Write the weights as a Hugging Face folder for `from_pretrained`; return the files.

        Adapters are merged into their base weights. `dtype` is fp32, bf16 or fp16. With `packed`,
        sparse weights are written as values and masks, which only Penstock reads (`model.hf`).
        """
        dataset, out = self._data.dataset, Path(folder)
        return export(self.store, self.model, dataset, out, dtype, max_shard_bytes, packed=packed)

    def export_adapters(self, folder: str | Path, dtype: str = "fp32") -> list[Path]:
        """Write only the adapters, in the format of the PEFT library."""
        return export_adapters(self.config, self.store, self.model, Path(folder), dtype)

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield the generated text after `prompt`, piece by piece.

        `temperature` 0 chooses the most likely token; `top_k` None samples from all tokens.

        **Raises:** `ConfigError` if an argument cannot be used, or after `close`.
        """
        tokens, dataset = self.token_generator(), self._data.dataset
        if dataset is None:
            raise ConfigError(
                "generate needs the data set's tokenizer; this run has none: "
                "token_generator().generate takes token ids"
            )
        return TextGenerator(tokens, dataset.tokenizer()).write(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )

    def token_generator(self) -> TokenGenerator:
        """Return a generator of token ids, which continues token ids with the present weights."""
        with self._tokens_lock:
            if self._is_closed:
                raise closed_error()
            if self._tokens is None:
                parts = (self.config, self.model, self._layout, self.store, self.device)
                self._tokens = make_token_generator(*parts, self._notice)
            return self._tokens

    def _notice(self, text: str) -> None:
        self._notify(Notice(text))
