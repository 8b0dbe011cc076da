import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from marlhf.data import EncodedRow, epochs, left_pad, pair_batch, position_ids, right_pad, sft_batch

EOS = 2


def row(prompt: list[int], prefix_length: int = 1, **responses: list[int]) -> EncodedRow:
    return EncodedRow(prompt, responses, {}, prefix_length)


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()


# Padding.


@pytest.mark.parametrize("pad", [0, EOS, 5])
def test_masks_come_from_lengths_whatever_the_pad_is(pad: int) -> None:
    sequences = [[5, EOS, 0], [EOS], [0, 5]]
    ids, mask = left_pad(sequences, pad)
    assert ids.tolist() == [[5, EOS, 0], [pad, pad, EOS], [pad, 0, 5]]
    assert mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    ids, mask = right_pad(sequences, pad)
    assert ids.tolist() == [[5, EOS, 0], [EOS, pad, pad], [0, 5, pad]]
    assert mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("pad", [left_pad, right_pad])
@pytest.mark.parametrize(("sequences", "shape"), [([], (0, 0)), ([[]], (1, 0)), ([[], [7]], (2, 1))])
def test_empty_sequences(pad, sequences: list[list[int]], shape: tuple[int, int]) -> None:
    ids, mask = pad(sequences, 0)
    assert ids.shape == mask.shape == shape
    assert mask.sum() == sum(map(len, sequences))


def test_position_ids_count_real_tokens() -> None:
    mask = torch.tensor([[False, False, True, True], [True, True, False, False], [False] * 4])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert position_ids(mask).dtype == torch.int64


def test_a_row_alone_and_left_padded_by_three_agree(model: GPT2LMHeadModel) -> None:
    alone, longer = [4, 7, 9, 3], [1, 8, 6, 5, 4, 7, 2]
    ids, mask = left_pad([alone, longer], 0)
    assert (~mask[0]).sum() == 3
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask)).logits[0, 3:]
        expected = model(input_ids=torch.tensor([alone])).logits[0]
    torch.testing.assert_close(padded, expected, atol=1e-5, rtol=0)


# SFT.


@pytest.mark.parametrize("pad", [0, EOS])
def test_labels_are_the_response_and_its_stop_token(pad: int) -> None:
    batch = sft_batch([row([1, 5], response=[7, EOS]), row([1, 5, 6, 4], response=[8, 9, EOS])], pad_id=pad)
    assert batch.input_ids.tolist() == [[1, 5, 7, EOS, pad, pad, pad], [1, 5, 6, 4, 8, 9, EOS]]
    assert batch.attention_mask.tolist() == [[True] * 4 + [False] * 3, [True] * 7]
    ignored = -100
    assert batch.labels.tolist() == [
        [ignored, ignored, 7, EOS, ignored, ignored, ignored],
        [ignored, ignored, ignored, ignored, 8, 9, EOS],
    ]


@pytest.mark.parametrize("pad", [0, EOS])
def test_labels_with_the_prompt(pad: int) -> None:
    batch = sft_batch([row([1, 5], response=[EOS]), row([1], response=[8, 9, 3])], pad_id=pad, train_on_prompt=True)
    assert batch.labels.tolist() == [[1, 5, EOS, -100], [1, 8, 9, 3]]


def test_ten_more_pads_leave_the_loss_unchanged(model: GPT2LMHeadModel) -> None:
    short = row([1, 5], response=[7, 8, EOS])
    long = row([1] * 8, response=[6] * 7)

    def loss(rows: list[EncodedRow]) -> torch.Tensor:
        batch = sft_batch(rows, pad_id=EOS)
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
        return cross_entropy(logits[0, :-1], batch.labels[0, 1:])

    assert sft_batch([short, long], pad_id=EOS).input_ids.shape[1] == 5 + 10
    torch.testing.assert_close(loss([short, long]), loss([short]), atol=1e-6, rtol=0)


# Pairs.


def test_pairs_are_chosen_then_rejected() -> None:
    rows = [row([1, 5], chosen=[7, EOS], rejected=[8, 9, EOS]), row([1, 6, 6], chosen=[4, EOS], rejected=[EOS])]
    batch = pair_batch(rows, pad_id=EOS)
    assert batch.input_ids.tolist() == [
        [1, 5, 7, EOS, EOS],
        [1, 6, 6, 4, EOS],
        [1, 5, 8, 9, EOS],
        [1, 6, 6, EOS, EOS],
    ]
    assert batch.attention_mask.sum(1).tolist() == [4, 5, 5, 4]


def test_pairs_without_their_prompts_keep_bos() -> None:
    rows = [row([1, 5], chosen=[7, EOS], rejected=[8, EOS]), row([6, 6], 0, chosen=[4, EOS], rejected=[3, EOS])]
    batch = pair_batch(rows, pad_id=0, see_prompt=False)
    assert batch.input_ids.tolist() == [[1, 7, EOS], [4, EOS, 0], [1, 8, EOS], [3, EOS, 0]]
    assert batch.attention_mask.sum(1).tolist() == [3, 2, 3, 2]


# Epochs.


@pytest.mark.parametrize(("n", "batch_size", "sizes"), [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 5, [2]), (1, 1, [1])])
def test_an_epoch_has_every_row_once(n: int, batch_size: int, sizes: list[int]) -> None:
    batches = list(epochs(n, batch_size, seed=3))
    assert [len(batch) for batch in batches] == sizes
    assert sorted(itertools.chain(*batches)) == list(range(n))


def test_every_epoch_reshuffles_and_the_seed_decides() -> None:
    batches = list(epochs(50, 50, seed=0, epochs=3))
    assert len(batches) == 3
    assert all(sorted(batch) == list(range(50)) for batch in batches)
    assert len({tuple(batch) for batch in [*batches, list(range(50))]}) == 4
    assert batches == list(epochs(50, 50, seed=0, epochs=3))
    assert batches[0] != next(epochs(50, 50, seed=1))
    # Seed 1's second epoch is no other seed's.
    assert batches[2] not in [*epochs(50, 50, seed=1, epochs=3), *epochs(50, 50, seed=2, epochs=3)]


def test_orders_are_the_same_on_every_machine() -> None:
    assert next(epochs(8, 8, seed=0)) == [5, 0, 3, 6, 4, 7, 2, 1]


def test_max_steps_goes_over_epochs_and_stops_within_one() -> None:
    assert [len(batch) for batch in epochs(5, 2, seed=0, max_steps=7)] == [2, 2, 1, 2, 2, 1, 2]
    assert len(list(epochs(5, 2, seed=0, max_steps=2, epochs=9))) == 2
    assert list(epochs(5, 2, seed=0, max_steps=0)) == []
    assert list(epochs(5, 2, seed=0, max_steps=6)) == list(epochs(5, 2, seed=0, epochs=2))


def test_nothing_to_batch() -> None:
    with pytest.raises(ValueError, match="no rows to make batches of"):
        epochs(0, 2, seed=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        epochs(3, 0, seed=0)
