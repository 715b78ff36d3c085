"""A process that compiles kernels for a run, while the run's own process builds and compiles its
model: the first start of an installation is then shorter.

It is started once for each version of the kernels and each kind of run, if the run computes on
the processor and there are a core and memory for it. Every kernel that it has not compiled when the
run needs it, the run compiles as before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from penstock.config import Config, PresetModel, resolve_preset
from penstock.errors import PenstockError
from penstock.kernels.processor import Processor
from penstock.telemetry import Notice, process_memory

if TYPE_CHECKING:
    from penstock.telemetry import Event, Listener

LEAST_FREE_BYTES = 4 << 30
"""With less free memory, 300 MiB for some seconds could be missed by the run."""
_LANES = 16  # attention's kernels compute heads of multiples of this size


class KernelWorker:
    """The process, which ends with the context at the latest."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._failure: str | None = None

    def start(self, config: Config) -> None:
        """Start the process for a run, unless it would not help or was started before."""
        groups = groups_of(config)
        if not groups or not _has_room(config):
            return
        if not _is_first(" ".join([config.precision, *groups])):
            return
        command = [sys.executable, "-m", "penstock.kernels.compiled_ahead"]
        try:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
            self._process = subprocess.Popen(
                [*command, config.precision, *groups],
                stdin=subprocess.PIPE,  # whose end, for whatever reason, ends the process
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
            )
        except OSError as error:
            self._failure = f"{error.strerror}"

    def watched(self, listener: Listener) -> Listener:
        """Return a listener that passes events on, and gives a notice if the process has failed."""

        def pass_on(event: Event) -> None:
            if (failure := self._failed()) is not None:
                listener(
                    Notice(
                        f"the process that compiles kernels ahead has failed ({failure}); this "
                        "process compiles them when it needs them"
                    )
                )
            listener(event)

        return pass_on

    def end(self) -> None:
        """End the process, if it has not ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def __enter__(self) -> KernelWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def _failed(self) -> str | None:
        """Return why the process has failed, once."""
        if self._process is not None and (code := self._process.poll()) is not None:
            if code:
                self._failure = self._last_line() or _ended_by(code)
            self.end()
        failure, self._failure = self._failure, None
        return failure

    def _last_line(self) -> str:
        assert self._stderr is not None
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def groups_of(config: Config) -> list[str]:
    """Return the groups of `compiled_ahead.GROUPS` that a run needs, as far as its configuration
    and the processor show, in the order in which it needs them; none if too little is known."""
    if not isinstance(config.model, PresetModel) or config.sparsity.method is not None:
        return []
    with contextlib.suppress(PenstockError):  # which the run reports
        preset = resolve_preset(config.model.preset, config.model.overrides)
        groups = ["masters", *_attention_of(preset.task, preset.config, config.precision)]
        if preset.config.get("activation_function") == "gelu_new":
            groups.append("gelu")
        if config.precision == "fp32" and Processor.here().prefers_onednn:
            groups.append("transposition")
        groups += ["loss", "gradients"]
        if config.optimizer.name == "adamw" and config.optimizer.moments == "fp32":
            groups.append("adamw")
        if config.evaluation.every is not None:
            groups.append("evaluation")
        return groups
    return []


def _attention_of(task: str, fields: Mapping[str, Any], precision: str) -> list[str]:
    """Return the group of causal attention, if the model's heads are computed by its kernels."""
    width = fields.get("n_embd") or fields.get("hidden_size") or 0
    heads = fields.get("n_head") or fields.get("num_attention_heads") or 1
    size = fields.get("head_dim") or width // heads
    drops = fields.get("attn_pdrop") or fields.get("attention_dropout")
    if task != "causal_lm" or drops or not size or size % _LANES:
        return []
    if precision == "bf16" and not _has_attention_in_bfloat16():
        return []
    return [f"attention:{size}"]


def _has_attention_in_bfloat16() -> bool:
    """Whether kernels compute attention in bfloat16 on this processor."""
    import torch

    from penstock.compiler import kernel_types, products_for

    return torch.bfloat16 in kernel_types(products_for(Processor.here()))


def _has_room(config: Config) -> bool:
    """Whether this process computes on the processor, and leaves a core and memory."""
    from penstock.engine import choose_target

    if config.memory is not None or config.cluster.start != "none":
        return False
    if len(os.sched_getaffinity(0)) < 2 or process_memory.available_bytes() < LEAST_FREE_BYTES:
        return False
    try:
        return choose_target(config.engine.device).name == "cpu"
    except PenstockError:
        return False


def _is_first(kind: str) -> bool:
    """Whether no process was started for these kernels on such a host; marks that one is."""
    from penstock.calibration import HostKey, kept_file
    from penstock.kernels.code_cache import code_folder

    folder = code_folder()
    if folder is None:  # nothing can be kept
        return False
    name = f"{kept_file(HostKey.here()).stem}-{kind.replace(' ', '-').replace(':', '')}.ahead"
    try:
        (folder / name).touch(exist_ok=False)
    except OSError:
        return False
    return True


def _ended_by(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
