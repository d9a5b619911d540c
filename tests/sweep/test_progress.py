"""The table of a sweep: its columns, its refreshing on a terminal, what a log gets."""

import io
import re

from dpfl_mpi.sweep.known import Row
from dpfl_mpi.sweep.table import Live, lines, screen, summary

NONE = float("nan")
LONG = "image_folder-pathological-random_graph-Buniform:2:20-s{}-300df09d"
ROWS = [
    Row("digits-pathological-dpfl-B8-s1-0aa53c1e", "finished", 20, 20, 0.973),
    Row("digits-pathological-dpfl-B8-s2-93be07f2", "running", 7, 20, 0.9012),
    Row("digits-pathological-dpfl-B8-s3-5d7f11c0", "waiting", -1, 20, NONE),
]


def seen(text: str) -> list[str]:
    """Return the screen that a terminal shows after this text: lines, each cleared before, over those that it went up by, and nothing below them."""
    rows: list[str] = []
    first, *later = re.split(r"\x1b\[(\d+)A\r", text)
    for up, drawn in zip(["0", *later[::2]], [first, *later[1::2]], strict=True):
        *cleared, end = drawn.split("\n")
        assert end == "\x1b[J" and all(line.startswith("\x1b[2K") for line in cleared)
        rows = [*rows[: len(rows) - int(up)], *(line.removeprefix("\x1b[2K") for line in cleared)]
    return rows


def test_the_table_word_for_word():
    assert lines(ROWS) == [
        "run                                      state     round  test %",
        "digits-pathological-dpfl-B8-s1-0aa53c1e  finished  20/20   97.30",
        "digits-pathological-dpfl-B8-s2-93be07f2  running    7/20   90.12",
        "digits-pathological-dpfl-B8-s3-5d7f11c0  waiting       -       -",
    ]
    assert summary(ROWS) == "1 finished, 1 running, 1 waiting of 3"


def test_nothing_is_wider_than_the_terminal_and_the_ends_of_names_stay():
    rows = [Row(LONG.format(s), "unreadable", 1234, 5000, 1.0) for s in (1, 2)]
    table = screen(rows, 80, 24)
    assert max(map(len, table)) == 79  # a full last column would begin a new line on some terminals
    assert table[1].startswith("…") and "-s1-300df09d  unreadable  1234/5000  100.00" in table[1]
    assert max(map(len, lines(rows))) > 80  # in a log names are whole


def test_a_low_terminal_shows_what_moves():
    states = ["finished"] * 10 + ["running"] * 2 + ["waiting"] * 18
    rows = [Row(f"run{i:02d}", state, -1, 5, NONE) for i, state in enumerate(states)]
    table = screen(rows, 80, 10)
    assert len(table) == 9
    assert [line.split()[0] for line in table[1:-2]] == ["run10", "run11", "run12", "run13", "run14", "run15"]
    assert table[-2:] == ["… and 24 more", "10 finished, 2 running, 18 waiting of 30"]


def test_it_is_refreshed_in_place(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(out := io.StringIO(), "isatty", lambda: True)
    live = Live(out)
    live.show(ROWS)
    once = out.getvalue()
    live.show(ROWS)
    assert out.getvalue() == once  # nothing changed, nothing flickers
    later = [ROWS[0], Row(ROWS[1].name, "finished", 20, 20, 0.95), Row(ROWS[2].name, "running", 0, 20, 0.5)]
    live.show(later)
    assert seen(out.getvalue()) == [*lines(later), "2 finished, 1 running of 3"]
    live.end(later[:2])
    assert seen(out.getvalue()) == [*lines(later[:2]), "2 finished of 2"]


def test_a_log_gets_changes_of_state_and_the_table_at_the_end():
    out = io.StringIO()
    live = Live(out)
    live.show(ROWS)
    live.show([ROWS[0], Row(ROWS[1].name, "running", 8, 20, 0.91), ROWS[2]])
    assert out.getvalue() == ""
    later = [ROWS[0], Row(ROWS[1].name, "finished", 20, 20, 0.95), Row(ROWS[2].name, "running", -1, 20, NONE)]
    live.show(later)
    assert [line[10:] for line in out.getvalue().splitlines()] == [
        "digits-pathological-dpfl-B8-s2-93be07f2  finished  round 20/20  test 95.00 %",
        "digits-pathological-dpfl-B8-s3-5d7f11c0  running",
    ]
    live.end(later)
    assert out.getvalue().splitlines()[2:] == [*lines(later), "2 finished, 1 running of 3"]
    assert "\x1b" not in out.getvalue()
