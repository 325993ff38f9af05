"""Who asks for a window of a run, and the rank that answers: by files alone, without a run."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from dflash_dist.errors import UserError
from dflash_dist.train import window
from dflash_dist.train.run_folder import LOCK
from dflash_dist.train.window import ANSWER, REQUEST, Request, Requests, ask_window


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "profile").mkdir()
    return tmp_path


def ask(run_folder: Path, number: int, steps: object = 3) -> None:
    request = {"number": number, "steps": steps, "stack_steps": 0}
    (run_folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")


def test_a_request_waits_until_the_window_before_it_is_over(run_folder: Path) -> None:
    requests = Requests(run_folder, ahead=4, total_steps=100, ranks=2, rank=1)
    ask(run_folder, 1)
    assert requests.take(10) == (14, Request(1, 3, 0))
    assert json.loads((run_folder / ANSWER).read_text())["request"] == 1 and not (run_folder / REQUEST).exists()
    ask(run_folder, 2)
    assert all(requests.take(step) is None for step in range(11, 17))
    assert json.loads((run_folder / ANSWER).read_text())["request"] == 1
    assert requests.take(17) == (21, Request(2, 3, 0))


def test_a_request_that_the_run_is_too_short_for_is_answered_so(run_folder: Path) -> None:
    requests = Requests(run_folder, ahead=4, total_steps=15, ranks=2, rank=1)
    ask(run_folder, 1)
    assert requests.take(10) is None
    assert json.loads((run_folder / ANSWER).read_text())["fits"] is False
    ask(run_folder, 2, steps=1)
    assert requests.take(11) == (15, Request(2, 1, 0))


@pytest.mark.parametrize("steps", ["3", -1, None, 1.5, True])
def test_a_request_that_is_none_disturbs_no_run(run_folder: Path, steps: object) -> None:
    ask(run_folder, 1, steps)
    assert Requests(run_folder, ahead=4, total_steps=100, ranks=2, rank=1).take(10) is None


def test_a_run_that_cannot_answer_goes_on(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as on a full disk, or in a folder that another user made to ask: it warns once, and records nothing."""
    requests = Requests(run_folder, ahead=4, total_steps=100, ranks=2, rank=1)
    ask(run_folder, 1)
    (run_folder / ANSWER).mkdir()  # which nobody can write as a file, not even root
    assert [requests.take(step) for step in (10, 11, 12)] == [None, None, None]
    assert capsys.readouterr().err.count("warning: no trace is taken") == 1


def test_two_do_not_ask_at_once(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would take the first one's request away, who would wait to the run's end."""
    with (run_folder / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = os.open(run_folder / "profile", os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another command waits"):
            ask_window(run_folder, 3, 0, print)
        assert not (run_folder / REQUEST).exists()
        os.close(other)
        monkeypatch.setattr(window, "_ask", lambda *_: 1)
        ask_window(run_folder, 3, 0, print)
