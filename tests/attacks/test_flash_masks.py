"""Hostile records of masks in the journal of a store on flash: each is refused."""

import copy
import shutil

import pytest
from bounded_memory import bounded_memory
from sparse_training import train_sparse
from store_programs import flash_store, make_program, random_weights
from test_flash_files import rewritten, verified, with_content

from penstock.errors import CorruptionError
from penstock.sparsity import ChangeTimes, DropFraction, SparseEvolutionaryTraining
from penstock.store import MaskRule

# To hang is to fail; fixtures may compile kernels first.
pytestmark = pytest.mark.timeout(30, func_only=True)

SPARSE = make_program(({"embed": (50, 16)}, {"block": (70, 70)}), sparse={"block": 2450})
MASKS = MaskRule(
    SparseEvolutionaryTraining(ChangeTimes(1, 9, 1), DropFraction(0.3, 9)),
    1,
    "random",
    {"block": 0.5},
)


@pytest.fixture(autouse=True)
def _little_memory():
    with bounded_memory():
        yield


def sparse_opened(folder):
    return flash_store(SPARSE, folder, masks=MASKS, dram_bytes=500_000)


@pytest.fixture(scope="module")
def sparse_original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse") / "flash"
    store = sparse_opened(folder)
    store.load(random_weights(SPARSE, 1).items())
    train_sparse(store, 2)
    store.make_durable()
    store.close()
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": None},
        {"masks": {}},
        {"masks": {"other": [0, 9, 2450, 0]}},
        {"masks": {"block": None}},
        {"masks": {"block": [0, 9, 2450]}},
        {"masks": {"block": [3, 9, 2450, 0]}},
        {"masks": {"block": [-1, 9, 2450, 0]}},
        {"masks": {"block": [0, 1 << 40, 2450, 0]}},
        {"masks": {"block": [0, 0, 2450, 0]}},
        {"masks": {"block": [0, 9, 2451, 0]}},
        {"masks": {"block": [0, 9, -1, 0]}},
        {"masks": {"block": [0, 9, 2450, 1]}},
        {"masks": {"block": [0, 9, 2450, True]}},
        {"changes": None},
        {"changes": []},
        {"changes": [5]},
        {"changes": [[2, 1]]},
        {"changes": [[1, 9]]},
        {"changes": [[-1, 1]]},
        {"changes": [["1"]]},
        {"updates": 3},
        {"updates": None},
    ],
)
def test_invalid_masks_are_refused(sparse_original, tmp_path, changes):
    folder = shutil.copytree(sparse_original, tmp_path / "flash")
    rewritten(folder / "journal", lambda r: [*r[:-1], with_content(r[-1], **changes)])
    for look in (sparse_opened, verified):
        with pytest.raises(CorruptionError, match="the masks in the journal's record of step 2 do"):
            look(folder)


@pytest.mark.parametrize("kept", [0, 1, 2449])
def test_mask_of_another_number_of_entries_is_refused(sparse_original, tmp_path, kept):
    folder = shutil.copytree(sparse_original, tmp_path / "flash")

    def changed(records):
        place, size, _, at = records[-1].content["masks"]["block"]
        masks = {"masks": {"block": [place, size, kept, at]}}
        return [*records[:-1], with_content(records[-1], **masks)]

    rewritten(folder / "journal", changed)
    with pytest.raises(CorruptionError, match="extents: the mask of block: packed index: "):
        verified(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": 4901},
        {"capacity": 0},
        {"capacity": "2450"},
        {"capacity": 2450, "weights": {"block": [1 << 30, 1 << 30]}},
        {"capacity": 2450, "weights": {"block": [70, 70], "other": [70, 70]}},
        {"format": "dense"},
    ],
)
def test_invalid_capacity_is_refused(sparse_original, tmp_path, changes):
    folder = shutil.copytree(sparse_original, tmp_path / "flash")

    def changed(records):
        units = copy.deepcopy(records[0].content["units"])
        units[1] |= changes
        return [with_content(records[0], units=units), *records[1:]]

    rewritten(folder / "journal", changed)
    with pytest.raises(CorruptionError, match="its first record does not describe a store"):
        verified(folder)
