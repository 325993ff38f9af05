import os
import signal

import pytest
import torch.distributed as dist

from dflash_dist.errors import UserError
from dflash_dist.train.control import Control


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_heard_though_a_library_took_the_signal(number: signal.Signals) -> None:
    """LLVM installs handlers of its own at the first kernel that Triton compiles in the process."""
    control = Control(dist.HashStore(), 0)
    before = signal.getsignal(number)
    try:
        control.listen((number,))
        signal.signal(number, signal.SIG_IGN)
        assert control.stop_step() is None
        os.kill(os.getpid(), number)
        assert control.stop_step() is None, "the lead names the step"
        control.lead_stop(step=7, lag_steps=1)
        assert control.stop_step() == 9
    finally:
        signal.signal(number, before)


def test_what_rank_0_finds_is_taken_by_all() -> None:
    store = dist.HashStore()
    found = {"cost_token_us": 0.1 + 0.2, "cost_fixed_us": None}
    assert Control(store, 0).from_rank_0("costs", lambda: found) == found
    for rank in (1, 2):
        assert Control(store, rank).from_rank_0("costs", lambda: pytest.fail("rank 0 decides")) == found


def test_facts_that_differ_are_shown_with_their_keys() -> None:
    store = dist.HashStore()
    Control(store, 0).agree_on_command(["train.seed: 1", "evaluate.seed: 0"])
    Control(store, 1).agree_on_command(["train.seed: 1", "evaluate.seed: 0"])
    with pytest.raises(
        UserError, match=r"rank 2 .*\(train.seed: 0; evaluate.seed: 1 instead of train.seed: 1; evaluate"
    ):
        Control(store, 2).agree_on_command(["train.seed: 0", "evaluate.seed: 1"])
