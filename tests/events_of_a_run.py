"""Events of a run that never happened, for tests of what watches one."""

from pathlib import Path

from penstock.telemetry.events import RunStarted, StepDone


def started(run_dir="runs/x", steps=100, resumed_from=None):
    return RunStarted(
        run_dir=Path(run_dir),
        model="gpt2",
        parameters=124_439_808,
        trainable_parameters=124_439_808,
        weight_bytes=497_759_232,
        state_bytes=2 << 30,
        engine_bytes=4 << 30,
        steps=steps,
        tokens_per_step=16384,
        resumed_from=resumed_from,
        precision="fp32",
        device="cpu",
        micro_batch=4,
        micro_batches=8,
        recompute_stages=3,
        stages=14,
        steps_per_epoch=80.0,
    )


def step(number, loss=None, seconds=2.0):
    return StepDone(
        step=number,
        loss=10.0 / number if loss is None else loss,
        learning_rate=3e-4,
        grad_norm=2.0,
        clip_scale=0.5,
        seconds=seconds,
        tokens=16384,
        streamed_bytes=1_000_000_000,
        gradient_bytes=500 * 2**20,
        engine_bytes=3 << 30,
        store_bytes=1 << 30,
    )
