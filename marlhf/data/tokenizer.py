"""A tokenizer trained on a run's own texts, and loading of anyone's."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marlhf.errors import ConfigError, UserError

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 4096, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts, as a transformers fast tokenizer.

    The ids 0, 1 and 2 are `<pad>`, `<bos>` and `<eos>`; encoding puts `<bos>` in front. Every text decodes to
    itself, also one with those three words in it, since they become their tokens only where a caller passes
    `split_special_tokens=False`. The same texts give the same tokenizer.

    vocab_size: an upper bound, since few texts hold few pairs to merge; at least 259, the special tokens and
    one token per byte.
    """
    alphabet = ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 3:
        raise ConfigError(f"a byte-level vocabulary has at least {len(alphabet) + 3} tokens, not {vocab_size}")
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hugging Face model, with a pad token.

    A tokenizer without a pad token pads with its end-of-sequence token: batches take their masks from
    lengths, so the two are never mixed up.

    Raises UserError saying what is missing: a tokenizer at that path, or an end-of-sequence token.
    """
    if not path:
        raise ConfigError("no tokenizer: the model's path is not set")
    folder = Path(path)
    if folder.is_file():
        raise UserError(f"{path} is a file; a tokenizer is loaded from the folder that holds its files")
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained"
        )
    if not folder.is_dir() and (path[0] in "./~" or path.count("/") > 1):
        raise UserError(f"cannot load the tokenizer of {path}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "" if folder.is_dir() else "there is no such folder, nor could a model of that name be loaded: "
        raise UserError(f"cannot load the tokenizer of {path}: {where}{reason}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {path} has no end-of-sequence token, so no response could ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
