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
from marlhf.data.rows import load_rows
from marlhf.data.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "EncodedRow",
    "PairBatch",
    "SFTBatch",
    "Splits",
    "encode_prompt",
    "encode_response",
    "encode_rows",
    "epochs",
    "left_pad",
    "load_rows",
    "load_tokenizer",
    "pair_batch",
    "position_ids",
    "read_docstrings",
    "right_pad",
    "sft_batch",
    "train_tokenizer",
]
