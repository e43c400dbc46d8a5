"""Films written by hand, for what no run in these tests gives: every state of a block, huge pools, crowds."""

import threading
from types import SimpleNamespace

from pagedinfer.trace.recording import Recording
from pagedinfer.views import film
from pagedinfer.views.film import Film
from pagedinfer.views.frame import DECODE, GONE, Lane


class MadeFilm(Film):
    """A film of lines written by hand: what a recording of every feature gives."""

    def __init__(self, num_blocks, block_size, lanes, lines, texts):
        self.lock, self.driving = threading.RLock(), threading.RLock()
        self.lanes = [Lane(i, rid, rid, prompt) for i, (rid, prompt) in enumerate(lanes)]
        self.first_step, self.lines, self.texts, self._keyframes = 0, lines, texts, {}
        lane_of = {lane.rid: lane.number for lane in self.lanes}
        state = SimpleNamespace(block_size=block_size)
        self._camera = SimpleNamespace(
            state=state, num_blocks=num_blocks, lane_of=lane_of, update=lambda: len(lines)
        )


def made(num_blocks, block_size, lanes, lines, texts=()):
    """The recording that stands for such a film."""
    recording = Recording()
    made_film = MadeFilm(num_blocks, block_size, lanes, lines, list(texts))
    film._films[recording] = made_film
    return recording


def everything():
    """Four requests: A and B share blocks 0 to 2, C is swapped out, D has reserved blocks; 20 to 24 are cached."""
    new = [["A", "A", 12], ["B", "B", 14], ["C", "C", 8], ["D", "D", 6]]
    submitted = {
        "s": 0, "b": 0, "m": [0, 0, 128, 0], "say": "step 0", "new": new, "c": {str(i): 1 for i in range(4)},
        "q": [[[], []], [[], [[0, 0], [1, 1], [2, 2], [3, 3]]], [[], []]],
        "r": {str(i): [n, 0, 0] for i, n in enumerate((12, 14, 8, 6))},
    }  # fmt: skip
    planned = {
        "s": 1, "b": 40, "m": [34, 2, 56, 13, 12, 20, 8, 2], "say": "step 1",
        "q": [[[], [[0, 0], [1, 1], [2, 3]]], [[0, 1, 2, 3], []], [[], [[0, 2]]]],
        "r": {"0": [13, 13, 1], "1": [14, 14, 1], "2": [8, 8, 3], "3": [6, 6, 1]},
        "t": {"0": [0, [0, 1, 2, 3]], "1": [0, [0, 1, 2, 4]], "3": [0, [8, 9, 10, 11]]}, "o": {"2": [0, 1]},
        "c": {"0": 3, "1": 2, "2": 6, "3": 2}, "n": {"0": 1, "1": 14, "3": 6}, "w": {"2": 0},
        "k": [[0, 1, -1], [1, 2, 1], [2, 3, 2], [20, 4, 2], [21, 5, 4], [22, 9, -1], [23, 10, 9], [24, 11, 9],
              [16, 12, -1]],
        "i": [[16, 1]], "x": ["swapped out for B, which needs 2 blocks"], "e": [["preempted", 2, 0]],
    }  # fmt: skip
    lines = [submitted, planned]
    return made(
        32, 4, [("A", 12), ("B", 14), ("C", 8), ("D", 6)], lines, ["swapped out for B, which needs 2 blocks"]
    )


def huge_pool(num_blocks, held):
    """A pool of which one request holds `held` blocks from the start on, all filled."""
    line = {
        "s": 0, "b": 64, "m": [16 * held, 0, 16 * (num_blocks - held), held], "say": "step 0: 1 running",
        "new": [["A", "A", 16 * held]], "q": [[[], [[0, 0]]], [[], []], [[], []]],
        "r": {"0": [16 * held, 16 * held, 1]}, "t": {"0": [0, list(range(held))]}, "c": {"0": 3},
    }  # fmt: skip
    return made(num_blocks, 16, [("A", 16 * held)], [line])


def crowd(steps, width):
    """`steps` steps with `width` requests waiting all the time; one of them decodes for a while, then the next."""
    lines, each = [], 10
    for step in range(steps):
        turn = step // each
        line = {
            "s": step,
            "b": 64,
            "m": [16, 0, 16 * 63, 1],
            "say": f"step {step}: 1 running, {width} waiting",
        }
        if step == 0:
            lanes = range(width)
            line |= {
                "new": [[f"R{i}", f"R{i}", 4] for i in lanes], "r": {str(i): [5, 4, 0] for i in lanes},
                "c": {str(i): 1 for i in lanes}, "q": [[[], []], [[], [[i, i] for i in lanes]], [[], []]],
            }  # fmt: skip
        if step % each == 1:
            if turn:
                line["gone"] = [turn - 1]
            line.setdefault("c", {}).update({str(turn): DECODE} | ({str(turn - 1): GONE} if turn else {}))
            line["q"] = [[[turn - 1] if turn else [], [[0, turn]]], [[turn], []], [[], []]]
            line["t"] = {str(turn): [0, [turn % 64]]}
        lines.append(line)
    return made(64, 16, [(f"R{i}", 4) for i in range(width)], lines)
