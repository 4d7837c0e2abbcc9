"""The split of the `code` pair: nothing of a held-out file is in training, near copies included."""

from __future__ import annotations

from launch.demo_training.data import split


def lines(start: int, count: int) -> str:
    return "".join(f"    x{i} = {i}\n\n" for i in range(start, start + count))


def test_a_near_copy_of_a_held_out_file_is_left_out() -> None:
    held_out = {"held.py": lines(0, 100)}
    train = {
        "own.py": lines(1000, 100),
        "copy.py": lines(0, 100).replace("    ", "\t"),
        "part.py": lines(2000, 100) + lines(0, 12),
        "a-line.py": lines(3000, 100) + lines(0, 4),
    }
    made = split(train, held_out)
    assert set(made.train) == {"own.py", "a-line.py"} and made.held_out == held_out
    assert made.near_copies == ("copy.py", "part.py")


def test_a_small_file_inside_a_held_out_one_is_left_out() -> None:
    """Measured from both sides: few of the held-out file's passages may be all of the other's."""
    made = split({"small.py": lines(10, 6), "own.py": lines(1000, 9)}, {"held.py": lines(0, 500)})
    assert made.near_copies == ("small.py",)
