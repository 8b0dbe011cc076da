"""From files, data sets and docstrings to padded tensors."""

from marlhf.data.collate import (
    PairBatch,
    SFTBatch,
    epochs,
    left_pad,
    pair_batch,
    position_ids,
    right_pad,
    sft_batch,
)
from marlhf.data.docstrings import Splits, read_docstrings
from marlhf.data.encoding import EncodedRow, encode_prompt, encode_response, encode_rows
from marlhf.data.pairs import drop_equal_pairs, make_pairs
from marlhf.data.rows import load_rows
from marlhf.data.text_metrics import distinct_n, repeated_ngram_share, rouge_l
from marlhf.data.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "EncodedRow",
    "PairBatch",
    "SFTBatch",
    "Splits",
    "distinct_n",
    "drop_equal_pairs",
    "encode_prompt",
    "encode_response",
    "encode_rows",
    "epochs",
    "left_pad",
    "load_rows",
    "load_tokenizer",
    "make_pairs",
    "pair_batch",
    "position_ids",
    "read_docstrings",
    "repeated_ngram_share",
    "right_pad",
    "rouge_l",
    "sft_batch",
    "train_tokenizer",
]
