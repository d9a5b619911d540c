"""Spectral: the directions of kinds against the eigenvectors of all cosines, and noise."""

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


def twin(sketch: np.ndarray, kinds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines between clients and eigenvalues, by LAPACK on the matrix of all cosines."""
    unit = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
    unit -= unit.mean(0)
    values, vectors = np.linalg.eigh(unit @ unit.T)
    place = vectors[:, -kinds:] * values[-kinds:]
    place /= np.linalg.norm(place, axis=1, keepdims=True)
    return place @ place.T, values


def kinds(sketch: np.ndarray) -> tuple[np.ndarray, float]:
    return spectral.positions(sketch, np.random.default_rng(3), clear=2)


@pytest.mark.parametrize("groups", [2, 4, 10])
def test_directions_are_the_largest_eigenvectors_of_all_cosines(groups):
    sketch = drawn(80, 1.5, groups)
    place, explained = kinds(sketch)
    assert place.shape == (80, groups - 1)
    cosines, values = twin(sketch, groups - 1)
    assert abs(place @ place.T / spectral.STEP**2 - cosines).max() < 2e-3
    assert explained == pytest.approx(values[1 - groups :].sum() / values.sum(), rel=1e-3)
    kind = np.arange(80) % groups
    assert ((cosines > 0.5) == (kind == kind[:, None])).all()


def test_noise_has_no_kinds_and_unlike_shares_of_classes_are_none():
    assert not any(kinds(drawn(60, 0.0, entries=64, seed=i))[0].any() for i in range(100))
    # each client of one kind has drawn 20 images of 10 classes
    rng = np.random.default_rng(4)
    shares, of_class = rng.multinomial(20, np.ones(10) / 10, 60) / 20, rng.normal(size=(10, 512))
    rows = rng.normal(size=(60, 512)) + 2 * shares @ of_class
    sketch = np.rint(127 * rows / abs(rows).max(1, keepdims=True)).astype(np.int8)
    found = [spectral.positions(sketch, rng, clear)[0].shape[1] for clear in (1, 2)]
    assert found[0] > 0 == found[1]


def test_places_depend_on_no_order_and_absent_clients_have_none():
    sketch = drawn(60, 0.9)
    place, explained = kinds(sketch)
    order = np.random.default_rng(1).permutation(60)
    other, again = kinds(sketch[order])
    assert (other == place[order]).all() and again == explained
    absent = np.concatenate([sketch, 0 * sketch[:5]])
    third, same = kinds(absent)
    assert (third[:60] == place).all() and (third[60:] == 0).all() and same == explained
