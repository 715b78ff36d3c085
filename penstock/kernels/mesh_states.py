"""The states of simulated cores: for how many ticks each was busy, starved and blocked."""

from penstock.kernels.compilation import called
from penstock.kernels.mesh_tables import (
    CORE_AT,
    CORE_NUMBER,
    CORES,
    NOW,
    STATE,
    STATE_SINCE,
    STATE_SUMS,
    TRACE_STATES,
    TRACE_TICKS,
    TRACE_WINDOWS,
)


@called
def account(t, block, now):
    """Add the ticks up to now to the sums of a core's state, and to the windows of the trace."""
    row = block + t[CORE_AT]
    since, state = t[row + STATE_SINCE], t[row + STATE]
    t[row + STATE_SINCE] = now
    t[row + STATE_SUMS + state] += now - since
    span = t[TRACE_TICKS]
    if span == 0:
        return
    window = since // span
    while since < now and window < t[TRACE_WINDOWS]:
        end = min(now, (window + 1) * span)
        place = (window * t[CORES] + t[block + CORE_NUMBER]) * 3 + state
        t[t[TRACE_STATES] + place] += end - since
        since = end
        window += 1


@called
def enter_state(t, block, state):
    """Change the state of a core."""
    if t[block + t[CORE_AT] + STATE] != state:
        account(t, block, t[NOW])
        t[block + t[CORE_AT] + STATE] = state
