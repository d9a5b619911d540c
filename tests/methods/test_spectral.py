"""Spectral: the directions of kinds against the eigenvectors of all cosines, and noise."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from dpfl_mpi.methods import spectral


def drawn(
    n: int, strength: float, groups: int = 4, entries: int = 512, seed: int = 0
) -> np.ndarray:
    """Return sketches of clients of `groups` kinds: noise, what all share, and their kind's."""
    rng = np.random.default_rng(seed)
    of_kind, of_all = rng.normal(size=(groups, entries)), rng.normal(size=entries)
    rows = rng.normal(size=(n, entries)) + of_all + strength * of_kind[np.arange(n) % groups]
    return np.rint(127 * rows / abs(rows).max(1, keepdims=True)).astype(np.int8)


def twin(sketch: np.ndarray, directions: int) -> np.ndarray:
    """Return cosines between clients in the first directions, by LAPACK on all cosines."""
    unit = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
    unit -= unit.mean(0)
    values, vectors = np.linalg.eigh(unit @ unit.T)
    position = vectors[:, -directions:] * np.sqrt(values[-directions:])
    position /= np.linalg.norm(position, axis=1, keepdims=True)
    return position @ position.T


def positions(sketch: np.ndarray) -> np.ndarray:
    return spectral.positions(sketch, np.random.default_rng(3))


@pytest.mark.parametrize("groups", [2, 4, 10])
def test_directions_are_the_largest_eigenvectors_of_all_cosines(groups):
    sketch = drawn(80, 1.5, groups)
    found = positions(sketch)
    assert found.shape == (80, groups - 1)
    # an entry of a unit sketch is rounded to about 1/180 of its size
    assert abs(found @ found.T / spectral.STEP**2 - twin(sketch, groups - 1)).max() < 5e-3
    kind = np.arange(80) % groups
    moved = spectral.gathered(found, np.random.default_rng(4))
    assert ((2 * moved @ moved.T > spectral.STEP**2) == (kind == kind[:, None])).all()


def test_positions_of_one_kind_gather_and_one_that_is_alone_stays():
    # two kinds around (1, 0) and (0, 1), of which some lie 40 degrees away, and one far from all
    angles = np.deg2rad([0, 10, -40, 90, 100, 130, 225])
    found = np.rint(spectral.STEP * np.stack([np.cos(angles), np.sin(angles)], 1))
    moved = spectral.gathered(found, np.random.default_rng(0))
    degrees = np.rad2deg(np.arctan2(moved[:, 1], moved[:, 0]))
    # near: 0 and 10 to each other and to -40; -40 to all within 60; 90, 100 and 130 to one another
    assert degrees[:3] == pytest.approx([mean(0, 10, -40)] * 3, abs=0.01)
    assert degrees[3:6] == pytest.approx([mean(90, 100, 130)] * 3, abs=0.01)
    assert (moved[6] == found[6]).all()


def mean(*degrees: float) -> float:
    """Return the direction of the sum of unit vectors."""
    angles = np.deg2rad(degrees)
    return float(np.rad2deg(np.arctan2(np.sin(angles).sum(), np.cos(angles).sum())))


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return on how much two looks agree that have these sketches."""
    others = [np.delete(np.arange(len(a)), k) for k in range(len(a))]
    fed = SimpleNamespace(n=len(a), ids=np.arange(len(a)), tell=lambda share: share)
    fed.candidates = lambda: SimpleNamespace(of=others.__getitem__, room=np.full(len(others), 9))
    found = [spectral.positions(look, np.random.default_rng(3)) for look in (a, b)]
    return spectral.agreement(fed, *(spectral.gathered(f, np.random.default_rng(4)) for f in found))


def test_two_looks_agree_on_kinds_and_not_on_noise():
    noise = [drawn(60, 0.0, entries=64, seed=i) for i in range(41)]
    assert max(agreement(a, b) for a, b in pairwise(noise)) < spectral.AGREE
    kinds = drawn(40, 1.5)
    assert agreement(kinds, kinds) == 1
    assert agreement(kinds, drawn(40, 1.5, seed=1)) > 0.95
    assert agreement(kinds, 0 * kinds) == agreement(0 * kinds, 0 * kinds) == 0


def test_agreement_by_hand():
    """Four clients on a circle: kin are those within half of the largest cosine."""

    def at(*degrees: float) -> np.ndarray:
        angles = np.deg2rad(degrees)
        return np.rint(spectral.STEP * np.stack([np.cos(angles), np.sin(angles)], 1))

    fed = SimpleNamespace(n=4, ids=np.arange(4), tell=lambda share: share)
    others = [np.delete(np.arange(4), k) for k in range(4)]
    fed.candidates = lambda: SimpleNamespace(of=others.__getitem__, room=np.full(len(others), 9))
    # kin before: 0 and 1, 2 and 3; after: 0, 1 and 2, and 3 has none
    found = spectral.agreement(fed, at(0, 0, 180, 180), at(0, 0, 10, 180))
    # 1 of 2, 1 of 2, 0 of 3, 0 of 1
    assert found == pytest.approx((1 / 2 + 1 / 2 + 0 + 0) / 4)


def test_of_many_candidates_a_few_are_compared(monkeypatch):
    monkeypatch.setattr(spectral, "SAMPLE", 5)
    monkeypatch.setattr(spectral, "MOST", 4)
    run, others = SimpleNamespace(seed=1), np.arange(3, 20)
    fed = SimpleNamespace(run=run, round=2)
    for room, few in ((0, 5), (1, 5), (3, 12), (5, 17)):
        candidates = SimpleNamespace(of=lambda k: others, room=np.full(3, room))
        found = [spectral.compared(fed, k, candidates) for k in range(3)]
        assert all(len(set(f)) == few and set(f) <= set(others) for f in found)
        assert ([f.tolist() for f in found] == [others.tolist()] * 3) == (few == 17)


def test_positions_depend_on_no_order_and_absent_clients_have_none():
    sketch = drawn(60, 0.9)
    found = positions(sketch)
    order = np.random.default_rng(1).permutation(60)
    assert (positions(sketch[order]) == found[order]).all()
    third = positions(np.concatenate([sketch, 0 * sketch[:5]]))
    assert (third[:60] == found).all() and (third[60:] == 0).all()
