"""Whatever one device of a group meets, no other waits for it for ever, and the driver hears of it.

What devices do together is a barrier here: whoever comes alone hangs until the test fails.
"""

import threading
from types import SimpleNamespace

import pytest

from penstock.collectives.tree_reduce import PartialSum
from penstock.engine import DeviceThread, Member, MemoryAccount, Rounds
from penstock.errors import GroupError

SIZE, STAGES = 3, 4
PATIENCE = 20  # seconds, of a barrier; never reached unless something is wrong


class Pending:
    def __init__(self, nodes):
        self._nodes = nodes

    def wait(self):
        return self._nodes


class Device:
    """Engine and slots of a device that computes nothing, and fails as it is told."""

    def __init__(self, rank, meet, failing):
        self.rank, self._meet, self._failing = rank, meet, failing
        self.program, self.memory = object(), MemoryAccount()
        self.stages_ahead = 1
        self.log = []

    def _maybe_fail(self, *what):
        error = self._failing.pop((self.rank, *what), None)
        if error is not None:
            raise error
        self.log.append(what)

    def begin(self, batch):
        self._maybe_fail("begin", batch)

    def forward(self, stage):
        self._maybe_fail("forward", stage)

    infer = forward

    def turn(self, stage):
        self._maybe_fail("turn", stage)
        self._meet()
        return Pending([PartialSum(0, stage, ())])

    def backward(self, stage):
        self._maybe_fail("backward", stage)
        self._meet()
        return Pending([PartialSum(0, stage, ())])

    def losses(self):
        return [float(self.rank)]

    def results(self):
        self._maybe_fail("results")
        return [(float(self.rank),)]

    def is_finite(self, stage):
        return True

    # As slots

    def load(self, stage, weights):
        self._maybe_fail("load", stage)
        self._meet()

    def reset(self):
        pass

    def skip_stage(self, stage, returns_gradients):
        self._maybe_fail("pass over", stage)
        if returns_gradients:
            self._meet()


class Group:
    def __init__(self, failing=None):
        barrier = threading.Barrier(SIZE)
        self.aborted = threading.Event()
        self.left = []

        def meet():
            try:
                barrier.wait(timeout=PATIENCE)
            except threading.BrokenBarrierError:
                raise GroupError("another device has left") from None

        def abort():
            self.aborted.set()
            barrier.abort()

        self.rounds = Rounds(abort)
        self.devices = [Device(rank, meet, failing or {}) for rank in range(SIZE)]
        self.engines = [
            DeviceThread(
                f"device {rank}",
                lambda rank=rank, device=device: Member(
                    device, device, lambda: self.left.append(rank)
                ),
                self.rounds,
            )
            for rank, device in enumerate(self.devices)
        ]
        for engine in self.engines:
            engine.start()

    def step(self, number=0):
        """Drive the engines as a step does; return what came of it."""
        engines, last = self.engines, STAGES - 1
        for engine in engines:
            engine.begin(number)
        for stage in range(STAGES):
            for engine in engines:
                engine.load(stage, ())
            if stage < last:
                for engine in engines:
                    engine.forward(stage)
        waiting = [engine.turn(last) for engine in engines]
        losses = [loss for engine in engines for loss in engine.losses()]
        for stage in range(last - 1, -1, -1):
            for engine in engines:
                engine.load(stage, ())
            parts = [engine.backward(stage) for engine in engines]
            [part.wait() for part in waiting]
            waiting = parts
        return losses, [part.wait()[0].index for part in waiting]

    def close(self):
        self.rounds.close()
        assert not any(engine._thread.is_alive() for engine in self.engines)


@pytest.fixture
def group(request):
    made = Group(getattr(request, "param", None))
    yield made
    made.close()


GOOD = ([0.0, 1.0, 2.0], [0, 0, 0])


