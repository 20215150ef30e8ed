"""The examples read the files that they write, and report files that they cannot read."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from harness import needs

pytestmark = [pytest.mark.slow, needs("keras")]

Opener = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def mnist(open_example: Opener) -> ModuleType:
    return open_example("mnist_horovod")


@pytest.fixture(scope="module")
def cifar10(open_example: Opener) -> ModuleType:
    pytest.importorskip("tensorflow", reason="the example reads TFRecords with TensorFlow")
    return open_example("cifar10_horovod")


@pytest.fixture(scope="module")
def unet(open_example: Opener) -> ModuleType:
    return open_example("unet_horovod")


class TestIdx:
    @pytest.mark.parametrize("shape", [(5,), (3, 4, 6)], ids=["labels", "images"])
    @pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
    def test_round_trip(self, mnist: ModuleType, tmp_path: Path, shape: tuple[int, ...], zipped: bool) -> None:
        array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        path = tmp_path / "array"
        mnist.write_idx(path, array)
        if zipped:
            (tmp_path / "array.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        np.testing.assert_array_equal(mnist.read_idx(mnist.find_idx(tmp_path, "array")), array)

    def test_header_is_that_of_mnist(self, mnist: ModuleType, tmp_path: Path) -> None:
        mnist.write_idx(tmp_path / "array", np.zeros((2, 28, 28), np.uint8))
        header = (tmp_path / "array").read_bytes()[:16]
        assert header == bytes.fromhex("00000803 00000002 0000001c 0000001c")

    def test_other_types_are_rejected(self, mnist: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "floats").write_bytes(bytes.fromhex("00000d01 00000001 3f800000"))
        with pytest.raises(SystemExit, match="floats is not an IDX file of unsigned bytes: it starts with 00 00 0d 01"):
            mnist.read_idx(tmp_path / "floats")

    def test_a_missing_file_is_named(self, mnist: ModuleType, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match="neither train-images-idx3-ubyte nor"):
            mnist.read_examples(tmp_path, mnist.TRAIN_FILES, None)

    def test_digits(self, mnist: ModuleType, tmp_path: Path) -> None:
        mnist.write_digits(tmp_path / "digits")
        for files, number in ((mnist.TRAIN_FILES, 1497), (mnist.TEST_FILES, 300)):
            images, labels = mnist.read_examples(tmp_path / "digits", files, None)
            assert images.shape == (number, 28, 28, 1)
            assert (images.dtype, images.min(), images.max()) == (np.float32, 0, 1)
            assert sorted(set(labels)) == list(range(10))
            assert len(labels) == number

    def test_limit(self, mnist: ModuleType, tmp_path: Path) -> None:
        mnist.write_digits(tmp_path / "digits")
        images, labels = mnist.read_examples(tmp_path / "digits", mnist.TRAIN_FILES, 7)
        assert (len(images), len(labels)) == (7, 7)


class TestRecords:
    def test_round_trip(self, cifar10: ModuleType, tmp_path: Path) -> None:
        images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
        (tmp_path / "eval").mkdir()
        cifar10.write_records(tmp_path / "eval" / "eval.tfrecords", zip(images, [4, 0, 9], strict=True))
        records = cifar10.records(tmp_path, "eval", None)
        assert len(records) == 3
        decoded, labels = zip(*map(cifar10.parse_record, records), strict=True)
        np.testing.assert_array_equal(np.stack(decoded), images.transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(np.argmax(labels, axis=1), [4, 0, 9])

    def test_a_missing_file_is_named(self, cifar10: ModuleType, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=r"validation/validation\.tfrecords is missing"):
            cifar10.records(tmp_path, "validation", None)

    def test_digits(self, cifar10: ModuleType, tmp_path: Path) -> None:
        cifar10.write_digits(tmp_path / "digits")
        sizes = [len(cifar10.records(tmp_path / "digits", name, None)) for name in ("train", "validation", "eval")]
        assert sizes == [1197, 300, 300]
        assert len(cifar10.records(tmp_path / "digits", "train", 7)) == 7

    def test_augmentation_moves_by_four_pixels_at_most(self, cifar10: ModuleType) -> None:
        image = np.zeros((32, 32, 3), np.float32)
        image[16, 16] = 1
        for _ in range(20):
            (row,), (column,) = np.nonzero(np.asarray(cifar10.augment(image))[..., 0])
            assert 12 <= row <= 20
            assert 11 <= column <= 20  # mirrored, 16 becomes 15


class TestMasks:
    def test_digits(self, unet: ModuleType, tmp_path: Path) -> None:
        unet.write_digits(tmp_path / "digits")
        images, masks = unet.open_arrays(tmp_path / "digits", None)
        assert images.shape == masks.shape == (1797, 48, 48)
        assert set(np.unique(masks)) == {0, 255}
        assert images[masks > 0].mean() > images[masks == 0].mean() + 64

    def test_missing_files_are_named(self, unet: ModuleType, tmp_path: Path) -> None:
        np.save(tmp_path / "imgs_train.npy", np.zeros((2, 8, 8), np.uint8))
        with pytest.raises(SystemExit, match=r"lacks imgs_mask_train\.npy"):
            unet.open_arrays(tmp_path, None)

    @pytest.mark.parametrize("shape", [(2, 8, 4), (2, 8)])
    def test_masks_of_another_shape_are_rejected(
        self, unet: ModuleType, tmp_path: Path, shape: tuple[int, ...]
    ) -> None:
        np.save(tmp_path / "imgs_train.npy", np.zeros((2, 8, 8), np.uint8))
        np.save(tmp_path / "imgs_mask_train.npy", np.zeros(shape, np.uint8))
        with pytest.raises(SystemExit, match="expected is one shape for both"):
            unet.open_arrays(tmp_path, None)


class TestDice:
    def test_the_coefficient_of_equal_masks_is_1_and_of_disjoint_masks_near_0(self, unet: ModuleType) -> None:
        left, right = np.zeros((2, 1, 8, 8, 1), np.float32)
        left[:, :, :4], right[:, :, 4:] = 1, 1
        np.testing.assert_allclose(unet.dice_coef(left, left), [1.0])
        np.testing.assert_allclose(unet.dice_coef(left, right), [1 / 65], rtol=1e-6)

    def test_the_mean_does_not_depend_on_the_sharding(self, unet: ModuleType) -> None:
        truth, guess = np.random.default_rng(0).random((2, 6, 8, 8, 1)).astype(np.float32)
        parts = [np.asarray(unet.dice_coef(truth[rank::2], guess[rank::2])) for rank in range(2)]
        np.testing.assert_allclose(np.mean(parts), np.mean(unet.dice_coef(truth, guess)), rtol=1e-6)


class TestShuffledBatches:
    def test_the_order_depends_only_on_the_epoch(self, unet: ModuleType) -> None:
        images = np.arange(10, dtype=np.float32)
        first, second = (unet.ShuffledBatches(images, images, batch_size=4) for _ in range(2))
        for epoch in (0, 1, 2):
            first.shuffle(epoch)
        second.shuffle(2)
        batches = [first[index][0] for index in range(len(first))]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(np.concatenate(batches)) == list(images)
        assert list(np.concatenate(batches)) != list(images)
        np.testing.assert_array_equal(batches[2], second[2][0])


@pytest.mark.parametrize(("below", "latest"), [(99, 10), (10, 9), (1, 0)])
def test_latest_epoch(unet: ModuleType, tmp_path: Path, below: int, latest: int) -> None:
    for name in ("checkpoint-9.keras", "checkpoint-10.keras", "partial.keras", "unet.keras"):
        (tmp_path / name).touch()
    assert unet.latest_epoch(tmp_path, below=below) == latest
