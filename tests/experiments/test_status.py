from __future__ import annotations

import io

from experiments.status import Status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_passing_line_leaves_nothing_on_a_terminal() -> None:
    stream = Terminal()
    status = Status(stream)
    status.busy("loading")
    status.say("done")
    # What a terminal shows: the text behind the last return to the line's start and erasure.
    assert stream.getvalue().split("\r\x1b[K")[-1] == "done\n"


def test_lines_stay_elsewhere() -> None:
    stream = io.StringIO()
    status = Status(stream)
    status.busy("loading")
    status.busy("a detail", terminal_only=True)
    status.clear()
    assert stream.getvalue() == "loading\n"


def test_progress_has_rate_and_time_left_and_is_rare() -> None:
    stream = io.StringIO()
    status = Status(stream)
    status.progress(0, 10, 5, 0.01)  # too early for a rate
    for _ in range(100):
        status.progress(2, 10, 300, 20.0)
    assert stream.getvalue() == "2/10 done, 15.0 tokens/s, 1 min 20 s left\n"


def test_progress_without_a_finished_request_knows_no_time() -> None:
    stream = Terminal()
    Status(stream).progress(0, 10, 30, 2.0)
    assert stream.getvalue().endswith("0/10 done, 15.0 tokens/s, unknown time left")