def test_a_step_gives_every_engine_its_calls_in_order(group):
    assert group.step(1) == GOOD
    assert group.step(2) == GOOD
    loads = [0, 1, 2, 3, 2, 1, 0]
    for device in group.devices:
        assert [stage for what, stage in device.log if what == "load"] == loads * 2
        assert [entry for entry in device.log if entry[0] == "begin"] == [
            ("begin", 1),
            ("begin", 2),
        ]
    group.rounds.close()
    assert sorted(group.left) == [0, 1, 2]


EVENTS = [("begin", 0), ("forward", 0), ("forward", 2), ("turn", 3), ("backward", 2)]
EVENTS += [("backward", 0), ("load", 1)]


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("event", EVENTS, ids=[f"{what}-{number}" for what, number in EVENTS])
def test_error_of_one_device_is_raised_and_the_next_step_succeeds(event, rank):
    group = Group({(rank, *event): ValueError("out of order")})
    with pytest.raises(ValueError, match="out of order") as caught:
        group.step()
    assert caught.value.__notes__ == [f"on device {rank}, one of engine.devices"]
    assert group.step() == GOOD
    assert not group.aborted.is_set()
    group.close()


def test_results_of_each_device_raise_its_error():
    group = Group({(1, "results"): RuntimeError("out of memory")})
    try:
        assert [group.engines[rank].results() for rank in (0, 2)] == [[(0.0,)], [(2.0,)]]
        with pytest.raises(RuntimeError, match="out of memory"):
            group.engines[1].results()
    finally:
        group.rounds.close()


def test_every_device_may_fail_at_once():
    group = Group({(rank, "forward", 1): ValueError(str(rank)) for rank in range(SIZE)})
    with pytest.raises(ValueError, match=r"[012]"):
        group.step()
    assert group.step() == GOOD
    group.close()


@pytest.mark.parametrize("given", [1, 2])
@pytest.mark.parametrize("call", ["load", "turn"])
def test_caller_interrupted_between_engines_can_start_a_new_step(call, given, group):
    for engine in group.engines:
        engine.begin(0)
    for engine in group.engines[:given]:
        if call == "load":
            engine.load(0, ())
        else:
            engine.turn(0)
    assert group.step() == GOOD


def test_caller_interrupted_at_begin_can_start_a_new_step(group):
    group.step()
    group.engines[0].begin(0)
    assert group.step() == GOOD


def test_close_during_a_step_leaves_no_thread():
    group = Group()
    for engine in group.engines:
        engine.begin(0)
    group.engines[0].load(0, ())
    group.close()
    assert sorted(group.left) == [0, 1, 2]


def test_closed_group_refuses_a_step(group):
    assert group.step() == GOOD
    group.close()
    with pytest.raises(GroupError, match=r"were released by close\(\); create a new Trainer"):
        group.step()


def test_failed_collective_ends_the_group_without_deadlock():
    group = Group({(1, "forward", 1): ValueError("first"), (1, "pass over", 1): OSError("lost it")})
    with pytest.raises((ValueError, GroupError)):
        group.step()
    assert group.aborted.is_set()
    with pytest.raises(
        GroupError, match=r"can no longer communicate \(lost it\); start the run again"
    ):
        group.step()
    group.close()


def test_weights_are_released_only_after_all_devices_read_them(group):
    read = threading.Event()
    devices = [SimpleNamespace(load=device.load) for device in group.devices]

    def slowly(stage, weights):
        read.wait(timeout=0.2)  # the others are done by then
        devices[2].load(stage, weights)
        read.set()

    group.devices[2].load = slowly
    for engine in group.engines:
        engine.begin(0)
    for engine in group.engines:
        engine.load(0, ())
    assert read.is_set()


def test_error_during_device_setup_is_raised():
    rounds = Rounds(lambda: None)

    def build():
        raise MemoryError("no room")

    thread = DeviceThread("device 0", build, rounds)
    with pytest.raises(MemoryError, match="no room"):
        thread.start()
    rounds.close()
    assert not thread._thread.is_alive()
