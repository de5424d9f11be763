"""The data, held to a slow implementation of the page in plain Python integers."""

from __future__ import annotations

import pytest
import torch
from conftest import small_scenario

from data import Dataset, hash_counters
from errors import InputError
from scenario import DTYPES

M64 = 2**64 - 1


def slow_mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & M64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def slow_hash(seed: int, *counters: int) -> int:
    h = slow_mix(seed)
    for v in counters:
        h = slow_mix(h ^ (v + 0x9E3779B97F4A7C15 & M64))
    return h


def test_mix_is_the_finalizer_of_splitmix64():
    # The first outputs of the published generator from state 1234567 (https://rosettacode.org/wiki/
    # Pseudo-random_numbers/Splitmix64): it adds the golden ratio to its state and mixes.
    state = 1234567
    for published in (6457827717110365317, 3203168211198807973, 9817491932198370423):
        state = state + 0x9E3779B97F4A7C15 & M64
        assert int(hash_counters(state)[0]) == slow_mix(state) == published


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("counters", [(), (0,), (1, 2, 3), (2**64 - 1, 5), (0x61C8864680B583EB,)])
def test_hash_is_that_of_the_page(seed, counters):
    assert int(hash_counters(seed, *counters)[0]) == slow_hash(seed, *counters)


def test_bytes_are_windows_of_the_joined_files(tmp_path):
    files = [tmp_path / "one", tmp_path / "two"]
    files[0].write_bytes(bytes(range(200)))
    files[1].write_bytes(bytes(range(256)))
    corpus = bytes(range(200)) + bytes(range(256))
    scenario = small_scenario(
        "transformer",
        model__vocabulary=256,
        data={"kind": "bytes", "corpus": [str(file) for file in files]},
    )
    step, micro_batch, rank = 3, 1, 1
    input, target = Dataset(scenario).batch(step, micro_batch, rank)
    assert input.dtype == target.dtype == torch.int64
    assert input.shape == target.shape == (3, 8)
    for b in range(3):
        start = slow_hash(7, 1, step, micro_batch, rank, b) % (len(corpus) - 8)
        assert input[b].tolist() == list(corpus[start : start + 8])
        assert target[b].tolist() == list(corpus[start + 1 : start + 9])


def test_synthetic_tokens_are_those_of_the_page():
    input, target = Dataset(small_scenario("transformer")).batch(2, 0, 1)
    for b in range(3):
        tokens = [slow_hash(7, 2, 2, 0, 1, b, i) % 32 for i in range(9)]
        assert input[b].tolist() == tokens[:-1]
        assert target[b].tolist() == tokens[1:]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_synthetic_numbers_are_those_of_the_page(dtype):
    scenario = small_scenario("mlp", dtype=dtype)
    input, target = Dataset(scenario).batch(4, 1, 0)
    assert input.dtype == target.dtype == scenario.torch_dtype
    for stream, numbers, size in ((3, input, 12), (4, target, 7)):
        assert numbers.shape == (3, size)
        for b in range(3):
            for i in range(size):
                bits = slow_hash(7, stream, 4, 1, 0, b, i) >> 53
                assert numbers[b, i].item() == (bits - 1024) / 1024


def test_synthetic_numbers_of_the_quirks_model_are_those_of_an_mlp_of_its_width():
    ours = Dataset(small_scenario("quirks", model__quirk_width=11)).batch(1, 1, 1)
    theirs = Dataset(small_scenario("mlp", model__sizes=[11, 11])).batch(1, 1, 1)
    assert ours[0].shape == ours[1].shape == (3, 11)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_synthetic_numbers_are_rounded_to_bfloat16_and_exact_in_float16():
    exact = Dataset(small_scenario("mlp", batch=50)).batch(0, 0, 0)[0]
    for dtype, same in (("float16", True), ("bfloat16", False)):
        numbers = Dataset(small_scenario("mlp", batch=50, dtype=dtype)).batch(0, 0, 0)[0]
        assert numbers.dtype == DTYPES[dtype]
        assert torch.equal(numbers, exact.to(DTYPES[dtype]))
        assert torch.equal(numbers.float(), exact) == same


def test_synthetic_numbers_are_of_both_signs_and_below_one():
    input, _ = Dataset(small_scenario("mlp", batch=200)).batch(0, 0, 0)
    assert -1 <= input.min() < -0.9
    assert 0.9 < input.max() < 1


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_every_step_micro_batch_rank_and_seed_has_its_own_batch(kind):
    seen = set()
    for seed in (0, 1):
        data = Dataset(small_scenario(kind, seed=seed))
        for position in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
            seen.add(tuple(data.batch(*position)[0].flatten().tolist()))
    assert len(seen) == 8


def test_a_corpus_may_be_as_short_as_one_window(tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"123456789")  # context + 1
    data = {"kind": "bytes", "corpus": [str(file)]}
    scenario = small_scenario("transformer", model__vocabulary=256, data=data)
    input, target = Dataset(scenario).batch(0, 0, 0)
    assert bytes(input[0].tolist()) == b"12345678"
    assert bytes(target[0].tolist()) == b"23456789"


def test_a_corpus_that_is_too_short_or_missing_is_refused(tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"12345678")
    for path, message in (
        (file, "has 8 bytes"),
        (tmp_path / "none", "cannot read the corpus file"),
    ):
        data = {"kind": "bytes", "corpus": [str(path)]}
        scenario = small_scenario("transformer", model__vocabulary=256, data=data)
        with pytest.raises(InputError, match=message):
            Dataset(scenario)
