"""Boxes that make up a tensor exactly once, and such that do not."""

from __future__ import annotations

import itertools
import random

import pytest

from hfai.checkpoint.coverage import fault


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((), [((), ())], ""),
        ((), [((), ()), ((), ())], "overlap"),
        ((), [], "lack 1 of its 1 items"),
        ((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))], ""),
        ((4,), [((0,), (2,)), ((2,), (2,))], ""),
        ((4,), [((0,), (2,))], "lack 2 of its 4 items"),
        ((4,), [((0,), (3,)), ((2,), (1,))], "overlap"),
        ((4,), [((2,), (4,))], "reach beyond it"),
    ],
)
def test_the_fault_of_boxes_is_named(
    shape: tuple[int, ...], boxes: list[object], words: str
) -> None:
    assert fault(shape, boxes) == words  # type: ignore[arg-type]


def test_it_says_what_counting_every_item_says() -> None:
    random.seed(0)
    whole = 0
    for _ in range(300):
        shape = (random.randint(1, 4), random.randint(1, 4))
        boxes = []
        rows = sorted({0, shape[0], random.randint(0, shape[0])})
        for begin, end in itertools.pairwise(rows):
            columns = sorted({0, shape[1], random.randint(0, shape[1])})
            for left, right in itertools.pairwise(columns):
                boxes.append(((begin, left), (end - begin, right - left)))
        if random.random() < 0.5:
            at = random.randrange(len(boxes))
            (_, sizes) = boxes[at]
            moved = (random.randint(0, shape[0] - sizes[0]), random.randint(0, shape[1] - sizes[1]))
            boxes[at] = (moved, sizes)
        counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
        for offsets, sizes in boxes:
            spans = (range(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            for place in itertools.product(*spans):
                counts[place] += 1
        expected = all(count == 1 for count in counts.values())
        assert (fault(shape, boxes) == "") == expected, (shape, boxes)
        whole += expected
    assert 100 < whole < 290
